"""`kvstrata conformance` as a process of its own, which takes its agent along when it is stopped."""

import json
import subprocess
import sys
from typing import Any, NamedTuple

from support.runner.alone import environment

KIT_S = 280.0


class Ended(NamedTuple):
    status: int
    rows: list[str]
    """The table, without its head."""
    told: dict[str, Any]
    """The last line; empty where there is none."""
    errors: str


def kit(*arguments: str) -> Ended:
    command = [sys.executable, "-m", "kvstrata_client.cli", "conformance", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            printed, errors = process.communicate(timeout=KIT_S)
        except BaseException:
            process.terminate()
            process.communicate()
            raise
    lines = printed.splitlines()
    is_told = bool(lines) and lines[-1].startswith("{")
    told = json.loads(lines[-1])["conformance"] if is_told else {}
    return Ended(process.returncode, lines[1:-1] if is_told else lines[1:], told, errors)
