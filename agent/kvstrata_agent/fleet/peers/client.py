"""The asking side of one connection to another agent: questions, answers, and blocks pulled over TCP."""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvstrata_agent.cache.ports import Follow
from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.connection import READ_AHEAD_BYTES, PeerTls, Stream, frame_within
from kvstrata_api.blocks import LayoutId, ScopeId
from kvstrata_api.errors import AgentAwayError, InvalidInputError, KvStrataError, PermanentError, RetryableError
from kvstrata_api.trace_context import traceparent

CONNECT_TIMEOUT_S: Final = 2.0
LIFE_S: Final = 300.0
"""Age at which a connection is replaced, so that a token that was revoked does not live on in it."""

FOLLOW_SLACK_S: Final = 10.0
"""What the bytes of the parts may take beyond the wait for them."""

BATCHES_MAX: Final = 4
"""Batches under way at once over one connection; their leases hold the owner's memory."""

OFFER_TIMEOUT_S: Final = 60.0
"""A batch is fetched and written meanwhile, with the lowest priority; an offer may be repeated."""

TRACE_TIMEOUT_S: Final = 10.0
"""The owner answers from memory; it may be busy, or stopped."""

A = TypeVar("A", bound=wire.Answer)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """Consecutive blocks of one chain that an agent of another pool is to take over. Holds no bytes."""

    scope: ScopeId
    tenant: str
    """Account that they are on."""
    layout_id: LayoutId
    raw_bytes: int
    """Of each block."""
    digests: tuple[bytes, ...]
    """The first one of the chain first."""
    before: bytes
    """What that continues; empty at the root."""
    tier: str = ""
    """Where they are to lie; empty for the fastest tier there that survives a restart."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of an offer."""

    count: int
    """Leading blocks that are whole in their tier now: written, and found by whoever asks."""
    reason: str = ""
    """CamelCase cause when that is not all."""


@dataclass(frozen=True, slots=True)
class PeerHolding:
    """What an agent has of one revision of a model."""

    digest: str = ""
    """Of its listing; empty while it has none."""
    listing_bytes: int = 0
    """Of the encoded listing."""
    staged_bytes: int = 0
    """Bytes of files that it has so far."""


@dataclass(frozen=True, slots=True)
class WeightsPlace:
    """Where bytes of a model begin."""

    model: str
    revision: str
    digest: str
    """Of the listing that this speaks of."""
    file: int
    """Number of the file in it; -1 for the listing itself."""
    offset: int


