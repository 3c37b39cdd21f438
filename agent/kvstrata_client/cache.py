"""A prefix cache over a client: tokens in, verified blocks out; the scopes and keys stay inside."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from kvstrata_api.blocks import token_ids
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import Handover
from kvstrata_client.async_client import AsyncClient
from kvstrata_client.client import Client
from kvstrata_client.prompt import hints
from kvstrata_client.prompt.chain import Tokens
from kvstrata_client.prompt.handover import AsyncHandoverWriter, HandoverWriter, begin_handover
from kvstrata_client.prompt.load import DeviceRows, load
from kvstrata_client.prompt.routes import Job, look_up, prompt_of
from kvstrata_client.prompt.store import store
from kvstrata_client.prompt.streaming import LEASE_S, AsyncLayerStream, LayerStream, lease_route
from kvstrata_client.target import Devices, Target
from kvstrata_client.tracing import span
from kvstrata_client.verbs.copying import HeadRange
from kvstrata_client.verbs.leases import lost
from kvstrata_client.verbs.results import Bytes2D, Dropped, Hinted, Loaded, Located, Stored

DEADLINE_S: Final = 10.0
TOKENS_MAX: Final = 1 << 24
"""Sixteen million tokens: above every context window there is, below what would be a mistake in the unit."""


class PrefixCache:
    """Loads and stores prompts' blocks; blocking."""

    def __init__(self, client: Client, *, variant: str = "") -> None:
        """Use `client`, which stays the caller's to close.

        `variant` says what besides the tokens makes blocks different, such as the digest of an adapter or of a
        picture, or a user's salt: blocks of another variant are misses. It parts a tenant's own blocks further and
        opens nothing.
        """
        self._client = client
        self._variant = variant

    def lookup(self, tokens: Sequence[int] | Tokens, *, session: str = "", blocks_max: int | None = None) -> Located:
        """Return how many leading blocks of `tokens` can be had now, here or from another node; leases nothing."""
        job = _job(self._client, self._variant, tokens, session, DEADLINE_S, blocks_max)
        with span("kvstrata.client.lookup", session_id=session, requested_blocks=job.wanted_blocks) as active:
            located = self._client.run(look_up(job))
            active.set(hit_blocks=located.blocks)
        return located

    def load(
        self,
        tokens: Sequence[int] | Tokens,
        into: Bytes2D | None = None,
        *,
        session: str = "",
        deadline_s: float = DEADLINE_S,
        blocks_max: int | None = None,
        first_block: int = 0,
    ) -> Loaded:
        """Copy the longest cached prefix of `tokens`, block by block, into `into` or a new buffer.

        `blocks_max` bounds the prefix; pass it rather than fewer tokens, because a shared prefix is recognised by all
        of its tokens, which may end within a block. Blocks before `first_block` are at hand: they are not copied, and
        the first row is that of `first_block`.
        Rows of `into` beyond the blocks loaded hold nothing of use. Every row has been verified after the copy.
        Raises `InvalidInputError` for a buffer of another shape, and nothing else unless the client is strict.
        """
        job = replace(
            _job(self._client, self._variant, tokens, session, deadline_s, blocks_max), first_block=max(0, first_block)
        )
        check_buffer(job.target, into)
        return self._loaded(job, into, session)

    @property
    def devices(self) -> Devices | None:
        """What opens blocks in the memory of devices, where the target has that."""
        return self._client.target.devices

    def load_rows(
        self,
        tokens: Sequence[int] | Tokens,
        into: DeviceRows,
        *,
        session: str = "",
        deadline_s: float = DEADLINE_S,
        blocks_max: int | None = None,
        first_block: int = 0,
    ) -> Loaded:
        """Copy the longest cached prefix of `tokens` to a device; blocks that lie there are not brought to the host.

        What `into` got counts as far as the result's `blocks`. Errors as for `load`.
        """
        job = replace(
            _job(self._client, self._variant, tokens, session, deadline_s, blocks_max), first_block=max(0, first_block)
        )
        return self._loaded(job, into, session)

    def _loaded(self, job: Job, into: Bytes2D | DeviceRows | None, session: str) -> Loaded:
        with span("kvstrata.client.load", session_id=session, requested_blocks=job.lacking_blocks) as active:
            loaded = self._client.run(load(job, into))
            active.set(hit_blocks=loaded.blocks)
        self._client.counters.note_load(job.lacking_blocks, loaded)
        return _vouched(loaded, is_strict=self._client.is_strict)

    def stream(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        heads: range | None = None,
        session: str = "",
        deadline_s: float = DEADLINE_S,
        blocks_max: int | None = None,
        handover: Handover | None = None,
    ) -> LayerStream:
        """Lease the longest cached prefix of `tokens`, to be read layer by layer, of some KV `heads` or of all.

        Every layer is verified after its copy, against checksums that the agent made of the parts of proven blocks.
        With `handover` the stream goes on with blocks whose writer, on another node, is still computing them: reading
        a layer waits for it. Raises `InvalidInputError` for heads that the layout has not, or of a hand-over, and
        nothing else unless the client is strict.
        """
        head_range = _head_range(self._client.target, heads, handover)
        job = _job(self._client, self._variant, tokens, session, deadline_s, blocks_max)
        leased = self._client.run(lease_route(replace(job, lease_s=LEASE_S), head_range, handover))
        return self._client.stream(leased, head_range)

    def hand_over(
        self, tokens: Sequence[int] | Tokens, *, session: str = "", deadline_s: float = DEADLINE_S
    ) -> HandoverWriter:
        """Reserve blocks of `tokens` that a reader on another node may have layer by layer while they are computed."""
        job = _job(self._client, self._variant, tokens, session, deadline_s)
        return self._client.write_handover(self._client.run(begin_handover(job)))

    def store(
        self,
        tokens: Sequence[int] | Tokens,
        blocks: Bytes2D,
        *,
        first_block: int = 0,
        session: str = "",
        deadline_s: float = DEADLINE_S,
        may_gap: bool = False,
    ) -> Stored:
        """Make the blocks of `tokens` available in the scope that this tenant writes to.

        `blocks` are the bytes of blocks `first_block` and up, as many as are at hand. Blocks that are there already
        are not written again. Those behind a block that is neither here nor at hand are stored only where it `may_gap`:
        a load by `first_block` finds them, as of a session with a window. Errors as for `load`.
        """
        job = replace(_job(self._client, self._variant, tokens, session, deadline_s), may_gap=may_gap)
        check_buffer(job.target, blocks)
        with span("kvstrata.client.store", session_id=session, blocks=len(blocks)):
            stored = self._client.run(store(job, blocks, first_block))
        self._client.counters.note_store(stored)
        return stored

    def touch(self, tokens: Sequence[int] | Tokens, *, blocks_max: int | None = None) -> int:
        """Record use of the longest cached prefix of `tokens` without reading it; returns how many blocks are here.

        Moves nothing. 0 while the agent is away, and from one that knows no touches.
        """
        return self._client.run(hints.touch(_job(self._client, self._variant, tokens, "", DEADLINE_S, blocks_max)))

    def prefetch(self, tokens: Sequence[int] | Tokens, *, session: str = "", blocks_max: int | None = None) -> Hinted:
        """Begin to bring the longest prefix of `tokens` that this node has into memory; counts blocks on their way.

        Answers at once. What is in memory already does not count, and what other nodes have stays there until it is
        loaded or fetched; the pool's `policy.prefetch` bounds how much is under way.
        """
        job = _job(self._client, self._variant, tokens, session, DEADLINE_S, blocks_max)
        return self._client.run(hints.prefetch(job))

    def fetch(self, tokens: Sequence[int] | Tokens, *, session: str = "", blocks_max: int | None = None) -> Hinted:
        """Like `prefetch`, of blocks wherever they are: other nodes are asked for theirs."""
        job = _job(self._client, self._variant, tokens, session, DEADLINE_S, blocks_max)
        return self._client.run(hints.fetch(job))

    def pin(self, tokens: Sequence[int] | Tokens, ttl_s: float, *, blocks_max: int | None = None) -> Hinted:
        """Keep the longest cached prefix of `tokens` in memory for `ttl_s` seconds, an hour at most; counts its blocks.

        What lies in slower tiers is not brought up for it: refused where all of it does.
        """
        return self._client.run(hints.pin(_job(self._client, self._variant, tokens, "", DEADLINE_S, blocks_max), ttl_s))

    def unpin(self, tokens: Sequence[int] | Tokens, *, blocks_max: int | None = None) -> int:
        """Take pins on the longest cached prefix of `tokens` back; returns how many blocks they held."""
        return self._client.run(hints.unpin(_job(self._client, self._variant, tokens, "", DEADLINE_S, blocks_max)))

    def demote(self, tokens: Sequence[int] | Tokens, *, first_block: int = 0) -> Hinted:
        """Have the tenant's own blocks of `tokens` copied to a slower tier soon, and leave memory first; counts them.

        From the end on, up to `first_block` or the first one that somebody holds or another chain continues. Refused
        for blocks of a domain or a share, which are its other readers' as well, and where there is no slower tier.
        """
        job = _job(self._client, self._variant, tokens, "", DEADLINE_S)
        return self._client.run(hints.demote(replace(job, first_block=max(0, first_block))))

    def share(self, tokens: Sequence[int] | Tokens, *, blocks_max: int | None = None) -> Hinted:
        """Copy the longest cached prefix of `tokens` to where others may read it; counts the blocks that came there.

        That is to prefix shares that this tenant grants and to its domain where it publishes: what it stored for itself
        before. Refused for a tenant that has neither.
        """
        return self._client.run(hints.share(_job(self._client, self._variant, tokens, "", DEADLINE_S, blocks_max)))

    def drop(self, tokens: Sequence[int] | Tokens, *, first_block: int = 0) -> Dropped:
        """Remove the tenant's own blocks of `tokens` from this node, those before `first_block` excepted.

        Blocks of a domain or a share are its other readers' as well and stay. What somebody leases, pins, moves or
        decodes from stays, and so does what a block continues that stays. It makes room and keeps no secret: other
        nodes keep their copies, and erasing is a KVOperation of type `Erase`. Nothing with an agent that is away or
        knows no drops.
        """
        job = _job(self._client, self._variant, tokens, "", DEADLINE_S)
        return self._client.run(hints.drop(replace(job, first_block=max(0, first_block))))


