"""Questions to the API server through kubectl, under the user's own rights and kubeconfig."""

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvstrata_api import names
from kvstrata_api.errors import ApiServerAwayError, UnsupportedError

Json = dict[str, Any]

TIMEOUT_S: Final = 30.0
_KLOG: Final = re.compile(r"[EWIF]\d{4} ")
"""Begin of a line of klog: severity, month and day."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """One cluster, as the command line names it."""

    command: tuple[str, ...]

    @classmethod
    def of(cls, given: argparse.Namespace, otherwise: str) -> Self:
        """Take `--kubeconfig` and `--context`. Raises `UnsupportedError` without kubectl, which says `otherwise`."""
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise UnsupportedError(f"kubectl is not in PATH; {otherwise}")
        places = (f"--{o}={v}" for o, v in (("kubeconfig", given.kubeconfig), ("context", given.context)) if v)
        return cls((kubectl, *places))

    def get(self, *words: str) -> Json:
        """Ask for objects as JSON. Raises `ApiServerAwayError` when there is no answer."""
        return self.json("get", *words, "--output=json")

    def json(self, *words: str) -> Json:
        """Run kubectl and read the JSON that it prints. Raises `ApiServerAwayError` when there is none."""
        try:
            found: Json = json.loads(self.text(*words))
        except ValueError as e:
            raise ApiServerAwayError(f"kubectl: {e}") from e
        return found

    def text(self, *words: str) -> str:
        """Run kubectl and return what it prints. Raises `ApiServerAwayError` when it fails."""
        try:
            done = self._run(words)
            done.check_returncode()
        except subprocess.CalledProcessError as e:
            raise ApiServerAwayError(f"kubectl: {_said(e.stderr)[:500]}") from e
        return done.stdout

    def may(self, verb: str, resource: str, namespace: str) -> bool:
        """Whether the user may do it there, by the API server's own word."""
        return self._run(("auth", "can-i", verb, resource, f"--namespace={namespace}")).stdout.strip() == "yes"

    def _run(self, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        try:
            return subprocess.run(
                (*self.command, *words),
                capture_output=True,
                text=True,
                errors="replace",  # Logs of containers are any bytes.
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise ApiServerAwayError(f"kubectl: {e}") from e


def _said(stderr: str) -> str:
    """What kubectl has to say, without the log of its library before it."""
    return "\n".join(line for line in stderr.strip().splitlines() if not _KLOG.match(line)) or stderr.strip()


def add_options(command: argparse.ArgumentParser) -> None:
    """Add what names a cluster."""
    command.add_argument("--kubeconfig", help="of the cluster; default: what kubectl uses")
    command.add_argument("--context", help="of the kubeconfig")


def add_release_options(command: argparse.ArgumentParser) -> None:
    """Add what names a release in a cluster."""
    command.add_argument(
        "-n", "--namespace", default=names.SYSTEM_NAMESPACE, help="of the release; default: %(default)s"
    )
    add_options(command)
