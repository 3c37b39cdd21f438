"""Fetches blocks from other agents: implements `ports.Peers`. A block that cannot be had is None, never an error.

They come over NIXL or the connection to their owner; what an owner keeps on flash that this node mounts too is read
there, by `FlashReader`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import Record, SharedBackend, SlotRef
from kvstrata_agent.backends.file.index_format import parse_name
from kvstrata_agent.backends.scratch import ScratchPool
from kvstrata_agent.backends.threads import in_thread, settle
from kvstrata_agent.cache.ports import Follow, Followed, Wanted
from kvstrata_agent.codec.base import UNENCODED
from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
from kvstrata_agent.fleet.peers.client import Link, Offer, PeerHolding, Taken, WeightsPlace, open_link
from kvstrata_agent.fleet.peers.lender import LEND_S, Placed
from kvstrata_agent.fleet.peers.transfer import Leased, Result, Transfers, Transport
from kvstrata_api import names
from kvstrata_api.blocks import BlockKey, LayoutId, unpack_digests
from kvstrata_api.errors import AgentAwayError, KvStrataError
from kvstrata_api.units import MIB
from kvstrata_metadata.store.records import AgentRecord, Location

if TYPE_CHECKING:
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.cache.ports import Wanted
    from kvstrata_agent.fleet.peers.connection import PeerTls
    from kvstrata_agent.fleet.peers.nixl import NixlReader
    from kvstrata_agent.movement.move import Codecs
    from kvstrata_telemetry.metrics import Instruments


BATCH_BYTES_MAX: Final = 128 * MIB
"""Bytes leased with one question: what an engine asks for at a time, and seconds of a slow link."""

LINKS_MAX: Final = 256
AWAY_S: Final = 2.0
"""After an owner could not be reached, it is not asked for so long."""

LEND_TIMEOUT_S: Final = LEND_S + 5.0
"""An owner that has not answered a Lend by then is taken for gone: it ends its own work after `LEND_S`."""

LEASE_SLACK_S: Final = 2.0
"""A lease outlives the deadline of its transfer by this."""

UNREGISTER_TIMEOUT_S: Final = 5.0

Resolve = Callable[[str, int], AgentRecord | None]
"""Where the agent of a location is (`RedisDirectory.peer`)."""

Find = Callable[[str], Awaitable[AgentRecord | None]]
"""Where an agent is that nobody has located anything at, by its name; raises a `KvStrataError` while unknown."""

OwnToken = Callable[[], Awaitable[str]]
"""Token that proves us to other agents; raises a `KvStrataError` while there is none."""

_log = logging.getLogger(__name__)

READS_MAX: Final = 16
"""Records that are read at once: twice the threads of a tier, so that one is decoded while the next is read."""


class RemotePeers:
    """Connections to other agents and the transfers over them. For one event loop."""

    def __init__(
        self,
        me: str,
        resolve: Resolve,
        own_token: OwnToken,
        nixl: NixlReader | None,
        instruments: Instruments,
        *,
        tls: PeerTls | None,
    ) -> None:
        """`nixl` is None where every byte is to travel by TLS; `tls` is None in simulated networks alone."""
        self._me = me
        self._tls = tls
        self._resolve = resolve
        self.find: Find | None = None
        """Knows where agents of other pools are; without it nothing is offered to them."""
        self._found: dict[str, AgentRecord] = {}
        self._own_token = own_token
        self._nixl = nixl
        self.shared: FlashReader | None = None
        """What reads shared tiers; set once the node has its core."""
        self._metrics = instruments
        pool, _, node = me.partition(".")
        self._labels = {"pool": pool, "node": node}
        self._transfers = Transfers(nixl)
        self._links: dict[str, asyncio.Task[Link]] = {}
        self._away_until_s: dict[str, float] = {}
        landing = instruments.gauge("kvstrata_peer_landing_bytes", **self._labels)
        landing.set_function(lambda: float(self._transfers.landing_bytes))

    def register_extent(self, extent: int, view: memoryview) -> None:
        """Let other agents read an extent by NIXL. Idempotent."""
        if self._nixl:
            self._nixl.register(extent, view)

    def unregister_extent(self, extent: int) -> None:
        """Undo `register_extent` before the memory goes away."""
        if self._nixl:
            self._nixl.unregister(extent).result(UNREGISTER_TIMEOUT_S)

    async def fetch(self, wanted: Sequence[Wanted], deadline_s: float) -> list[bytes | None]:
        """Fetch blocks; for each the parent digest when its bytes arrived and were verified, None when not.

        `deadline_s` is in seconds from now. Nothing is written to any target once this has returned.
        """
        parents: list[bytes | None] = [None] * len(wanted)
        until_s = time.monotonic() + deadline_s
        tasks = [
            asyncio.create_task(self._fetch_batch(batch, [wanted[i] for i in batch], parents, until_s))
            for batch in _batches(wanted)
        ]
        if not tasks:
            return parents
        try:
            await asyncio.wait(tasks, timeout=deadline_s)
        finally:
            for task in tasks:
                task.cancel()
            await settle(asyncio.gather(*tasks, return_exceptions=True))
        return parents

    async def follow(self, wanted: Follow, have: int, wait_s: float, into: Sequence[memoryview]) -> Followed:
        """See `ports.FollowedPeers`."""
        owner = Location(wanted.handover.agent, wanted.handover.epoch, "", 0, 0)
        link = await self._link(owner)
        answer = await link.follow(wanted, have, wait_s, into)
        return Followed(answer.parts, answer.sums, answer.parents, answer.stamps, answer.checksums)

    async def trace(self, key: BlockKey, at: Location, most: int) -> ChainSegment | None:
        """See `chain_lookup.TracedPeers`."""
        try:
            link = await self._link(at)
            answer = await link.trace(key.scope, key.digest, min(most, wire.KEYS_MAX), at.epoch)
        except AgentAwayError as e:
            _log.info("chain not traced", extra={"peer": at.agent, "error": str(e)})
            return None
        digests = tuple(unpack_digests(answer.digests))
        return ChainSegment(LayoutId(answer.layout_id), answer.raw_bytes, digests, answer.before) if digests else None

    async def offer(self, agent: str, offer: Offer) -> Taken | None:
        """Ask the agent of this name to take blocks over; None when it does not answer. Never raises."""
        try:
            found = await self.find(agent) if self.find is not None else None
            if found is None:
                return None
            self._found[agent] = found
            link = await self._link(Location(agent, found.epoch, "", 0, 0))
            answer = await link.offer(offer)
        except KvStrataError as e:
            _log.info("offer not answered", extra={"peer": agent, "error": str(e)})
            return None
        return Taken(min(answer.count, len(offer.digests)), answer.reason)

    async def weights_held(self, node: str, model: str, revision: str) -> PeerHolding:
        """What the agent of a node of this pool has of a model. Raises a `KvStrataError` when it does not answer."""
        held = await (await self._link_to(node)).weights_held(model, revision)
        return PeerHolding(held.digest, held.listing_bytes, held.staged_bytes)

    async def read_weights(self, node: str, at: WeightsPlace, into: memoryview) -> None:
        """Fill `into` with what the agent of a node has there. Nothing is verified.

        Raises a `KvStrataError` when it does not come; nothing is written once this has returned or failed.
        """
        await (await self._link_to(node)).read_weights(at, into)

    async def _link_to(self, node: str) -> Link:
        """Connection to the agent of a node of this pool, of which the directory may not know yet."""
        agent = names.pool_node_name(self._labels["pool"], node)
        link = _opened(self._links.get(agent))
        if link is not None and link.is_usable:
            return link
        found = await self.find(agent) if self.find is not None else None
        if found is None:
            raise AgentAwayError(f"nobody knows where agent {agent} is")
        self._found[agent] = found
        return await self._link(Location(agent, found.epoch, "", 0, 0))

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        opened, self._links = list(self._links.values()), {}
        for task in opened:
            if link := _opened(task):
                await link.close()
            else:
                task.cancel()

    async def _fetch_batch(
        self, places: list[int], wanted: list[Wanted], parents: list[bytes | None], until_s: float
    ) -> None:
        """Fetch one batch from one owner, writing parents at `places`. Raises nothing but cancellation."""
        started_s = time.monotonic()
        owner = wanted[0].location.agent
        try:
            link = await self._link(wanted[0].location)
            with link.used():  # Its leases end with the connection.
                async with link.batches:
                    fetched = await self._bring(link, wanted, until_s)
        except AgentAwayError as e:
            self._count("none", "away", len(wanted))
            _log.info("peer away", extra={"peer": owner, "blocks": len(wanted), "error": str(e)})
            return
        except asyncio.CancelledError:
            self._count("none", "late", len(wanted))
            raise
        for place, parent in zip(places, fetched, strict=True):
            parents[place] = parent
        took_s = time.monotonic() - started_s
        self._metrics.histogram("kvstrata_peer_fetch_duration_seconds", **self._labels).observe(took_s)

    async def _bring(self, link: Link, wanted: list[Wanted], until_s: float) -> list[bytes | None]:
        """Bring blocks from where they are; what an owner keeps on a shared tier that we cannot read, it sends."""
        tiers = self.shared.tiers if self.shared is not None else ()
        parents, unread = await self._bring_leased(link, wanted, until_s, tiers)
        if unread:
            sent, _ = await self._bring_leased(link, [wanted[i] for i in unread], until_s, ())
            for i, parent in zip(unread, sent, strict=True):
                parents[i] = parent
        return parents

    async def _bring_leased(
        self, link: Link, wanted: list[Wanted], until_s: float, tiers: tuple[str, ...]
    ) -> tuple[list[bytes | None], list[int]]:
        """Lease, move or read, verify, end the leases; parents, and which blocks could not be read at their place."""
        owner = wanted[0].location.agent
        lending = await self._lend(link, wanted, until_s, tiers)
        pairs = [Leased(w, loan) for w, loan in zip(wanted, lending.loans, strict=True)]
        usable = [one for one in pairs if one.loan.lease and one.loan.size_bytes == len(one.wanted.into)]
        placed = [one for one in usable if one.loan.place is not None]
        sent = [one for one in usable if one.loan.place is None]
        try:
            outcome = await self._read_shared(placed)
            if sent:
                outcome |= await self._transfers.bring(link, sent, lending.generation, until_s)
        finally:
            await self._end(link, pairs)
        unread = [i for i, one in enumerate(pairs) if one.loan.place is not None and one not in outcome]
        self._count_all(outcome, owner)
        self._count("none", Result.ABSENT, len(pairs) - len(usable))
        parents = [p.loan.parent if outcome.get(p, (None,))[0] is Result.VERIFIED else None for p in pairs]
        return parents, unread

    async def _lend(self, link: Link, wanted: list[Wanted], until_s: float, tiers: tuple[str, ...]) -> wire.Lending:
        """Lease blocks. An owner that says nothing loses its connection, and is away for a while."""
        first, digests = wanted[0], [w.key.digest for w in wanted]
        lease_s = until_s - time.monotonic() + LEASE_SLACK_S
        try:
            async with asyncio.timeout(LEND_TIMEOUT_S):
                return await link.lend(first.key.scope, first.layout_id, digests, lease_s, first.location.epoch, tiers)
        except TimeoutError as e:
            self._away_until_s[first.location.agent] = time.monotonic() + AWAY_S
            await link.close()
            raise AgentAwayError(f"agent {first.location.agent} did not lend for {LEND_TIMEOUT_S} s") from e

    async def _read_shared(self, placed: list[Leased]) -> dict[Leased, tuple[Result, Transport]]:
        """Read blocks at their place; those that could not be read or are not there any more are left out.

        A read that fails in an unforeseen way costs its own block.
        """
        reader = self.shared
        if reader is None or not placed:
            return {}
        reads = [asyncio.ensure_future(_read_placed(reader, one)) for one in placed]
        try:
            await asyncio.wait(reads)
        finally:
            for read in reads:
                read.cancel()
            # Nothing may be written to a slot once we have returned, so cancelled reads are waited for.
            ends = await settle(asyncio.gather(*reads, return_exceptions=True))
        return {one: (_result(one, end), Transport.SHARED) for one, end in zip(placed, ends, strict=True) if end}

    async def _end(self, link: Link, pairs: list[Leased]) -> None:
        """End leases even when we are cancelled: the owner should not wait for their expiry."""
        leases = tuple(one.loan.lease for one in pairs if one.loan.lease)
        try:
            if leases:
                await settle(asyncio.ensure_future(link.end(leases)))
        except AgentAwayError:
            return  # They end with the connection.

    async def _link(self, at: Location) -> Link:
        """Return the connection to an owner, a new one when there is none or it is old. Raises `AgentAwayError`."""
        owner = at.agent
        if time.monotonic() < self._away_until_s.get(owner, 0.0):
            raise AgentAwayError(f"agent {owner} could not be reached a moment ago")
        task = self._links.get(owner)
        if task is None or (task.done() and not _is_usable(task)):
            _retire(task)
            self._make_room()
            task = self._links[owner] = asyncio.create_task(self._open(at))
            task.add_done_callback(_seen)
        try:
            # A caller that gives up must not break the connection that others wait for.
            return await asyncio.shield(task)
        except AgentAwayError:
            self._away_until_s[owner] = time.monotonic() + AWAY_S
            raise

    async def _open(self, at: Location) -> Link:
        found = self._found.get(at.agent)  # Of another pool: nothing may have been located there yet.
        record = self._resolve(at.agent, at.epoch) or (found if found and found.epoch == at.epoch else None)
        if record is None:
            raise AgentAwayError(f"agent {at.agent} of epoch {at.epoch} is not in the directory any more")
        try:
            token = await self._own_token()
        except KvStrataError as e:
            raise AgentAwayError(f"no token of our own: {e}") from e
        return await open_link(
            record.address, at.agent, wire.Hello(0, wire.PROTOCOL_VERSION, self._me, token), self._tls
        )

    def _make_room(self) -> None:
        """Drop connections that ended; at the bound, all of them."""
        if len(self._links) >= LINKS_MAX:
            self._found.clear()
            for owner, task in tuple(self._links.items()):
                if task.done():
                    del self._links[owner]
                    _retire(task)
        self._away_until_s = {o: s for o, s in self._away_until_s.items() if s > time.monotonic()}

    def _count_all(self, outcome: Mapping[Leased, tuple[Result, Transport]], owner: str) -> None:
        """Count what became of the blocks of a batch; those that were corrupt are logged one by one."""
        for (result, transport), blocks in Counter(outcome.values()).items():
            has_come = result is not Result.FAILED
            ends = [one for one, end in outcome.items() if end == (result, transport)]
            self._count(transport, result, blocks, sum(one.loan.size_bytes for one in ends) if has_come else 0)
            for one in ends if result is Result.CORRUPT else ():
                _log.warning("corrupt block from peer", extra={"peer": owner, "block": str(one.wanted.key)})

    def _count(self, transport: str, result: str, blocks: int, size_bytes: int = 0) -> None:
        counter = self._metrics.counter
        counter("kvstrata_peer_fetched_blocks_total", **self._labels, transport=transport, result=result).inc(blocks)
        if size_bytes:
            counter("kvstrata_peer_fetched_bytes_total", **self._labels, transport=transport).inc(size_bytes)


def _placed(leased: Leased) -> Placed:
    """What an owner reports of a block's place, with what we know of the block ourselves."""
    wanted, loan, at = leased.wanted, leased.loan, leased.loan.place
    assert at is not None, "asked for"
    name = parse_name(at.file)
    slot = SlotRef(name.id if name is not None else -1, at.offset, at.slot_bytes, loan.stamp)
    facts = (at.codec, loan.size_bytes, at.stored_bytes, loan.checksum, loan.epoch)
    return Placed(at.tier, at.file, slot, Record(wanted.key, loan.parent, wanted.layout_id, *facts))


