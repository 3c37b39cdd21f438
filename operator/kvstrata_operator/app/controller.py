"""The one loop that turns what was seen into what is done: debounced, level-triggered, a bounded batch at a time.

New objects and statuses are written while the next plan is made. All else is awaited first: what is drained, replaced
or deleted next depends on what was before. When planners are asked, statuses written and failed actions tried again is
pure: `Turn`, `Pacing`, `Retries` and `Refusals` are given a monotonic clock.

Laws: a moment that was set stands until the planner is asked, whatever else is planned meanwhile. Two writes of one
object are never closer than `WRITE_EVERY_S`; what is held back is due at the time that is given back, so nothing is
lost; an object that was quiet is written at once. Where all of a kind are refused, a few are tried now and then, each
in its turn, until one is not. The pause after failures grows with each of them and never exceeds `PAUSE_S_MAX`; one
success forgets all failures; what is wanted keeps its failures, also while it is being tried or has to wait.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, TypeVar

from kvstrata_api.errors import KvStrataError, PermanentError, RetryableError
from kvstrata_operator.app.gauges import Gauges
from kvstrata_operator.apply.executor import Executor, Outcome, WritesInFlight
from kvstrata_operator.decide.incremental import Seen
from kvstrata_operator.decide.plan.actions import Action, Create, Merge, StatusWrite
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.observe.world import Change, ChangeBus, Setting
from kvstrata_telemetry.tracing import span

log = logging.getLogger(__name__)

DEBOUNCE_S: Final = 0.05
"""Changes within this time become one plan."""

STATUS_EVERY_S: Final = 0.2
"""Statuses are compared at most this often, and less often where comparing takes long, see `STATUS_SHARE`."""

STATUS_SHARE: Final = 10
"""Comparing statuses takes at most one part in so many of the time."""

IDLE_S: Final = 30.0
"""Each planner is asked at least this often, as a last resort; it finds nothing to do when all is well."""

STANDBY_S: Final = 1.0
"""Polling interval of whether this replica may decide, where no change reports it: a Lease that is renewed too late."""

BATCH_ACTIONS: Final = 512
"""Actions between two plans: about 3 s of work for the API server of two cores (6 ms each, design)."""

BATCH_S: Final = 5.0
"""Of a batch nothing is begun later, so that statuses are written while the API server is slow; what is left is planned
again. More than a batch takes where it is not."""

WRITE_EVERY_S: Final = 1.0
"""A pool of any size is written at most once a second (design)."""

USAGE_EVERY_S: Final = 10.0
"""Figures that move with the load are for people; programs read the metrics (conventions)."""

PAUSE_S_MAX: Final = 30.0
"""What was refused for good, a missing right for instance, is tried again this often: people repair such things."""

PAUSE_S_FIRST: Final = 0.5

REFUSALS_MAX: Final = 32
"""Refusals in a row of one verb, kind and pool after which the others are expected to end like these; and how many of
them are tried again at once from then on. Of a pool of 5,000 nodes that is 1 write a second in place of 170."""

T = TypeVar("T")


@dataclass(slots=True)
class Turn:
    """One planner's next turn."""

    is_wanted: bool = True
    """Something has changed that it depends on."""
    at_s: float = 0.0
    """When it is asked though nothing has changed."""

    def is_due(self, now_s: float) -> bool:
        """True when the planner is to be asked now."""
        return self.is_wanted or now_s >= self.at_s

    def begin(self, at_latest_s: float) -> None:
        """Note that the planner is being asked; its next turn is by a change, by `by`, or then."""
        self.is_wanted = False
        self.at_s = at_latest_s

    def by(self, moment_s: float | None) -> None:
        """Ask at that moment, unless that is done before; None for no such moment."""
        if moment_s is not None:
            self.at_s = min(self.at_s, moment_s)

    def put_off(self, moment_s: float) -> None:
        """Ask at that moment and not before."""
        self.is_wanted = False
        self.at_s = moment_s


