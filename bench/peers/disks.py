"""Child side of what takes part in `bench.nvme`: blocks go from memory to a disk and come back into memory.

Blocks look like bf16, so that a codec has something to do. What came back is shown after the clock has stopped. Needs
numpy and nothing of ours.
"""

from typing import Any, Final, Protocol

import numpy as np

from bench.peers.loop import Bench, Store, Work

PATTERN_BYTES: Final = 2 << 20
"""So much is drawn and repeated: drawing a whole set took longer than all turns of storing it."""


class Disk(Store, Protocol):
    """A store whose `get` leaves the set in memory of its own."""

    def show(self, generation: int) -> None:
        """Copy what was loaded into `sink`; not timed."""


class DiskBench(Bench):
    """Answers the verbs with one disk."""

    def __init__(self, store: Disk) -> None:
        super().__init__(store)
        self._disk = store

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carry out one verb."""
        if asked["verb"] == "check":
            self._disk.show(int(asked["generation"]))
        return super().answer(asked)

    def _fill(self, work: Work) -> None:
        rng = np.random.default_rng(work.client)
        numbers = rng.standard_normal(PATTERN_BYTES // 2, np.float32)
        pattern = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        self._source = np.resize(pattern, (work.blocks, work.block_bytes))
        self._source[:, :8] = np.arange(work.blocks, dtype="<u8")[:, None].view(np.uint8)  # No two are the same.
