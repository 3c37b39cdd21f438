"""Laws of KVModelCaches over a simulated cluster: who is ordered to have weights, and what people read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstrata_api.models.poolnode import MODELS_MAX
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.decide.status_planner import plan_statuses
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import SETTING, Fleet, Json, condition, facts_of, pool_node, pool_spec, tier
from support.operator.kept import KeptFleet
from support.operator.models_fleet import (
    DIGEST,
    OTHER_DIGEST,
    SIZE_BYTES,
    answer,
    chosen,
    declare,
    labels,
    ordered,
    put_node,
    running,
    told,
)

pytestmark = pytest.mark.unit


def status(fleet: Fleet, ref: Ref) -> Json:
    found: Json = fleet.objects[ref]["status"]
    return found


def test_every_node_of_the_pool_is_ordered_and_the_cache_is_staged_once_all_have_answered() -> None:
    fleet = running()
    ref = declare(fleet, source={"url": "s3://m/llama", "secretRef": {"name": "s"}}, weight=7, idleSeconds=0)
    fleet.settle()
    uid = fleet.objects[ref]["metadata"]["uid"]
    assert ordered(fleet, "n0") == [
        {
            "name": "m",
            "uid": uid,
            "generation": 1,
            "tier": "nvme",
            "source": {"url": "s3://m/llama", "secretRef": {"name": "s"}},
            "revision": "v1",
            "peers": [],
            "weight": 7,
            "idleSeconds": 0,
        }
    ]
    assert condition(fleet.objects[ref], "Accepted") == ("True", "Accepted")
    assert condition(fleet.objects[ref], "Staged") == ("False", "Staging")
    assert condition(fleet.objects[ref], "Progressing") == ("True", "Staging")

    answer(fleet, "n0", inUse=True)
    answer(fleet, "n1", state="Staging", sizeBytes=SIZE_BYTES, stagedBytes=SIZE_BYTES // 2)
    fleet.settle()
    told_so_far = status(fleet, ref)
    assert (told_so_far["summary"], told_so_far["sizeBytes"]) == ("1/3 nodes, 50%", SIZE_BYTES)
    assert [told_so_far[f"nodes{which}"] for which in ("Wanted", "Staged", "InUse")] == [3, 1, 1]

    for node in ("n1", "n2"):
        answer(fleet, node)
    fleet.settle()
    assert condition(fleet.objects[ref], "Staged") == ("True", "Staged")
    assert condition(fleet.objects[ref], "Progressing") == ("False", "Complete")
    assert (status(fleet, ref)["summary"], status(fleet, ref)["stagingSince"]) == ("3/3 nodes", "")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"poolRef": "q"}, "PoolNotFound"),
        ({"tier": "nothing"}, "TierNotFound"),
        ({"tier": "dram"}, "TierUnsuitable"),
    ],
)
def test_a_cache_without_a_place_is_refused_and_orders_nothing(spec: Json, reason: str) -> None:
    fleet = running()
    ref = declare(fleet, **spec)
    fleet.settle()

    assert condition(fleet.objects[ref], "Accepted") == ("False", reason)
    assert condition(fleet.objects[ref], "Staged") == ("False", "NotAccepted")
    assert not chosen(fleet)


def test_a_cache_waits_for_its_pool_and_follows_it() -> None:
    fleet = running()
    ref = declare(fleet, poolRef="q")
    fleet.settle()
    fleet.pool("q", pool_spec([tier("flash", "NVMe", "1Ti", nvme={"path": "/q"})]))
    fleet.settle()
    assert condition(fleet.objects[ref], "Accepted") == ("True", "Accepted")
    assert chosen(fleet, pool="q") == {"n0", "n1", "n2"}
    assert status(fleet, ref)["tier"] == "flash"

    declare(fleet, poolRef="p")
    fleet.settle()
    assert (chosen(fleet, pool="q"), chosen(fleet, pool="p")) == (set(), {"n0", "n1", "n2"})


def test_a_pool_without_a_fitting_tier_has_no_place() -> None:
    fleet = Fleet()
    fleet.pool("p", pool_spec([tier()]))
    ref = declare(fleet)
    fleet.settle()
    assert condition(fleet.objects[ref], "Accepted") == ("False", "TierNotFound")


@pytest.mark.parametrize(
    ("page_size", "reason"), [("4Ki", "Accepted"), ("2Mi", "TierUnsuitable"), ("1Gi", "TierUnsuitable")]
)
def test_memory_holds_weights_where_it_is_named_and_has_pages_that_files_can_have(page_size: str, reason: str) -> None:
    fleet = Fleet()
    fleet.pool("p", pool_spec([tier("dram", size="100Gi", hostDRAM={"pageSize": page_size})]))
    put_node(fleet, 0)
    ref = declare(fleet, tier="dram")
    unnamed = declare(fleet, "u")
    fleet.settle()

    assert condition(fleet.objects[unnamed], "Accepted") == ("False", "TierNotFound")
    is_accepted = reason == "Accepted"
    assert condition(fleet.objects[ref], "Accepted") == (str(is_accepted), reason)
    assert chosen(fleet) == ({"n0"} if is_accepted else set())
    if not is_accepted:
        message = next(c["message"] for c in status(fleet, ref)["conditions"] if c["type"] == "Accepted")
        assert f"is of type HostDRAM and has pages of {page_size}; weights lie in" in message


def test_a_failure_is_an_event_once_and_what_passes_is_none() -> None:
    fleet = running()
    ref = declare(fleet)
    fleet.settle()
    answer(fleet, "n0", state="Failed", reason="DiskFull", message="60 B wanted, 30 B free")
    answer(fleet, "n1", state="Staging", reason="WaitingForRoom")

    assert notes(fleet, ref) == [("DiskFull", "1 x, n0: 60 B wanted, 30 B free")]
    fleet.settle()
    answer(fleet, "n2", state="Failed", reason="DiskFull", message="60 B wanted, 20 B free")
    assert notes(fleet, ref) == []
    fleet.settle()
    for node in ("n0", "n2"):
        answer(fleet, node)
    fleet.settle()
    answer(fleet, "n0", state="Failed", reason="DiskFull", message="again")
    assert notes(fleet, ref) == [("DiskFull", "1 x, n0: again")]


def notes(fleet: Fleet, ref: Ref) -> list[tuple[str, str]]:
    """Events about an object that the next status of it brings."""
    writes = plan_statuses(*fleet.seen(), SETTING, fleet.now)
    return [(n.reason, n.message) for w in writes if w.action.ref == ref for n in w.action.notes]


def test_nodes_are_meant_by_name_and_by_labels_together() -> None:
    fleet = running(4)
    put_node(fleet, 3, rack="r7")
    declare(fleet, nodes={"names": ["n0", "stranger"], "matchLabels": {"rack": "r7"}})
    fleet.settle()
    assert chosen(fleet) == {"n0", "n3"}

    fleet.delete(Ref(kinds.NODE, "n3"))
    fleet.settle()
    assert chosen(fleet) - {"n3"} == {"n0"}


def test_a_choice_of_no_node_is_stated() -> None:
    fleet = running()
    ref = declare(fleet, nodes={"names": ["stranger"]})
    fleet.settle()
    assert condition(fleet.objects[ref], "Staged") == ("False", "NoNodes")
    assert status(fleet, ref)["stagingSince"] == ""


def test_copies_go_to_those_that_have_them_and_then_to_zones_in_turn() -> None:
    fleet = running(6)
    declare(fleet, copies=1, nodes={"names": ["n3"]})
    fleet.settle()
    answer(fleet, "n3")
    fleet.settle()

    declare(fleet, copies=4)
    fleet.settle()
    assert chosen(fleet) == {"n3", "n0", "n2", "n1"}
    declare(fleet, copies=1)
    fleet.settle()
    assert chosen(fleet) == {"n3"}


def test_two_copies_are_in_two_zones_where_there_are_two() -> None:
    fleet = running(5)
    for number in range(5):
        fleet.node(f"n{number}", pool="yes", **{"topology.kubernetes.io/zone": "far" if number == 3 else "near"})
    declare(fleet, copies=2)
    fleet.settle()
    assert chosen(fleet) == {"n0", "n3"}


def test_a_node_keeps_its_copy_while_its_agent_is_silent_or_drains_and_loses_it_with_the_node() -> None:
    fleet = running(3)
    declare(fleet, copies=1)
    fleet.settle()
    (holder,) = chosen(fleet)
    answer(fleet, holder)
    fleet.settle()
    fleet.fall_silent(f"p.{holder}")
    fleet.settle()
    assert chosen(fleet) == {holder}

    fleet.delete(Ref(kinds.NODE, holder))
    fleet.settle()
    assert len(chosen(fleet) - {holder}) == 1


def test_a_silent_agent_that_has_nothing_yet_gives_way() -> None:
    fleet = running(3)
    ref = declare(fleet, copies=1)
    fleet.settle()
    (first,) = chosen(fleet)
    fleet.fall_silent(f"p.{first}")
    fleet.settle()
    assert len(chosen(fleet)) == 1
    assert chosen(fleet) != {first}

    fleet.fall_silent(f"p.{next(iter(chosen(fleet)))}")
    fleet.fall_silent("p.n2")
    fleet.settle()
    assert status(fleet, ref)["failures"][0]["reason"] == "AgentAway"


@pytest.mark.slow
@settings(max_examples=20)
@given(
    copies=st.integers(1, 6),
    acts=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["Staged", "Failed", "silent", "back", "gone", "new"]))),
)
def test_never_more_nodes_than_copies_and_as_many_as_there_are(copies: int, acts: list[tuple[int, str]]) -> None:
    fleet = running(6)
    declare(fleet, copies=copies)
    fleet.settle()
    for number, what in acts:
        node = f"n{number}"
        before = chosen(fleet)
        if what in ("Staged", "Failed") and node in before:
            answer(fleet, node, state=what)
        elif what == "silent" and f"p.{node}" in fleet.of(kinds.POOL_NODE):
            fleet.fall_silent(f"p.{node}")
        elif what == "back":
            fleet.alive.add(f"p.{node}")
            fleet.silent.discard(f"p.{node}")
        elif what == "gone":
            fleet.delete(Ref(kinds.NODE, node))
        elif what == "new":
            put_node(fleet, number)
        has = {n for n in before if is_staged(fleet, n) and Ref(kinds.NODE, n) in fleet.objects}
        fleet.settle(12)
        here = {n for n in fleet.of(kinds.NODE) if f"p.{n}" in fleet.of(kinds.POOL_NODE)}

        assert len(chosen(fleet) & here) == min(copies, len(here))
        assert has <= chosen(fleet), "who has the weights keeps them"


def is_staged(fleet: Fleet, node: str) -> bool:
    body = fleet.of(kinds.POOL_NODE).get(f"p.{node}")
    return body is not None and any(m["state"] == "Staged" for m in body.get("status", {}).get("models", []))


def test_the_first_digest_holds_for_all_nodes_until_the_spec_changes() -> None:
    fleet = running()
    ref = declare(fleet)
    fleet.settle()
    answer(fleet, "n1", digest=DIGEST)
    fleet.settle()
    assert {ordered(fleet, node)[0]["digest"] for node in ("n0", "n1", "n2")} == {DIGEST}
    assert status(fleet, ref)["digest"] == DIGEST

    answer(fleet, "n0", digest=OTHER_DIGEST)
    answer(fleet, "n2", digest=OTHER_DIGEST)
    fleet.settle()
    assert (status(fleet, ref)["digest"], status(fleet, ref)["nodesStaged"]) == (DIGEST, 1)
    assert (labels(fleet, "n0"), labels(fleet, "n1")) == ({}, {"m": "v1"})

    declare(fleet, weight=5)
    fleet.settle()
    assert status(fleet, ref)["digest"] == ""
    assert "digest" not in ordered(fleet, "n0")[0]
    for node in ("n0", "n2"):
        answer(fleet, node, digest=OTHER_DIGEST)
    fleet.settle()
    assert status(fleet, ref)["digest"] == OTHER_DIGEST


def test_a_declared_digest_goes_with_the_first_order() -> None:
    fleet = running()
    ref = declare(fleet, digest=OTHER_DIGEST)
    fleet.settle()
    assert ordered(fleet, "n0")[0]["digest"] == OTHER_DIGEST
    assert status(fleet, ref)["digest"] == OTHER_DIGEST


def test_agents_ask_their_parents_in_a_tree_that_those_with_the_weights_are_the_top_of() -> None:
    fleet = running(6)
    declare(fleet, digest=DIGEST)
    fleet.settle()
    asked = {node: tuple(ordered(fleet, node)[0].get("peers", ())) for node in sorted(chosen(fleet))}
    assert asked == {
        "n0": (), "n1": ("n0",), "n2": ("n0",), "n3": ("n1", "n0"), "n4": ("n1", "n0"), "n5": ("n2", "n0"),
    }  # fmt: skip

    for node in ("n4", "n5"):
        answer(fleet, node)
    fleet.settle()
    assert ordered(fleet, "n0")[0].get("peers", []) == [], "orders are not written for this alone"
    put_node(fleet, 6)
    fleet.settle()
    assert ordered(fleet, "n6")[0]["peers"] == ["n0", "n4"], "the order is n4, n5, n0, n1, n2, n3, n6"


def test_an_answer_to_an_earlier_generation_counts_for_nothing_but_the_label() -> None:
    fleet = running(1)
    ref = declare(fleet)
    fleet.settle()
    answer(fleet, "n0")
    fleet.settle()
    declare(fleet, weight=5)
    fleet.settle()
    assert condition(fleet.objects[ref], "Staged") == ("False", "Staging")
    assert labels(fleet, "n0") == {"m": "v1"}

    declare(fleet, revision="v2")
    fleet.settle()
    assert labels(fleet, "n0") == {}


def test_labels_state_what_a_node_has_and_go_with_it() -> None:
    fleet = running(2)
    fleet.node("apart", pool="no", **{"models.kvstrata.io/m": "v0", "models.kvstrata.io/gone": "v9"})
    ref = declare(fleet)
    declare(fleet, "other", revision="0123abc")
    fleet.settle()
    assert labels(fleet, "apart") == {}
    answer(fleet, "n0")
    answer(fleet, "n0", "other")
    fleet.settle()
    assert (labels(fleet, "n0"), labels(fleet, "n1")) == ({"m": "v1", "other": "0123abc"}, {})
    assert fleet.objects[Ref(kinds.NODE, "n0")]["metadata"]["labels"]["pool"] == "yes"

    answer(fleet, "n0", state="Evicted", message="made room for KV")
    fleet.settle()
    assert labels(fleet, "n0") == {"other": "0123abc"}
    answer(fleet, "n0")
    fleet.settle()
    fleet.delete(ref)
    fleet.settle()
    assert labels(fleet, "n0") == {"other": "0123abc"}
    assert [o["name"] for o in ordered(fleet, "n0")] == ["other"]
    fleet.delete(Ref(kinds.POOL, "p"))
    fleet.step()
    assert labels(fleet, "n0") == {}


def test_a_successor_of_the_same_name_does_not_inherit_the_label() -> None:
    fleet = running(1)
    ref = declare(fleet)
    fleet.settle()
    answer(fleet, "n0")
    fleet.settle()
    fleet.delete(ref)
    declare(fleet)
    fleet.settle()
    assert labels(fleet, "n0") == {}
    assert condition(fleet.objects[ref], "Staged") == ("False", "Staging")


def test_what_is_late_is_stated_and_goes_on() -> None:
    fleet = running()
    ref = declare(fleet, deadlineSeconds=60)
    fleet.settle()
    answer(fleet, "n0", state="Failed", reason="NoSpace", message="needs 2Ti")
    answer(fleet, "n1", state="Staging")
    answer(fleet, "n2")
    fleet.settle()
    wake_at = plan_orders(*fleet.seen(), SETTING, fleet.now).wake_at
    assert wake_at is not None
    assert (wake_at - fleet.now).total_seconds() == 60

    fleet.pass_time(60)
    fleet.settle()
    assert condition(fleet.objects[ref], "Staged") == ("False", "DeadlineExceeded")
    assert condition(fleet.objects[ref], "Progressing") == ("True", "Staging")
    assert status(fleet, ref)["failures"] == [{"reason": "NoSpace", "nodes": 1, "node": "n0", "message": "needs 2Ti"}]
    assert len(chosen(fleet)) == 3

    answer(fleet, "n1", state="Staging", reason="WaitingForRoom")
    fleet.settle()
    assert condition(fleet.objects[ref], "Progressing") == ("False", "Waiting")
    assert [f["reason"] for f in status(fleet, ref)["failures"]] == ["NoSpace", "WaitingForRoom"]
    for node in ("n0", "n1"):
        answer(fleet, node)
    fleet.settle()
    assert condition(fleet.objects[ref], "Staged") == ("True", "Staged")

    put_node(fleet, 3)
    fleet.settle()
    assert condition(fleet.objects[ref], "Staged") == ("False", "Staging"), "its time begins with the new node"


def test_weights_that_made_room_for_kv_are_not_late() -> None:
    fleet = running(1)
    ref = declare(fleet, deadlineSeconds=60)
    fleet.settle()
    answer(fleet, "n0", state="Evicted", reason="RoomForKv", message="idle for 86400 s")
    fleet.settle()
    fleet.pass_time(600)
    fleet.settle()
    assert condition(fleet.objects[ref], "Staged") == ("False", "Evicted")
    assert status(fleet, ref)["failures"][0]["reason"] == "Evicted"


def test_a_paused_pool_keeps_its_orders_and_says_so() -> None:
    fleet = running()
    fleet.pool("p", pool_spec([tier(), tier("nvme", "NVMe", "100Gi")], paused=True))
    ref = declare(fleet)
    fleet.settle()
    assert not chosen(fleet)
    assert condition(fleet.objects[ref], "Progressing") == ("False", "PoolPaused")


def test_orders_for_weights_stand_beside_those_of_operations_and_through_a_change_of_tiers() -> None:
    fleet = running(2)
    declare(fleet)
    spec = {"type": "Flush", "poolRef": "p", "flush": {}}
    fleet.put(kinds.OPERATION, "op", spec=spec)
    fleet.settle()
    assert fleet.objects[pool_node("p", "n0")]["spec"]["orders"]
    fleet.pool("p", pool_spec([tier(size="2Gi"), tier("nvme", "NVMe", "100Gi")]))
    fleet.settle()
    body = fleet.objects[pool_node("p", "n0")]["spec"]
    assert (len(body["orders"]), len(body["models"]), body["tiers"][0]["capacityBytes"]) == (1, 1, 2 << 30)


def test_a_node_takes_so_many_models_and_the_oldest_first() -> None:
    fleet = running(1)
    refs = [declare(fleet, f"m{i:02}") for i in range(MODELS_MAX + 1)]
    fleet.settle()
    assert len(ordered(fleet, "n0")) == MODELS_MAX
    last = fleet.objects[refs[-1]]
    assert status(fleet, refs[-1])["failures"][0]["reason"] == "TooManyModels"
    fleet.delete(refs[0])
    fleet.settle()
    assert last["metadata"]["uid"] in {order["uid"] for order in ordered(fleet, "n0")}


NAMES = ("m", "n")
NODES = 5


class Keeping(RuleBasedStateMachine):
    """Administrators, nodes and agents do what they like: facts that are kept are those of a look at everything."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = running(3, KeptFleet())

    @rule(
        name=st.sampled_from(NAMES),
        copies=st.sampled_from([None, 1, 2]),
        revision=st.sampled_from(["v1", "v2"]),
        pool=st.sampled_from(["p", "q"]),
        tier_=st.sampled_from([None, "nvme", "dram"]),
    )
    def declare(self, name: str, copies: int | None, revision: str, pool: str, tier_: str | None) -> None:
        more: Json = {key: value for key, value in (("copies", copies), ("tier", tier_)) if value is not None}
        declare(self.fleet, name, poolRef=pool, revision=revision, **more)

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        self.fleet.delete(Ref(kinds.MODEL_CACHE, name))

    @rule(paused=st.booleans(), name=st.sampled_from(["p", "q"]))
    def pool(self, name: str, *, paused: bool) -> None:
        body = self.fleet.of(kinds.POOL).get(name)
        if body is None or "deletionTimestamp" not in body["metadata"]:
            disk = tier("nvme", "NVMe", "100Gi", nvme={"path": f"/{name}"})
            self.fleet.pool(name, pool_spec([tier(), disk], paused=paused))

    @rule(name=st.sampled_from(["p", "q"]))
    def drop_pool(self, name: str) -> None:
        self.fleet.delete(Ref(kinds.POOL, name))

    @rule(number=st.integers(0, NODES - 1), is_there=st.booleans())
    def node(self, number: int, *, is_there: bool) -> None:
        if is_there:
            put_node(self.fleet, number)
        else:
            self.fleet.delete(Ref(kinds.NODE, f"n{number}"))

    @rule(
        pool=st.sampled_from(["p", "q"]),
        number=st.integers(0, NODES - 1),
        name=st.sampled_from(NAMES),
        what=st.sampled_from(["Staging", "Staged", "Failed", "Evicted", "silent", "up", "forgets"]),
    )
    def agent(self, pool: str, number: int, name: str, what: str) -> None:
        key, node = f"{pool}.n{number}", f"n{number}"
        if key not in self.fleet.of(kinds.POOL_NODE):
            return
        if what == "silent":
            self.fleet.fall_silent(key)
        elif what == "up":
            self.fleet.report(key)
        elif what == "forgets":
            told(self.fleet, node, [], pool)
        elif any(order["name"] == name for order in ordered(self.fleet, node, pool)):
            answer(self.fleet, node, name, what, pool)

    @rule(seconds=st.sampled_from([1, 4000]))
    def wait(self, seconds: int) -> None:
        self.fleet.pass_time(seconds)

    @rule()
    def operate(self) -> None:
        self.fleet.step()

    @invariant()
    def what_is_kept_is_what_is_there(self) -> None:
        kept, view = self.fleet.seen(), Fleet.view(self.fleet)
        whole = view, facts_of(view)
        now = self.fleet.now
        assert plan_orders(*kept, SETTING, now) == plan_orders(*whole, SETTING, now)
        assert plan_statuses(*kept, SETTING, now) == plan_statuses(*whole, SETTING, now)
        assert kept[1].mislabelled == whole[1].mislabelled


TestKeeping = pytest.mark.slow(Keeping.TestCase)
TestKeeping.settings = settings(max_examples=15, stateful_step_count=15)
