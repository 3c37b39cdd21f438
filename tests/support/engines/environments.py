"""Interpreters of engines' environments, for tests."""

import sys
from pathlib import Path

import pytest

import peers


def say(line: str) -> None:
    """Tell whoever runs the tests."""
    sys.stderr.write(line + "\n")


def python_of(name: str) -> Path:
    """Interpreter of an environment of `peers`, made where it is not there; skips the test when it cannot be made."""
    try:
        return peers.ensure(name, say)
    except peers.InstallError as e:
        pytest.skip(f"the environment {name} could not be made: {e}")
