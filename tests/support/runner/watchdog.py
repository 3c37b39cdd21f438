"""Hooks of pytest that end a process whose test outlasts its timeout.

A timeout is an exception that a signal raises: a call of native code never sees it, and an event loop may swallow it
in a callback. Under pytest-xdist such a test counts as failed, and the next one runs in a new process.
"""

import faulthandler
import os
from collections.abc import Generator
from typing import Final

import pytest

GRACE_S: Final = 60.0
"""How long after its timeout a test may still go on, to clean up."""

_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the process's own stderr; nothing is captured yet."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Print the stack of every thread and end the process when the test's timeout is past, and some time for it."""
    marker = item.get_closest_marker("timeout")
    timeout_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
