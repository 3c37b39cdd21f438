"""Verbs as values: the request, how to read its reply, and what to answer when there is none. Pure.

Every client, blocking or not, executes the same calls, so a verb's meaning is written once.
"""

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from kvstrata_api import wire
from kvstrata_api.blocks import KEY_BYTES, BlockKey, ScopeId, ScopeSecret, pack_digests
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import Advance, Arrive, Arrived, Handover
from kvstrata_client.target import Target
from kvstrata_client.verbs.results import Answer, Grants, Hinted, Lease, Prefix, Published, Reservation, Scope

T = TypeVar("T")
S = TypeVar("S", bound=wire.AnyReply)

STATES: Final = ("decoding", "idle")
"""Of a session, as an engine reports it."""
ARCHIVED: Final = 2
"""Count in the answer to CloseSession that means: archived."""


class SlotViews(Protocol):
    """The agent's memory as far as it is mapped here."""

    def view(self, extent: int, offset: int, size_bytes: int, *, is_writable: bool) -> memoryview:
        """View of one slot. Raises `InvalidInputError` when it was not granted so."""


class DeviceParts(Protocol):
    """The agent's memory in devices, as far as it is open here."""

    def part(self, extent: int, offset: int, size_bytes: int) -> Any:
        """Tensor of one slot, None where its extent is not open. Raises `InvalidInputError` outside of the extent."""


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What is needed to make sense of a reply: the mapped extents and the size of a block in them."""

    extents: SlotViews
    block_bytes: int
    connection: int
    """Serial number of the connection, to keep its leases and reservations apart from another's."""
    devices: DeviceParts | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One verb to be executed."""

    request: Callable[[int], wire.AnyRequest]
    """Makes the request of a given id."""
    read: Callable[[wire.AnyReply, ReplyContext], T]
    """Turns the reply into the verb's result. Raises `InvalidInputError` for a reply that makes no sense."""
    absent: T
    """The result while the agent is away."""
    timeout_s: float
    undo: Callable[[wire.AnyReply], "Call[int] | None"] = lambda _: None
    """What to send when the reply comes after the caller has gone, so that nothing stays held."""
    connection: int = 0
    """The only connection on which this call means anything; 0 for any."""
    give_back: Callable[[T], "Call[int] | None"] = lambda _: None
    """What to send when nobody takes the result, so that nothing stays held."""


_RESULTS: Final = tuple(Published)
"""By code."""


Calls = tuple[Call[Any], ...]
Answers = Sequence[Answer[Any]]


@dataclass(frozen=True, slots=True)
class Post:
    """Calls to be sent without waiting for their answers."""

    calls: Calls


@dataclass(frozen=True, slots=True)
class Work:
    """Copying and checksumming, to be done where it blocks nobody else."""

    run: Callable[[], None]


Perform = Callable[[Work], Awaitable[Any]]
"""Does work on memory in a thread; returns, also when cancelled, only when it is done."""


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Calls to be sent now, whose answers are collected later: the agent works on them while something else is done."""

    calls: Calls


@dataclass(frozen=True, slots=True)
class Collect:
    """The answers to calls that were sent ahead, once; their time to answer counts from here."""

    ahead: Ahead


Step = Calls | Post | Work | Ahead | Collect

Operation = Generator[Step, Answers, T]
"""Several steps that make up one verb of the high-level interface.

Yields calls to be executed together or collected (their answers are sent back), posts, work or calls to be sent ahead
(answered by an empty sequence); returns the result. It holds no socket, so each client drives it. A driver that must
give up throws its exception in and carries out what is yielded in answer: that is how leases and reservations are given
back. What was sent ahead and not collected by the end the driver undoes, as it does for any caller that has gone.
"""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The end of an operation."""

    value: T


def begin(operation: Operation[T]) -> Step | Done[T]:
    """Take an operation to its first step."""
    try:
        return next(operation)
    except StopIteration as end:
        return Done(end.value)


