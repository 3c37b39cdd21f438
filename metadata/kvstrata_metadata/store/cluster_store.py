"""The store over a Redis Cluster: each transition goes to the primary of its slot; one that is away takes none along.

The client library's own cluster client is not used: its pipeline fails as a whole when one server is away, reconnects
to all of them then, and sends ASKING on whatever connection is free. A slot on its way to another server is away for us
until it has arrived: our transitions create and remove keys by the hundred, which is only atomic in one place.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.servers import Address, Topology, slot_of
from kvstrata_metadata.store.store import AWAY_DELAY_S, Call, Redirect, Store

SERVER_TIMEOUT_S: Final = 2.0
"""Silence of one server after which its calls fail; the others' answers wait for it that long."""

REST_FIRST_S: Final = 0.25
REST_LONGEST_S: Final = 4.0
"""A server that did not answer is asked nothing for so long, each time twice as long."""

REFRESH_S: Final = 0.25
"""Least time between two reads of who serves what."""

TOPOLOGY_AGE_MAX_S: Final = 5.0
"""Longest time between two reads: a failover that we were not talking to shows in this."""

HOPS_MAX: Final = 3
"""Servers that are tried for one call; each names the next."""


@dataclass(slots=True)
class _Server:
    """One server of the cluster, as far as we know."""

    store: Store
    failures: int = 0
    """Calls in a row that it did not answer."""
    rests_until_s: float = 0.0
    breaks: int = 0
    """Of its store, as far as they are in our own count."""


