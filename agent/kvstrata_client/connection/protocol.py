"""One connection's state without its socket: ids, answers, grants, mapped extents. Sans-I/O.

Splits the agent's byte stream into replies and gives each its descriptors.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from kvstrata_api import failures, wire
from kvstrata_api.errors import AgentAwayError, InvalidInputError, KvStrataError
from kvstrata_api.trace_context import traceparent
from kvstrata_client.connection.extents import DeviceExtents, Extents
from kvstrata_client.target import Devices
from kvstrata_client.verbs.calls import Call, Calls, ReplyContext, close_extents, read_grants
from kvstrata_client.verbs.results import Answer, Grants

_HEADER_BYTES = 4

PENDING_MAX: Final = 1024
"""Requests under way on one connection; more are answered as if the agent were away."""
CROWD: Final = 32
"""Requests under way from which on nobody sends a further batch ahead: half of what an agent takes of one connection
before it has answered some. Beyond that it reads nothing, what gives memory back and what asks for little included."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One reply and the descriptors of the extents that it grants, in their order. The receiver owns them."""

    reply: wire.AnyReply
    fds: tuple[int, ...] = ()


class ReplyReader:
    """Takes chunks as they come from the socket and yields the replies that are complete.

    Linux delivers descriptors no later than the first byte of the message that they were sent with, and never
    merges two messages that carry some, so a queue keeps them in step with the frames (man 7 unix).
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, chunk: bytes, fds: Sequence[int] = ()) -> Iterator[Arrival]:
        """Add a chunk. Replies are cut out of the stream as they are asked for; descriptors of the others stay here.

        The iterator raises `InvalidInputError` for a stream that is none of ours; the connection is void then.
        """
        self._buffer += chunk
        self._fds.extend(fds)
        return self._arrivals()

    def unclaimed_fds(self) -> list[int]:
        """Hand over descriptors that no reply has asked for, to be closed."""
        left = list(self._fds)
        self._fds.clear()
        return left

    def _arrivals(self) -> Iterator[Arrival]:
        while (body := self._next_body()) is not None:
            yield self._arrival(wire.decode_reply(body))

    def _next_body(self) -> bytes | None:
        buffer = self._buffer
        if len(buffer) < _HEADER_BYTES:
            return None
        end = _HEADER_BYTES + wire.frame_bytes(buffer[:_HEADER_BYTES])
        if len(buffer) < end:
            return None
        body = bytes(buffer[_HEADER_BYTES:end])
        del buffer[:end]
        return body

    def _arrival(self, reply: wire.AnyReply) -> Arrival:
        wanted = wire.descriptors(reply)
        if wanted > len(self._fds):
            raise InvalidInputError(f"reply {reply.id} grants {wanted} extents, {len(self._fds)} descriptors came")
        return Arrival(reply, tuple(self._fds.popleft() for _ in range(wanted)))


class _Wait(Enum):
    CALLER = auto()
    """Somebody waits for the answer."""
    NOBODY = auto()
    """Sent without waiting; the reply is dropped."""
    OVERDUE = auto()
    """The caller's time was up; a reply is undone."""
    CANCELLED = auto()
    """The caller went away before that; a reply is undone."""


@dataclass(slots=True)
class _Pending:
    call: Call[Any]
    wait: _Wait


@dataclass(frozen=True, slots=True)
class _Answered:
    call: Call[Any]
    reply: wire.AnyReply
    answer: Answer[Any]


@dataclass(frozen=True, slots=True)
class Sent:
    """Calls that were sent, or could not be."""

    calls: Calls
    ids: Sequence[int]
    error: KvStrataError | None = None
    """Why they were not sent."""


def unsent(sent: Sent) -> list[Answer[Any]]:
    """Answers to calls that were not sent."""
    return [Answer(c.absent, sent.error) for c in sent.calls]


