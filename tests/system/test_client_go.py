"""The client in Go: builds from the standard library alone, agrees with the vectors, and passes the conformance kit."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from controlplane.pins import BUILD_FLAGS
from kvstrata_client.conformance.scenarios import SCENARIOS
from support.client.conformance_kit import kit

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("go") is None, reason="needs the Go toolchain"),
]

CLIENT = Path(__file__).parents[2] / "examples" / "clients" / "go"


def go(*arguments: str) -> "subprocess.CompletedProcess[str]":
    fixed = {"GOPROXY": "off", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0"}
    alone = {**os.environ, **fixed}
    command = ("go", *arguments)
    return subprocess.run(command, cwd=CLIENT, env=alone, capture_output=True, text=True, timeout=280, check=False)


def test_it_is_vetted_and_agrees_with_the_vectors() -> None:
    assert "require" not in (CLIENT / "go.mod").read_text()
    done = go("test", *BUILD_FLAGS, "-count=1", "-vet=all", "./...")
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_passes_the_conformance_kit(tmp_path: Path) -> None:
    built = go("build", *BUILD_FLAGS, "-o", str(tmp_path / "conformance"), "./cmd/conformance")
    assert built.returncode == 0, built.stderr
    ended = kit("--answer-s", "60", "--", str(tmp_path / "conformance"))
    assert (ended.status, ended.told) == (0, {"passed": len(SCENARIOS), "failed": 0, "failures": {}}), ended.errors
