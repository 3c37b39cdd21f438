"""Which rung each plane is tried on first: the one that the last block of its layout settled on. No clock, no I/O.

Rungs are told by their places on the ladder (`kvstrata_native.mixing.LADDER`), a byte for each plane. Layouts of which
nothing is known start where the calibration says, and else at the cheapest.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Final, NamedTuple

LAYOUTS_MAX: Final = 16
"""Layouts remembered, a byte for each plane; a pool has one for each rank of a tensor-parallel engine."""
PROBE_EVERY: Final = 16
"""Of so many blocks of a layout one is tried a rung cheaper: the numbers may have become easier meanwhile."""


class First(NamedTuple):
    """Where the planes of a block start."""

    places: bytes
    is_guess: bool
    """They were known to do; false where nothing is known, and where cheaper ones are tried."""


class Guesses:
    """The memory of one permitted error. Threads may share it."""

    def __init__(self, calibrated: Mapping[bytes, bytes] | None = None) -> None:
        """Start with what a calibration found, places by layout id."""
        self._lock = Lock()
        self._places: dict[bytes, bytes] = dict(list((calibrated or {}).items())[:LAYOUTS_MAX])
        self._blocks = 0

    def first(self, layout_id: bytes, planes: int) -> First:
        """Place for each plane."""
        with self._lock:
            known = self._places.get(layout_id)
            if known is None or len(known) != planes:
                return First(bytes(planes), is_guess=False)
            self._blocks += 1
            is_probe = self._blocks % PROBE_EVERY == 0
        return First(known.translate(_CHEAPER), is_guess=False) if is_probe else First(known, is_guess=True)

    def settle(self, layout_id: bytes, places: bytes) -> None:
        """Remember what a block settled on; the layout that was used least lately is forgotten."""
        with self._lock:
            self._places.pop(layout_id, None)
            self._places[layout_id] = places
            if len(self._places) > LAYOUTS_MAX:
                del self._places[next(iter(self._places))]


_CHEAPER: Final = bytes(max(0, place - 1) for place in range(256))
