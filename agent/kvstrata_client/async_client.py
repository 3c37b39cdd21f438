"""The asyncio client: the same verbs, calls and life cycle as the blocking one, on an event loop."""

import asyncio
import contextlib
import itertools
import os
import random
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import AgentAwayError, KvStrataError
from kvstrata_client.connection.async_link import AsyncLink
from kvstrata_client.connection.lifecycle import ATTACH_WAIT_S, Connect, Down, Idle, LifecycleStep, Pause, Up, lifecycle
from kvstrata_client.connection.protocol import Sent, unsent
from kvstrata_client.prompt.handover import AsyncHandoverWriter, HandoverSlots
from kvstrata_client.prompt.routes import knows
from kvstrata_client.prompt.streaming import AsyncLayerStream, Leased, partial_sources
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
from kvstrata_client.verbs.leases import AsyncLeases
from kvstrata_client.verbs.results import Answer, Grants, Hinted, Lease, Prefix, Published, Reservation, Scope

T = TypeVar("T")

_InFlight = dict[Ahead, tuple[AsyncLink | None, Sent]]
"""What an operation has sent ahead and not collected yet."""


class AsyncClient:
    """One attachment to an agent, shared by the tasks of an event loop. See `Client` for what it promises."""

    def __init__(self, target: Target, *, strict: bool = False) -> None:
        """Prepare; `start` or `async with` begins to attach."""
        self.target = target
        self.counters = Counters()
        self.is_strict = strict
        self._link: AsyncLink | None = None
        self._candidate: AsyncLink | None = None
        self._serials = itertools.count(1)
        self._reason: KvStrataError = AgentAwayError("not attached yet")
        self._attached = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def attach(cls, target: Target, *, strict: bool = False, wait_s: float = ATTACH_WAIT_S) -> Self:
        """Make a client and wait up to `wait_s` until it is attached; see `is_attached`."""
        client = cls(target, strict=strict)
        client.start()
        await client.wait_attached(wait_s)
        return client

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to attach in the background. Idempotent."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="kvstrata-client")

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
        return self._link.protocol.grants if self._link is not None else None

    @property
    def is_stale(self) -> bool:
        """True when the agent has reported that the grants may have changed."""
        return self._link is not None and self._link.protocol.is_stale

    @property
    def is_crowded(self) -> bool:
        """True while so many requests are under way that no operation should send several ahead."""
        return self._link is not None and self._link.protocol.is_crowded

    async def wait_attached(self, wait_s: float) -> bool:
        """Wait until attached, `wait_s` at most; returns whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._attached.wait()
        return self.is_attached

    async def close(self) -> None:
        """Let go of everything held and end the connection. Idempotent; verbs answer absence from then on."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait((keeper,))
        self._drop(AgentAwayError("the client is closed"))

    # Verbs. Each is one round trip at most; see `Client`.

    async def refresh_grants(self) -> Grants | None:
        """Ask for the grants again."""
        return await self._one(calls.scopes(self.target))

    async def open_session(
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
        await self._one(calls.open_session(self.target, session, parent, priority, attended))

    async def fork_session(self, session: str, parent: str, *, priority: str = "") -> None:
        """Start a session that shares everything its parent has so far."""
        await self._one(calls.open_session(self.target, session, parent, priority))

    async def touch_session(
        self, session: str, state: str, *, urgency: int = 0, expected_return_s: float = 0.0
    ) -> Hinted:
        """Like `Client.touch_session`."""
        return await self._one(calls.touch_session(self.target, session, state, urgency, expected_return_s))

    async def tool_wait(self, session: str, expected_s: float = 0.0, *, urgency: int = 0) -> Hinted:
        """Like `Client.tool_wait`."""
        return await self._one(calls.tool_wait(self.target, session, expected_s, urgency))

    async def retain_session(self, session: str, for_s: float) -> Hinted:
        """Like `Client.retain_session`."""
        return await self._one(calls.retain(self.target, session, for_s)) if knows(self, wire.Retain) else Hinted()

    async def report_engine(
        self, prefill_tokens_per_s: float, *, queued_tokens: int = 0, running: int = 0, half_rate_tokens: int = 0
    ) -> bool:
        """Report how fast the engine computes prompts, and how many tokens wait: loads are weighed against it for 30 s.

        False where the agent is away, or older than the verb.
        """
        if not knows(self, wire.ReportEngine):
            return False
        noted: int = await self._one(
            calls.report_engine(self.target, prefill_tokens_per_s, queued_tokens, running, half_rate_tokens)
        )
        return noted > 0

    async def complete_session(self, session: str, *, archive: bool = True, wait_s: float = 0.0) -> Hinted:
        """Like `Client.complete_session`."""
        return await self._one(calls.complete_session(self.target, session, archive=archive, wait_s=wait_s))

    async def lookup(self, keys: Sequence[BlockKey], *, session: str = "") -> Prefix:
        """Ask how long a prefix of these chained keys (one scope) can be had."""
        return await self._one(calls.lookup(self.target, keys, session))

    async def acquire(
        self, keys: Sequence[BlockKey], *, session: str = "", lease_s: float = 30.0, deadline_s: float = 10.0
    ) -> AsyncLeases:
        """Lease the longest usable prefix, brought into memory within `deadline_s`; use it in an `async with` block.

        Read the views inside the block. Its exit raises `LeaseLostError` when what was read there is void.
        """
        (answer,) = await self._ask((calls.acquire(self.target, keys, session, lease_s, deadline_s),))
        return AsyncLeases(answer.value, self._end, answer.busy_s)

    async def _end(self, leases: Sequence[Lease], suspects: Sequence[Lease] = ()) -> bool:
        """End leases; true when the agent confirms that all of them lived until now."""
        try:
            ended = (await self._ask((calls.release(self.target, leases, suspects),)))[0]
        except KvStrataError:  # Strict: whatever the reason is, nobody vouches for what was read.
            return self.counters.judge(len(leases), 0)
        return self.counters.judge(len(leases), ended.value)

    def stream(self, leased: Leased, heads: HeadRange) -> AsyncLayerStream:
        """Read leased blocks layer by layer; the stream ends the leases."""
        self.counters.note_blocks(leased.wanted_blocks, leased.whole_sources)
        return AsyncLayerStream(leased, heads, self._end_stream, self._arrive, _work)

    async def _end_stream(self, leases: Sequence[Lease], suspects: Sequence[Lease], is_read: bool) -> bool:  # noqa: FBT001  As `AsyncEnd` is called.
        """End a stream's leases, and count its partial blocks."""
        is_valid = await self._end(leases, suspects)
        partial = partial_sources(leases)
        if partial:
            came = partial if is_read and is_valid else ()
            self.counters.note_blocks(len(partial), came)
            self._post((calls.count_load(self.target, len(partial), len(came)),))
        return is_valid

    async def _arrive(self, leases: Sequence[Lease], have: int, wait_s: float) -> tuple[bytes, ...]:
        """Checksums of parts of partial blocks; none when they are lost, or the agent is."""
        return await self._one(calls.arrive(self.target, leases, have, wait_s))

    def write_handover(self, slots: HandoverSlots) -> AsyncHandoverWriter:
        """Write blocks that were reserved for a hand-over."""
        return AsyncHandoverWriter(self.target, self._one, self._post, _work, slots)

    async def reserve(
        self, keys: Sequence[BlockKey], *, parent: bytes = b"", session: str = ""
    ) -> tuple[Reservation, ...]:
        """Ask for slots to fill, in chain order; fewer than asked for when the tier is full."""
        return await self._one(calls.reserve(self.target, parent, keys, session))

    async def publish(self, reservations: Sequence[Reservation], checksums: Sequence[bytes]) -> tuple[Published, ...]:
        """Commit filled slots with their checksums (`copying.fill`)."""
        return await self._one(calls.publish(self.target, reservations, checksums))

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """Give reservations back unfilled, without waiting for the agent."""
        self._post((calls.abandon(self.target, reservations),))

    async def prefetch(self, keys: Sequence[BlockKey], *, session: str = "") -> Hinted:
        """Like `Client.prefetch`."""
        return await self._one(calls.prefetch(self.target, keys, session))

    async def fetch(self, keys: Sequence[BlockKey], *, session: str = "") -> Hinted:
        """Like `Client.fetch`."""
        return await self._one(calls.fetch(self.target, keys, session)) if knows(self, wire.Fetch) else Hinted()

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float) -> Hinted:
        """Like `Client.pin`."""
        return await self._one(calls.pin(self.target, keys, ttl_s))

    async def demote(self, keys: Sequence[BlockKey]) -> Hinted:
        """Like `Client.demote`."""
        return await self._one(calls.demote(self.target, keys)) if knows(self, wire.Demote) else Hinted()

    async def unpin(self, keys: Sequence[BlockKey]) -> int:
        """Take pins of this connection back; returns how many."""
        return await self._one(calls.unpin(self.target, keys))

    async def stats(self) -> str:
        """Tiers and counters as JSON text; `{}` when the agent is away."""
        return await self._one(calls.stats(self.target))

    async def explain(self, *, key: BlockKey | None = None, session: str = "", granted: Scope | None = None) -> str:
        """Why a block or a session is where it is, or what one of `grants.scopes` has, as JSON text: `wire.Explain`."""
        return await self._one(calls.explain(self.target, key, session, granted))

    async def why_miss(self, keys: Sequence[BlockKey]) -> str:
        """Why these chained keys (one scope) are not found, or not all, as JSON text: see `wire.WhyMiss`.

        `{}` where the agent is away, or older than the verb.
        """
        if self.grants is None or wire.WhyMiss.__name__ not in self.grants.verbs:
            return "{}"
        return await self._one(calls.why_miss(self.target, keys))

    async def route_hint(self, keys: Sequence[BlockKey]) -> str:
        """Which nodes have most of these chained keys (one scope), the soonest first, as JSON text: `wire.RouteHint`.

        `{}` where the agent is away, or older than the verb.
        """
        if self.grants is None or wire.RouteHint.__name__ not in self.grants.verbs:
            return "{}"
        return await self._one(calls.route_hint(self.target, keys))

    async def run(self, operation: Operation[T]) -> T:
        """Drive an operation that was made for this client; work on memory goes to a worker thread."""
        in_flight: _InFlight = {}
        try:
            step = begin(operation)
            while not isinstance(step, Done):
                try:
                    outcome = await self._perform(step, in_flight)
                except BaseException as e:  # noqa: BLE001  Given to the operation, which lets go of what it holds and re-raises.
                    step = interrupt(operation, e)
                else:
                    step = resume(operation, outcome)
        finally:
            for link, sent in in_flight.values():
                if link is not None:
                    link.forget(sent)
        return step.value

    async def _perform(self, step: Step, in_flight: _InFlight) -> Sequence[Answer[Any]]:
        match step:
            case Work():
                await _work(step)
            case Post():
                self._post(step.calls)
            case Ahead():
                in_flight[step] = self._link, self._send(step.calls)
            case Collect():
                return await self._collect(*in_flight.pop(step.ahead))
            case _:
                return await self._ask(step)
        return ()

    async def _one(self, call: Call[T]) -> T:
        return (await self._ask((call,)))[0].value  # type: ignore[no-any-return]

    async def _ask(self, asked: Calls) -> list[Answer[Any]]:
        """Execute calls; absent answers when the agent is away, or its error when strict."""
        return await self._collect(self._link, self._send(asked))

    def _send(self, asked: Calls) -> Sent:
        return Sent(asked, (), self._reason) if self._link is None else self._link.send(asked)

    async def _collect(self, link: AsyncLink | None, sent: Sent) -> list[Answer[Any]]:
        answers = unsent(sent) if link is None else await link.collect(sent)
        try:
            self.counters.settle(answers, link, is_strict=self.is_strict)
        except KvStrataError:  # What the other answers brought has no taker.
            if (unused := calls.given_back(sent.calls, answers)) and link is not None:
                link.post(unused)
            raise
        return answers

    def _post(self, posted: Calls) -> None:
        if self._link is not None:
            self._link.post(posted)

    # The keeper: a task that carries out the steps of `lifecycle`.

    async def _keep(self) -> None:
        steps = lifecycle(self.target, random.Random())
        step = next(steps)
        while True:
            try:
                outcome = await self._do(step)
            except Exception as e:  # noqa: BLE001  The life cycle goes on with another connection.
                step = steps.throw(e)
            else:
                step = steps.send(outcome)

    async def _do(self, step: LifecycleStep) -> Any:
        match step:
            case Connect():
                return await self._connect()
            case Up():
                self._link, self._candidate = self._candidate, None
                self._attached.set()
            case Idle(timeout_s, is_patient):
                assert self._link is not None, "only an attached client idles"
                return await self._link.idle(timeout_s, is_patient=is_patient)
            case Down(reason):
                self._drop(reason)
            case Pause(wait_s):
                await asyncio.sleep(wait_s)
            case _:
                link = self._link or self._candidate
                assert link is not None, "only a connected client asks"
                return await link.exchange(step)
        return None

    async def _connect(self) -> KvStrataError | None:
        with contextlib.ExitStack() as unused:
            try:
                connected = unused.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connected.setblocking(False)  # noqa: FBT003  The standard library's signature.
                async with asyncio.timeout(self.target.move_timeout_s):
                    await asyncio.get_running_loop().sock_connect(connected, os.fspath(self.target.socket))
                self._candidate = AsyncLink(self.target, connected, next(self._serials))
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
                link.fail(reason)


async def _work(step: Work) -> None:
    """Do what touches memory in a thread, to its end, however often the caller is cancelled meanwhile.

    The memory must not be given back under the thread. It is no task: the end of a loop would cancel that.
    """
    work = asyncio.get_running_loop().run_in_executor(None, step.run)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((work,))
        raise
