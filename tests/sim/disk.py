"""A node's disk: the volume that its record stores live on, in good and bad times."""

import errno
import random
from dataclasses import dataclass, field
from typing import Final

from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.record.encryption import DataKeys
from kvstrata_api.errors import BackendFailedError
from sim.volume import Lie, MemoryVolume

SEGMENT: Final = "seg"
_ERRORS: Final = (errno.EIO, errno.EIO, errno.ENOSPC)


@dataclass(slots=True)
class DiskFaults:
    """Chances for each call."""

    fail: float = 0.0
    slow: float = 0.0
    lie: float = 0.0
    """Of a write to be acknowledged and lost, torn or misdirected."""


@dataclass(slots=True)
class Disk:
    """What one node's disk holds, and what it does to those who use it."""

    rng: random.Random
    faults: DiskFaults = field(default_factory=DiskFaults)
    volume: MemoryVolume = field(init=False)
    failed: int = 0
    lied: int = 0
    rotten: int = 0

    def __post_init__(self) -> None:
        """Begin with an empty disk."""
        self.volume = MemoryVolume(rng=self.rng, latency_s=self._latency_s)

    def _latency_s(self, site: str, size_bytes: int) -> float:  # noqa: ARG002
        """Seconds that a call takes. Raises the `OSError` of a call that fails."""
        faults, rng = self.faults, self.rng
        if faults.fail and rng.random() < faults.fail:
            self.failed += 1
            raise OSError(rng.choice(_ERRORS), f"simulated failure of {site}")
        if site == "write" and faults.lie and rng.random() < faults.lie:
            self.lied += 1
            kind = rng.choice(("lost", "torn", "misdirected"))
            self.volume.lies.append(Lie(kind))
        if faults.slow and rng.random() < faults.slow:
            return rng.random() ** 3 * 0.5
        return 0.0

    async def open(self, capacity_bytes: int, keys: DataKeys | None = None) -> RecordStore:
        """Begin a run of the store, sealed when there are `keys`. Raises `BackendFailedError`."""
        try:
            return await open_store(self.volume, capacity_bytes, keys=keys)
        except OSError as e:
            raise BackendFailedError(f"volume: {e}") from e

    def lose_process(self) -> None:
        """The agent died: what it had begun may or may not be done."""
        self.volume = self.volume.kill()

    def lose_power(self) -> None:
        """The node died: of what was not synced any part may be there."""
        self.volume = self.volume.crash()

    def rot(self) -> bool:
        """Flip a bit of some segment; false when there is none."""
        image, rng = self.volume.image, self.rng
        names = sorted(n for n in image.names if n.startswith(SEGMENT))
        if not names:
            return False
        name = rng.choice(names)
        size_bytes = image.files[image.names[name]].size_bytes
        self.volume.flip(name, rng.randrange(size_bytes), 1 << rng.randrange(8))
        self.rotten += 1
        return True