class Protocol:
    """Turns calls into bytes to send and received bytes into answers. Not thread-safe: its owner locks."""

    def __init__(self, block_bytes: int, connection: int, devices: Devices | None = None) -> None:
        """Start at an unauthenticated connection; `block_bytes` is the layout's, `connection` a number of its own."""
        self._reader = ReplyReader()
        self._extents = Extents()
        self._devices = DeviceExtents(devices)
        self._context = ReplyContext(self._extents, block_bytes, connection, self._devices)
        self._pending: dict[int, _Pending] = {}
        self._answers: dict[int, _Answered] = {}
        self._next_id = 1
        self._seen_version = 0
        self.grants: Grants | None = None
        """Newest grants; None before the first attach."""
        self.lost: KvStrataError | None = None
        """Why the connection is over; None while it is not."""

    @property
    def is_stale(self) -> bool:
        """True when the agent has reported that the grants may have changed."""
        return self.grants is not None and self._seen_version > self.grants.version

    @property
    def is_suspect(self) -> bool:
        """True while a request is unanswered past its deadline: more would only make their callers wait."""
        return any(p.wait is _Wait.OVERDUE for p in self._pending.values())

    @property
    def is_owed(self) -> bool:
        """True while a reply is to come that has to be undone, because its caller has gone."""
        return any(p.wait is _Wait.CANCELLED for p in self._pending.values())

    @property
    def is_crowded(self) -> bool:
        """True while so many requests are under way that more should wait for an answer first."""
        return len(self._pending) >= CROWD

    def send(self, calls: Sequence[Call[Any]], *, is_awaited: bool = True) -> tuple[list[int], bytes]:
        """Number calls and frame them.

        Raises `AgentAwayError` when the connection is over, when it is not the calls' connection, or when too many
        requests are under way.
        """
        self._raise_for(calls)
        ids, frames = [], []
        wait, parent = _Wait.CALLER if is_awaited else _Wait.NOBODY, traceparent()
        for number, call in enumerate(calls, self._next_id):
            frames.append(wire.encode(wire.within_span(call.request(number), parent)))
            self._pending[number] = _Pending(call, wait)
            ids.append(number)
            self._next_id = number + 1
        return ids, b"".join(frames)

    def receive(self, chunk: bytes, fds: Sequence[int] = ()) -> bytes:
        """Take a chunk; return what must be sent in consequence.

        Raises `InvalidInputError` for a malformed stream, and why the connection is over where it is; the caller then
        calls `lose`.
        """
        arrivals = self._reader.feed(chunk, fds)
        if self.lost is not None:
            raise self.lost
        followups: list[Call[Any]] = []
        for arrival in arrivals:
            followups += self._settle(arrival)
        return self.send(followups, is_awaited=False)[1] if followups else b""

    def is_answered(self, ids: Sequence[int]) -> bool:
        """Whether every one of these calls has its answer."""
        return self.lost is not None or all(i in self._answers for i in ids)

    def take(self, ids: Sequence[int], calls: Calls) -> list[Answer[Any]]:
        """Hand over the answers of `calls`; one that has none by now counts as away, and its reply will be undone."""
        return [
            self._answers.pop(i).answer if i in self._answers else self._give_up(i, call)
            for i, call in zip(ids, calls, strict=True)
        ]

    def discard(self, ids: Sequence[int]) -> bytes:
        """Forget calls whose caller has gone; return what undoes the answers that are here already."""
        undo: list[Call[Any]] = []
        for i in ids:
            pending = self._pending.get(i)
            if pending is not None:
                pending.wait = _Wait.CANCELLED
            answered = self._answers.pop(i, None)
            if answered is not None:
                undo += self._undo(answered.call, answered.reply)
        return self.send(undo, is_awaited=False)[1] if undo and self.lost is None else b""

    def lose(self, reason: KvStrataError) -> list[int]:
        """End the connection: nothing is pending or mapped any more. Returns descriptors to close."""
        self.lost = self.lost or reason
        self._pending.clear()
        self._extents.clear()
        self._devices.clear()
        return self._reader.unclaimed_fds()

    def _raise_for(self, calls: Sequence[Call[Any]]) -> None:
        if self.lost is not None:
            raise self.lost
        if {c.connection for c in calls} - {0, self._context.connection}:
            raise AgentAwayError("what the call speaks of ended with its connection")
        if len(self._pending) + len(calls) > PENDING_MAX:
            raise AgentAwayError(f"{len(self._pending)} requests under way, limit {PENDING_MAX}")

    def _give_up(self, request_id: int, call: Call[Any]) -> Answer[Any]:
        pending = self._pending.get(request_id)
        if pending is None:
            return Answer(call.absent, self.lost or AgentAwayError("the connection was lost"))
        pending.wait = _Wait.OVERDUE
        return Answer(call.absent, AgentAwayError(f"no answer within {call.timeout_s} s"))

    def _settle(self, arrival: Arrival) -> list[Call[Any]]:
        """File one reply; return the calls that undo it when nobody wants it any more."""
        reply = arrival.reply
        self._seen_version = max(self._seen_version, reply.grants_version)
        if isinstance(reply, wire.GRANTING):
            self._install(reply, arrival.fds)
        if isinstance(reply, wire.Granted):
            self.grants = read_grants(reply)
        pending, closing = self._pending.pop(reply.id, None), self._close()
        if pending is None or pending.wait is _Wait.NOBODY:
            return closing
        if pending.wait is not _Wait.CALLER:
            return closing + self._undo(pending.call, reply)
        self._answers[reply.id] = _Answered(pending.call, reply, self._answer(pending.call, reply))
        return closing

    def _install(self, reply: wire.Acquired | wire.Reserved, fds: tuple[int, ...]) -> None:
        count = len(reply.extents)
        try:
            self._extents.install(reply.extents, fds[:count])
        finally:
            self._devices.install(reply.devices if isinstance(reply, wire.Acquired) else (), fds[count:])
        self._extents.forget(reply.gone)
        self._devices.forget(reply.gone)

    def _close(self) -> list[Call[Any]]:
        """Report memory of devices that is closed here."""
        closed = self._devices.closed()
        return [close_extents(closed)] if closed else []

    def _answer(self, call: Call[Any], reply: wire.AnyReply) -> Answer[Any]:
        if isinstance(reply, wire.Failed):
            return Answer(call.absent, failures.error_of(reply))
        busy_s = reply.busy_s if isinstance(reply, wire.GRANTING) else 0.0
        refusal = reply.refusal if isinstance(reply, wire.Reserved) else ""
        return Answer(call.read(reply, self._context), busy_s=busy_s, refusal=refusal)

    def _undo(self, call: Call[Any], reply: wire.AnyReply) -> list[Call[Any]]:
        undo = None if isinstance(reply, wire.Failed) else call.undo(reply)
        return [undo] if undo is not None else []
