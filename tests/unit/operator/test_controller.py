"""Laws of the loop that asks the planners, in virtual time: what wakes it, and what it remembers meanwhile."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvstrata_api.errors import ForbiddenError, RetryableError
from kvstrata_kube.answers import Answer as ApiAnswer
from kvstrata_kube.api import Call
from kvstrata_operator.app import controller
from kvstrata_operator.app.controller import DEBOUNCE_S, PAUSE_S_MAX, STANDBY_S, Controller
from kvstrata_operator.app.gauges import Gauges
from kvstrata_operator.apply.executor import Executor, Outcome
from kvstrata_operator.decide.incremental import Seen
from kvstrata_operator.decide.plan.actions import Action, Create, Merge, SetFinalizers, StatusWrite
from kvstrata_operator.decide.planner import Plan
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.world import Change, ChangeBus, View
from support.operator.fleet import SETTING, Fleet, facts_of
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit

POOL = Ref(kinds.POOL, "p")
MADE = Create(Ref(kinds.POOL_NODE, "p.a"), "p", body={})
FREED = SetFinalizers(POOL, "p", finalizers=(), resource_version="1")
TOLD = Merge(POOL, body={"status": {}}, subresource="status")

Answer = Callable[[Action], Awaitable[Outcome]]


@dataclass
class Bench:
    """A controller, what its planners ask for, and an API server that answers as it is told."""

    answer: Answer
    orders: list[Action] = field(default_factory=list)
    statuses: list[Merge] = field(default_factory=list)
    wake_after_s: float | None = None
    """When plans want to be made again."""
    view: View | None = field(default_factory=View)
    looked_s: list[float] = field(default_factory=list)
    planned_s: list[float] = field(default_factory=list)
    tried: list[tuple[float, Action]] = field(default_factory=list)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def plan_orders(self, _view: View, _facts: Any, _setting: Any, now: datetime) -> Plan:
        self.planned_s.append(clock())
        wake_at = None if self.wake_after_s is None else now + timedelta(seconds=self.wake_after_s)
        return Plan(tuple(self.orders), wake_at)

    def plan_statuses(self, *_: Any) -> tuple[StatusWrite, ...]:
        return tuple(StatusWrite(action, is_usage_only=False) for action in self.statuses)

    def look(self, _failures: dict[str, str]) -> Seen | None:
        self.looked_s.append(clock())
        return (self.view, facts_of(self.view)) if self.view is not None else None

    async def apply(self, actions: Iterable[Action], _until_s: float = math.inf) -> list[Outcome]:
        return [await self._try(action) for action in actions]

    async def _try(self, action: Action) -> Outcome:
        self.tried.append((clock(), action))
        return await self.answer(action)

    def run(self, monkeypatch: pytest.MonkeyPatch, during: Callable[[Controller], Awaitable[None]]) -> None:
        """Let the controller run until `during` has ended."""
        monkeypatch.setattr(controller, "plan_orders", self.plan_orders)
        monkeypatch.setattr(controller, "plan_statuses", self.plan_statuses)
        gauges = Gauges(self.registry)

        async def ran() -> None:
            made = Controller(SETTING, self.look, self, gauges, ChangeBus(), clock=clock)  # type: ignore[arg-type]
            running = asyncio.create_task(made.run())
            await during(made)
            running.cancel()
            await asyncio.wait([running])

        run_virtually(ran())


def clock() -> float:
    return asyncio.get_running_loop().time()


def failed(action: Action, delay_s: float = 0.5) -> Outcome:
    return Outcome(action, RetryableError("later", delay_s=delay_s))


async def told_of_statuses(made: Controller, duration_s: float, every_s: float) -> None:
    """Tell of a change of some status again and again."""
    for _ in range(round(duration_s / every_s)):
        made.status_again()
        await asyncio.sleep(every_s)


@pytest.mark.parametrize("what", [MADE, TOLD], ids=["order", "status"])
def test_a_retry_that_is_under_way_does_not_wake_the_loop(monkeypatch: pytest.MonkeyPatch, what: Action) -> None:
    async def answer(action: Action) -> Outcome:
        if len(bench.tried) == 1:
            return failed(action)
        await asyncio.sleep(20.0)
        return Outcome(action)

    bench = Bench(answer)
    if isinstance(what, Merge):
        bench.statuses = [what]
    else:
        bench.orders = [what]
    bench.run(monkeypatch, lambda _: asyncio.sleep(20.0))

    retried_s = bench.tried[1][0]
    assert [s for s in bench.planned_s if s > retried_s + DEBOUNCE_S] == []


def test_a_status_that_is_retried_does_not_plan_orders_until_it_may_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Comparing statuses is put off by its cost, and a retry that has come due meanwhile waits for it."""
    monkeypatch.setattr(controller, "STATUS_EVERY_S", 20.0)

    async def answer(action: Action) -> Outcome:
        return failed(action)

    bench = Bench(answer, statuses=[TOLD])
    bench.run(monkeypatch, lambda _: asyncio.sleep(15.0))

    assert len(bench.planned_s) == 2, "at the start and after the failure"