class Link:
    """An authenticated connection. Every question raises `AgentAwayError` when the owner does not answer it."""

    def __init__(self, stream: Stream, welcome: wire.Welcome) -> None:
        self.epoch = welcome.epoch
        self.opened_s = time.monotonic()
        self.nixl_name = ""
        """The owner's name in NIXL; empty while it is not known, or the owner has no NIXL."""
        self.nixl_generation = -1
        """Of the description that NIXL knows."""
        self.describing = asyncio.Lock()
        self.batches = asyncio.Semaphore(BATCHES_MAX)
        """Held by those who lease and move a batch."""
        self._stream = stream
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.Answer]] = {}
        self._targets: dict[int, Mapping[int, memoryview]] = {}
        self._users = 0
        self._is_retired = False
        self._task = asyncio.create_task(self._read(), name="peer link")

    @property
    def is_usable(self) -> bool:
        """False when closed or so old that a new one is due."""
        return self._stream.is_open and not self._task.done() and time.monotonic() - self.opened_s < LIFE_S

    async def describe(self) -> wire.Described:
        """What NIXL must know of the owner."""
        return await self._ask(wire.Describe(next(self._ids)), wire.Described)

    async def lend(
        self,
        scope: str,
        layout_id: bytes,
        digests: list[bytes],
        lease_s: float,
        epoch: int,
        tiers: tuple[str, ...] = (),
    ) -> wire.Lending:
        """Lease blocks of the incarnation `epoch`; one loan for each digest. We read `tiers` ourselves."""
        place, joined = (scope, layout_id), b"".join(digests)
        question = wire.Lend(next(self._ids), *place, joined, lease_s, epoch, tiers, traceparent())
        answer = await self._ask(question, wire.Lending)
        if len(answer.loans) != len(digests):
            raise AgentAwayError(f"owner answered {len(answer.loans)} loans to {len(digests)} keys")
        return answer

    async def pull(self, targets: Mapping[int, memoryview]) -> None:
        """Fill the target of each lease over this connection. Nothing is verified.

        Nothing more is written when this has returned, failed or been cancelled.
        """
        question = wire.Pull(next(self._ids), tuple(targets), traceparent())
        self._targets[question.id] = targets
        try:
            await self._ask(question, wire.Done)
        finally:
            del self._targets[question.id]

    async def follow(self, wanted: Follow, have: int, wait_s: float, into: Sequence[memoryview]) -> wire.Followed:
        """Wait for parts of partial blocks and put them into place. Nothing is verified.

        Nothing more is written when this has returned, failed or been cancelled.
        """
        digests, epoch, name = b"".join(wanted.digests), wanted.handover.epoch, wanted.handover.name
        place, size = (wanted.scope, wanted.layout_id, digests, epoch, name), wanted.part_bytes
        question = wire.Follow(next(self._ids), *place, size, have, len(into), wait_s)
        self._targets[question.id] = dict(enumerate(into))
        try:
            async with asyncio.timeout(wait_s + FOLLOW_SLACK_S):
                return await self._ask(question, wire.Followed)
        except TimeoutError as e:
            raise AgentAwayError(f"owner of a partial block did not answer for {wait_s + FOLLOW_SLACK_S} s") from e
        finally:
            del self._targets[question.id]

    async def trace(self, scope: str, digest: bytes, most: int, epoch: int) -> wire.Traced:
        """Ask the incarnation `epoch` which blocks stand before one."""
        question = wire.Trace(next(self._ids), scope, digest, most, epoch)
        try:
            async with asyncio.timeout(TRACE_TIMEOUT_S):
                return await self._ask(question, wire.Traced)
        except TimeoutError as e:
            raise AgentAwayError(f"owner of a chain did not answer for {TRACE_TIMEOUT_S} s") from e

    async def offer(self, offer: Offer) -> wire.Taken:
        """Ask for blocks to be taken over; the other agent fetches them meanwhile."""
        digests, place = b"".join(offer.digests), (offer.scope, offer.tenant, offer.layout_id, offer.raw_bytes)
        question = wire.Offer(next(self._ids), *place, digests, offer.before, offer.tier)
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                return await self._ask(question, wire.Taken)
        except TimeoutError as e:
            raise AgentAwayError(f"no answer to an offer for {OFFER_TIMEOUT_S} s") from e

    async def weights_held(self, model: str, revision: str) -> wire.WeightsHeld:
        """Ask what the owner has of a revision of a model."""
        question = wire.Weights(next(self._ids), model, revision)
        try:
            async with asyncio.timeout(TRACE_TIMEOUT_S):
                return await self._ask(question, wire.WeightsHeld)
        except TimeoutError as e:
            raise AgentAwayError(f"owner of weights did not answer for {TRACE_TIMEOUT_S} s") from e

    async def read_weights(self, at: WeightsPlace, into: memoryview) -> None:
        """Fill `into` with bytes of a model. Nothing is verified.

        Nothing more is written when this has returned, failed or been cancelled.
        """
        place = (at.model, at.revision, at.digest, at.file, at.offset)
        question = wire.ReadWeights(next(self._ids), *place, len(into))
        self._targets[question.id] = {0: into}
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                await self._ask(question, wire.Done)
        except TimeoutError as e:
            raise AgentAwayError(f"weights did not come for {OFFER_TIMEOUT_S} s") from e
        finally:
            del self._targets[question.id]

    async def end(self, leases: tuple[int, ...]) -> None:
        """End leases."""
        await self._stream.send(wire.End(next(self._ids), leases))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep it open meanwhile, also when it is retired: for questions that belong together."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._is_retired:
                self.retire()

    def retire(self) -> None:
        """Close when nobody uses it any more. Leases end with the connection."""
        self._is_retired = True
        if not self._users:
            self._stream.close()

    async def close(self) -> None:
        """Close; questions under way fail. Idempotent."""
        self._stream.close()
        await asyncio.wait([self._task])

    async def _ask(self, question: wire.Question, kind: type[A]) -> A:
        answered: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        if self._task.done():
            raise AgentAwayError("the connection to the owner has ended")
        self._waiting[question.id] = answered
        with self.used():
            try:
                await self._stream.send(question)
                answer = await answered
            finally:
                del self._waiting[question.id]
                if answered.done() and not answered.cancelled():
                    answered.exception()  # Seen, also when sending has failed before.
        if not isinstance(answer, kind):
            raise AgentAwayError(f"owner refused: {answer.reason if isinstance(answer, wire.Refused) else answer}")
        return answer

    async def _read(self) -> None:
        """Hand answers to those who wait, until the connection ends; then fail them all."""
        try:
            while True:
                answer = wire.decode_answer(await self._stream.next_frame())
                if isinstance(answer, wire.Chunk):
                    await self._land(answer)
                elif (waiting := self._waiting.get(answer.id)) and not waiting.done():
                    waiting.set_result(answer)
        except KvStrataError as e:
            _log.debug("peer link ended", extra={"error": str(e)})
        finally:
            self._stream.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(AgentAwayError("the connection to the owner has ended"))

    async def _land(self, chunk: wire.Chunk) -> None:
        """Put a chunk into its target; bytes that nobody waits for any more are dropped."""
        received = await self._stream.next_bytes(chunk.size_bytes)
        target = self._targets.get(chunk.id, {}).get(chunk.lease)
        if target is None:
            return
        if chunk.offset < 0 or chunk.offset + chunk.size_bytes > len(target):
            raise InvalidInputError(f"chunk at {chunk.offset} of {chunk.size_bytes} B in a block of {len(target)} B")
        target[chunk.offset : chunk.offset + chunk.size_bytes] = received