async def _read_placed(reader: FlashReader, one: Leased) -> bool:
    return await reader.read(one.wanted, _placed(one))


def _result(one: Leased, end: bool | BaseException) -> Result:  # noqa: FBT001  What a read came to.
    """What became of a block whose read has ended, other than without success."""
    if not isinstance(end, BaseException):
        return Result.VERIFIED
    _log.error("read of a shared tier failed", extra={"block": str(one.wanted.key)}, exc_info=end)
    return Result.FAILED


def _opened(task: asyncio.Task[Link] | None) -> Link | None:
    """Link that a finished task opened; None when there is none."""
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()


def _is_usable(task: asyncio.Task[Link]) -> bool:
    link = _opened(task)
    return link is not None and link.is_usable


def _retire(task: asyncio.Task[Link] | None) -> None:
    if link := _opened(task):
        link.retire()


def _seen(task: asyncio.Task[Link]) -> None:
    """Mark a failure as seen, also when nobody waits for the connection any more."""
    if not task.cancelled():
        task.exception()


def _batches(wanted: Sequence[Wanted]) -> Iterator[list[int]]:
    """Positions of blocks that are asked for together: one owner, scope and layout, bounded bytes and keys."""

    def group(i: int) -> tuple[str, int, str, bytes]:
        want = wanted[i]
        return (want.location.agent, want.location.epoch, want.key.scope, want.layout_id)

    for _, members in groupby(sorted(range(len(wanted)), key=group), key=group):
        batch: list[int] = []
        size_bytes = 0
        for i in members:
            if batch and (size_bytes + len(wanted[i].into) > BATCH_BYTES_MAX or len(batch) == wire.KEYS_MAX):
                yield batch
                batch, size_bytes = [], 0
            batch.append(i)
            size_bytes += len(wanted[i].into)
        yield batch