class AsyncPrefixCache:
    """Loads and stores prompts' blocks under asyncio; memory is copied in a worker thread."""

    def __init__(self, client: AsyncClient, *, variant: str = "") -> None:
        """Like `PrefixCache`."""
        self._client = client
        self._variant = variant

    async def lookup(
        self, tokens: Sequence[int] | Tokens, *, session: str = "", blocks_max: int | None = None
    ) -> Located:
        """Like `PrefixCache.lookup`."""
        job = _job(self._client, self._variant, tokens, session, DEADLINE_S, blocks_max)
        with span("kvstrata.client.lookup", session_id=session, requested_blocks=job.wanted_blocks) as active:
            located = await self._client.run(look_up(job))
            active.set(hit_blocks=located.blocks)
        return located

    async def load(
        self,
        tokens: Sequence[int] | Tokens,
        into: Bytes2D | None = None,
        *,
        session: str = "",
        deadline_s: float = DEADLINE_S,
        blocks_max: int | None = None,
        first_block: int = 0,
    ) -> Loaded:
        """Like `PrefixCache.load`. A cancelled load gives its leases back."""
        job = replace(
            _job(self._client, self._variant, tokens, session, deadline_s, blocks_max), first_block=max(0, first_block)
        )
        check_buffer(job.target, into)
        with span("kvstrata.client.load", session_id=session, requested_blocks=job.lacking_blocks) as active:
            loaded = await self._client.run(load(job, into))
            active.set(hit_blocks=loaded.blocks)
        self._client.counters.note_load(job.lacking_blocks, loaded)
        return _vouched(loaded, is_strict=self._client.is_strict)

    async def stream(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        heads: range | None = None,
        session: str = "",
        deadline_s: float = DEADLINE_S,
        blocks_max: int | None = None,
        handover: Handover | None = None,
    ) -> AsyncLayerStream:
        """Like `PrefixCache.stream`: `async with await cache.stream(tokens) as layers: async for layer in layers: ...`.

        Cancelled, it gives its leases back; so does leaving the `async with` block, in whatever way.
        """
        head_range = _head_range(self._client.target, heads, handover)
        job = _job(self._client, self._variant, tokens, session, deadline_s, blocks_max)
        leased = await self._client.run(lease_route(replace(job, lease_s=LEASE_S), head_range, handover))
        return self._client.stream(leased, head_range)

    async def hand_over(
        self, tokens: Sequence[int] | Tokens, *, session: str = "", deadline_s: float = DEADLINE_S
    ) -> AsyncHandoverWriter:
        """Like `PrefixCache.hand_over`."""
        job = _job(self._client, self._variant, tokens, session, deadline_s)
        return self._client.write_handover(await self._client.run(begin_handover(job)))

    async def store(
        self,
        tokens: Sequence[int] | Tokens,
        blocks: Bytes2D,
        *,
        first_block: int = 0,
        session: str = "",
        deadline_s: float = DEADLINE_S,
        may_gap: bool = False,
    ) -> Stored:
        """Like `PrefixCache.store`. A cancelled store gives its reservations back."""
        job = replace(_job(self._client, self._variant, tokens, session, deadline_s), may_gap=may_gap)
        check_buffer(job.target, blocks)
        with span("kvstrata.client.store", session_id=session, blocks=len(blocks)):
            stored = await self._client.run(store(job, blocks, first_block))
        self._client.counters.note_store(stored)
        return stored

    async def touch(self, tokens: Sequence[int] | Tokens, *, blocks_max: int | None = None) -> int:
        """Like `PrefixCache.touch`."""
        job = _job(self._client, self._variant, tokens, "", DEADLINE_S, blocks_max)
        return await self._client.run(hints.touch(job))

    async def prefetch(
        self, tokens: Sequence[int] | Tokens, *, session: str = "", blocks_max: int | None = None
    ) -> Hinted:
        """Like `PrefixCache.prefetch`."""
        job = _job(self._client, self._variant, tokens, session, DEADLINE_S, blocks_max)
        return await self._client.run(hints.prefetch(job))

    async def fetch(
        self, tokens: Sequence[int] | Tokens, *, session: str = "", blocks_max: int | None = None
    ) -> Hinted:
        """Like `PrefixCache.fetch`."""
        job = _job(self._client, self._variant, tokens, session, DEADLINE_S, blocks_max)
        return await self._client.run(hints.fetch(job))

    async def pin(self, tokens: Sequence[int] | Tokens, ttl_s: float, *, blocks_max: int | None = None) -> Hinted:
        """Like `PrefixCache.pin`."""
        return await self._client.run(
            hints.pin(_job(self._client, self._variant, tokens, "", DEADLINE_S, blocks_max), ttl_s)
        )

    async def unpin(self, tokens: Sequence[int] | Tokens, *, blocks_max: int | None = None) -> int:
        """Like `PrefixCache.unpin`."""
        return await self._client.run(
            hints.unpin(_job(self._client, self._variant, tokens, "", DEADLINE_S, blocks_max))
        )

    async def demote(self, tokens: Sequence[int] | Tokens, *, first_block: int = 0) -> Hinted:
        """Like `PrefixCache.demote`."""
        job = _job(self._client, self._variant, tokens, "", DEADLINE_S)
        return await self._client.run(hints.demote(replace(job, first_block=max(0, first_block))))

    async def share(self, tokens: Sequence[int] | Tokens, *, blocks_max: int | None = None) -> Hinted:
        """Like `PrefixCache.share`."""
        return await self._client.run(
            hints.share(_job(self._client, self._variant, tokens, "", DEADLINE_S, blocks_max))
        )

    async def drop(self, tokens: Sequence[int] | Tokens, *, first_block: int = 0) -> Dropped:
        """Like `PrefixCache.drop`."""
        job = _job(self._client, self._variant, tokens, "", DEADLINE_S)
        return await self._client.run(hints.drop(replace(job, first_block=max(0, first_block))))


