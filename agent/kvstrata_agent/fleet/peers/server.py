"""The owner's side: lends blocks to authenticated agents, sends bytes to those that cannot read them by NIXL.

Whoever connects has shown a certificate before its first frame is read, and must be the agent that it claims to be.
Every lease belongs to the connection that asked for it and ends with it.

Parts of blocks that are still being written go over the connection, chunk by chunk: a slot whose reservation ends in
the middle must not be read any more, which can be checked before each chunk here, and not of a read by NIXL.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from kvstrata_agent.blocks.handovers import Growing, Stage
from kvstrata_agent.cache.ports import Follow
from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.chain_lookup import ChainSegment
from kvstrata_agent.fleet.peers.client import Offer, PeerHolding, Taken, WeightsPlace
from kvstrata_agent.fleet.peers.connection import HANDSHAKE_S, READ_AHEAD_BYTES, PeerTls, Stream, frame_within
from kvstrata_agent.fleet.peers.lender import HandoverSource, Lent
from kvstrata_agent.fleet.peers.nixl import NixlReader, address_of, answer_of
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId, ScopeSecret, unpack_digests
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import InvalidInputError, KvStrataError
from kvstrata_api.trust import Identity
from kvstrata_api.wire import Handover
from kvstrata_kube.tasks import TaskSet
from kvstrata_metadata.store.records import AgentRecord, Announcement
from kvstrata_telemetry.tracing import span

WAIT_S_MAX: Final = 10.0
"""Longest wait of one question."""
PARTS_ONCE_MAX: Final = 64
"""Parts of each block in one answer: their checksums fit a frame for 1,024 blocks."""
_NOTHING: Final = (-1, (), (), (), ())

CONNECTIONS_MAX: Final = 256
QUESTIONS_MAX: Final = 8
"""Questions of one connection under way at once; the next one is read when one is answered."""

FOLLOWERS_MAX: Final = 64
"""Hand-overs that one connection waits for at once."""

LEASES_MAX: Final = 8_192
"""Leases of one connection at once."""

LEASE_S_MAX: Final = 60.0
HELLO_TIMEOUT_S: Final = 5.0
ATTEND_S: Final = 5.0
"""How long NIXL looks out for the read after a loan; a longer one goes on while it is slower, or over TCP."""

IDLE_S: Final = 600.0
"""Silence after which a connection is closed; twice the age at which an asking agent replaces its own."""

LIFE_S: Final = 600.0
"""Age at which a connection is closed, busy or not: what was shown at its start is not believed for ever."""

VerifyPeer = Callable[[str, str], Awaitable[Identity]]
"""Accepts a token as that of another agent of this fleet, by its name; raises `KvStrataError` for every other one."""

_log = logging.getLogger(__name__)


class Lender(Protocol):
    """What the peer listener needs of the core."""

    async def lend(
        self, keys: Sequence[BlockKey], layout_id: LayoutId, lease_s: float, tiers: Sequence[str] = ()
    ) -> list[Lent | None]:
        """Lease blocks in memory, bringing them up first; None for absent ones and for another layout.

        Blocks that lie on one of the shared `tiers` alone are leased there, for the asking agent to read.
        """

    def trace(self, key: BlockKey, most: int) -> ChainSegment | None:
        """A block that can be read here and up to `most` in all with those before it; None when it is not here."""

    def end(self, leases: Sequence[int]) -> None:
        """End leases; unknown ones are ignored."""

    def holdings(self) -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        """Everything that this agent holds, in parts that are read when they are asked for, for a full report."""


class Adopter(Protocol):
    """What the peer listener needs to take blocks of other pools over."""

    async def adopt(self, offer: Offer) -> Taken:
        """Fetch what is offered and bring it to its tier, within the rights and quotas of its tenant."""


class WeightsOwner(Protocol):
    """What the peer listener needs to send weights of models."""

    def held(self, model: str, revision: str) -> PeerHolding | None:
        """What is here of a revision; None for nothing."""

    async def read(self, at: WeightsPlace, size_bytes: int) -> memoryview:
        """So many bytes from there on. Raises a `KvStrataError` when they are not here (yet)."""


class PeerListener:
    """Listens from construction on, so that the address can be announced; answers from `serve` on."""

    def __init__(self, host: str, port: int = 0) -> None:
        """Bind. Raises `OSError` when the address is taken or not ours; port 0 chooses one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._server: asyncio.Server | None = None
        self._open: TaskSet[None] = TaskSet()
        self.adopter: Adopter | None = None
        """What takes blocks of other pools over; set before `serve`, or none are."""
        self.weights: WeightsOwner | None = None
        """Weights that other agents may have; set before `serve`, or they have none."""

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def serve(
        self,
        me: AgentRecord,
        lender: Lender,
        verify: VerifyPeer,
        nixl: NixlReader | None,
        *,
        tls: PeerTls | None,
        handovers: HandoverSource | None = None,
    ) -> None:
        """Begin to answer. `tls` is None in simulated networks alone; without `handovers` only whole blocks go."""
        owner = _Owner(me, lender, verify, nixl, tls, handovers, self.adopter, self.weights)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Not a coroutine, whose task would be asyncio's: until 3.12 it reports one that is cancelled as a failure.
            if len(self._open) >= CONNECTIONS_MAX:
                writer.transport.abort()
                return
            stream = Stream(reader, writer)
            self._open.spawn(_Conversation(stream, owner).run()).add_done_callback(partial(_ended, stream))

        secured: Any = {"ssl": tls.listening(), "ssl_handshake_timeout": HANDSHAKE_S} if tls else {}
        self._server = await asyncio.start_server(accept, sock=self._socket, limit=READ_AHEAD_BYTES, **secured)

    async def close(self) -> None:
        """Stop listening and end all conversations with their leases. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        await self._open.close()


def _ended(stream: Stream, conversation: "asyncio.Task[None]") -> None:
    stream.close()  # One that was cancelled at once never got to it.
    if not conversation.cancelled() and (bug := conversation.exception()):
        _log.error("peer conversation failed", exc_info=bug)


@dataclass(frozen=True, slots=True)
class _Owner:
    """What every conversation needs of us."""

    me: AgentRecord
    lender: Lender
    verify: VerifyPeer
    nixl: NixlReader | None
    tls: PeerTls | None
    handovers: HandoverSource | None
    adopter: Adopter | None
    weights: WeightsOwner | None


class _Conversation:
    """One connection of one agent."""

    def __init__(self, stream: Stream, owner: "_Owner") -> None:
        self._stream = stream
        self._me, self._lender, self._verify = owner.me, owner.lender, owner.verify
        self._nixl, self._tls, self._handovers, self._adopter = owner.nixl, owner.tls, owner.handovers, owner.adopter
        self._weights = owner.weights
        self._lent: dict[int, Lent] = {}
        self._gate = asyncio.Semaphore(QUESTIONS_MAX)
        self._followers = asyncio.Semaphore(FOLLOWERS_MAX)
        self._tasks: TaskSet[None] = TaskSet()

    async def run(self) -> None:
        """Answer until the connection ends. Raises nothing but cancellation."""
        try:
            if await self._welcome():
                await self._converse()
        except KvStrataError as e:
            _log.debug("peer conversation ended", extra={"error": str(e)})
        finally:
            self._tasks.cancel()
            self._stream.close()
            self._end(tuple(self._lent))

    async def _welcome(self) -> bool:
        hello = wire.decode_question(await frame_within(self._stream, HELLO_TIMEOUT_S))
        if not isinstance(hello, wire.Hello) or hello.version != wire.PROTOCOL_VERSION:
            await self._stream.send(wire.Refused(hello.id, f"this agent speaks version {wire.PROTOCOL_VERSION}"))
            return False
        try:
            if self._tls:
                self._tls.check(self._stream.transport, hello.agent)
            await self._verify(hello.token, hello.agent)
        except KvStrataError as e:
            _log.warning("peer refused", extra={"peer": hello.agent, "error": str(e)})
            await self._stream.send(wire.Refused(hello.id, type(e).__name__))
            return False
        await self._stream.send(wire.Welcome(hello.id, wire.PROTOCOL_VERSION, self._me.agent, self._me.epoch))
        return True

    async def _converse(self) -> None:
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + LIFE_S
        while (left_s := ends_at_s - loop.time()) > 0:
            question = wire.decode_question(await frame_within(self._stream, min(IDLE_S, left_s)))
            if isinstance(question, wire.End):
                self._end(question.leases)
                continue
            # Those who wait for parts must not keep others from asking.
            gate = self._followers if isinstance(question, wire.Follow) else self._gate
            await gate.acquire()
            self._tasks.spawn(self._answer(question)).add_done_callback(partial(self._answered, gate))

    def _answered(self, gate: asyncio.Semaphore, task: "asyncio.Task[None]") -> None:
        gate.release()
        if not task.cancelled() and (bug := task.exception()):
            _log.error("peer question failed", exc_info=bug)
            self._stream.close()

    async def _answer(self, question: wire.Question) -> None:
        """Answer one question; what fails is refused, and a broken connection ends with its reader."""
        with contextlib.suppress(KvStrataError):
            try:
                match question:
                    case wire.Describe():
                        await self._describe(question)
                    case wire.Lend():
                        await self._lend(question)
                    case wire.Pull():
                        await self._send_blocks(question)
                    case wire.Trace():
                        await self._trace(question)
                    case wire.Offer() if self._adopter is not None:
                        await self._adopt(self._adopter, question)
                    case wire.Weights() if self._weights is not None:
                        await self._hold(self._weights, question)
                    case wire.ReadWeights() if self._weights is not None:
                        await self._send_weights(self._weights, question)
                    case wire.Follow() if self._handovers is not None:
                        await _send_parts(self._stream, self._handovers, self._me.epoch, question)
                    case _:
                        raise InvalidInputError(f"{type(question).__name__} has no place here")
            except KvStrataError as e:
                await self._stream.send(wire.Refused(question.id, str(e)))

    async def _describe(self, question: wire.Describe) -> None:
        generation = self._nixl.generation if self._nixl else 0
        described = await answer_of(self._nixl.describe()) if self._nixl else b""
        await self._stream.send(wire.Described(question.id, generation, described))

    async def _trace(self, question: wire.Trace) -> None:
        key = BlockKey(ScopeId(question.scope), question.digest)
        found = self._lender.trace(key, question.most) if question.epoch == self._me.epoch else None
        fields = (
            (found.layout_id, found.raw_bytes, b"".join(found.digests), found.before) if found else (b"", 0, b"", b"")
        )
        await self._stream.send(wire.Traced(question.id, *fields))

    async def _adopt(self, adopter: Adopter, asked: wire.Offer) -> None:
        place = (ScopeId(asked.scope), asked.tenant, LayoutId(asked.layout_id), asked.raw_bytes)
        offer = Offer(*place, tuple(unpack_digests(asked.digests)), asked.before, asked.tier)
        taken = await adopter.adopt(offer)
        await self._stream.send(wire.Taken(asked.id, taken.count, taken.reason))

    async def _hold(self, weights: WeightsOwner, asked: wire.Weights) -> None:
        held = weights.held(asked.model, asked.revision) or PeerHolding()
        await self._stream.send(wire.WeightsHeld(asked.id, held.digest, held.listing_bytes, held.staged_bytes))

    async def _send_weights(self, weights: WeightsOwner, asked: wire.ReadWeights) -> None:
        place = WeightsPlace(asked.model, asked.revision, asked.digest, asked.file, asked.offset)
        piece = await weights.read(place, asked.size_bytes)
        for offset in range(0, len(piece), wire.CHUNK_BYTES_MAX):
            part = piece[offset : offset + wire.CHUNK_BYTES_MAX]
            await self._stream.send(wire.Chunk(asked.id, 0, offset, len(part)), part)
        await self._stream.send(wire.Done(asked.id))

    async def _lend(self, question: wire.Lend) -> None:
        keys = [BlockKey(ScopeId(question.scope), digest) for digest in unpack_digests(question.digests)]
        if len(self._lent) + len(keys) > LEASES_MAX:
            raise InvalidInputError(f"{len(self._lent)} leases held, limit {LEASES_MAX}")
        lease_s = min(max(question.lease_s, 0.0), LEASE_S_MAX)
        # Whoever knows of an earlier incarnation asks for what was lost with it, as far as anybody can know.
        is_ours = question.epoch in {0, self._me.epoch}
        lent: list[Lent | None] = [None] * len(keys)
        if is_ours:
            with span("kvstrata.lend", parent=question.traceparent, requested_blocks=len(keys)) as active:
                lent = await self._lender.lend(keys, LayoutId(question.layout_id), lease_s, question.tiers)
                active.set(hit_blocks=sum(one is not None for one in lent))
        leases = tuple(one.lease for one in lent if one)
        self._lent |= {one.lease: one for one in lent if one}
        if not self._stream.is_open:
            self._end(leases)
            return
        # Past its time the lender ends a lease by itself: we must not hold its memory any longer then.
        asyncio.get_running_loop().call_later(lease_s, self._end, leases)
        if self._nixl:
            self._nixl.attend(min(lease_s, ATTEND_S))
        generation = self._nixl.generation if self._nixl else 0
        loans = tuple(_loan(one) if one else wire.Loan() for one in lent)
        await self._stream.send(wire.Lending(question.id, generation, loans))

    async def _send_blocks(self, question: wire.Pull) -> None:
        with span("kvstrata.send", parent=question.traceparent, blocks=len(question.leases)):
            for lease in question.leases:
                offset = 0
                # Looked up for each chunk: the lease may end meanwhile, and then its memory is somebody else's.
                while (lent := self._lent.get(lease)) and offset < len(lent.view):
                    with lent.view[offset : offset + wire.CHUNK_BYTES_MAX] as part:
                        await self._stream.send(wire.Chunk(question.id, lease, offset, len(part)), part)
                        offset += len(part)
        await self._stream.send(wire.Done(question.id))

    def _end(self, leases: tuple[int, ...]) -> None:
        ours = [lease for lease in leases if self._lent.pop(lease, None)]
        if ours:
            self._lender.end(ours)


def _loan(lent: Lent) -> wire.Loan:
    if (at := lent.placed) is not None:
        record, slot = at.record, at.slot
        place = wire.ReadAddress(at.tier, at.file, slot.offset, slot.size_bytes, record.codec, record.stored_bytes)
        fields = (lent.lease, 0, record.raw_bytes, slot.stamp, record.epoch)
        return wire.Loan(*fields, record.parent, record.checksum, place)
    size_bytes = len(lent.view)
    return wire.Loan(
        lent.lease, address_of(lent.view), size_bytes, lent.slot.stamp, lent.epoch, lent.parent, lent.checksum
    )


async def _send_parts(stream: Stream, handovers: HandoverSource, epoch: int, question: wire.Follow) -> None:
    """Answer one question: chunks of the new parts, and how many there are by then."""
    handover = Handover("", question.epoch, question.name)
    digests = tuple(unpack_digests(question.digests))
    wanted = Follow(handover, ScopeId(question.scope), LayoutId(question.layout_id), digests, question.part_bytes)
    wait_s = min(max(question.wait_s, 0.0), WAIT_S_MAX)
    blocks = await handovers.wait_for_parts(wanted, question.have, wait_s) if question.epoch == epoch else []
    parts = min((b.parts for b in blocks), default=-1)
    parts = min(parts, question.have + min(question.most, PARTS_ONCE_MAX))
    size_bytes = len(blocks) * question.part_bytes
    for part in range(question.have, parts):
        for at in range(0, size_bytes, wire.CHUNK_BYTES_MAX):
            # Gathered before each chunk: a slot may be somebody else's after any wait.
            piece = _gathered(blocks, part, at, min(at + wire.CHUNK_BYTES_MAX, size_bytes))
            if piece is None:
                await stream.send(wire.Followed(question.id, *_NOTHING))
                return
            await stream.send(wire.Chunk(question.id, part - question.have, at, len(piece)), piece)
    sums = slice(question.have * CHECKSUM_BYTES, max(0, parts) * CHECKSUM_BYTES)
    await stream.send(
        wire.Followed(
            question.id,
            parts,
            tuple(bytes(b.sums[sums]) for b in blocks),
            tuple(b.reservation.entry.parent for b in blocks),
            tuple(b.reservation.slot.stamp for b in blocks),
            tuple(b.checksum if b.stage is Stage.WHOLE else b"" for b in blocks),
        )
    )


def _gathered(blocks: Sequence[Growing], index: int, start: int, stop: int) -> bytes | None:
    """Bytes `start` to `stop` of one part of all blocks, one after the other; None when a block was lost."""
    size, pieces = blocks[0].part_bytes, []
    for position in range(start // size, -(-stop // size)):
        view = blocks[position].part(index)
        if view is None:
            return None
        with view:
            pieces.append(bytes(view[max(0, start - position * size) : stop - position * size]))
    return b"".join(pieces)