class ClusterStore(Store):
    """Runs transitions on a Redis Cluster. Errors of a part have `is_partial`; others mean that nobody answers."""

    def __init__(self, access: RedisAccess, *, timeout_s: float = SERVER_TIMEOUT_S) -> None:  # Opens no client.
        self._access = access
        self._timeout_s = timeout_s
        self._servers: dict[Address, _Server] = {}
        self._topology: Topology | None = None
        self._is_stale = True
        self._read_s = 0.0
        self._reading = asyncio.Lock()
        self.breaks = 0

    @property
    def is_partial(self) -> bool:
        """True when a primary did not answer the last time that it was asked."""
        primaries = self._topology.primaries if self._topology else ()
        return any(a in self._servers and self._servers[a].failures for a in primaries)

    async def install(self) -> None:
        """Load every transition into every server that answers, replicas too: they may be primaries next."""
        await self._on_all(Store.install)

    async def is_installed(self) -> bool:
        """True when every server that answers has every transition."""
        return all(await self._on_all(Store.is_installed))

    async def memory_bytes(self) -> tuple[int, int]:
        """Sum over the primaries that answer."""
        topology = await self._current_topology()
        found = await self._on_all(Store.memory_bytes, topology.primaries)
        return sum(used for used, _ in found), sum(startup for _, startup in found)

    async def describe(self) -> list[dict[str, Any]]:
        """What the primaries that answer report of themselves."""
        topology = await self._current_topology()
        return [facts for found in await self._on_all(Store.describe, topology.primaries) for facts in found]

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run transitions, those of each server in order. Raises the first error; the others may have been done."""
        replies = await self.run_each(calls)
        for reply in replies:
            if isinstance(reply, DirectoryAwayError):
                raise reply
        return replies

    async def run_each(self, calls: Sequence[Call], *, within_s: float | None = None) -> list[Any]:
        """Run transitions side by side on the servers that have their slots; errors in the place of replies."""
        limit_s = self._timeout_s if within_s is None else min(within_s, self._timeout_s)
        replies: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        for _ in range(HOPS_MAX):
            if not left:
                break
            try:
                async with asyncio.timeout(limit_s):
                    topology = await self._current_topology()
            except (DirectoryAwayError, TimeoutError) as e:
                away = e if isinstance(e, DirectoryAwayError) else _away("no server lists who serves what", whole=True)
                left = _put(replies, dict.fromkeys(left, away))
                break
            left = _put(replies, await self._round(topology, calls, left, limit_s))
        _put(replies, dict.fromkeys(left, _away("servers send each other's slots around")))
        return replies

    async def _round(
        self, topology: Topology, calls: Sequence[Call], left: list[int], limit_s: float
    ) -> dict[int, Any]:
        """Ask every server concerned once; replies by position."""
        found: dict[int, Any] = {}
        at: dict[Address, list[int]] = {}
        for i in left:
            owner = topology.owner(slot_of(calls[i].key))
            if owner is None:
                found[i] = _away(f"nobody serves slot {slot_of(calls[i].key)}")
                self._is_stale = True
            else:
                at.setdefault(owner, []).append(i)
        asked = (self._ask_server(address, [calls[i].command for i in part], limit_s) for address, part in at.items())
        for part, answers in zip(at.values(), await asyncio.gather(*asked), strict=True):
            found |= {i: self._judged(answer) for i, answer in zip(part, answers, strict=True)}
        return found

    async def _ask_server(self, address: Address, commands: list[Any], limit_s: float) -> list[Any]:
        server, now_s = self._server(address), asyncio.get_running_loop().time()
        if now_s < server.rests_until_s:
            return [_away(f"{address} did not answer")] * len(commands)
        try:
            async with asyncio.timeout(limit_s):
                answers = await server.store.ask(commands)
        except (DirectoryAwayError, TimeoutError) as e:
            rest_s = min(REST_LONGEST_S, REST_FIRST_S * 2.0 ** min(server.failures, 16))
            server.rests_until_s = asyncio.get_running_loop().time() + rest_s
            server.failures += 1
            self._is_stale = True
            why = str(e) or f"no answer in {limit_s} s"
            return [_away(f"{address}: {why}")] * len(commands)
        if server.failures or server.breaks != server.store.breaks:
            server.failures, server.breaks = 0, server.store.breaks
            self.breaks += 1
        return answers

    def _judged(self, answer: Any) -> Any:
        """An answer as our callers get it; a final `Redirect` stays one, so that it is followed."""
        if isinstance(answer, Redirect):
            self._is_stale = True
            if not answer.is_final:
                return _away(f"slot {answer.slot} is on its way to {answer.to}")
            if self._topology is not None:
                self._topology = self._topology.moved(answer.slot, answer.to)
                self.breaks += 1
        elif isinstance(answer, DirectoryAwayError):
            answer.is_partial = True
            self._is_stale = True
        return answer

    async def _current_topology(self) -> Topology:
        """Who serves what, read again when there is reason to. Raises `DirectoryAwayError` when no server lists it."""
        async with self._reading:
            now_s = asyncio.get_running_loop().time()
            known = self._topology
            if known is not None and now_s < self._read_s + (REFRESH_S if self._is_stale else TOPOLOGY_AGE_MAX_S):
                return known
            self._read_s = now_s
            seen = await self._ask_topology(known)
            self._is_stale = False
            if known is not None and seen.has_other_owners(known):
                self.breaks += 1
            self._topology = seen
            await self._forget_servers(seen)
            return seen

    async def _ask_topology(self, known: Topology | None) -> Topology:
        """Ask one server after the other, those first that answered last."""
        candidates = dict.fromkeys((*(known.servers if known else ()), *self._access.servers))
        last = _away("no server is known", whole=True)
        for address in sorted(candidates, key=lambda a: self._server(a).failures):
            try:
                async with asyncio.timeout(self._timeout_s):
                    seen = await self._server(address).store.topology()
            except (DirectoryAwayError, TimeoutError) as e:
                self._server(address).failures += 1
                last = _away(f"{address}: {e}", whole=True)
                continue
            if seen.ranges:
                return _with_host(seen, address.host)
            last = _away(f"{address} knows of no server with slots", whole=True)
        raise last

    async def _forget_servers(self, seen: Topology) -> None:
        """Close what is no longer part of the cluster."""
        for address in self._servers.keys() - {*seen.servers, *self._access.servers}:
            await self._servers.pop(address).store.close()

    async def _on_all(self, act: Any, only: frozenset[Address] | None = None) -> list[Any]:
        """Do the same on every server, or on some; the results of those that answer. Raises when none does."""
        topology = await self._current_topology()
        results, last = [], _away("no server answers", whole=True)
        for address in topology.servers:
            if only is not None and address not in only:
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    results.append(await act(self._server(address).store))
            except (DirectoryAwayError, TimeoutError) as e:
                self._is_stale = True
                last = _away(f"{address}: {e}", whole=True)
        if not results:
            raise last
        return results

    def _server(self, address: Address) -> _Server:
        if address not in self._servers:
            self._servers[address] = _Server(Store(self._access.at(address), timeout_s=self._timeout_s))
        return self._servers[address]

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        for server in self._servers.values():
            await server.store.close()
        self._servers.clear()


def open_store(access: RedisAccess) -> Store:
    """Open what an access leads to: one server or a cluster."""
    return ClusterStore(access) if access.is_cluster else Store(access)


def _put(replies: list[Any], found: dict[int, Any]) -> list[int]:
    """Put answers in their places; the positions that were sent on."""
    for i, answer in found.items():
        replies[i] = answer
    return [i for i, answer in found.items() if isinstance(answer, Redirect)]


def _away(why: str, *, whole: bool = False) -> DirectoryAwayError:
    return DirectoryAwayError(f"redis: {why}", delay_s=AWAY_DELAY_S, is_partial=not whole)


def _with_host(seen: Topology, host: str) -> Topology:
    """Fill in the host where a server does not know its own: it is the one that we asked."""

    def known(address: Address) -> Address:
        return address if address.host else Address(host, address.port)

    return Topology(
        replace(r, primary=known(r.primary), replicas=tuple(known(a) for a in r.replicas)) for r in seen.ranges
    )