def resume(operation: Operation[T], outcome: Answers) -> Step | Done[T]:
    """Take an operation to its next step."""
    try:
        return operation.send(outcome)
    except StopIteration as end:
        return Done(end.value)


def interrupt(operation: Operation[T], error: BaseException) -> Step | Done[T]:
    """Let an operation clean up after `error`; it raises `error` when it has."""
    try:
        return operation.throw(error)
    except StopIteration as end:
        return Done(end.value)


def given_back(asked: Calls, answers: Answers) -> Calls:
    """What to send when nobody takes the results of some calls."""
    made = (call.give_back(a.value) for call, a in zip(asked, answers, strict=True) if a.error is None and a.value)
    return tuple([call for call in made if call is not None])


def _expect(reply: wire.AnyReply, kind: type[S]) -> S:
    if not isinstance(reply, kind):
        raise InvalidInputError(f"reply {reply.id} is {type(reply).__name__}, {kind.__name__} wanted")
    return reply


def hello(target: Target) -> Call[wire.Welcome | None]:
    """First call of a connection."""
    return Call(
        lambda i: wire.Hello(i, wire.PROTOCOL_VERSION, target.client),
        lambda reply, _: _expect(reply, wire.Welcome),
        None,
        target.move_timeout_s,
    )


def attach(target: Target, token: str) -> Call[Grants | None]:
    """Authenticate; a TokenReview may lie behind it."""
    names = target.devices.names if target.devices is not None else ()
    return Call(
        lambda i: wire.Attach(i, token, target.pool, target.layout, names),
        lambda reply, _: read_grants(_expect(reply, wire.Granted)),
        None,
        target.move_timeout_s,
    )


def scopes(target: Target) -> Call[Grants | None]:
    """Ask for the grants again."""
    return Call(wire.Scopes, lambda reply, _: read_grants(_expect(reply, wire.Granted)), None, target.timeout_s)


def read_grants(reply: wire.Granted) -> Grants:
    """Parse grants. Raises `InvalidInputError` for secrets of a wrong size."""
    for s in reply.scopes:
        if len(s.secret) != 32:
            raise InvalidInputError(f"secret of scope {s.scope} has {len(s.secret)} bytes, 32 wanted")
    parsed = tuple(
        Scope(ScopeSecret(ScopeId(s.scope), s.secret), s.kind, s.name, s.can_write, s.prefixes) for s in reply.scopes
    )
    return Grants(
        reply.grants_version,
        reply.tenant,
        parsed,
        ScopeId(reply.write_scope),
        reply.block_bytes,
        reply.token_expires_s,
        reply.verbs,
    )


def lookup(
    target: Target, keys: Sequence[BlockKey], session: str, *, is_probe: bool = False, is_use: bool = True
) -> Call[Prefix]:
    """Ask how long a prefix can be had; a probe does not count in the hit ratio, and what is no use teaches nothing."""
    scope, digests = _pack(keys)

    def request(number: int) -> wire.Lookup:
        return wire.Lookup(number, scope, digests, session, is_probe, is_use)

    return Call(request, _read_prefix, Prefix(), target.timeout_s)


def count_load(target: Target, wanted_blocks: int, loaded_blocks: int) -> Call[int]:
    """Report how a load ended, for the hit ratio."""
    return _counted(lambda i: wire.CountLoad(i, wanted_blocks, loaded_blocks), target)


def _read_prefix(reply: wire.AnyReply, _: ReplyContext) -> Prefix:
    found = _expect(reply, wire.Found)
    return Prefix(found.prefix_blocks, found.states, found.places, found.tier_names)