@dataclass(slots=True)
class Pacing:
    """When which object was written last. Bounded by the objects of the last `USAGE_EVERY_S`."""

    _written_s: dict[str, float] = field(default_factory=dict)

    def sort(self, writes: Iterable[StatusWrite], now_s: float) -> tuple[list[Merge], float | None]:
        """Return the writes that are due, and when the first of the others is."""
        self._written_s = {path: s for path, s in self._written_s.items() if now_s < s + USAGE_EVERY_S}
        due, held_s = [], []
        for write in writes:
            path = write.action.ref.path
            free_s = self._written_s.get(path, float("-inf")) + (
                USAGE_EVERY_S if write.is_usage_only else WRITE_EVERY_S
            )
            if now_s < free_s:
                held_s.append(free_s)
                continue
            self._written_s[path] = now_s
            due.append(write.action)
        return due, min(held_s, default=None)


@dataclass(slots=True)
class Retries:
    """Failures by action. Bounded by the actions that the last plans asked for, see `keep`."""

    _until_s: dict[Hashable, float] = field(default_factory=dict)
    _count: dict[Hashable, int] = field(default_factory=dict)

    def is_due(self, key: Hashable, now_s: float) -> bool:
        """True unless the action has failed a moment ago."""
        return now_s >= self._until_s.get(key, 0.0)

    def has_failed(self, key: Hashable) -> bool:
        """True when the last try of the action failed."""
        return key in self._until_s

    def failed_s(self, key: Hashable) -> float | None:
        """When the pause after the last try ends, or has ended; None where that did not fail."""
        return self._until_s.get(key)

    def note(self, key: Hashable, error: KvStrataError | None, now_s: float) -> None:
        """Take in how an action went."""
        if error is None:
            self._until_s.pop(key, None)
            self._count.pop(key, None)
            return
        count = self._count.get(key, 0)
        first_s = min(error.delay_s, PAUSE_S_MAX) if isinstance(error, RetryableError) else PAUSE_S_FIRST
        self._count[key] = count + 1
        self._until_s[key] = now_s + min(first_s * 2 ** min(count, 16), PAUSE_S_MAX)

    def keep(self, wanted: Collection[Hashable]) -> None:
        """Forget all actions that are not asked for any more."""
        for key in self._until_s.keys() - set(wanted):
            del self._until_s[key], self._count[key]

    def due(self, wanted: Mapping[Hashable, T], now_s: float) -> list[T]:
        """Leave out what failed a moment ago. `wanted` is all that is asked for, and all that is remembered."""
        self.keep(wanted.keys())
        return [what for key, what in wanted.items() if self.is_due(key, now_s)]

    def next_s(self, now_s: float) -> float | None:
        """Return when the first of the pauses that last ends.

        What is due already has no moment: it is under way, or waits for something that wakes the caller.
        """
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=None)


@dataclass(slots=True)
class Refusals:
    """Refusals for good in a row, by what the actions have in common. Bounded as `Retries` is, see `due`."""

    _count: dict[Hashable, int] = field(default_factory=dict)
    _until_s: dict[Hashable, float] = field(default_factory=dict)

    def note(self, action: Action, error: KvStrataError | None) -> None:
        """Take in how an action went."""
        group = _group(action)
        if isinstance(error, PermanentError):
            self._count[group] = self._count.get(group, 0) + 1
        elif error is None:
            self._count.pop(group, None)
            self._until_s.pop(group, None)

    def due(self, actions: Iterable[Action], failed_s: Callable[[Action], float | None], now_s: float) -> list[Action]:
        """Leave out what will be refused like others. `actions` are all that are due for themselves.

        `failed_s` gives a second by which those that have failed take turns, None for the others: these are all tried.
        """
        free: list[Action] = []
        again: dict[Hashable, list[tuple[float, Action]]] = {}
        for action in actions:
            since_s = failed_s(action)
            if since_s is None or self._count.get(_group(action), 0) < REFUSALS_MAX:
                free.append(action)
            else:
                again.setdefault(_group(action), []).append((since_s, action))
        for group, held in again.items():
            if now_s >= self._until_s.get(group, 0.0):
                self._until_s[group] = now_s + PAUSE_S_MAX
                free += [action for _, action in sorted(held, key=lambda one: one[0])[:REFUSALS_MAX]]
        return free

    def keep(self, wanted: Iterable[Action]) -> None:
        """Forget all groups of which nothing is asked for any more."""
        for group in self._count.keys() - {_group(action) for action in wanted}:
            self._count.pop(group)
            self._until_s.pop(group, None)

    def next_s(self, now_s: float) -> float | None:
        """Return when the first of the pauses that last ends."""
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=None)