async def open_link(address: str, agent: str, hello: wire.Hello, tls: PeerTls | None) -> Link:
    """Connect to the agent named `agent` and authenticate; `tls` is None in simulated networks alone.

    Raises `AgentAwayError` with the cause. Our token is not sent before the other end has proved its name.
    """
    host, _, port = address.rpartition(":")
    try:
        secured: Any = {"ssl": tls.connecting(), "server_hostname": ""} if tls else {}
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            opened = asyncio.open_connection(host.strip("[]"), int(port), limit=READ_AHEAD_BYTES, **secured)
            reader, writer = await opened
    except (OSError, ValueError, TimeoutError, RetryableError) as e:
        raise AgentAwayError(f"agent {agent} at {address}: {type(e).__name__}: {e}") from e
    stream = Stream(reader, writer)
    try:
        if tls:
            tls.check(stream.transport, agent)
        return Link(stream, await _greet(stream, agent, hello))
    except PermanentError as e:
        stream.close()
        raise AgentAwayError(f"agent {agent} at {address}: {e}") from e
    except BaseException:
        stream.close()
        raise


async def _greet(stream: Stream, agent: str, hello: wire.Hello) -> wire.Welcome:
    await stream.send(hello)
    try:
        answer = wire.decode_answer(await frame_within(stream, CONNECT_TIMEOUT_S))
    except InvalidInputError as e:
        raise AgentAwayError(f"agent {agent}: {e}") from e
    if not isinstance(answer, wire.Welcome) or answer.agent != agent:
        raise AgentAwayError(f"agent {agent} is not there, or refuses us: {answer}")
    return answer