def acquire(
    target: Target, keys: Sequence[BlockKey], session: str, lease_s: float, deadline_s: float, part_bytes: int = 0
) -> Call[tuple[Lease, ...]]:
    """Lease leading blocks, with checksums of their parts where `part_bytes` are given.

    Waits for `deadline_s` at most, plus the usual time of a verb.
    """
    scope, digests = _pack(keys)

    def read(reply: wire.AnyReply, context: ReplyContext) -> tuple[Lease, ...]:
        acquired = _expect(reply, wire.Acquired)
        return tuple([_lease(b, k, acquired.epoch, context) for b, k in zip(acquired.blocks, keys, strict=False)])

    return Call(
        lambda i: wire.Acquire(i, scope, digests, session, lease_s, deadline_s, part_bytes),
        read,
        (),
        deadline_s + target.timeout_s,
        lambda reply: _release(target, tuple(b.lease for b in _expect(reply, wire.Acquired).blocks)),
        give_back=lambda leases: release(target, leases),
    )


def in_place(plain: Call[tuple[Lease, ...]]) -> Call[tuple[Lease, ...]]:
    """Turn an `acquire` into one that leases blocks which lie in a device of the target there."""
    return replace(plain, request=lambda i: msgspec.structs.replace(plain.request(i), in_place=True))


def usable(leases: Sequence[Lease]) -> int:
    """Leading leases whose bytes can be read here: the memory of a device may not have opened."""
    return next((i for i, x in enumerate(leases) if x.device_sum and x.tensor is None), len(leases))


def _lease(block: wire.Leased, key: BlockKey, epoch: int, context: ReplyContext) -> Lease:
    bound, tensor, view = block.epoch or epoch, None, memoryview(b"")
    if not block.device_sum:
        view = context.extents.view(block.extent, block.offset, context.block_bytes, is_writable=False)
    elif context.devices is not None:
        tensor = context.devices.part(block.extent, block.offset, context.block_bytes)
    return Lease(
        block.lease,
        key.digest,
        bound,
        block.stamp,
        block.checksum,
        block.source,
        context.connection,
        view,
        block.parts,
        block.is_growing,
        tensor,
        block.device_sum,
    )


def close_extents(extents: Sequence[int]) -> Call[int]:
    """Report that memory of devices is closed here, to nobody's waiting. Only for an agent that granted some."""
    return Call(
        lambda i: wire.CloseExtents(i, tuple(extents)), lambda reply, _: _expect(reply, wire.Done).count, 0, 0.0
    )


def release(target: Target, leases: Sequence[Lease], suspects: Sequence[Lease] = ()) -> Call[int]:
    """End leases of one connection; the result counts those that lived until now.

    `suspects` are those whose copy did not match its checksum.
    """
    ids = tuple(lease.lease for lease in leases)
    return _release(target, ids, _connection(leases), tuple(lease.lease for lease in suspects))


def _release(target: Target, leases: tuple[int, ...], connection: int = 0, suspects: tuple[int, ...] = ()) -> Call[int]:
    return _counted(lambda i: wire.Release(i, leases, suspects), target, connection)


def reserve(target: Target, parent: bytes, keys: Sequence[BlockKey], session: str) -> Call[tuple[Reservation, ...]]:
    """Ask for slots; `parent` is the digest that the first key continues."""
    scope, digests = _pack(keys)

    def read(reply: wire.AnyReply, context: ReplyContext) -> tuple[Reservation, ...]:
        reserved = _expect(reply, wire.Reserved)
        return tuple([_reservation(s, k, reserved.epoch, context) for s, k in zip(reserved.slots, keys, strict=False)])

    def undo(reply: wire.AnyReply) -> Call[int]:
        return _abandon(target, tuple(s.reservation for s in _expect(reply, wire.Reserved).slots if s.reservation))

    return Call(
        lambda i: wire.Reserve(i, scope, parent, digests, session),
        read,
        (),
        target.move_timeout_s,
        undo,
        give_back=lambda made: abandon(target, made),
    )


