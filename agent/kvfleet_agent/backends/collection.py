"""Python's garbage collector while very many objects are made that are no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MANY: Final = 100_000
"""From here on a full collection takes 25 ms and more (250 ms for each million objects)."""


@contextmanager
def uncollected() -> Iterator[list[int]]:
    """Make objects without collections in between; put their number into the list that is handed out.

    The collector walks all living objects again and again while they become more: 2 of 3.4 us for each record of an
    index. Many objects are left out of all later collections; what counts references still frees them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    counts: list[int] = []
    try:
        yield counts
    finally:
        if sum(counts) >= _MANY:
            gc.freeze()
        if was_enabled:
            gc.enable()
