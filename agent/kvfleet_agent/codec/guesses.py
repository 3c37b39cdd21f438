"""Which rung each plane is tried on first: the one that the last block of its layout settled on. No clock, no I/O."""

from threading import Lock
from typing import Final

LAYOUTS_MAX: Final = 16
"""Layouts remembered, a byte for each plane; a pool has one for each rank of a tensor-parallel engine."""
PROBE_EVERY: Final = 16
"""Of so many blocks of a layout one is tried a rung cheaper: the numbers may have become easier meanwhile."""


class Guesses:
    """The memory of one permitted error. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rungs: dict[bytes, bytes] = {}
        self._blocks = 0

    def first(self, layout_id: bytes, planes: int) -> tuple[bytearray, bool]:
        """Rung for each plane, and whether these were taken a rung lower than what is known to do."""
        with self._lock:
            known = self._rungs.get(layout_id)
            if known is None or len(known) != planes:
                return bytearray(planes), True
            self._blocks += 1
            is_probe = self._blocks % PROBE_EVERY == 0
        return bytearray(max(0, rung - 1) for rung in known) if is_probe else bytearray(known), is_probe

    def settle(self, layout_id: bytes, rungs: bytes) -> None:
        """Remember what a block settled on; the layout that was used least lately is forgotten."""
        with self._lock:
            self._rungs.pop(layout_id, None)
            self._rungs[layout_id] = rungs
            if len(self._rungs) > LAYOUTS_MAX:
                del self._rungs[next(iter(self._rungs))]
