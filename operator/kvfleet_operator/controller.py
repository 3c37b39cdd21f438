"""The one loop that turns what was seen into what is done: debounced, level-triggered, a bounded batch at a time.

New objects and statuses are written while the next plan is made. All else is awaited first: what is drained, replaced
or deleted next depends on what was before.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final

from kvfleet_api.errors import PermanentError
from kvfleet_operator.actions import Action, Create
from kvfleet_operator.apply import Executor, Outcome
from kvfleet_operator.flights import Flights
from kvfleet_operator.gauges import Gauges
from kvfleet_operator.pacing import Pacing
from kvfleet_operator.planner import plan_orders
from kvfleet_operator.retries import Retries
from kvfleet_operator.setting import Setting
from kvfleet_operator.status_planner import plan_statuses
from kvfleet_operator.world import View

log = logging.getLogger(__name__)

DEBOUNCE_S: Final = 0.05
"""News within this time become one plan."""

STATUS_EVERY_S: Final = 0.2
"""Statuses are compared at most this often, and seldomer where comparing takes long, see `STATUS_SHARE`."""

STATUS_SHARE: Final = 10
"""Comparing statuses takes at most one part in so many of the time."""

IDLE_S: Final = 30.0
"""A round without any news, as a last resort; it finds nothing to do when all is well."""

BATCH_ACTIONS: Final = 512
"""Actions between two looks at the world: about 3 s of work for the API server of two cores (6 ms each, design)."""


class Controller:
    """Observes through `view`, decides through the planners, applies through the executor."""

    def __init__(
        self,
        setting: Setting,
        view: Callable[[dict[str, str]], View | None],
        executor: Executor,
        gauges: Gauges,
        stale: Callable[[], None],
    ) -> None:
        """Call `stale` when an action failed: the world may be older than the API server.

        `view` gives the world, with the failures put in, or None while this replica must not decide.
        """
        self._stale = stale
        self._setting = setting
        self._view = view
        self._executor = executor
        self._gauges = gauges
        self._news = asyncio.Event()
        self._wants_orders = True
        self._wants_statuses = True
        self._order_retries = Retries()
        self._status_retries = Retries()
        self._failures: dict[str, str] = {}
        self._wake_s = 0.0
        self._statuses_s = 0.0
        self._pacing = Pacing()
        self._is_held = False
        """True when something was left out because its object was being written."""
        self.round_s = time.monotonic()
        """When the loop last came around; a probe looks at it."""

    def plan_again(self) -> None:
        """Something changed that orders depend on."""
        self._wants_orders = True
        self.status_again()

    def status_again(self) -> None:
        """Something changed that only statuses depend on."""
        self._wants_statuses = True
        self._news.set()

    async def run(self) -> None:
        """Go on for ever."""
        async with asyncio.TaskGroup() as tasks:
            flights = Flights(tasks, self._executor.apply)
            while True:
                await self._wait()
                await flights.until_few()
                self._news.clear()
                self.round_s = time.monotonic()
                view = self._view(self._failures)
                if view is not None:
                    self._gauges.pools(view.pools, self.round_s)
                    self._gauges.operations(view.operations.values())
                    await self._round(flights)

    async def _wait(self) -> None:
        """Wait for news or for the next moment that matters, then a little for more news."""
        left_s = max(0.0, min(self._wake_s - time.monotonic(), IDLE_S))
        try:
            async with asyncio.timeout(left_s):
                await self._news.wait()
        except TimeoutError:
            self._wants_orders = self._wants_statuses = True
        await asyncio.sleep(DEBOUNCE_S)

    async def _round(self, flights: Flights) -> None:
        """Carry out one batch of orders, then write the statuses when they are due."""
        retries_s = (self._order_retries.next_s(), self._status_retries.next_s())
        self._wake_s = min([time.monotonic() + IDLE_S, *(s for s in retries_s if s is not None)])
        self._is_held = False
        if self._wants_orders:
            self._wants_orders = False
            await self._orders(flights)
        if self._wants_statuses:
            self._statuses(flights)

    async def _orders(self, flights: Flights) -> None:
        view = self._view(self._failures)
        if view is None:
            return
        now = datetime.now(UTC)
        with self._gauges.part("plan"):
            plan = plan_orders(view, self._setting, now)
        if plan.wake_at is not None:
            self._wake_by(time.monotonic() + (plan.wake_at - now).total_seconds())
        due = self._due(self._order_retries, plan.actions)
        self._gauges.queue(len(due))
        free = [action for action in due if flights.is_free(action)]
        self._is_held = len(free) < len(due)
        batch = free[:BATCH_ACTIONS]
        flights.launch((a for a in batch if isinstance(a, Create)), self._ordered)
        with self._gauges.part("apply"):
            for outcome in await self._executor.apply(a for a in batch if not isinstance(a, Create)):
                self._ordered(outcome)
        pools = {action.pool for action in plan.actions if self._order_retries.has_failed(_key(action))}
        self._failures = {pool: why for pool, why in self._failures.items() if pool in pools}
        if len(free) > BATCH_ACTIONS:
            self.plan_again()

    def _ordered(self, outcome: Outcome) -> None:
        """Remember how an order went, and look again when that matters."""
        self._note(self._order_retries, outcome)
        pool = outcome.action.pool
        if isinstance(outcome.error, PermanentError) and pool:
            self._failures[pool] = str(outcome.error)
        if self._is_held or (outcome.error is None and pool in self._failures):
            self.plan_again()

    def _due(self, retries: Retries, actions: Iterable[Action]) -> list[Action]:
        """Leave out what failed a moment ago, and forget failures of what nobody wants any more."""
        wanted = {_key(action): action for action in actions}
        retries.keep(wanted.keys())
        now_s = time.monotonic()
        return [action for key, action in wanted.items() if retries.is_due(key, now_s)]

    def _note(self, retries: Retries, outcome: Outcome) -> None:
        """Count how an action went and set the time of its next try."""
        retries.note(_key(outcome.action), outcome.error, time.monotonic())
        self._gauges.action(outcome)
        if outcome.error is not None:
            log.warning("action failed", extra={"on": str(outcome.action.ref), "error": str(outcome.error)})
            self._stale()
            self.plan_again()

    def _statuses(self, flights: Flights) -> None:
        began_s = time.monotonic()
        if began_s < self._statuses_s:
            self._wake_by(self._statuses_s)
            return
        view = self._view(self._failures)
        if view is None:
            return
        self._wants_statuses = False
        with self._gauges.part("status"):
            writes = plan_statuses(view, self._setting, datetime.now(UTC))
        self._statuses_s = began_s + max(STATUS_EVERY_S, STATUS_SHARE * (time.monotonic() - began_s))
        free = [write for write in writes if flights.is_free(write.action)]
        self._is_held |= len(free) < len(writes)
        due, held_until_s = self._pacing.sort(free, began_s)
        if held_until_s is not None:
            self._wants_statuses = True
            self._wake_by(held_until_s)
        flights.launch(self._due(self._status_retries, due), self._told)

    def _told(self, outcome: Outcome) -> None:
        """Remember how a status went."""
        self._note(self._status_retries, outcome)
        if self._is_held:
            self.plan_again()

    def _wake_by(self, moment_s: float) -> None:
        self._wake_s = min(self._wake_s, moment_s)


def _key(action: Action) -> tuple[str, str, str]:
    """Name an action over plans: its verb and its object."""
    return (type(action).__name__, action.ref.path, getattr(action, "subresource", ""))