def check_buffer(target: Target, buffer: Bytes2D | None) -> None:
    """Raise `InvalidInputError` unless `buffer` is (blocks, block bytes) uint8 in C order."""
    if buffer is None:
        return
    wanted = target.layout.block_bytes
    if buffer.dtype != np.uint8 or buffer.ndim != 2 or buffer.shape[1] != wanted or not buffer.flags.c_contiguous:
        raise InvalidInputError(f"buffer of {buffer.dtype} {buffer.shape}: contiguous uint8 (blocks, {wanted}) wanted")


def _vouched(loaded: Loaded, *, is_strict: bool) -> Loaded:
    """Return a load; for a strict client, raise `LeaseLostError` when leases were over before the copies were."""
    if loaded.lost_blocks and is_strict:
        raise lost(loaded.lost_blocks)
    return loaded


def _job(
    client: Client | AsyncClient,
    variant: str,
    tokens: Sequence[int] | Tokens,
    session: str,
    deadline_s: float,
    blocks_max: int | None = None,
) -> Job:
    packed = token_ids(tokens)
    if packed.ndim != 1 or len(packed) > TOKENS_MAX:
        raise InvalidInputError(f"tokens of shape {packed.shape}: one row of at most {TOKENS_MAX} wanted")
    prompt = prompt_of(client.target, packed, variant)
    return Job(client.target, client, prompt, session, deadline_s=deadline_s, blocks_max=blocks_max)


def _head_range(target: Target, heads: range | None, handover: Handover | None) -> HeadRange:
    """What a stream reads of blocks. Raises `InvalidInputError` for heads that there are not, or of a hand-over."""
    if handover is not None and heads is not None:
        raise InvalidInputError(f"heads {heads.start} to {heads.stop}: a hand-over goes by whole layers")
    return HeadRange(target.layout, heads)
