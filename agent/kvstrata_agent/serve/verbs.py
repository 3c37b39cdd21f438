"""The verbs of the local protocol: checks the caller, calls the cache, makes the reply.

A handler returns its reply at once where nothing has to be waited for, else a coroutine. A scope that the caller may
not read is treated as one that is empty: absent and forbidden look the same.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, get_args

from msgspec.structs import replace

from kvstrata_agent.blocks.reservations import RESERVATION_S
from kvstrata_agent.blocks.session_log import Happened, SessionEvent
from kvstrata_agent.cache.load import LOCATE_KEYS_MAX, AcquireCall
from kvstrata_agent.cache.part_checksums import blocks_max
from kvstrata_agent.cache.why_miss import Asked
from kvstrata_agent.movement.mover import INLINE_BYTES_MAX
from kvstrata_agent.policy.recompute import EngineLoad
from kvstrata_agent.serve.extent_grants import NO_SLOT, ExtentGrants, leased_of, slot_of
from kvstrata_agent.serve.handover_verbs import HandoverVerbs
from kvstrata_api import wire
from kvstrata_api.blocks import KEY_BYTES, unpack_digests
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import ForbiddenError, InvalidInputError, KvStrataError
from kvstrata_api.tiers import Lookup
from kvstrata_api.trust import ScopeKind
from kvstrata_telemetry.tracing import span

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.blocks.reservations import Reservation
    from kvstrata_agent.blocks.sessions import Session
    from kvstrata_agent.cache.cache import Cache
    from kvstrata_agent.cache.load import Findings, Read
    from kvstrata_agent.cache.ports import Directory
    from kvstrata_agent.serve.audit import Audit
    from kvstrata_agent.serve.authorization import Attaching, Attachment, ScopeRight
    from kvstrata_agent.serve.load_counts import LoadCounts
    from kvstrata_agent.serve.session_verbs import SessionVerbs
    from kvstrata_metadata.store.records import Location

    Outcome = wire.AnyReply | Coroutine[Any, Any, wire.AnyReply]
    Handler = Callable[[Attachment, Any], Outcome]
    _Keyed = (
        wire.Lookup | wire.Acquire | wire.Reserve | wire.Prefetch | wire.Fetch | wire.Pin | wire.Unpin | wire.Touch
        | wire.Demote | wire.Drop
    )  # fmt: skip
    _Asked = _Keyed | wire.WhyMiss | wire.RouteHint

LEASE_S_MAX: Final = 300.0
"""Longest lease: a reader that copies for minutes has stopped."""
LEASES_MAX: Final = wire.LEASES_MAX
"""Leases of one connection at once; one that asks for more without ending any gets none."""
DEADLINE_S_MAX: Final = 60.0
PIN_S_MAX: Final = 3600.0
SUSPECTS_MAX: Final = 2
"""Blocks that one release may have inspected: a client must not make the agent hash for nothing."""
_VERBS: Final = {t: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", t.__name__).lower() for t in get_args(wire.AnyRequest)}
"""Names of requests in metrics, such as `open_session`."""


class Verbs:
    """All verbs of one agent, for all of its connections."""

    def __init__(self, cache: Cache, attaching: Attaching, sessions: SessionVerbs) -> None:
        self._cache = cache
        self._node = cache.node
        self._attaching = attaching
        self._grants = ExtentGrants(cache.node)
        self._checked_version = attaching.grants_version
        """Grants under which extents were last checked; -1 when some were unknown."""
        self._audit = attaching.audit
        self._observer = ReadObserver(cache, attaching.audit)
        self._handovers = HandoverVerbs(cache, attaching)
        self._open: dict[type, Handler] = {wire.Hello: self._hello, wire.Attach: attaching.attach}
        """Verbs that need no caller yet."""
        self._handlers: dict[type, Handler] = {
            wire.Scopes: attaching.scopes,
            wire.Lookup: self._lookup,
            wire.CountLoad: self._count_load,
            wire.Acquire: self._acquire,
            wire.Release: self._release,
            wire.Reserve: self._reserve,
            wire.Publish: self._publish,
            wire.Abandon: self._abandon,
            wire.Prefetch: self._prefetch,
            wire.Fetch: self._fetch,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.Demote: self._demote,
            wire.Touch: self._touch,
            wire.Drop: self._drop,
            wire.ReportEngine: self._report_engine,
            wire.WhyMiss: self._why_miss,
            wire.RouteHint: self._route_hint,
            wire.CloseExtents: self._close_extents,
            **sessions.handlers,
            **self._handovers.handlers,
        }

    @property
    def grants_version(self) -> int:
        """Version of all grants, for replies."""
        return self._attaching.grants_version

    def start(self, at: Attachment, request: wire.AnyRequest) -> Outcome:
        """Begin to carry out a request. Raises the error that its reply is to carry."""
        if self._checked_version not in (-1, self.grants_version):
            self._recheck()  # Before anybody gets a slot that somebody has mapped who has lost the scope.
        handler = self._open.get(type(request))
        if handler is not None:
            return handler(at, request)
        self._attaching.refresh(at)
        return self._handlers[type(request)](at, request)

    def refresh(self, at: Attachment) -> None:
        """Bring a quiet connection's rights up to date. What fails is reported when the connection asks next."""
        if self._checked_version != self.grants_version:
            self._recheck()
        if at.caller is not None and at.grants_version != self.grants_version:
            with suppress(KvStrataError):
                self._attaching.refresh(at)

    def _recheck(self) -> None:
        version = self.grants_version
        self._checked_version = version if self._grants.recheck(self._attaching.readable) else -1

    def left_s(self, at: Attachment) -> float:
        """Seconds until a connection has no caller any more, unless that presents its token again; 0 without one."""
        return max(0.0, at.expires_at_s - self._node.clock()) if at.caller else 0.0

    def end(self, at: Attachment) -> None:
        """Release everything that a connection held."""
        self._node.end_owner(at.owner)
        if at.devices:
            self._grants.closed(at.owner)

    def took(self, request: wire.AnyRequest, duration_s: float) -> None:
        """Note how long a request took, its reply included. Requests that fail are not among them."""
        verb = _VERBS[type(request)]
        parent = request.traceparent if isinstance(request, wire.Traceable) else ""
        self._node.counters.observe("kvstrata_request_duration_seconds", duration_s, traceparent=parent, verb=verb)

    def descriptors(self, at: Attachment, reply: wire.AnyReply) -> list[int]:
        """Descriptors to send with the extents that a reply grants; the backends own them."""
        if not isinstance(reply, wire.GRANTING):
            return []
        devices = reply.devices if isinstance(reply, wire.Acquired) else ()
        return self._grants.descriptors(at.owner, reply.extents, devices)

    def _hello(self, at: Attachment, request: wire.Hello) -> wire.Welcome:
        if request.version != wire.PROTOCOL_VERSION:
            raise InvalidInputError(f"protocol version {request.version}, this agent speaks {wire.PROTOCOL_VERSION}")
        at.client = request.client
        node = self._node
        version = self.grants_version
        return wire.Welcome(request.id, version, wire.PROTOCOL_VERSION, node.agent, node.name, node.epoch)

    def _begin(self, at: Attachment, request: _Keyed, session: str) -> RequestContext | None:
        """Return the context of a request on keys; None when the caller may not read the scope, which is then empty.

        The one place where such a request is noted before it is carried out, and where a session that it names comes
        back from an earlier run.
        """
        right = at.readable(request.scope)
        if right is None:
            self._observer.on_refused(at, request, len(request.digests) // KEY_BYTES)
            return None
        self._observer.on_request(request)
        context = right.context
        if session:
            context = context.within(self._cache.life.find(at.tenant, at.own_secret, session))
        if isinstance(request, wire.Acquire):
            self._node.returns.loaded(context.scope, context.session, unpack_digests(request.digests))
        elif isinstance(request, wire.Lookup) and request.is_use:
            self._node.returns.asked(context.scope, context.session, unpack_digests(request.digests))
        return context

    def _lookup(self, at: Attachment, request: wire.Lookup) -> Outcome:
        digests = unpack_digests(request.digests)
        context = self._begin(at, request, request.session)
        reader = self._cache.reader
        with span(
            "kvstrata.lookup",
            parent=request.traceparent,
            session_id=request.session,
            pool=self._node.pool,
            requested_blocks=len(digests),
        ):
            entries = reader.lookup_now(context, digests) if context else [None] * len(digests)
            if context is not None and reader.needs_directory(entries):
                return self._lookup_wide(at, request, context, digests, entries)
            return self._found(at, request, entries, reader.answer(entries, {}))

    async def _lookup_wide(
        self,
        at: Attachment,
        request: wire.Lookup,
        context: RequestContext,
        digests: Sequence[bytes],
        entries: Sequence[Entry | None],
    ) -> wire.Found:
        with span(
            "kvstrata.lookup", parent=request.traceparent, session_id=request.session, pool=self._node.pool, remote=True
        ):
            located = await self._cache.reader.locate(context, digests, entries)
            entries = self._cache.reader.still(context, entries)
            return self._found(at, request, entries, self._cache.reader.answer(entries, located))

    def _found(
        self, at: Attachment, request: wire.Lookup, entries: Sequence[Entry | None], answer: Findings
    ) -> wire.Found:
        states, places = answer.states, answer.places
        miss = states.find(Lookup.MISS) if request.is_use and at.readable(request.scope) is not None else -1
        if miss >= 0:
            missing = request.digests[miss * KEY_BYTES : (miss + 1) * KEY_BYTES]
            self._node.prefill_rates.missed(missing, self._node.clock())
        self._observer.on_lookup(at, request, entries, states)
        return wire.Found(request.id, self.grants_version, states, len(places), places, answer.tier_names)

    def _count_load(self, at: Attachment, request: wire.CountLoad) -> wire.Done:
        wanted, loaded = request.wanted_blocks, request.loaded_blocks
        if not 0 <= loaded <= wanted <= wire.KEYS_MAX:
            raise InvalidInputError(
                f"loaded_blocks {loaded} of wanted_blocks {wanted}: 0 <= loaded <= wanted <= {wire.KEYS_MAX}"
            )
        self._node.counters.looked_up(at.tenant, wanted, loaded)
        self._observer.on_loaded(at, at.loads.end(wanted, loaded))
        return wire.Done(request.id, self.grants_version, loaded)

    def _acquire(self, at: Attachment, request: wire.Acquire) -> Outcome:
        digests = unpack_digests(request.digests)
        context = self._begin(at, request, request.session)
        if context is None:
            return wire.Acquired(request.id, self.grants_version, (), (), self._node.epoch)
        call = self._acquire_call(context, request, digests)
        if request.in_place and at.devices:
            call = replace(call, devices=self._openable(at, request))
        if call.handover is not None:
            return self._acquire_partial(at, request, call)
        count, name = len(call.digests), request.session
        with span(
            "kvstrata.acquire",
            parent=request.traceparent,
            session_id=name,
            pool=self._node.pool,
            requested_blocks=count,
        ) as active:
            acquired = self._cache.reader.acquire_now(call)
            active.set(hit_blocks=len(acquired.reads))
        if acquired.may_grow:
            at.loads.begin(call.digests, self._node.clock())
            return self._acquire_slow(at, request, call, acquired.reads)
        at.loads.note(call.digests, acquired.held, acquired.captured, self._node.clock())
        if call.part_bytes:
            return self._acquired_in_parts(at, request, call, acquired.reads)
        return self._acquired(at, request, context, acquired.reads)

    def _acquire_call(self, context: RequestContext, request: wire.Acquire, digests: Sequence[bytes]) -> AcquireCall:
        """Bound what a client asks for. Raises `InvalidInputError` for parts that fit no block."""
        digests = digests[: max(0, LEASES_MAX - self._node.leases.count(context.owner))]
        if request.part_bytes:
            digests = digests[: blocks_max(request.part_bytes, context.raw_bytes)]
        lease_s = min(max(request.lease_s, 0.0), LEASE_S_MAX)
        deadline_s = min(max(request.deadline_s, 0.0), DEADLINE_S_MAX)
        return AcquireCall(context, digests, lease_s, deadline_s, request.part_bytes, request.handover)

    @staticmethod
    def _openable(at: Attachment, request: wire.Acquire) -> frozenset[str]:
        """Devices in which the caller may have whole blocks in place: who opens an extent can write all of it."""
        access = at.rights[request.scope].access
        is_own = access.kind is ScopeKind.TENANT and access.can_write
        return at.devices if is_own and not request.part_bytes else frozenset()

    async def _acquire_partial(self, at: Attachment, request: wire.Acquire, call: AcquireCall) -> wire.Acquired:
        count, name = len(call.digests), request.session
        at.loads.begin(call.digests, self._node.clock())
        with span(
            "kvstrata.follow", parent=request.traceparent, session_id=name, pool=self._node.pool, requested_blocks=count
        ):
            reads = await self._handovers.follow(call)
        at.loads.note(call.digests, [r.source for r in reads], len(reads), self._node.clock())
        return self._acquired(at, request, call.context, reads)

    async def _acquire_slow(
        self, at: Attachment, request: wire.Acquire, call: AcquireCall, leased: list[Read]
    ) -> wire.AnyReply:
        reader, count, name = self._cache.reader, len(call.digests), request.session
        with span(
            "kvstrata.acquire",
            parent=request.traceparent,
            session_id=name,
            pool=self._node.pool,
            requested_blocks=count,
        ) as active:
            began_s = self._node.clock()
            acquired = await reader.acquire(call, leased)
            at.loads.note(call.digests, acquired.held, acquired.captured, began_s)
            active.set(hit_blocks=len(acquired.reads))
        if call.context.session is not None:
            self._note_wait(call.context.session, began_s, call.digests[len(leased)])
        got = len(acquired.reads)
        if got < len(call.digests):
            self._node.prefill_rates.missed(call.digests[got], began_s)
        rest = reader.lookup_now(call.context, call.digests[got:])
        unfetched = next((i for i, e in enumerate(rest) if e is None or not e.residences), len(rest))
        self._node.signs.asked(got - len(leased) + unfetched, unfetched)
        if call.part_bytes:
            answer = await self._acquired_in_parts(at, request, call, acquired.reads)
        else:
            answer = self._acquired(at, request, call.context, reader.live(call, acquired.reads))
        return self._with_congestion(answer, acquired.busy_s, "acquire")

    def _note_wait(self, session: Session, began_s: float, weighed: bytes) -> None:
        now_s = self._node.clock()
        waited = SessionEvent(Happened.LOAD, began_s, now_s, waited_s=now_s - began_s, weighed=weighed)
        self._node.sessions.log.note(session.key, waited)

    def _with_congestion(self, answer: wire.Acquired | wire.Reserved, busy_s: float, verb: str) -> wire.AnyReply:
        """Return, and count, an answer that its path is congested for so long; 0.0 leaves it as it is."""
        if busy_s <= 0:
            return answer
        self._node.counters.add("kvstrata_busy_answers_total", verb=verb)
        return replace(answer, busy_s=busy_s)

    async def _acquired_in_parts(
        self, at: Attachment, request: wire.Acquire, call: AcquireCall, reads: list[Read]
    ) -> wire.Acquired:
        """Answer with checksums of parts, of the leading blocks that are sound and still leased by then."""
        sums = await self._cache.parts.of([r.lease for r in reads], call.part_bytes)
        sound = next((i for i, joined in enumerate(sums) if not joined), len(reads))
        self._cache.unlease(at.owner, [r.lease.id for r in reads[sound:]])
        return self._acquired(at, request, call.context, self._cache.reader.live(call, reads[:sound]), sums)

    def _acquired(
        self,
        at: Attachment,
        request: wire.Acquire,
        context: RequestContext,
        reads: list[Read],
        sums: Sequence[bytes] = (),
    ) -> wire.Acquired:
        right = at.readable(request.scope)
        if right is None:
            self._cache.unlease(at.owner, [r.lease.id for r in reads])  # The right was lost on the way.
            self._observer.on_refused(at, request, len(reads))
            return wire.Acquired(request.id, self.grants_version, (), (), self._node.epoch)
        places = [(r.lease.residence.tier, r.lease.residence.slot) for r in reads]
        kept, extents, devices = self._grants.fit(at, right, places)
        if kept < len(reads):
            self._cache.unlease(at.owner, [r.lease.id for r in reads[kept:]])
        reads = reads[:kept]
        blocks = tuple([leased_of(read, joined) for read, joined in zip(reads, sums or repeat(b""), strict=False)])
        if context.session is not None:
            self._cache.archiver.attend(context.session, [r.lease.entry for r in reads])
            now_s, lacking = self._node.clock(), len(request.digests) // KEY_BYTES - len(reads)
            sources = Counter([r.source for r in reads])
            read = SessionEvent(Happened.LOAD, now_s, now_s, blocks=sources, lacking=lacking)
            self._node.sessions.log.note(context.session.key, read)
        self._observer.on_acquired(at, right, reads)
        gone = self._grants.gone(at, extents, has_devices=bool(at.devices))
        epoch = self._node.epoch
        return wire.Acquired(request.id, self.grants_version, blocks, extents, epoch, gone, devices=devices)

    def _release(self, at: Attachment, request: wire.Release) -> wire.Done:
        self._cache.reader.inspect(at.owner, request.suspects[:SUSPECTS_MAX])
        at.loads.released(self._node.clock())
        return wire.Done(request.id, self.grants_version, self._cache.release(at.owner, request.leases))

    def _reserve(self, at: Attachment, request: wire.Reserve) -> Outcome:
        if len(request.parent) not in (0, KEY_BYTES):
            raise InvalidInputError(f"parent of {len(request.parent)} B, 0 or {KEY_BYTES} wanted")
        if request.handover or request.part_bytes:
            self._handovers.check(request, at.block_bytes)
        self._writable(at, request)
        context = self._begin(at, request, request.session)
        assert context is not None, "whoever may write a scope may read it"
        digests = unpack_digests(request.digests)
        made = self._cache.writer.reserve_now(context, request.parent, digests)
        if len(made) == len(digests):
            return self._reserved(at, request, made, made)
        return self._reserve_slow(at, request, context, digests, made)

    def _writable(self, at: Attachment, request: wire.Reserve | wire.Drop) -> ScopeRight:
        try:
            return at.writable(request.scope)
        except ForbiddenError:
            verb, blocks = _VERBS[type(request)], len(request.digests) // KEY_BYTES
            self._audit.refused_write(at.caller, request.scope, verb, blocks)
            if at.caller is not None:
                self._node.counters.denied(at.tenant, blocks)
            raise

    async def _reserve_slow(
        self,
        at: Attachment,
        request: wire.Reserve,
        context: RequestContext,
        digests: Sequence[bytes],
        made: list[Reservation | None],
    ) -> wire.AnyReply:
        with span(
            "kvstrata.reserve",
            parent=request.traceparent,
            session_id=request.session,
            pool=self._node.pool,
            requested_blocks=len(digests),
        ):
            parent = digests[len(made) - 1] if made else request.parent
            rest = digests[len(made) :]
            more, refusal, busy_s = await self._cache.writer.reserve(context, parent, rest, has_some=bool(made))
            made += more
        # Whoever waited for the rest so long that a first one expired gets what stands before that one.
        answer = self._reserved(at, request, made, self._node.reservations.open_ones(made))
        return self._with_congestion(replace(answer, refusal=refusal), busy_s, "reserve")

    def _reserved(
        self,
        at: Attachment,
        request: wire.Reserve,
        made: list[Reservation | None],
        standing: Sequence[Reservation | None],
    ) -> wire.Reserved:
        """Answer with those of what was `made` that are `standing` and fit into one frame."""
        spots = [r for r in made if r is not None]
        try:
            right = self._writable(at, request)
        except ForbiddenError:  # The right was lost on the way.
            self._cache.abandon(at.owner, [r.id for r in spots])
            raise
        kept, extents, _ = self._grants.fit(at, right, [(r.tier, r.slot) for r in standing if r is not None])
        if kept < len(spots):
            made = self._cut(at, made, kept)
        gone = self._grants.gone(at, extents, has_devices=bool(at.devices))
        slots = tuple([NO_SLOT if r is None else slot_of(r.id, r.tier, r.slot) for r in made])
        named = self._handovers.begin(request, made) if request.handover else None
        version, epoch = self.grants_version, self._node.epoch
        return wire.Reserved(request.id, version, slots, extents, epoch, RESERVATION_S, gone, named)

    def _cut(self, at: Attachment, made: list[Reservation | None], kept: int) -> list[Reservation | None]:
        """Keep the leading answers with `kept` reservations and give the rest back."""
        given = [i for i, r in enumerate(made) if r is not None]
        self._cache.abandon(at.owner, [r.id for r in made[given[kept] :] if r is not None])
        return made[: given[kept]]

    def _publish(self, at: Attachment, request: wire.Publish) -> Outcome:
        if len(request.reservations) != len(request.checksums):
            raise InvalidInputError(
                f"{len(request.checksums)} checksums for {len(request.reservations)} reservations: one for each wanted"
            )
        sizes = set(map(len, request.checksums))
        if sizes - {CHECKSUM_BYTES}:
            raise InvalidInputError(f"checksums of {sorted(sizes)} B: {CHECKSUM_BYTES} B wanted")
        if at.block_bytes <= INLINE_BYTES_MAX:
            results = self._cache.writer.publish_now(at.owner, request.reservations, request.checksums)
            return wire.Published(request.id, self.grants_version, results)
        return self._publish_slow(at, request)

    async def _publish_slow(self, at: Attachment, request: wire.Publish) -> wire.Published:
        with span(
            "kvstrata.publish", parent=request.traceparent, pool=self._node.pool, blocks=len(request.reservations)
        ):
            results = await self._cache.writer.publish(at.owner, request.reservations, request.checksums)
        return wire.Published(request.id, self.grants_version, results)

    def _abandon(self, at: Attachment, request: wire.Abandon) -> wire.Done:
        return wire.Done(request.id, self.grants_version, self._cache.abandon(at.owner, request.reservations))

    def _hinted(self, request: wire.AnyRequest, outcome: wire.Outcome, count: int = 0) -> wire.Done:
        self._node.counters.add("kvstrata_hints_total", hint=_VERBS[type(request)], outcome=outcome)
        return wire.Done(request.id, self.grants_version, count, outcome)

    def _prefetch(self, at: Attachment, request: wire.Prefetch) -> wire.Done:
        context, digests = self._begin(at, request, request.session), unpack_digests(request.digests)
        if context is None or not self._cache.reader.may_prefetch:
            return self._hinted(request, wire.Outcome.UNKNOWN if context is None else wire.Outcome.REFUSED)
        begun = self._cache.reader.prefetch(context, digests)
        return self._hinted(request, wire.outcome_of(begun.blocks, len(digests)), begun.started)

    def _fetch(self, at: Attachment, request: wire.Fetch) -> Outcome:
        context, digests = self._begin(at, request, request.session), unpack_digests(request.digests)
        if context is None or not self._cache.reader.may_prefetch:
            return self._hinted(request, wire.Outcome.UNKNOWN if context is None else wire.Outcome.REFUSED)
        return self._fetch_wide(request, context, digests)

    async def _fetch_wide(self, request: wire.Fetch, context: RequestContext, digests: Sequence[bytes]) -> wire.Done:
        begun = await self._cache.reader.fetch(context, digests)
        return self._hinted(request, wire.outcome_of(begun.blocks, len(digests)), begun.started)

    def _pin(self, at: Attachment, request: wire.Pin) -> wire.Done:
        context, digests = self._begin(at, request, ""), unpack_digests(request.digests)
        if context is None or request.expires_s <= 0:
            return self._hinted(request, wire.Outcome.UNKNOWN if context is None else wire.Outcome.EXPIRED)
        count = self._cache.pin(context, digests, min(request.expires_s, PIN_S_MAX))
        is_below = not count and any(self._cache.reader.lookup_now(context, digests))
        outcome = wire.Outcome.REFUSED if is_below else wire.outcome_of(count, len(digests))
        return self._hinted(request, outcome, count)

    def _demote(self, at: Attachment, request: wire.Demote) -> wire.Done:
        context, digests = self._begin(at, request, ""), unpack_digests(request.digests)
        if context is None:
            return self._hinted(request, wire.Outcome.UNKNOWN)
        if at.rights[request.scope].access.kind is not ScopeKind.TENANT:
            return self._hinted(request, wire.Outcome.REFUSED)  # A shared scope's blocks are others' as well.
        count, here = self._cache.demote(context, digests)
        outcome = wire.Outcome.REFUSED if here and not count else wire.outcome_of(count, len(digests))
        return self._hinted(request, outcome, count)

    def _unpin(self, at: Attachment, request: wire.Unpin) -> wire.Done:
        context = self._begin(at, request, "")
        count = self._cache.unpin(context, unpack_digests(request.digests)) if context else 0
        return wire.Done(request.id, self.grants_version, count)

    def _touch(self, at: Attachment, request: wire.Touch) -> wire.Done:
        context = self._begin(at, request, request.session)
        count = self._cache.touch(context, unpack_digests(request.digests)) if context else 0
        return wire.Done(request.id, self.grants_version, count)

    def _report_engine(self, at: Attachment, request: wire.ReportEngine) -> wire.Done:
        if not 0 < request.prefill_tokens_per_s <= wire.RATE_MAX:
            raise InvalidInputError(
                f"prefill_tokens_per_s: {request.prefill_tokens_per_s}, over 0 and {wire.RATE_MAX:.0e} at most wanted"
            )
        for name in ("queued_tokens", "running", "half_rate_tokens"):
            value = getattr(request, name)
            if not 0 <= value <= wire.QUEUED_MAX:
                raise InvalidInputError(f"{name}: {value}, 0 to {wire.QUEUED_MAX:.0e} wanted")
        reported = self._node.engines.setdefault(at.tenant, {})
        reported[at.owner] = EngineLoad(
            request.prefill_tokens_per_s,
            request.queued_tokens,
            request.running,
            self._node.clock(),
            request.half_rate_tokens,
        )
        return wire.Done(request.id, self.grants_version, 1)

    def _why_miss(self, at: Attachment, request: wire.WhyMiss) -> Outcome:
        """Ask as a lookup does, without being one: it is no use of the blocks, and counts nothing."""
        digests, right = unpack_digests(request.digests), at.readable(request.scope)
        if not digests:
            raise InvalidInputError(f"digests of 0 B: 1 to {wire.KEYS_MAX} keys of {KEY_BYTES} B wanted")
        if right is None:
            self._observer.on_refused(at, request, len(digests))
            return self._missed(request, None, digests, [None] * len(digests), {})
        entries = self._cache.reader.lookup_now(right.context, digests)
        self._audit.read(at.caller, right.access, "why_miss", [e for e in entries if e is not None])
        if self._cache.reader.needs_directory(entries):
            return self._missed_wide(request, right.context, digests, entries)
        return self._missed(request, right.context, digests, entries, {})

    async def _missed_wide(
        self, request: wire.WhyMiss, context: RequestContext, digests: Sequence[bytes], entries: Sequence[Entry | None]
    ) -> wire.Text:
        absent = [i for i, entry in enumerate(entries) if entry is None]
        cut = absent[LOCATE_KEYS_MAX] if len(absent) > LOCATE_KEYS_MAX else len(digests)  # Nobody is asked for more.
        digests, entries = digests[:cut], entries[:cut]
        located = await self._cache.reader.locate(context, digests, entries)
        return self._missed(request, context, digests, self._cache.reader.still(context, entries), located)

    def _missed(
        self,
        request: wire.WhyMiss,
        context: RequestContext | None,
        digests: Sequence[bytes],
        entries: Sequence[Entry | None],
        located: Mapping[int, Location],
    ) -> wire.Text:
        directory = self._cache.directory
        is_alone = directory is not None and not directory.is_up
        found = self._cache.explainer.miss(Asked(context, digests, entries, located, is_alone))
        return wire.Text(request.id, self.grants_version, json.dumps(found))

    def _route_hint(self, at: Attachment, request: wire.RouteHint) -> Outcome:
        """Ask this node and the directory. No use of the blocks, as `_why_miss`."""
        digests, right = unpack_digests(request.digests), at.readable(request.scope)
        if not digests:
            raise InvalidInputError(f"digests of 0 B: 1 to {wire.KEYS_MAX} keys of {KEY_BYTES} B wanted")
        if right is None:
            self._observer.on_refused(at, request, len(digests))
            return self._routes(request, None, [None] * len(digests), [()] * len(digests))
        entries = self._cache.reader.lookup_now(right.context, digests)
        self._audit.read(at.caller, right.access, "route_hint", [e for e in entries if e is not None])
        directory = self._cache.directory
        if directory is not None and directory.is_up:
            return self._routes_wide(request, right.context, digests, entries, directory)
        return self._routes(request, right.context, entries, [()] * len(digests))

    async def _routes_wide(
        self,
        request: wire.RouteHint,
        context: RequestContext,
        digests: Sequence[bytes],
        entries: Sequence[Entry | None],
        directory: Directory,
    ) -> wire.Text:
        found = await directory.locate(context.secret, digests[:LOCATE_KEYS_MAX])
        others = [*found, *repeat((), len(digests) - len(found))]  # Nobody is asked for more.
        return self._routes(request, context, self._cache.reader.still(context, entries), others)

    def _routes(
        self,
        request: wire.RouteHint,
        context: RequestContext | None,
        entries: Sequence[Entry | None],
        others: Sequence[Sequence[Location]],
    ) -> wire.Text:
        scores, directory = self._cache.explainer.routes(context, entries, others), self._cache.directory
        longest = max(scores, key=lambda s: s.blocks).node if scores else ""
        is_alone = directory is not None and not directory.is_up
        nodes = [asdict(score) for score in scores]
        answer = {"blocks": len(entries), "is_alone": is_alone, "longest": longest, "nodes": nodes}
        return wire.Text(request.id, self.grants_version, json.dumps(answer))

    def _close_extents(self, at: Attachment, request: wire.CloseExtents) -> wire.Done:
        self._grants.closed(at.owner, request.extents)
        return wire.Done(request.id, self.grants_version, len(request.extents))

    def _drop(self, at: Attachment, request: wire.Drop) -> wire.Found:
        right = self._writable(at, request)
        if right.access.kind is not ScopeKind.TENANT:
            raise ForbiddenError("drop: the blocks of a shared scope are its other readers' as well")
        states = self._cache.drop(right.context, unpack_digests(request.digests))
        return wire.Found(request.id, self.grants_version, states, 0, b"", ())


class ReadObserver:
    """What is noted of requests on keys: the audit log, the counts, and uses for tiers that scale by themselves."""

    def __init__(self, cache: Cache, audit: Audit) -> None:
        self._audit = audit
        self._counters = cache.node.counters
        self._reader = cache.reader
        self._demand = cache.demand

    def on_request(self, request: _Keyed) -> None:
        """Note keys that an engine asks for or brings, in a scope that it may read."""
        if self._demand.is_followed:
            is_lookup = isinstance(request, wire.Lookup) and request.is_use
            is_asked = is_lookup or isinstance(request, wire.Acquire)
            self._demand.note(unpack_digests(request.digests), is_asked=is_asked)

    def on_refused(self, at: Attachment, request: _Asked, blocks: int) -> None:
        """Note a request for blocks of a scope that the caller may not read, or not any more."""
        self._audit.refused_scope(at.caller, request.scope, _VERBS[type(request)], blocks)
        if at.caller is not None:
            self._counters.denied(at.tenant, blocks)

    def on_lookup(
        self, at: Attachment, request: wire.Lookup, entries: Sequence[Entry | None], states: Sequence[int]
    ) -> None:
        """Note what a caller found; of a probe only what crossed tenants."""
        if not request.is_probe:
            self._counters.looked_up(at.tenant, len(states), states.count(Lookup.HIT))
        right = at.readable(request.scope)
        if right is not None:
            hits = (entry for entry, state in zip(entries, states, strict=True) if state == Lookup.HIT)
            self._audit.read(at.caller, right.access, "lookup", hits)

    def on_loaded(self, at: Attachment, counts: LoadCounts) -> None:
        """Note how far the blocks of a load came, and, where it is known how fast its engine computes, what it saved.

        Each shard counts its part of the tokens.
        """
        layout, counters = at.layout, self._counters
        if layout is None or not at.rights:
            return
        tenant, shards = at.tenant, max(1, layout.tp_size)
        for stage, places in (("held", counts.held), ("captured", counts.captured), ("delivered", counts.delivered)):
            for place, blocks in places.items():
                tokens = blocks * layout.block_tokens / shards
                counters.add("kvstrata_load_tokens_total", tokens, tenant=tenant, tier=place, stage=stage)
        engine = self._reader.engine(tenant, at.owner)
        if engine.is_lower_bound:
            return  # Of what loading cost alone nobody could tell whether it was worth it.
        tokens = counts.delivered.total() * layout.block_tokens
        computed_s = engine.compute_s(0, tokens)
        counters.add("kvstrata_load_saved_prefill_tokens_total", tokens / shards)
        counters.add("kvstrata_load_saved_prefill_seconds_total", computed_s / shards, tenant=tenant)
        counters.add("kvstrata_load_saved_gpu_seconds_total", computed_s, tenant=tenant)
        counters.add("kvstrata_load_seconds_total", counts.took_s / shards, tenant=tenant)

    def on_acquired(self, at: Attachment, right: ScopeRight, reads: Sequence[Read]) -> None:
        """Note blocks that a caller was given."""
        sources = [read.source for read in reads]
        for source in set(sources):
            self._counters.add("kvstrata_acquired_blocks_total", sources.count(source), tenant=at.tenant, source=source)
        lent = Counter(r.source for r in reads if r.lease.residence.tier.backend.lending is not None)
        for source, blocks in lent.items():
            self._counters.add("kvstrata_lent_bytes_total", blocks * at.block_bytes, tier=source)
        self._audit.read(at.caller, right.access, "acquire", (read.lease.entry for read in reads))
        self._counters.leased(right.access, len(reads))