def _reservation(slot: wire.Slot, key: BlockKey, epoch: int, context: ReplyContext) -> Reservation:
    view = None
    if slot.reservation:
        view = context.extents.view(slot.extent, slot.offset, context.block_bytes, is_writable=True)
    return Reservation(slot.reservation, key.digest, epoch, slot.stamp, context.connection, view)


def publish(
    target: Target, reservations: Sequence[Reservation], checksums: Sequence[bytes]
) -> Call[tuple[Published, ...]]:
    """Commit filled slots."""

    def read(reply: wire.AnyReply, _: ReplyContext) -> tuple[Published, ...]:
        return _published(_expect(reply, wire.Published).results)

    return Call(
        lambda i: wire.Publish(i, tuple(r.reservation for r in reservations), tuple(checksums)),
        read,
        (Published.REFUSED,) * len(reservations),
        target.move_timeout_s,
        connection=_connection(reservations),
    )


def _published(results: bytes) -> tuple[Published, ...]:
    try:
        return tuple([_RESULTS[code] for code in results])
    except IndexError:
        raise InvalidInputError(f"result of a publish is {max(results)}, 0 to 2 wanted") from None


def abandon(target: Target, reservations: Sequence[Reservation]) -> Call[int]:
    """Give reservations of one connection back."""
    taken = tuple(r.reservation for r in reservations if r.reservation)
    return _abandon(target, taken, _connection(reservations))


def _abandon(target: Target, reservations: tuple[int, ...], connection: int = 0) -> Call[int]:
    return _counted(lambda i: wire.Abandon(i, reservations), target, connection)


@dataclass(frozen=True, slots=True)
class Begun:
    """Slots of a hand-over, to be filled part by part."""

    reservations: tuple[Reservation, ...] = ()
    handover: Handover | None = None
    """None from an agent that knows no hand-overs, and where there was no slot."""


def begin_handover(plain: Call[tuple[Reservation, ...]], name: str, part_bytes: int) -> Call[Begun]:
    """Turn a `reserve` into one whose slots may be read, by readers who know `name`, while they are filled."""

    def read(reply: wire.AnyReply, context: ReplyContext) -> Begun:
        made = plain.read(reply, context)
        return Begun(made, reply.handover if isinstance(reply, wire.Reserved) else None)

    return Call(
        lambda i: msgspec.structs.replace(plain.request(i), handover=name, part_bytes=part_bytes),
        read,
        Begun(),
        plain.timeout_s,
        plain.undo,
        give_back=lambda begun: plain.give_back(begun.reservations),
    )


def advance(target: Target, reservations: Sequence[Reservation], first: int, sums: Sequence[bytes]) -> Call[int]:
    """Report filled parts; the result counts the blocks that are still partial."""
    ids = tuple(r.reservation for r in reservations)
    return _counted(lambda i: Advance(i, ids, first, tuple(sums)), target, reservations[0].connection)


def follow(plain: Call[tuple[Lease, ...]], handover: Handover) -> Call[tuple[Lease, ...]]:
    """Turn an `acquire` into one that leases blocks of a hand-over; `arrive` brings their parts."""
    return replace(plain, request=lambda i: msgspec.structs.replace(plain.request(i), handover=handover))


def arrive(target: Target, leases: Sequence[Lease], have: int, wait_s: float) -> Call[tuple[bytes, ...]]:
    """Wait for parts of partial blocks; the result has for each the joined checksums of those behind the first `have`.

    It is empty when the blocks are lost.
    """

    def read(reply: wire.AnyReply, _: ReplyContext) -> tuple[bytes, ...]:
        sums = _expect(reply, Arrived).sums
        if len(sums) != len(leases):
            raise InvalidInputError(f"reply {reply.id} is about {len(sums)} partial blocks, {len(leases)} wanted")
        return sums

    ids = tuple(lease.lease for lease in leases)
    return Call(
        lambda i: Arrive(i, ids, have, wait_s), read, (), wait_s + target.timeout_s, connection=leases[0].connection
    )