def test_the_pause_of_a_status_that_fails_grows_whatever_is_told_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(action: Action) -> Outcome:
        await asyncio.sleep(0.4)
        return failed(action)

    bench = Bench(answer, statuses=[TOLD])
    bench.run(monkeypatch, lambda made: told_of_statuses(made, duration_s=100.0, every_s=0.3))

    tried_s = [s for s, _ in bench.tried]
    pauses_s = [after - before for before, after in pairwise(tried_s)]
    assert pauses_s[-1] > PAUSE_S_MAX / 2
    assert len(pauses_s) < 10


def test_a_status_that_waits_for_its_retry_is_not_paced_as_if_it_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(action: Action) -> Outcome:
        return failed(action, delay_s=4.0)

    bench = Bench(answer, statuses=[TOLD])
    bench.run(monkeypatch, lambda made: told_of_statuses(made, duration_s=6.0, every_s=0.25))

    first_s, second_s = (s for s, _ in bench.tried)
    assert second_s - first_s < 4.0 + 2 * controller.STATUS_EVERY_S


def test_news_of_statuses_do_not_put_off_the_moment_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain's deadline comes by time alone, and statuses change all the while."""

    async def answer(action: Action) -> Outcome:
        return Outcome(action)

    bench = Bench(answer, wake_after_s=5.0)
    bench.run(monkeypatch, lambda made: told_of_statuses(made, duration_s=40.0, every_s=1.0))

    pauses_s = [b - a for a, b in zip(bench.planned_s, bench.planned_s[1:], strict=False)]
    assert pauses_s
    assert all(5.0 <= pause_s < 5.5 for pause_s in pauses_s)


def test_an_order_that_waits_for_a_write_is_planned_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that compare statuses only lie between."""

    async def answer(action: Action) -> Outcome:
        bench.orders = [FREED] if action is MADE else []
        await asyncio.sleep(2.0)
        return Outcome(action)

    async def told(made: Controller) -> None:
        await asyncio.sleep(0.5)
        made.plan_again()
        await told_of_statuses(made, duration_s=1.2, every_s=0.3)
        await asyncio.sleep(2.0)

    bench = Bench(answer, orders=[MADE])
    bench.run(monkeypatch, told)

    (made_s, _), (freed_s, freed) = bench.tried
    assert freed == FREED
    assert freed_s - made_s < 2.0 + 2 * DEBOUNCE_S


def test_a_replica_that_may_not_decide_looks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(action: Action) -> Outcome:
        return Outcome(action)

    async def stood_by(_: Controller) -> None:
        await asyncio.sleep(10.0)
        bench.view = View()
        await asyncio.sleep(1.5 * STANDBY_S)

    bench = Bench(answer, view=None)
    bench.run(monkeypatch, stood_by)

    assert len(bench.looked_s) <= 10.0 / STANDBY_S + 5
    assert bench.planned_s


def test_a_replica_that_no_longer_decides_shows_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it saw last would hide what whoever leads shows: alerts take the best of all replicas."""

    async def answer(action: Action) -> Outcome:
        return Outcome(action)

    shown: list[float | None] = []

    async def deposed(made: Controller) -> None:
        for view in (bench.view, None):
            bench.view = view
            made.status_again()
            await asyncio.sleep(2 * STANDBY_S)
            shown.append(bench.registry.get_sample_value("kvstrata_pool_ready", {"pool": "p"}))

    fleet = Fleet()
    fleet.pool("p")
    bench = Bench(answer, view=fleet.view())
    bench.run(monkeypatch, deposed)

    assert shown == [0.0, None]