class Controller:
    """Observes through `observe`, decides through the planners, applies through the executor."""

    def __init__(
        self,
        setting: Setting,
        observe: Callable[[dict[str, str]], Seen | None],
        executor: Executor,
        gauges: Gauges,
        changes: ChangeBus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Plan when `changes` reports that it is needed, and report `stale` there when an action failed for now.

        `observe` gives what a plan is made from, with the failures put in, or None while this replica must not decide.
        `clock` is that of the event loop.
        """
        self._clock = clock
        self._changes = changes
        changes.listen(Change.ORDERS, self.plan_again)
        changes.listen(Change.STATUSES, self.status_again)
        self._setting = setting
        self._observe = observe
        self._executor = executor
        self._gauges = gauges
        self._wake = asyncio.Event()
        self._order_turn = Turn()
        self._status_turn = Turn()
        self._order_retries = Retries()
        self._status_retries = Retries()
        self._refusals = Refusals()
        """Of orders."""
        self._failures: dict[str, str] = {}
        self._queue: set[Hashable] = set()
        """Orders of the last plan that were due and have not been carried out."""
        self._wake_s = 0.0
        self._statuses_s = 0.0
        """Statuses are not compared before."""
        self._pacing = Pacing()
        self._is_held = False
        """True when something was left out because its object was being written, until one such write has ended."""
        self.round_s = clock()
        """When the loop last came around, or a write that it may wait for ended; a probe reads it."""

    def plan_again(self) -> None:
        """Something changed that orders depend on."""
        self._order_turn.is_wanted = True
        self.status_again()

    def status_again(self) -> None:
        """Something changed that only statuses depend on."""
        self._status_turn.is_wanted = True
        self._wake.set()

    async def run(self) -> None:
        """Go on for ever."""
        async with asyncio.TaskGroup() as tasks:
            in_flight = WritesInFlight(tasks, self._executor.apply)
            while True:
                await self._wait()
                await in_flight.until_below_limit()
                self._wake.clear()
                self.round_s = self._clock()
                seen = self._observe(self._failures)
                if seen is None:
                    self._gauges.stand_by()
                    self._wake_s = self.round_s + STANDBY_S
                    continue
                view, _ = seen
                self._gauges.pools(view.pools.declared, self.round_s)
                self._gauges.operations(view.pools.operations.values())
                self._gauges.model_caches(view.pools.model_caches)
                await self._round(in_flight)

    async def _wait(self) -> None:
        """Wait for a change or for the next moment that matters, then a little for more changes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._wake_s - self._clock())):
                await self._wake.wait()
        await asyncio.sleep(DEBOUNCE_S)

    async def _round(self, in_flight: WritesInFlight) -> None:
        """Carry out one batch of orders and write the statuses, each when it is due."""
        if self._order_turn.is_due(self._clock()):
            self._status_turn.is_wanted = True  # Statuses also show what time alone changes.
            with span("kvstrata.reconcile") as active:
                active.set(orders=await self._orders(in_flight))
        if self._status_turn.is_due(self._clock()):
            self._statuses(in_flight)
        self._wake_s = min(self._order_turn.at_s, self._status_turn.at_s)

    async def _orders(self, in_flight: WritesInFlight) -> int:
        """Plan, and carry out one batch; returns how many orders that is."""
        seen = self._observe(self._failures)
        if seen is None:
            return 0
        began_s, now = self._clock(), datetime.now(UTC)
        with self._gauges.part("plan"):
            plan = plan_orders(*seen, self._setting, now)
        ready = self._order_retries.due({_key(action): action for action in plan.actions}, began_s)
        self._refusals.keep(plan.actions)
        due = self._refusals.due(ready, lambda action: self._order_retries.failed_s(_key(action)), began_s)
        self._order_turn.begin(began_s + IDLE_S)
        self._order_turn.by(self._order_retries.next_s(began_s))
        self._order_turn.by(self._refusals.next_s(began_s))
        if plan.wake_at is not None:
            self._order_turn.by(began_s + (plan.wake_at - now).total_seconds())
        self._queue = {_key(action) for action in due}
        self._gauges.queue(len(self._queue))
        free = [action for action in due if in_flight.is_free(action)]
        self._is_held |= len(free) < len(due)
        batch = free[:BATCH_ACTIONS]
        until_s = self._clock() + BATCH_S
        in_flight.start((a for a in batch if isinstance(a, Create)), self._order_done, until_s)
        with self._gauges.part("apply"):
            await asyncio.gather(*(self._carry_out(a, until_s) for a in batch if not isinstance(a, Create)))
        pools = {action.pool for action in plan.actions if self._order_retries.has_failed(_key(action))}
        self._failures = {pool: why for pool, why in self._failures.items() if pool in pools}
        if len(free) > BATCH_ACTIONS:
            self.plan_again()
        return len(batch)

    async def _carry_out(self, action: Action, until_s: float) -> None:
        (outcome,) = await self._executor.apply((action,), until_s)
        self._order_done(outcome)

    def _order_done(self, outcome: Outcome) -> None:
        """Remember how an order went, and plan again when that matters."""
        if not outcome.is_begun:
            self.plan_again()
            self._release()
            return
        self._note(self._order_retries, outcome)
        self._refusals.note(outcome.action, outcome.error)
        self._queue.discard(_key(outcome.action))
        self._gauges.queue(len(self._queue))
        pool = outcome.action.pool
        if isinstance(outcome.error, PermanentError) and pool:
            self._failures[pool] = str(outcome.error)
        if outcome.error is None and pool in self._failures:
            self.plan_again()
        self._release()

    def _note(self, retries: Retries, outcome: Outcome) -> None:
        """Count how an action went and set the time of its next try."""
        self.round_s = self._clock()
        retries.note(_key(outcome.action), outcome.error, self._clock())
        self._gauges.action(outcome)
        if outcome.error is not None:
            log.warning("action failed", extra={"on": str(outcome.action.ref), "error": str(outcome.error)})
            if not isinstance(outcome.error, PermanentError):  # A refusal does not mean that the world has changed.
                self._changes.stale()
            self.plan_again()

    def _statuses(self, in_flight: WritesInFlight) -> None:
        began_s = self._clock()
        if began_s < self._statuses_s:
            self._status_turn.put_off(self._statuses_s)
            return
        seen = self._observe(self._failures)
        if seen is None:
            return
        with self._gauges.part("status"):
            writes = plan_statuses(*seen, self._setting, datetime.now(UTC))
        self._statuses_s = began_s + max(STATUS_EVERY_S, STATUS_SHARE * (self._clock() - began_s))
        due = self._status_retries.due({_key(write.action): write for write in writes}, began_s)
        free = [write for write in due if in_flight.is_free(write.action)]
        self._is_held |= len(free) < len(due)
        paced, held_until_s = self._pacing.sort(free, began_s)
        self._status_turn.begin(began_s + IDLE_S)
        self._status_turn.by(self._status_retries.next_s(began_s))
        self._status_turn.by(held_until_s)
        in_flight.start(paced, self._status_done)

    def _status_done(self, outcome: Outcome) -> None:
        """Remember how a status went."""
        self._note(self._status_retries, outcome)
        self._release()

    def _release(self) -> None:
        """Plan again what had to wait for a write."""
        if self._is_held:
            self._is_held = False
            self.plan_again()


def _key(action: Action) -> tuple[str, str, str]:
    """Name an action over plans: its verb and its object."""
    return (type(action).__name__, action.ref.path, getattr(action, "subresource", ""))


def _group(action: Action) -> tuple[str, str, str]:
    """Name what an action has in common with those that a missing right or a policy would refuse like it."""
    return (type(action).__name__, action.ref.kind.name, action.pool)
