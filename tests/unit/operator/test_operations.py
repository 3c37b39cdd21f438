"""Laws of KVOperations over a simulated cluster: every one ends, cancelling ends, restarts change nothing."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_operator.decide.operations.operation_status import operation_notes
from kvstrata_operator.decide.operations.operations import arounds, in_order, progress_of
from kvstrata_operator.decide.plan.actions import Merge
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import Fleet, Json, condition, pool_node, pool_spec
from support.operator.operations_fleet import (
    ENDS,
    TIMEOUT_S,
    answer,
    cancel,
    drain,
    drain_tier,
    is_cancelled,
    is_drained,
    listen,
    operate,
    orders,
    running,
    state,
    warm,
)

pytestmark = pytest.mark.unit


def test_a_flush_is_ordered_once_its_start_is_stored_and_complete_when_all_have_answered() -> None:
    fleet = running()
    flush = operate(fleet, mode="Demote")
    uid = fleet.objects[flush]["metadata"]["uid"]
    assert not any(isinstance(a, Merge) and a.ref.kind == kinds.POOL_NODE for a in fleet.orders())

    fleet.settle()
    assert state(fleet, flush) == "Progressing"
    order = fleet.objects[pool_node("p", "n1")]["spec"]["orders"]
    assert order == [{"uid": uid, "type": "Flush", "flush": {"mode": "Demote"}}]

    for node in ("n0", "n1"):
        answer(fleet, node, uid, blocksDone=10, blocksTotal=20, bytesDone=160, bytesTotal=320)
        fleet.settle()
    assert fleet.objects[flush]["status"]["summary"] == "2/3 nodes"
    assert fleet.objects[flush]["status"]["progress"]["blocksDone"] == 20
    answer(fleet, "n2", uid)
    fleet.settle()

    assert (state(fleet, flush), condition(fleet.objects[flush], "Complete")[0]) == ("Complete", "True")
    assert condition(fleet.objects[flush], "Progressing") == ("False", "Complete")
    assert not any(orders(fleet, node) for node in ("n0", "n1", "n2"))


def test_the_drain_of_a_tier_is_an_order_that_stands_until_it_is_cancelled_and_tells_what_is_left() -> None:
    fleet = running()
    ref = drain_tier(fleet)
    fleet.settle()
    uid = fleet.objects[ref]["metadata"]["uid"]
    wanted = fleet.objects[pool_node("p", "n0")]["spec"]["orders"]
    assert wanted == [{"uid": uid, "type": "Drain", "drain": {"tier": "dram"}}]
    assert not is_drained(fleet, "n0")

    answer(fleet, "n0", uid, "Running", reason="BlocksHeld", message="leased", blocksDone=2, blocksTotal=10)
    fleet.settle()
    status = fleet.objects[ref]["status"]
    assert (status["summary"], status["failures"][0]["reason"]) == ("0/1 nodes, 8 blocks left", "BlocksHeld")
    answer(fleet, "n0", uid, blocksDone=9, blocksTotal=10)
    fleet.settle()
    assert (state(fleet, ref), fleet.objects[ref]["status"]["summary"]) == ("Complete", "1/1 nodes, 1 blocks left")
    assert orders(fleet, "n0") == [uid]

    cancel(fleet, ref)
    fleet.settle()
    assert (state(fleet, ref), orders(fleet, "n0")) == ("Complete", [])


def test_a_warming_is_ordered_of_the_nodes_that_are_meant_and_counts_what_is_missing() -> None:
    fleet = running()
    fleet.tenant("a")
    fleet.settle()
    ref = warm(fleet, nodes={"names": ["n0", "n1"]}, archivedSessions=True, maxBytes="1Gi", tier="dram")
    fleet.settle()
    uid = fleet.objects[ref]["metadata"]["uid"]
    wanted = {"tenant": "a", "prefixes": ["ab" * 20], "archivedSessions": True, "maxBytes": 1 << 30, "tier": "dram"}
    assert fleet.objects[pool_node("p", "n0")]["spec"]["orders"] == [{"uid": uid, "type": "Warm", "warm": wanted}]
    assert not orders(fleet, "n2")

    answer(fleet, "n0", uid, blocksDone=6, blocksTotal=8, blocksMissing=2)
    answer(fleet, "n1", uid, "Failed", reason="NotWarmed", message="no room", blocksDone=1, blocksTotal=8)
    fleet.settle()
    status = fleet.objects[ref]["status"]
    assert (state(fleet, ref), status["summary"]) == ("Failed", "1/2 nodes, 2 blocks missing")
    assert status["progress"] | {"bytesDone": 0, "bytesTotal": 0} == status["progress"]
    assert [status["progress"][f"blocks{which}"] for which in ("Done", "Total", "Missing")] == [7, 16, 2]
    assert [(f["reason"], f["node"], f["message"]) for f in status["failures"]] == [("NotWarmed", "n1", "no room")]


@pytest.mark.parametrize(
    ("more", "reason"), [({"tenant": "b"}, "TenantNotFound"), ({"tier": "nothing"}, "TierNotFound")]
)
def test_a_warming_of_nobody_or_to_nowhere_waits_and_is_told(more: Json, reason: str) -> None:
    fleet = running()
    fleet.tenant("a")
    fleet.settle()
    ref = warm(fleet, **more)
    fleet.settle()

    assert condition(fleet.objects[ref], "Accepted") == ("False", reason)
    assert not orders(fleet, "n0")
    fleet.tenant("b")
    fleet.settle()
    assert bool(orders(fleet, "n0")) == (reason == "TenantNotFound")


def test_nodes_are_chosen_by_name_and_by_labels_together() -> None:
    fleet = running(4)
    operate(fleet, nodes={"names": ["n0"], "matchLabels": {"rack": "r1"}})
    fleet.settle()

    assert [bool(orders(fleet, f"n{i}")) for i in range(4)] == [True, True, False, True]


def test_a_drain_holds_until_its_operation_is_gone() -> None:
    fleet = running()
    ref = drain(fleet)
    fleet.settle()
    assert [is_drained(fleet, n) for n in ("n0", "n1")] == [True, False]
    assert state(fleet, ref) == "Progressing"

    listen(fleet, "n0", drains=False)
    fleet.settle()
    assert state(fleet, ref) == "Progressing"
    listen(fleet, "n0")
    fleet.settle()
    assert state(fleet, ref) == "Complete"

    fleet.pass_time(TIMEOUT_S * 10)
    fleet.settle()
    assert is_drained(fleet, "n0")
    fleet.delete(ref)
    fleet.settle()
    assert not is_drained(fleet, "n0")


@pytest.mark.parametrize("tier", [None, "dram"])
def test_a_drain_that_is_complete_asks_nobody_who_comes_later(tier: str | None) -> None:
    fleet = running()
    more: Json = {"tier": tier} if tier else {}
    ref = operate(fleet, "op", "Drain", nodes={"names": ["n1"], "matchLabels": {"rack": "r0"}}, **more)
    uid = fleet.objects[ref]["metadata"]["uid"]

    def asked() -> list[str]:
        return sorted(n for n in here_of(fleet) if (uid in orders(fleet, n) if tier else is_drained(fleet, n)))

    fleet.settle()
    assert asked() == ["n0", "n1", "n2"]
    for node in asked():
        listen(fleet, node)
        if tier:
            answer(fleet, node, uid)
    fleet.settle()
    assert state(fleet, ref) == "Complete"
    fleet.pass_time(TIMEOUT_S * 10)
    fleet.delete(Ref(kinds.NODE, "n1"))
    for node in ("n1", "n2"):
        fleet.fall_silent(f"p.{node}")
    fleet.settle(16)
    fleet.node("n1", pool="yes", rack="r1")
    fleet.node("n3", pool="yes", rack="r0")
    fleet.settle(16)

    assert here_of(fleet) == {"n0", "n1", "n2", "n3"}
    assert asked() == ["n0", "n1", "n2"]  # n1 is another KVPoolNode by now, and is named.
    drain_by_hand = {"requested": True, "mode": "Demote", "deadline": ""}
    fleet.objects[pool_node("p", "n3")]["spec"]["drain"] = drain_by_hand
    fleet.settle()
    assert asked() == ["n0", "n1", "n2"]
    fleet.delete(ref)
    fleet.settle()
    assert asked() == []


def test_a_drain_that_is_cancelled_after_its_end_is_undone_and_stays_complete() -> None:
    fleet = running()
    ref = drain(fleet)
    fleet.settle()
    listen(fleet, "n0")
    fleet.settle()
    cancel(fleet, ref)
    fleet.settle()

    assert state(fleet, ref) == "Complete"
    assert not is_drained(fleet, "n0")


def test_an_old_answer_does_not_complete_a_new_drain() -> None:
    fleet = running()
    first = drain(fleet, "first")
    fleet.settle()
    listen(fleet, "n0")
    fleet.settle()
    fleet.delete(first)
    fleet.settle()
    body = fleet.objects[pool_node("p", "n0")]
    assert condition(body, "Draining") == ("False", "Drained")

    second = drain(fleet, "second")
    body["metadata"]["generation"] += 1
    fleet.settle()
    assert state(fleet, second) == "Progressing"
    listen(fleet, "n0")
    fleet.settle()
    assert state(fleet, second) == "Complete"


def test_a_cancelled_drain_is_undone_and_another_ones_stays() -> None:
    fleet = running()
    first, second = drain(fleet, "a", names=["n0", "n1"]), drain(fleet, "b", names=["n1", "n2"])
    fleet.settle()
    cancel(fleet, first)
    fleet.settle()

    assert (state(fleet, first), state(fleet, second)) == ("Cancelled", "Progressing")
    assert [is_drained(fleet, f"n{i}") for i in range(3)] == [False, True, True]


def test_what_nobody_can_answer_fails_at_its_time_and_says_why() -> None:
    fleet = running()
    ref = operate(fleet, nodes={"names": ["n0", "n1", "elsewhere"]})
    fleet.settle()
    answer(fleet, "n0", fleet.objects[ref]["metadata"]["uid"])
    fleet.fall_silent("p.n1")
    fleet.settle()
    told = {f["reason"]: f["node"] for f in fleet.objects[ref]["status"]["failures"]}
    assert told == {"AgentAway": "n1", "NoPoolNode": "elsewhere"}

    fleet.pass_time(TIMEOUT_S)
    fleet.settle()
    assert condition(fleet.objects[ref], "Failed") == ("True", "DeadlineExceeded")
    assert not orders(fleet, "n0")


@pytest.mark.parametrize(
    ("block", "reason"),
    [({"tier": "nothing"}, "TierNotFound"), ({"nodes": {"matchLabels": {"rack": "none"}}}, "NoNodes")],
)
def test_what_means_nothing_waits_and_is_told(block: Json, reason: str) -> None:
    fleet = running()
    ref = operate(fleet, **block)
    fleet.settle()

    assert condition(fleet.objects[ref], "Accepted") == ("False", reason)
    assert state(fleet, ref) == "Pending"
    fleet.pass_time(TIMEOUT_S)
    fleet.settle()
    assert state(fleet, ref) == "Failed"


def test_a_paused_pool_gets_no_orders() -> None:
    fleet = running()
    fleet.pool(spec=pool_spec(paused=True))
    ref = operate(fleet)
    fleet.settle()

    assert condition(fleet.objects[ref], "Accepted") == ("False", "PoolPaused")
    assert not orders(fleet, "n0")


def test_what_is_over_is_deleted_when_its_time_is_up() -> None:
    fleet = running()
    ref = operate(fleet, ttlSecondsAfterFinished=60)
    fleet.settle()
    cancel(fleet, ref)
    fleet.settle()

    fleet.pass_time(59)
    fleet.settle()
    assert ref in fleet.objects
    fleet.pass_time(1)
    fleet.settle()
    assert ref not in fleet.objects


def test_start_and_end_are_told_once_each() -> None:
    fleet = running()
    ref = operate(fleet)
    told: list[str] = []
    for _ in range(4):
        view, facts = fleet.seen()
        (operation,) = in_order(view.pools.operations.values())
        around = arounds(view.pools, view.trust.tenants, facts.seen_of, fleet.now)
        if not any(condition(fleet.objects[ref], end)[0] for end in ENDS):
            told += [n.reason for n in operation_notes(operation, progress_of(operation, around["p"]))]
        fleet.step()
        for node in ("n0", "n1", "n2"):
            if orders(fleet, node):
                answer(fleet, node, operation.uid)

    assert told == ["Started", "Complete"]


happenings = st.lists(
    st.sampled_from(["listen", "answer", "fail", "silent", "back", "cancel", "node gone", "time", "step", "settle"]),
    max_size=12,
)
MAKERS: dict[str, Callable[[Fleet, str], Ref]] = {
    "Flush": operate,
    "Drain": drain,
    "DrainTier": drain_tier,
    "Warm": warm,
}
types_of_three = st.lists(st.sampled_from(sorted(MAKERS)), min_size=1, max_size=3)


def holds(fleet: Fleet, ref: Ref) -> bool:
    """True of a drain that goes on after its end."""
    is_drain = "drain" in fleet.objects[ref]["spec"]
    return is_drain and state(fleet, ref) == "Complete" and not is_cancelled(fleet, ref)


def here_of(fleet: Fleet) -> set[str]:
    return {n.partition(".")[2] for n in fleet.of(kinds.POOL_NODE)}


@pytest.mark.slow
@settings(deadline=None)
@given(types_of_three, happenings, st.data())
def test_every_operation_ends_and_its_end_is_final(types: list[str], events: list[str], data: st.DataObject) -> None:
    fleet = running()
    fleet.tenant("a")
    refs = [MAKERS[t](fleet, f"o{i}") for i, t in enumerate(types)]
    ended: dict[Ref, str] = {}
    for event in [*events, "settle"]:
        happen(fleet, refs, event, data)
        for ref in refs:
            if ref in ended:
                assert state(fleet, ref) == ended[ref]
            if state(fleet, ref) in ENDS:
                ended[ref] = state(fleet, ref)
    fleet.pass_time(TIMEOUT_S)
    fleet.settle(16)

    assert all(state(fleet, ref) in ENDS for ref in refs)
    holding = {r: t for r, t in zip(refs, types, strict=True) if holds(fleet, r)}
    tiers = {fleet.objects[r]["metadata"]["uid"] for r, t in holding.items() if t == "DrainTier"}
    assert {u for n in fleet.of(kinds.POOL_NODE) for u in orders(fleet, n.partition(".")[2])} <= tiers
    assert "n0" not in here_of(fleet) or set(orders(fleet, "n0")) == tiers
    held = {"n0"} if "Drain" in holding.values() else set()
    here = here_of(fleet)
    assert {n for n in here if is_drained(fleet, n)} == held & here
    assert all(sum(condition(fleet.objects[r], end)[0] == "True" for end in ENDS) == 1 for r in refs)


def happen(fleet: Fleet, refs: list[Ref], event: str, data: st.DataObject) -> None:
    """One thing that agents, people or time do. A fresh view is taken each time, as after a restart."""
    here = sorted(n.partition(".")[2] for n in fleet.of(kinds.POOL_NODE))
    node = data.draw(st.sampled_from(here)) if here else ""
    ref = data.draw(st.sampled_from(refs))
    uid = fleet.objects[ref]["metadata"]["uid"]
    if event == "listen" and node:
        listen(fleet, node, drains=data.draw(st.booleans()))
    elif event in ("answer", "fail") and node and uid in orders(fleet, node):
        answer(fleet, node, uid, "Done" if event == "answer" else "Failed")
    elif event == "silent" and node:
        fleet.fall_silent(f"p.{node}")
    elif event == "back" and node:
        listen(fleet, node)
    elif event == "cancel":
        cancel(fleet, ref)
    elif event == "node gone" and len(here) > 1 and f"p.{node}" not in fleet.alive:
        fleet.delete(Ref(kinds.NODE, node))
    elif event == "time":
        fleet.pass_time(TIMEOUT_S / 3)
    elif event == "step":
        fleet.step()
    elif event == "settle":
        fleet.settle(16)