def test_what_is_refused_for_all_is_tried_for_a_few_each_in_its_turn_until_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, settled_s, granted_s = 600, 100.0, 700.0
    left = {f"p.n{number}" for number in range(size)}
    stale: list[float] = []

    def passed_s(moment_s: float) -> float:
        return moment_s - bench.looked_s[0]

    async def answer(action: Action) -> Outcome:
        await asyncio.sleep(0.001)
        if passed_s(clock()) < granted_s:
            return Outcome(action, ForbiddenError("not granted"))
        left.discard(action.ref.name)
        bench.orders = [one for one in bench.orders if one.ref.name in left]
        return Outcome(action)

    async def watched(made: Controller) -> None:
        made._changes.listen(Change.STALE, lambda: stale.append(clock()))
        await asyncio.sleep(granted_s + 2 * PAUSE_S_MAX + 5.0)

    bench = Bench(answer, [Create(Ref(kinds.POOL_NODE, name), "p", body={}) for name in sorted(left)])
    bench.run(monkeypatch, watched)

    tries = [action.ref.name for s, action in bench.tried if settled_s < passed_s(s) < granted_s]
    assert len(tries) <= ((granted_s - settled_s) / PAUSE_S_MAX + 1) * controller.REFUSALS_MAX
    assert set(tries) == {f"p.n{number}" for number in range(size)}, "each has its turn"
    assert (
        len([s for s in bench.planned_s if settled_s < passed_s(s) < granted_s])
        < 4 * len(tries) / controller.REFUSALS_MAX
    )
    assert not stale
    assert not left


class SlowApi:
    """An API server that takes its time to say that an object is gone, or cannot be made now."""

    async def call(self, call: Call) -> ApiAnswer:
        await asyncio.sleep(8.0)
        return ApiAnswer(call.method, 503 if call.method == "POST" else 404, b"{}")


@pytest.mark.parametrize("verb", ["create", "patch"])
def test_many_slow_writes_hold_up_no_status_and_the_loop_is_seen_to_go_on(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    still_s: list[float] = []
    refs = [Ref(kinds.POOL_NODE, f"p.n{number}") for number in range(2000)]

    async def answer(action: Action) -> Outcome:
        return Outcome(action)

    async def watched(made: Controller) -> None:
        for _ in range(200):
            await asyncio.sleep(1.0)
            still_s.append(clock() - made.round_s)

    def compared(*_: Any) -> tuple[StatusWrite, ...]:
        compared_s.append(clock())
        return ()

    compared_s: list[float] = []
    bench = Bench(answer, [Create(r, "p", body={}) if verb == "create" else Merge(r, "p", body={}) for r in refs])
    executor = Executor(SlowApi(), lambda _kind, _raw: None, lambda: True, "operator-0")  # type: ignore[arg-type]
    monkeypatch.setattr(bench, "apply", executor.apply)
    monkeypatch.setattr(bench, "plan_statuses", compared)
    bench.run(monkeypatch, watched)

    assert max(still_s) < 10.0
    assert max(b - a for a, b in pairwise(compared_s)) < 20.0
    assert len(compared_s) > 200 / 20


def test_orders_alone_are_a_queue_and_no_more_of_them_end_than_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[float | None] = []

    async def answer(action: Action) -> Outcome:
        bench.orders = []  # An event may bring what was made before the request has ended.
        await asyncio.sleep(1.0)
        return Outcome(action)

    async def watched(made: Controller) -> None:
        for _ in range(30):
            await asyncio.sleep(0.1)
            depths.append(bench.registry.get_sample_value("kvstrata_operator_queue_depth"))
            made.plan_again()

    bench = Bench(answer, orders=[MADE], statuses=[TOLD])
    bench.run(monkeypatch, watched)

    assert depths[0] == 1.0
    assert set(depths) == {1.0, 0.0}


def test_the_first_refusal_of_the_api_server_is_an_increase() -> None:
    registry = CollectorRegistry()
    Gauges(registry).request("GET", "200", 0.1)

    labels = {"verb": "GET", "result": "403"}
    assert registry.get_sample_value("kvstrata_operator_api_requests_total", labels) == 0.0
