"""The blocking client: every verb answers within its deadline, as if nothing were cached when the agent is away."""

import contextlib
import itertools
import os
import random
import socket
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import AgentAwayError, KvStrataError
from kvstrata_client.connection.lifecycle import ATTACH_WAIT_S, Connect, Down, Idle, LifecycleStep, Pause, Up, lifecycle
from kvstrata_client.connection.link import Link
from kvstrata_client.connection.protocol import Sent, unsent
from kvstrata_client.prompt.handover import HandoverSlots, HandoverWriter
from kvstrata_client.prompt.routes import knows
from kvstrata_client.prompt.streaming import LayerStream, Leased, partial_sources
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import (
    Ahead,
    Call,
    Calls,
    Collect,
    Done,
    Operation,
    Post,
    Step,
    Work,
    begin,
    interrupt,
    resume,
)
from kvstrata_client.verbs.copying import HeadRange
from kvstrata_client.verbs.counters import Counters
from kvstrata_client.verbs.leases import Leases
from kvstrata_client.verbs.results import Answer, Grants, Hinted, Lease, Prefix, Published, Reservation, Scope

T = TypeVar("T")

_InFlight = dict[Ahead, tuple[Link | None, Sent]]
"""What an operation has sent ahead and not collected yet."""


class Client:
    """One attachment to an agent, shared by the threads of a process.

    While the agent is away (absent, restarting, hung, refusing) every verb answers at once that nothing is cached;
    the client reconnects in the background. With `strict` verbs raise the `KvStrataError` instead, for tools.
    Arguments that can never be right raise `InvalidInputError` in any case.
    """

    def __init__(self, target: Target, *, strict: bool = False) -> None:
        """Start to attach in the background; returns at once."""
        self.target = target
        self.counters = Counters()
        self.is_strict = strict
        self._pid = os.getpid()
        self._link: Link | None = None
        self._candidate: Link | None = None
        self._serials = itertools.count(1)
        self._reason: KvStrataError = AgentAwayError("not attached yet")
        self._settled = threading.Event()  # The first attempt has ended, well or not.
        self._attached = threading.Event()
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kvstrata-client", daemon=True)
        self._keeper.start()

    @classmethod
    def attach(cls, target: Target, *, strict: bool = False, wait_s: float = ATTACH_WAIT_S) -> Self:
        """Make a client and wait up to `wait_s` until it is attached; see `is_attached`."""
        client = cls(target, strict=strict)
        client.wait_attached(wait_s)
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_attached(self) -> bool:
        """True while verbs reach the agent."""
        return self._link is not None

    @property
    def reason(self) -> KvStrataError:
        """Why the client is (or last was) not attached."""
        return self._reason

    @property
    def grants(self) -> Grants | None:
        """Newest grants; None while not attached."""
        link = self._link
        return link.protocol.grants if link is not None else None

    def wait_attached(self, wait_s: float) -> bool:
        """Wait until attached, `wait_s` at most; returns whether it is."""
        return self._attached.wait(wait_s)

    def wait_settled(self, wait_s: float) -> bool:
        """Wait until the first attempt has ended, `wait_s` at most; returns whether the client is attached."""
        self._settled.wait(wait_s)
        return self.is_attached

    def close(self) -> None:
        """Let go of everything held and end the connection. Idempotent; verbs answer absence from then on."""
        if self._pid != os.getpid():  # The connection is the parent's.
            return
        self._closing.set()
        for link in (self._link, self._candidate):
            if link is not None:
                link.fail(AgentAwayError("the client is closed"))
        self._keeper.join(self.target.move_timeout_s)

    # Verbs. Each is one round trip at most.

    def refresh_grants(self) -> Grants | None:
        """Ask for the grants again."""
        return self._one(calls.scopes(self.target))

    def open_session(
        self,
        session: str,
        *,
        parent: str = "",
        priority: str = "",
        sink_tokens: int = 0,
        window_tokens: int = 0,
        anchor_tokens: int = 0,
    ) -> None:
        """Start or revive a session; with a window it is one whose tokens attend to those before them and the sinks.

        Blocks between the two leave first, but for the first one of each `anchor_tokens` (those twice as far apart
        whenever they are more than 256). 0: all tokens, or what the session is known to attend to; no anchors.
        """
        attended = sink_tokens, window_tokens, anchor_tokens
        self._one(calls.open_session(self.target, session, parent, priority, attended))

    def fork_session(self, session: str, parent: str, *, priority: str = "") -> None:
        """Start a session that shares everything its parent has so far."""
        self._one(calls.open_session(self.target, session, parent, priority))

    def touch_session(self, session: str, state: str, *, urgency: int = 0, expected_return_s: float = 0.0) -> Hinted:
        """Report what a session is about to do, `decoding` or `idle`, and when its next turn is expected."""
        return self._one(calls.touch_session(self.target, session, state, urgency, expected_return_s))

    def tool_wait(self, session: str, expected_s: float = 0.0, *, urgency: int = 0) -> Hinted:
        """Hint that a session waits for a tool, about so long; 0.0: for the pool's `retention.toolGapSeconds`."""
        return self._one(calls.tool_wait(self.target, session, expected_s, urgency))

    def retain_session(self, session: str, for_s: float) -> Hinted:
        """Hint that an idle session comes back within `for_s` seconds, a week at most: it is not finished before."""
        return self._one(calls.retain(self.target, session, for_s)) if knows(self, wire.Retain) else Hinted()

    def report_engine(
        self, prefill_tokens_per_s: float, *, queued_tokens: int = 0, running: int = 0, half_rate_tokens: int = 0
    ) -> bool:
        """Report how fast the engine computes prompts, and how many tokens wait: loads are weighed against it for 30 s.

        False where the agent is away, or older than the verb.
        """
        if not knows(self, wire.ReportEngine):
            return False
        return (
            self._one(calls.report_engine(self.target, prefill_tokens_per_s, queued_tokens, running, half_rate_tokens))
            > 0
        )

    def complete_session(self, session: str, *, archive: bool = True, wait_s: float = 0.0) -> Hinted:
        """Hint that a session is over; with `archive` its prefix goes to slow tiers instead of away.

        `is_archived` when every block of its prefix has a copy that survives a restart within `wait_s`. The archive
        goes on after that; `explain` has the session's state.
        """
        return self._one(calls.complete_session(self.target, session, archive=archive, wait_s=wait_s))

    def lookup(self, keys: Sequence[BlockKey], *, session: str = "") -> Prefix:
        """Ask how long a prefix of these chained keys (one scope) can be had."""
        return self._one(calls.lookup(self.target, keys, session))

    def acquire(
        self,
        keys: Sequence[BlockKey],
        *,
        session: str = "",
        lease_s: float = 30.0,
        deadline_s: float = 10.0,
        in_place: bool = False,
    ) -> Leases:
        """Lease the longest usable prefix, brought into memory within `deadline_s`; use it in a `with` block.

        With `in_place` blocks in a device of the target are leased there: they have a `tensor` and an empty view.

        Read the views inside the block: `copying.copy_verified` copies and verifies, `copying.is_intact` verifies what
        is to be used in place. Its exit raises `LeaseLostError` when what was read there is void.
        """
        call = calls.acquire(self.target, keys, session, lease_s, deadline_s)
        (answer,) = self._ask((calls.in_place(call) if in_place else call,))
        count = calls.usable(answer.value)
        if count < len(answer.value):
            self._post((calls.release(self.target, answer.value[count:]),))
        return Leases(answer.value[:count], self._end, answer.busy_s)

    def _end(self, leases: Sequence[Lease], suspects: Sequence[Lease] = ()) -> bool:
        """End leases; true when the agent confirms that all of them lived until now."""
        try:
            ended = self._ask((calls.release(self.target, leases, suspects),))[0]
        except KvStrataError:  # Strict: whatever the reason is, nobody vouches for what was read.
            return self.counters.judge(len(leases), 0)
        return self.counters.judge(len(leases), ended.value)

    def stream(self, leased: Leased, heads: HeadRange) -> LayerStream:
        """Read leased blocks layer by layer; the stream ends the leases."""
        self.counters.note_blocks(leased.wanted_blocks, leased.whole_sources)
        return LayerStream(leased, heads, self._end_stream, self._arrive)

    def _end_stream(self, leases: Sequence[Lease], suspects: Sequence[Lease], is_read: bool) -> bool:  # noqa: FBT001  As `End` is called.
        """End a stream's leases, and count its partial blocks."""
        is_valid = self._end(leases, suspects)
        partial = partial_sources(leases)
        if partial:
            came = partial if is_read and is_valid else ()
            self.counters.note_blocks(len(partial), came)
            self._post((calls.count_load(self.target, len(partial), len(came)),))
        return is_valid

    def _arrive(self, leases: Sequence[Lease], have: int, wait_s: float) -> tuple[bytes, ...]:
        """Checksums of parts of partial blocks; none when they are lost, or the agent is."""
        return self._one(calls.arrive(self.target, leases, have, wait_s))

    def write_handover(self, slots: HandoverSlots) -> HandoverWriter:
        """Write blocks that were reserved for a hand-over."""
        return HandoverWriter(self.target, self._one, slots)

    def reserve(self, keys: Sequence[BlockKey], *, parent: bytes = b"", session: str = "") -> tuple[Reservation, ...]:
        """Ask for slots to fill, in chain order; fewer than asked for when the tier is full."""
        return self._one(calls.reserve(self.target, parent, keys, session))

    def publish(self, reservations: Sequence[Reservation], checksums: Sequence[bytes]) -> tuple[Published, ...]:
        """Commit filled slots with their checksums (`copying.fill`)."""
        return self._one(calls.publish(self.target, reservations, checksums))

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """Give reservations back unfilled, without waiting for the agent."""
        self._post((calls.abandon(self.target, reservations),))

    def prefetch(self, keys: Sequence[BlockKey], *, session: str = "") -> Hinted:
        """Bring a prefix of this node into memory in the background."""
        return self._one(calls.prefetch(self.target, keys, session))

    def fetch(self, keys: Sequence[BlockKey], *, session: str = "") -> Hinted:
        """The same of a prefix wherever it is."""
        return self._one(calls.fetch(self.target, keys, session)) if knows(self, wire.Fetch) else Hinted()

    def pin(self, keys: Sequence[BlockKey], ttl_s: float) -> Hinted:
        """Keep blocks in memory until `ttl_s` from now, an hour at most; pins always expire."""
        return self._one(calls.pin(self.target, keys, ttl_s))

    def demote(self, keys: Sequence[BlockKey]) -> Hinted:
        """Have blocks of the own scope copied to a slower tier soon, and leave memory first."""
        return self._one(calls.demote(self.target, keys)) if knows(self, wire.Demote) else Hinted()

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        """Take pins of this connection back; returns how many."""
        return self._one(calls.unpin(self.target, keys))

    def stats(self) -> str:
        """Tiers and counters as JSON text; `{}` when the agent is away."""
        return self._one(calls.stats(self.target))

    def explain(self, *, key: BlockKey | None = None, session: str = "", granted: Scope | None = None) -> str:
        """Why a block or a session is where it is, or what one of `grants.scopes` has, as JSON text: `wire.Explain`."""
        return self._one(calls.explain(self.target, key, session, granted))

    def why_miss(self, keys: Sequence[BlockKey]) -> str:
        """Why these chained keys (one scope) are not found, or not all, as JSON text: see `wire.WhyMiss`.

        `{}` where the agent is away, or older than the verb.
        """
        if self.grants is None or wire.WhyMiss.__name__ not in self.grants.verbs:
            return "{}"
        return self._one(calls.why_miss(self.target, keys))

    def route_hint(self, keys: Sequence[BlockKey]) -> str:
        """Which nodes have most of these chained keys (one scope), the soonest first, as JSON text: `wire.RouteHint`.

        `{}` where the agent is away, or older than the verb.
        """
        if self.grants is None or wire.RouteHint.__name__ not in self.grants.verbs:
            return "{}"
        return self._one(calls.route_hint(self.target, keys))

    def run(self, operation: Operation[T]) -> T:
        """Drive an operation that was made for this client."""
        in_flight: _InFlight = {}
        try:
            step = begin(operation)
            while not isinstance(step, Done):
                try:
                    outcome = self._perform(step, in_flight)
                except BaseException as e:  # noqa: BLE001  Given to the operation, which lets go of what it holds and re-raises.
                    step = interrupt(operation, e)
                else:
                    step = resume(operation, outcome)
        finally:
            for link, sent in in_flight.values():
                if link is not None:
                    link.forget(sent)
        return step.value

    @property
    def is_stale(self) -> bool:
        """True when the agent has reported that the grants may have changed."""
        link = self._link
        return link is not None and link.protocol.is_stale

    @property
    def is_crowded(self) -> bool:
        """True while so many requests are under way that no operation should send several ahead."""
        link = self._link
        return link is not None and link.protocol.is_crowded

    def _perform(self, step: Step, in_flight: _InFlight) -> Sequence[Answer[Any]]:
        match step:
            case Work():
                step.run()
            case Post():
                self._post(step.calls)
            case Ahead():
                link = self._own_link
                in_flight[step] = link, self._send(link, step.calls)
            case Collect():
                return self._collect(*in_flight.pop(step.ahead))
            case _:
                return self._ask(step)
        return ()

    def _one(self, call: Call[T]) -> T:
        return self._ask((call,))[0].value  # type: ignore[no-any-return]

    def _ask(self, asked: Calls) -> list[Answer[Any]]:
        """Execute calls; absent answers when the agent is away, or its error when strict."""
        link = self._own_link
        answers = unsent(Sent(asked, (), self._reason)) if link is None else link.exchange(asked)
        return self._counted(link, asked, answers)

    def _send(self, link: Link | None, asked: Calls) -> Sent:
        return Sent(asked, (), self._reason) if link is None else link.send(asked)

    def _collect(self, link: Link | None, sent: Sent) -> list[Answer[Any]]:
        answers = unsent(sent) if link is None else link.collect(sent)
        return self._counted(link, sent.calls, answers)

    def _counted(self, link: Link | None, asked: Calls, answers: list[Answer[Any]]) -> list[Answer[Any]]:
        """Count answers. What the others brought is given back when one of them raises."""
        try:
            self.counters.settle(answers, link, is_strict=self.is_strict)
        except KvStrataError:
            if (unused := calls.given_back(asked, answers)) and link is not None:
                link.post(unused)
            raise
        return answers

    def _post(self, posted: Calls) -> None:
        link = self._own_link
        if link is not None:
            link.post(posted)

    @property
    def _own_link(self) -> Link | None:
        """The connection; none to a forked child, which must not read its parent's answers."""
        return self._link if self._pid == os.getpid() else None

    # The keeper: a thread that carries out the steps of `lifecycle`.

    def _keep(self) -> None:
        steps = lifecycle(self.target, random.Random())
        step = next(steps)
        while not self._closing.is_set():
            try:
                outcome = self._do(step)
            except Exception as e:  # noqa: BLE001  The life cycle goes on with another connection.
                step = steps.throw(e)
            else:
                step = steps.send(outcome)
        self._drop(AgentAwayError("the client is closed"))

    def _do(self, step: LifecycleStep) -> Any:
        match step:
            case Connect():
                return self._connect()
            case Up():
                self._link, self._candidate = self._candidate, None
                self._attached.set()
                self._settled.set()
            case Idle(timeout_s, is_patient):
                assert self._link is not None, "only an attached client idles"
                return self._link.idle(timeout_s, is_patient=is_patient)
            case Down(reason):
                self._drop(reason)
                self._settled.set()
            case Pause(wait_s):
                self._closing.wait(wait_s)
            case _:
                link = self._link or self._candidate
                assert link is not None, "only a connected client asks"
                return link.exchange(step)
        return None

    def _connect(self) -> KvStrataError | None:
        with contextlib.ExitStack() as unused:
            try:
                connected = unused.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connected.settimeout(self.target.move_timeout_s)
                connected.connect(os.fspath(self.target.socket))
                connected.setblocking(False)  # noqa: FBT003  The standard library's signature.
                self._candidate = Link(self.target, connected, next(self._serials))
            except OSError as e:  # Of the agent, or of this process, which may have no descriptor left.
                return AgentAwayError(f"{self.target.socket}: {e}")
            unused.pop_all()
        return None

    def _drop(self, reason: KvStrataError) -> None:
        links = (self._link, self._candidate)
        self._reason = reason
        self._attached.clear()
        self._link = self._candidate = None
        for link in links:
            if link is not None:
                link.close()
