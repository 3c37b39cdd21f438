"""What Redis servers report of themselves: which one of a cluster serves which slot, and their memory. Pure."""

import binascii
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

SLOTS: Final = 16_384
"""Of every Redis Cluster; redis.io/docs/reference/cluster-spec."""


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots `first` to `last`, both included, and who serves them."""

    first: int
    last: int
    primary: Address
    replicas: tuple[Address, ...] = ()


class Topology:
    """The slots of a cluster as one of its servers sees them. Immutable."""

    def __init__(self, ranges: Iterable[SlotRange]) -> None:
        self.ranges = tuple(sorted(ranges, key=lambda r: r.first))
        self._firsts = [r.first for r in self.ranges]

    @property
    def primaries(self) -> frozenset[Address]:
        """Servers that own slots."""
        return frozenset(r.primary for r in self.ranges)

    @property
    def servers(self) -> tuple[Address, ...]:
        """All servers, primaries first, each once."""
        replicas = sorted({a for r in self.ranges for a in r.replicas} - self.primaries)
        return (*sorted(self.primaries), *replicas)

    def owner(self, slot: int) -> Address | None:
        """Server of a slot; None when nobody serves it."""
        i = bisect_right(self._firsts, slot) - 1
        return self.ranges[i].primary if i >= 0 and slot <= self.ranges[i].last else None

    def moved(self, slot: int, to: Address) -> "Topology":
        """The topology in which one slot has another owner."""
        kept: list[SlotRange] = [SlotRange(slot, slot, to)]
        for r in self.ranges:
            if not r.first <= slot <= r.last:
                kept.append(r)
                continue
            if r.first < slot:
                kept.append(SlotRange(r.first, slot - 1, r.primary, r.replicas))
            if slot < r.last:
                kept.append(SlotRange(slot + 1, r.last, r.primary, r.replicas))
        return Topology(kept)

    def has_other_owners(self, other: "Topology") -> bool:
        """True when any slot has another owner in `other`."""
        return _owners(self.ranges) != _owners(other.ranges)


def _owners(ranges: tuple[SlotRange, ...]) -> list[tuple[int, int, Address]]:
    """Owners with neighbouring ranges of one server joined, however they were cut."""
    joined: list[tuple[int, int, Address]] = []
    for r in ranges:
        if joined and joined[-1][2] == r.primary and joined[-1][1] == r.first - 1:
            joined[-1] = (joined[-1][0], r.last, r.primary)
        else:
            joined.append((r.first, r.last, r.primary))
    return joined


def slot_of(key: bytes) -> int:
    """Slot of a key: CRC-16/XMODEM of what stands between its first braces, or of all of it."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    tagged = key[start + 1 : end] if start >= 0 and end > start + 1 else key
    return binascii.crc_hqx(tagged, 0) % SLOTS


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server."""

    run_id: str
    """Random name of one run; another one means that it was started again."""
    role: str
    """`master` or `slave`, as Redis calls it."""
    version: str
    used_bytes: int
    startup_bytes: int
    """What it used when it was empty."""
    max_bytes: int
    """Where it refuses announcements; 0 without a bound."""
    replicas: int

    @property
    def fill_ratio(self) -> float:
        """Used over bound; 0 without a bound."""
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0

    @property
    def is_full(self) -> bool:
        """True where announcements are refused for want of memory."""
        return self.max_bytes > 0 and self.used_bytes >= self.max_bytes


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """All servers of the directory: one, or the primaries of a cluster."""

    servers: tuple[ServerFacts, ...] = ()

    @property
    def used_bytes(self) -> int:
        """Bytes beyond those of empty servers."""
        return sum(max(0, server.used_bytes - server.startup_bytes) for server in self.servers)

    @property
    def fill_ratio(self) -> float:
        """Of the fullest server: keys of one shard cannot go elsewhere."""
        return max((server.fill_ratio for server in self.servers), default=0.0)

    @property
    def is_full(self) -> bool:
        """True where some announcements are refused for want of memory."""
        return any(server.is_full for server in self.servers)


def parse_servers(answers: Iterable[Mapping[str, Any]]) -> RedisFacts:
    """Read the answers to INFO, one for each server."""
    return RedisFacts(tuple(_server(answer) for answer in answers))


def _server(answer: Mapping[str, Any]) -> ServerFacts:
    return ServerFacts(
        run_id=str(answer.get("run_id", "")),
        role=str(answer.get("role", "")),
        version=str(answer.get("redis_version", "")),
        used_bytes=int(answer.get("used_memory", 0)),
        startup_bytes=int(answer.get("used_memory_startup", 0)),
        max_bytes=int(answer.get("maxmemory", 0)),
        replicas=int(answer.get("connected_slaves", 0)),
    )