def prefetch(target: Target, keys: Sequence[BlockKey], session: str) -> Call[Hinted]:
    """Bring a prefix up in the background."""
    scope, digests = _pack(keys)
    return _hinted(lambda i: wire.Prefetch(i, scope, digests, session), target, len(keys))


def fetch(target: Target, keys: Sequence[BlockKey], session: str) -> Call[Hinted]:
    """The same of a prefix wherever it is. Only for an agent that names `Fetch` in its grants."""
    scope, digests = _pack(keys)
    return _hinted(lambda i: wire.Fetch(i, scope, digests, session), target, len(keys))


def pin(target: Target, keys: Sequence[BlockKey], ttl_s: float) -> Call[Hinted]:
    """Keep blocks in memory for a time."""
    scope, digests = _pack(keys)
    return _hinted(lambda i: wire.Pin(i, scope, digests, ttl_s), target, len(keys))


def demote(target: Target, keys: Sequence[BlockKey]) -> Call[Hinted]:
    """Have blocks leave memory first. Only for an agent that names `Demote` in its grants."""
    scope, digests = _pack(keys)
    return _hinted(lambda i: wire.Demote(i, scope, digests), target, len(keys))


def retain(target: Target, session: str, for_s: float) -> Call[Hinted]:
    """Keep a session from counting as finished. Only for an agent that names `Retain` in its grants."""
    return _hinted(lambda i: wire.Retain(i, session, for_s), target)


def unpin(target: Target, keys: Sequence[BlockKey]) -> Call[int]:
    """Take pins back."""
    scope, digests = _pack(keys)
    return _counted(lambda i: wire.Unpin(i, scope, digests), target)


def touch(target: Target, keys: Sequence[BlockKey], session: str = "") -> Call[int]:
    """Record use of blocks without reading them, and that a session runs through them, in chain order.

    Only for an agent that names `Touch` in its grants.
    """
    scope, digests = _pack(keys)
    return _counted(lambda i: wire.Touch(i, scope, digests, session), target)


def report_engine(
    target: Target, prefill_tokens_per_s: float, queued_tokens: int, running: int, half_rate_tokens: int
) -> Call[int]:
    """Report how fast the engine computes, and how much waits. Only for an agent that names `ReportEngine`."""
    return _counted(
        lambda i: wire.ReportEngine(i, prefill_tokens_per_s, queued_tokens, running, half_rate_tokens), target
    )


def drop(target: Target, keys: Sequence[BlockKey]) -> Call[bytes]:
    """Remove blocks of the own scope that nobody holds; the result has a `tiers.Lookup` code for each afterwards.

    Only for an agent that names `Drop` in its grants; empty while the agent is away.
    """
    scope, digests = _pack(keys)
    return Call(
        lambda i: wire.Drop(i, scope, digests),
        lambda reply, _: _expect(reply, wire.Found).states,
        b"",
        target.timeout_s,
    )


def open_session(
    target: Target, session: str, parent: str, priority: str, attended: tuple[int, int, int] = (0, 0, 0)
) -> Call[int]:
    """Start, revive or fork a session; `attended` are tokens of sinks and window, and from anchor to anchor."""
    return _counted(lambda i: wire.OpenSession(i, session, parent, priority, *attended), target)


def touch_session(target: Target, session: str, state: str, urgency: int, expected_return_s: float) -> Call[Hinted]:
    """Report what a session is about to do. Raises `InvalidInputError` for what is no state of those."""
    if state not in STATES:
        raise InvalidInputError(f"state: {state!r}, one of {', '.join(STATES)} wanted; for a tool it is `tool_wait`")
    return _hinted(lambda i: wire.TouchSession(i, session, state, urgency, expected_return_s), target)


def tool_wait(target: Target, session: str, expected_s: float, urgency: int) -> Call[Hinted]:
    """Report that a session waits for a tool, about so long; 0.0 where that is not known."""
    return _hinted(lambda i: wire.TouchSession(i, session, "tool", urgency, expected_s), target)