class FlashReader:
    """Reads for `RemotePeers` records whose place an owner has reported."""

    def __init__(self, node: Node, codecs: Codecs) -> None:
        self._node = node
        self._codecs = codecs
        self._buffers = ScratchPool()
        self._turns = asyncio.Semaphore(READS_MAX)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the shared tiers that are up here."""
        return tuple(t.name for t in self._node.tiers if t.backend.shared is not None)

    async def read(self, wanted: Wanted, placed: Placed) -> bool:
        """Fill and seal a block's slot from its owner's file, verified; False when that cannot be done."""
        tier = self._node.tier(placed.tier)
        shared = None if tier is None else tier.backend.shared
        if tier is None or shared is None or placed.record.raw_bytes != len(wanted.into):
            return False
        async with self._turns:
            try:
                await self._read(shared, wanted, placed)
            except KvStrataError as e:
                tier.last_error = str(e)
                return False
        return True

    async def _read(self, backend: SharedBackend, wanted: Wanted, placed: Placed) -> None:
        """Verified bytes go into the slot, and our own checksum is of what went there."""
        record, node = placed.record, wanted.location.agent.partition(".")[2]
        with self._buffers.lend(max(record.raw_bytes, record.stored_bytes)) as stored:
            await backend.read_other(node, placed.file, placed.slot, record, stored)
            if record.codec in UNENCODED:
                await in_thread(None, partial(wanted.take, stored[: record.raw_bytes]))
                return
            codec = self._codecs.named(record.codec)
            with self._buffers.lend(record.raw_bytes) as raw:
                await in_thread(None, partial(codec.decode, stored[: record.stored_bytes], raw))
                await in_thread(None, partial(wanted.take, raw))
