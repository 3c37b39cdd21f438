"""The paths between the tiers of a node: the queue of each, and how fast it is now. No clock, no I/O."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvstrata_agent.gate import Gate
from kvstrata_agent.movement.fair_queue import TrafficClass

HALF_LIFE_S: Final = 10.0
"""Busy time after which a path's past speed counts half."""


@dataclass(slots=True)
class Speed:
    """Bytes for each second in which at least one move of the path was under way; idle time does not count."""

    _bytes: float = 0.0
    _busy_s: float = 0.0
    _under_way: int = 0
    _since_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Speed of late; 0.0 before the first move has ended."""
        return self._bytes / self._busy_s if self._busy_s > 0 else 0.0

    def begin(self, now_s: float) -> None:
        """A move begins."""
        self._pass(now_s)
        self._under_way += 1

    def end(self, now_s: float, moved_bytes: int) -> None:
        """A move has ended, after so many bytes; 0 when it failed."""
        self._pass(now_s)
        self._under_way -= 1
        self._bytes += moved_bytes

    def _pass(self, now_s: float) -> None:
        if self._under_way:
            passed_s = now_s - self._since_s
            faded = 0.5 ** (passed_s / HALF_LIFE_S)
            self._bytes, self._busy_s = self._bytes * faded, self._busy_s * faded + passed_s
        self._since_s = now_s


@dataclass(slots=True)
class Path:
    """One direction between two tiers."""

    source: str
    target: str
    gate: Gate = field(default_factory=Gate)
    speed: Speed = field(default_factory=Speed)


class Paths:
    """All paths that were used since the start. A path that hangs holds up no other one."""

    def __init__(self) -> None:
        self._paths: dict[tuple[str, str], Path] = {}

    def __iter__(self) -> Iterator[Path]:
        return iter(tuple(self._paths.values()))

    def between(self, source: str, target: str) -> Path:
        """Return a path; made when it is used for the first time."""
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = Path(source, target)
        return path

    def ahead_bytes(self, source: str, target: str, size_bytes: int) -> int:
        """Bytes that move on one path before a new KV move of `size_bytes` is done, at most."""
        path = self._paths.get((source, target))
        return path.gate.ahead_bytes(size_bytes) if path is not None else 0

    def bytes_per_s(self, source: str, target: str) -> float:
        """How fast one path was of late; 0.0 for one that has not moved anything."""
        path = self._paths.get((source, target))
        return path.speed.bytes_per_s if path is not None else 0.0

    def is_full(self, source: str, target: str) -> bool:
        """True while one path would refuse another KV move."""
        path = self._paths.get((source, target))
        return path is not None and path.gate.is_full()

    def is_waited_for(self, source: str, target: str) -> bool:
        """True while KV moves wait for one path."""
        path = self._paths.get((source, target))
        return path is not None and path.gate.queue(TrafficClass.KV).waiting > 0