def complete_session(target: Target, session: str, *, archive: bool, wait_s: float = 0.0) -> Call[Hinted]:
    """End a session, and wait that long for its archive."""

    def read(reply: wire.AnyReply, _: ReplyContext) -> Hinted:
        done = _expect(reply, wire.Done)
        return Hinted(_outcome(done, 1), min(done.count, 1), done.count == ARCHIVED)

    return Call(
        lambda i: wire.CloseSession(i, session, archive, wait_s), read, Hinted(), timeout_s=target.timeout_s + wait_s
    )


def stats(target: Target) -> Call[str]:
    """Tiers and counters as JSON."""
    return _text(wire.Stats, target)


def explain(target: Target, key: BlockKey | None, session: str, granted: Scope | None = None) -> Call[str]:
    """Why a block or session is where it is, or what a scope has, as JSON."""
    scope, digest = (key.scope, key.digest) if key else (granted.id if granted else "", b"")
    return _text(lambda i: wire.Explain(i, scope, digest, session), target)


def why_miss(target: Target, keys: Sequence[BlockKey]) -> Call[str]:
    """Why a prompt is not found, as JSON. Only for an agent that names `WhyMiss`."""
    scope, digests = _pack(keys)
    return _text(lambda i: wire.WhyMiss(i, scope, digests), target)


def route_hint(target: Target, keys: Sequence[BlockKey]) -> Call[str]:
    """Which nodes have a prompt, as JSON. Only for an agent that names `RouteHint`."""
    scope, digests = _pack(keys)
    return _text(lambda i: wire.RouteHint(i, scope, digests), target)


def _pack(keys: Sequence[BlockKey]) -> tuple[str, bytes]:
    """Scope and joined digests of keys. Raises `InvalidInputError` for none, too many, or keys of several scopes."""
    if not 0 < len(keys) <= wire.KEYS_MAX:
        raise InvalidInputError(f"{len(keys)} keys, 1 to {wire.KEYS_MAX} wanted")
    scope = keys[0].scope
    if {k.scope for k in keys} != {scope}:
        raise InvalidInputError(f"keys of {len({k.scope for k in keys})} scopes in one call of {len(keys)} keys")
    digests = pack_digests(keys)
    assert len(digests) == KEY_BYTES * len(keys)
    return scope, digests


def _connection(held: Sequence[Lease | Reservation]) -> int:
    """Return the connection that holds all of these. Raises `InvalidInputError` when there are several."""
    connections = {h.connection for h in held}
    if len(connections) > 1:
        raise InvalidInputError(f"{len(held)} leases or reservations of {len(connections)} connections in one call")
    return connections.pop() if connections else 0


def _counted(request: Callable[[int], wire.AnyRequest], target: Target, connection: int = 0) -> Call[int]:
    """Ask for something whose answer is a number."""
    return Call(request, lambda reply, _: _expect(reply, wire.Done).count, 0, target.timeout_s, connection=connection)


def _hinted(request: Callable[[int], wire.AnyRequest], target: Target, wanted: int = 1) -> Call[Hinted]:
    """Give a hint on so many blocks, or on a session."""

    def read(reply: wire.AnyReply, _: ReplyContext) -> Hinted:
        done = _expect(reply, wire.Done)
        return Hinted(_outcome(done, wanted), done.count)

    return Call(request, read, Hinted(), target.timeout_s)


def _outcome(done: wire.Done, wanted: int) -> wire.Outcome:
    """As the agent says, or by the count where it names none or one of a later protocol."""
    try:
        return wire.Outcome(done.outcome)
    except ValueError:
        return wire.outcome_of(done.count, wanted)


def _text(request: Callable[[int], wire.AnyRequest], target: Target) -> Call[str]:
    return Call(request, lambda reply, _: _expect(reply, wire.Text).json, "{}", target.timeout_s)
