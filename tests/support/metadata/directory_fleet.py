"""Agents' directories on a real Redis, each over a dictionary of what it holds: what Redis must come to tell."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvstrata_agent.fleet.directory.client import AccessProvider, Holdings, RedisDirectory
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.records import AgentRecord, Announcement, Location
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

SECRET = ScopeSecret(ScopeId("tenant/a/uid/v1"), b"s" * 32)
PART_BLOCKS = 1_024
"""Of a report, as agents cut it."""
_LOCATE_BLOCKS = 4_000


async def until(is_so: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.01)


@dataclass
class DirectoryFleet:
    """Agents that all reach Redis by `access`, which may change."""

    access: Callable[[], RedisAccess]
    jitter_s: float = 0.1
    held: dict[str, dict[bytes, int]] = field(default_factory=dict)
    """By agent: digest to stamp."""
    ever: dict[str, set[tuple[bytes, int]]] = field(default_factory=dict)
    """By agent: everything that was ever true."""
    made: dict[str, RedisDirectory] = field(default_factory=dict)
    _stamps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, name: str, blocks: int = 0) -> RedisDirectory:
        held = self.held[name] = {os.urandom(20): next(self._stamps) for _ in range(blocks)}
        self.ever[name] = set(held.items())

        def holdings() -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
            names = list(held)
            for i in range(0, len(names), PART_BLOCKS):
                known = ((d, held.get(d)) for d in names[i : i + PART_BLOCKS])
                yield SECRET, [Announcement(d, "NVMe", stamp, 1) for d, stamp in known if stamp is not None]

        async def access() -> RedisAccess:
            return self.access()

        record = AgentRecord(name, 1, "127.0.0.1:1")
        instruments = Instruments(AGENT, CollectorRegistry())
        made = self.make(record, access, holdings, instruments)
        self.made[name] = made
        made.start()
        return made

    def make(
        self, record: AgentRecord, access: AccessProvider, holdings: Holdings, instruments: Instruments
    ) -> RedisDirectory:
        return RedisDirectory(record, access, holdings, instruments, jitter_s=self.jitter_s)

    def publish(self, name: str, digest: bytes | None = None) -> bytes:
        digest, stamp = digest or os.urandom(20), next(self._stamps)
        self.held[name][digest] = stamp
        self.ever[name].add((digest, stamp))
        self.made[name].announce(SECRET, [Announcement(digest, "NVMe", stamp, 1)])
        return digest

    def evict(self, name: str, digest: bytes) -> None:
        del self.held[name][digest]
        self.made[name].announce(SECRET, [Announcement(digest, "", 0, 0, is_gone=True)])

    async def settled(self, timeout_s: float = 90.0) -> None:
        await until(
            lambda: all(a.is_settled for a in self.made.values()), "the directory was never told everything", timeout_s
        )

    async def locate(self, asker: str, digests: list[bytes]) -> list[tuple[Location, ...]]:
        found: list[tuple[Location, ...]] = []
        for i in range(0, len(digests), _LOCATE_BLOCKS):
            found += await self.made[asker].locate(SECRET, digests[i : i + _LOCATE_BLOCKS])
        return found

    async def known(self, asker: str, owner: str) -> dict[bytes, bool]:
        """For each block of `owner`, whether `asker` finds it there, and nothing else of `owner`; a lie fails."""
        held = self.held[owner]
        digests = list(held)
        found = await self.locate(asker, digests)
        is_known = {}
        for digest, locations in zip(digests, found, strict=True):
            stamps = [at.stamp for at in locations if at.agent == owner]
            assert all((digest, stamp) in self.ever[owner] for stamp in stamps), "a location that was never true"
            is_known[digest] = stamps == [held.get(digest)]
        return is_known

    async def becomes_known(self, asker: str, owner: str, timeout_s: float = 90.0) -> float:
        """Wait until `asker` finds exactly what `owner` holds; how long it took."""
        started_s = time.monotonic()
        while not all((await self.known(asker, owner)).values()):
            assert time.monotonic() < started_s + timeout_s, f"{asker} does not find what {owner} holds"
            await asyncio.sleep(0.02)
        return time.monotonic() - started_s

    async def close(self) -> None:
        for agent in self.made.values():
            await agent.close()
        self.made.clear()
