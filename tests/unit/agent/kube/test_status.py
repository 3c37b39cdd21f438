"""Laws of the status writer: a write settles it, noise causes none, and nothing is lost while the server is away."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.kube import report
from kvstrata_agent.kube.report import Urgency
from kvstrata_agent.kube.status_writer import KubeStatusSink
from kvstrata_api.errors import ApiServerAwayError
from kvstrata_api.models.conditions import Condition, Status
from kvstrata_api.models.poolnode import KVPoolNodeStatus, LookupCounts, NodeTierStatus, TenantBytes, TenantErased
from kvstrata_api.tiers import TierType
from kvstrata_kube import tasks
from kvstrata_kube.signal import Signal
from support.kube.doubles import ScriptedApi, ok

pytestmark = pytest.mark.unit

Json = dict[str, Any]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"

conditions = st.lists(
    st.builds(
        Condition,
        type=st.sampled_from(["Ready", "TierReady", "Draining"]),
        status=st.sampled_from(Status),
        reason=st.sampled_from(["A", "B"]),
        message=st.sampled_from(["", "1 of 2"]),
        observed_generation=st.integers(0, 2),
    ),
    unique_by=lambda c: c.type,
).map(tuple)
tiers = st.lists(
    st.builds(
        NodeTierStatus,
        name=st.sampled_from(["a", "b"]),
        type=st.sampled_from(TierType),
        phase=st.sampled_from(["Ready", "Failed"]),
        capacity_bytes=st.sampled_from([0, 7, 1000, 64 << 30]),
        used_bytes=st.integers(0, 64 << 30),
        blocks=st.integers(0, 9),
    ),
    max_size=2,
).map(tuple)
lookups = st.builds(LookupCounts, queried=st.integers(0, 300), hit=st.integers(0, 300))
usage = st.lists(
    st.builds(TenantBytes, tenant=st.sampled_from(["a", "domain/d"]), tier=st.just("a"), used_bytes=st.integers(0, 9)),
    unique_by=lambda t: t.tenant,
    max_size=2,
).map(tuple)
erased = st.lists(
    st.builds(TenantErased, uid=st.sampled_from(["u1", "u2"]), key_version=st.integers(1, 3)),
    unique_by=lambda e: e.uid,
    max_size=2,
).map(tuple)
statuses = st.builds(
    KVPoolNodeStatus,
    conditions=conditions,
    tiers=tiers,
    lookups=lookups,
    tenants=usage,
    erased=erased,
    epoch=st.integers(0, 2),
)
stored: st.SearchStrategy[Json] = st.just({}) | statuses.map(KVPoolNodeStatus.to_json)


def written(wanted: KVPoolNodeStatus, before: Json, now: str = NOW) -> Json:
    status: Json = report.document("p.n", wanted, before, now)["status"]
    return status


@given(statuses, stored)
def test_what_was_written_needs_no_second_write(wanted: KVPoolNodeStatus, before: Json) -> None:
    after = written(wanted, before)

    assert report.urgency(wanted, after) is Urgency.NONE
    assert written(wanted, after, LATER) == after, "a steady status is the same document"


@given(statuses, usage, erased)
def test_confirmations_are_urgent_while_somebody_waits_for_them_and_usage_never_is(
    old: KVPoolNodeStatus, now_used: tuple[TenantBytes, ...], confirmed: tuple[TenantErased, ...]
) -> None:
    before = written(old, {})
    new = old.model_copy(update={"tenants": now_used, "erased": confirmed})
    is_news = bool(set(confirmed) - set(old.erased))

    assert (report.urgency(new, before) is Urgency.FACTS) == is_news


@given(statuses, lookups, st.integers(0, 64 << 30))
def test_facts_are_urgent_and_counters_are_not(old: KVPoolNodeStatus, seen: LookupCounts, used_bytes: int) -> None:
    before = written(old, {})
    filled = tuple(t.model_copy(update={"used_bytes": used_bytes, "blocks": used_bytes}) for t in old.tiers)
    counted = old.model_copy(update={"lookups": seen, "tiers": filled})
    restarted = old.model_copy(update={"epoch": old.epoch + 1})

    assert report.urgency(counted, before) is not Urgency.FACTS
    assert report.urgency(restarted, before) is Urgency.FACTS


@given(statuses, st.dictionaries(st.sampled_from(["conditions", "tiers", "epoch"]), st.just("garbage")))
def test_a_stored_status_that_cannot_be_read_is_written_anew(wanted: KVPoolNodeStatus, garbage: Json) -> None:
    if garbage:
        assert report.urgency(wanted, garbage) is Urgency.FACTS
        assert written(wanted, garbage)


@given(statuses, statuses)
def test_transition_times_move_only_with_the_status(old: KVPoolNodeStatus, new: KVPoolNodeStatus) -> None:
    before = written(old, {}, NOW)
    after = written(new, before, LATER)
    seen = {c["type"]: c for c in before.get("conditions", ())}

    for condition in after.get("conditions", ()):
        earlier = seen.get(condition["type"])
        is_steady = earlier is not None and earlier["status"] == condition["status"]
        assert condition["lastTransitionTime"] == (NOW if is_steady else LATER)


@given(st.integers(1, 1 << 50), st.integers(0, 1 << 51))
def test_a_rounded_fill_is_within_half_a_percent_and_never_hides_the_last_block(capacity: int, used: int) -> None:
    tier = NodeTierStatus(name="a", type=TierType.NVME, capacity_bytes=capacity, used_bytes=min(used, 1 << 61))
    rounded = report.round_used(tier)

    assert 0 <= rounded <= capacity
    assert (rounded == 0) == (used == 0) or capacity < 100
    if used <= capacity and used * 100 >= capacity:
        assert abs(rounded - used) <= capacity / 200 + 1


def test_conditions_of_other_writers_are_left_out_of_comparison_and_document() -> None:
    mine = Condition(type="Ready", status=Status.TRUE, reason="A", message="")
    theirs = Condition(type="Fenced", status=Status.TRUE, reason="B", message="", last_transition_time=NOW)
    wanted = KVPoolNodeStatus(conditions=(mine,))
    before = written(wanted, {}) | {}
    before["conditions"] = [*before["conditions"], theirs.to_json()]

    assert report.urgency(wanted, before) is Urgency.NONE
    assert [c["type"] for c in written(wanted, before)["conditions"]] == ["Ready"]


def test_facts_wait_a_second_at_most_and_counters_ten_to_fifteen() -> None:
    assert report.due_s(Urgency.FACTS, None, 0.5) == 0
    assert report.due_s(Urgency.FACTS, 100.0, 0.5) == 100 + report.FACTS_S
    assert 110 <= report.due_s(Urgency.COUNTERS, 100.0, 0.999) <= 115


class Server:
    """Stores what is applied, and shows it through a watch that lags."""

    def __init__(self) -> None:
        self.stored: Json | None = {}
        self.shown: Json | None = {}
        self.is_away = False
        self.signal = Signal()
        self.api = ScriptedApi(self._answer)
        self.sink = KubeStatusSink(
            self.api,  # type: ignore[arg-type]
            "p.n",
            lambda: self.shown,
            self.signal,
            asyncio.get_running_loop().time,
        )

    def _answer(self, call: Any) -> Any:
        if self.is_away:
            return ApiServerAwayError("away")
        self.stored = call.body["status"]
        return ok({"status": self.stored})

    def catch_up(self) -> None:
        self.shown = self.stored
        self.signal.fire()


def fill(percent: int, epoch: int = 1) -> KVPoolNodeStatus:
    tier = NodeTierStatus(name="a", type=TierType.NVME, capacity_bytes=1000, used_bytes=percent * 10)
    return KVPoolNodeStatus(epoch=epoch, tiers=(tier,))


@pytest.mark.looptime
async def test_a_fill_that_moves_all_the_time_is_written_a_few_times_a_minute() -> None:
    server = Server()
    task = asyncio.create_task(server.sink.run())
    for second in range(60):
        server.sink.report(fill(second))
        await asyncio.sleep(1.0)
        server.catch_up()
    await tasks.cancel([task])

    assert 4 <= server.sink.writes <= 8


@pytest.mark.looptime
async def test_a_fact_is_written_at_once_even_before_the_watch_has_caught_up() -> None:
    server = Server()
    task = asyncio.create_task(server.sink.run())
    server.sink.report(fill(1, epoch=1))
    await asyncio.sleep(0.1)
    assert server.sink.writes == 1
    server.sink.report(fill(1, epoch=2))
    await asyncio.sleep(1.2)
    assert server.sink.writes == 2
    await asyncio.sleep(30.0)
    server.catch_up()
    await asyncio.sleep(30.0)
    await tasks.cancel([task])

    assert server.sink.writes == 2, "a late watch causes no write"
    assert server.stored is not None
    assert server.stored["epoch"] == 2


@pytest.mark.looptime
async def test_the_newest_status_is_written_when_the_server_comes_back() -> None:
    server = Server()
    server.is_away = True
    task = asyncio.create_task(server.sink.run())
    for epoch in range(60):
        server.sink.report(fill(1, epoch))
        await asyncio.sleep(1.0)
    assert server.sink.writes == 0
    assert len(server.api.calls) < 20
    assert not await server.sink.flush(1.0)
    server.is_away = False
    assert await server.sink.flush(15.0)
    await tasks.cancel([task])

    assert server.stored is not None
    assert server.stored["epoch"] == 59


@pytest.mark.looptime
async def test_nothing_is_written_to_an_object_that_does_not_exist() -> None:
    server = Server()
    server.shown = None
    task = asyncio.create_task(server.sink.run())
    server.sink.report(fill(1))
    await asyncio.sleep(60.0)
    await tasks.cancel([task])

    assert server.api.calls == []
