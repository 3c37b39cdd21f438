"""Whether a calibration still holds: how many planes need a safer form than it says. No clock, no I/O."""

from collections.abc import Mapping
from threading import Lock
from typing import Final, NamedTuple

import numpy as np

_BLOCKS: Final = 256
"""Blocks that the share is of: the last of them weigh as much as all before."""
_BLOCKS_LEAST: Final = 64
"""Fewer say nothing."""
_FROM_RATIO: Final = 0.05
"""A calibration is made such that 1 % of planes miss (`kvstrata_client.calibration`); five times that is
another cache."""
_UNTIL_RATIO: Final = 0.025
"""Half of it ends what began, so that nothing flaps."""


class Drift(NamedTuple):
    """What the watch sees."""

    blocks: int
    """Blocks of calibrated layouts since the calibration is known."""
    ratio: float
    """Share of their planes of late that needed a safer form."""
    is_over: bool


class DriftWatch:
    """The watch over one calibration. Threads may share it."""

    def __init__(self, calibrated: Mapping[bytes, bytes]) -> None:
        """Compare with places on the ladder by layout id."""
        self._calibrated = dict(calibrated)
        self._lock = Lock()
        self._seen = Drift(0, 0.0, is_over=False)

    @property
    def seen(self) -> Drift:
        """What was seen so far."""
        return self._seen

    def note(self, layout_id: bytes, places: bytes) -> int:
        """Note where the planes of a block settled; return how many are above their calibration."""
        wanted = self._calibrated.get(layout_id)
        if wanted is None or len(wanted) != len(places):
            return 0
        above = int((np.frombuffer(places, np.uint8) > np.frombuffer(wanted, np.uint8)).sum())
        with self._lock:
            blocks = self._seen.blocks + 1
            ratio = self._seen.ratio + (above / len(places) - self._seen.ratio) / min(blocks, _BLOCKS)
            bound = _UNTIL_RATIO if self._seen.is_over else _FROM_RATIO
            self._seen = Drift(blocks, ratio, is_over=blocks >= _BLOCKS_LEAST and ratio > bound)
        return above
