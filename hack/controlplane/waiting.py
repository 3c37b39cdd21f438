"""Waits with a bound."""

import time
from collections.abc import Callable

_PAUSE_S = 0.05


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Ask `condition` twenty times a second; false when it did not hold within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True
