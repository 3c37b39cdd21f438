"""Laws of the agents' workloads: what a pod gets from its pool, and how agents are replaced."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata_api import names
from kvstrata_operator.decide.agents import workloads
from kvstrata_operator.decide.plan.actions import Delete, Merge
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import GIB, condition, pool_node, pool_spec, tier
from support.operator.pods import NAMESPACE, Cluster, running, template

pytestmark = pytest.mark.unit

POOL = Ref(kinds.POOL, "p")


def rolling(**strategy: Any) -> Any:
    return pool_spec(updateStrategy=strategy)


def made(cluster: Cluster) -> Any:
    return cluster.fleet.of(kinds.DAEMON_SET)["kvstrata-agent-p"]


def pod_of(cluster: Cluster) -> Any:
    return made(cluster)["spec"]["template"]["spec"]


def status(cluster: Cluster, type_: str) -> tuple[str, str]:
    return condition(cluster.fleet.of(kinds.POOL)["p"], type_)


def serving(cluster: Cluster) -> set[str]:
    """Nodes that engines can use now."""
    ready = {
        n for n, p in cluster.pods().items() if p.get("status", {}).get("conditions", [{}])[0].get("status") == "True"
    }
    nodes = cluster.fleet.of(kinds.POOL_NODE)
    return {n for n in ready if not nodes[f"p.{n}"]["spec"]["drain"]["requested"] and f"p.{n}" in cluster.fleet.alive}


def staying(pods: Any) -> set[str]:
    """Nodes whose pod nobody ends."""
    return {node for node, pod in pods.items() if "deletionTimestamp" not in pod["metadata"]}


def test_a_pool_alone_gets_agents_a_budget_and_becomes_ready() -> None:
    cluster = running(3, rolling(maxUnavailable=2))

    assert status(cluster, "Ready") == ("True", "AllNodesReady")
    assert made(cluster)["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert made(cluster)["metadata"]["ownerReferences"][0]["uid"] == cluster.fleet.objects[POOL]["metadata"]["uid"]
    assert pod_of(cluster)["containers"][0]["args"] == ["--pool=p"]
    budget = cluster.fleet.of(kinds.BUDGET)["kvstrata-agent-p"]["spec"]
    assert (budget["minAvailable"], budget["selector"]) == (1, made(cluster)["spec"]["selector"])
    assert cluster.fleet.orders() == ()


def test_a_pod_gets_what_its_tiers_take() -> None:
    tiers = [
        tier("huge", size="4Gi", hostDRAM={"pageSize": "2Mi"}),
        tier("giant", size="2Gi", hostDRAM={"pageSize": "1Gi"}),
        tier("plain", size="1Gi", hostDRAM={"pageSize": "4Ki"}),
        tier("cxl", "CXL", "8Gi"),
        tier("nvme", "NVMe", nvme={"paths": ["/mnt/a/x", "/mnt/b"]}),
        tier("own", "NVMe", nvme={"path": "/var/lib/kvstrata/p/nvme"}),
    ]
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    timeout = {"drain": {"timeoutSeconds": 900}}
    cluster = running(1, pool_spec(tiers, tolerations=tolerations, updateStrategy=timeout))
    spec = pod_of(cluster)
    agent = spec["containers"][0]

    assert agent["resources"]["limits"] == {"memory": "11Gi", "hugepages-2Mi": "4Gi", "hugepages-1Gi": "2Gi"}
    assert agent["resources"]["requests"] == {
        "cpu": "1",
        "memory": "10Gi",
        "hugepages-2Mi": "4Gi",
        "hugepages-1Gi": "2Gi",
    }
    mounts = {m["mountPath"]: m["name"] for m in agent["volumeMounts"]}
    assert mounts == {"/var/lib/kvstrata/p": "storage", "/mnt/a/x": "tier-0", "/mnt/b": "tier-1"}
    assert {v["hostPath"]["path"] for v in spec["volumes"]} == mounts.keys()
    assert spec["tolerations"] == tolerations
    assert spec["terminationGracePeriodSeconds"] == 930


def test_nodes_left_out_get_no_pod_and_their_coming_and_going_replaces_none() -> None:
    cluster = running(2, pool_spec([tier("nvme", "NVMe")]))
    before = cluster.wanted()
    uids = {n: p["metadata"]["uid"] for n, p in cluster.pods().items()}
    cluster.fleet.pass_time(10)
    cluster.fleet.pool("q", pool_spec([tier("nvme", "NVMe")]))
    cluster.turn(3)
    other = cluster.fleet.of(kinds.DAEMON_SET)["kvstrata-agent-q"]["spec"]["template"]["spec"]["affinity"]

    (term,) = other["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [e["values"] for e in term["matchFields"]] == [["n0"], ["n1"]]
    assert cluster.pods("q") == {}
    cluster.fleet.node("n2")
    cluster.turn(3)
    assert cluster.wanted() == before
    assert {n: cluster.pods()[n]["metadata"]["uid"] for n in uids} == uids


def test_a_pool_that_moves_drains_nodes_before_their_pods_go() -> None:
    cluster = running(2)
    cluster.fleet.pool(spec=pool_spec(selector={"pool": "other"}))
    cluster.fleet.step()

    assert all(n["spec"]["drain"]["requested"] for n in cluster.fleet.of(kinds.POOL_NODE).values())
    cluster._make_pods()
    assert cluster.pods().keys() == {"n0", "n1"}
    cluster.turn(4)
    assert cluster.pods() == {}


@pytest.mark.parametrize("before", [{"pool": "yes"}, {}], ids=["by label", "from everywhere"])
def test_of_a_pool_that_moves_more_nodes_than_can_be_named_drain_before_their_pods_go(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str]
) -> None:
    monkeypatch.setattr(workloads, "NAMED_NODES_MAX", 2)
    cluster = running(5, pool_spec(selector=before))
    old = {f"n{number}" for number in range(5)}
    for node in [*old, "new"]:
        cluster.fleet.node(node, **{"pool": "yes", "kubernetes.io/hostname": node})
    cluster.fleet.node("new", **{"pool": "other", "kubernetes.io/hostname": "new"})
    cluster.turn(4)
    cluster.fleet.pool(spec=pool_spec(selector={"pool": "other"}))
    cluster.fleet.step()
    cluster._make_pods()

    nodes = cluster.fleet.of(kinds.POOL_NODE)
    assert all(nodes[f"p.{n}"]["spec"]["drain"]["requested"] for n in old)
    assert staying(cluster.pods()) == {*old, "new"}
    assert cluster.fleet.orders() == ()
    cluster.fleet.drained("p.n0")
    cluster.fleet.step()
    assert "p.n0" not in cluster.fleet.of(kinds.POOL_NODE)
    cluster.turn(4)
    assert cluster.pods().keys() == {"new"}
    assert len(terms(cluster, BASE)) == 1
    assert not cluster.ended


def test_a_pool_that_moves_bars_its_other_pods_from_the_nodes_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "NAMED_NODES_MAX", 2)
    cluster = mixed("2Gi", "2Gi", "2Gi", "0")
    cluster.fleet.node("new", pages="2Gi", pool="other")
    cluster.fleet.pool(spec=pool_spec(HUGE, selector={"pool": "other"}))
    cluster.fleet.step()
    cluster._make_pods()

    assert staying(cluster.pods_by(BASE)) == {"n0", "n1", "n2", "new"}
    assert staying(cluster.pods_by(SMALL)) == {"n3"}
    cluster.turn(5)
    assert cluster.pods_by(BASE).keys() == {"new"}
    assert cluster.fleet.of(kinds.DAEMON_SET).keys() == {BASE}
    assert not cluster.ended


def test_nodes_left_out_get_no_pod_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "NAMED_NODES_MAX", 2)
    cluster = running(5, pool_spec([tier("nvme", "NVMe")]))
    cluster.fleet.pass_time(10)
    cluster.fleet.pool("q", pool_spec([tier("nvme", "NVMe")]))
    cluster.turn(3)

    assert cluster.pods("q") == {}
    assert len(terms(cluster, "kvstrata-agent-q")[0]["matchFields"]) == 5


def test_more_nodes_than_can_be_named_drain_that_are_left_out_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "NAMED_NODES_MAX", 2)
    cluster = Cluster()
    cluster.install(template())
    cluster.fleet.pool("older", pool_spec([tier("nvme", "NVMe")], selector={"pool": "none"}))
    cluster.fleet.pass_time(10)
    cluster.fleet.pool(spec=pool_spec([tier("nvme", "NVMe")]))
    for number in range(5):
        cluster.fleet.node(f"n{number}")
    cluster.turn(4)
    cluster.fleet.pool("older", pool_spec([tier("nvme", "NVMe")]))
    cluster.fleet.step()
    cluster._make_pods()

    assert staying(cluster.pods()) == {f"n{number}" for number in range(5)}
    assert all(cluster.fleet.of(kinds.POOL_NODE)[f"p.n{n}"]["spec"]["drain"]["requested"] for n in range(5))
    cluster.turn(4)
    assert cluster.pods() == {}
    assert not cluster.ended


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "AgentTemplateInvalid"),
        ("[]", "AgentTemplateInvalid"),
        ({"spec": {"containers": [{"name": "other"}]}}, "AgentTemplateInvalid"),
        ("", "AgentTemplateMissing"),
    ],
)
def test_a_template_that_cannot_be_used_is_told_and_agents_stay(text: Any, reason: str) -> None:
    cluster = running(1)
    before = made(cluster)
    cluster.install(text)
    cluster.turn(2)

    assert status(cluster, "Provisioned") == ("False", reason)
    assert made(cluster) == before
    cluster.install(template())
    cluster.turn(2)
    assert status(cluster, "Provisioned")[0] == "True"


def test_a_pod_that_cannot_be_placed_is_told_with_the_scheduler_s_words() -> None:
    cluster = running(2)
    pod = cluster.pods()["n1"]
    said = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "Insufficient hugepages-2Mi",
    }
    pod["status"]["conditions"] = [said]
    cluster.fleet.step()

    assert status(cluster, "Provisioned") == ("False", "AgentsNotRunning")
    told = {c["type"]: c["message"] for c in cluster.fleet.of(kinds.POOL)["p"]["status"]["conditions"]}
    assert "1 of 2 nodes; n1" in told["Provisioned"]
    assert "Insufficient hugepages-2Mi" in told["Provisioned"]


def test_a_folder_that_cannot_be_given_is_told_with_its_node_in_the_words_of_what_gives_it() -> None:
    cluster = running(2)
    ended = {"terminated": {"reason": "Error", "message": "/a is user 65532's now\nfolder /b belongs to user 7\n"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    cluster.pods()["n1"]["status"]["initContainerStatuses"] = [{"state": waiting, "lastState": ended}]
    cluster.fleet.step()

    told = {c["type"]: c["message"] for c in cluster.fleet.of(kinds.POOL)["p"]["status"]["conditions"]}
    assert "1 of 2 nodes; n1" in told["Provisioned"]
    assert told["Provisioned"].endswith("CrashLoopBackOff: folder /b belongs to user 7")


def test_a_pod_that_its_node_does_not_start_is_told_with_the_folders_that_it_waits_for() -> None:
    cluster = running(2)
    since = cluster.fleet.now.isoformat()
    cluster.pods()["n1"]["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "PodReadyToStartContainers", "status": "False", "lastTransitionTime": since},
    ]
    cluster.fleet.step()
    assert status(cluster, "Provisioned")[0] == "True"
    plan = plan_orders(*cluster.fleet.seen(), cluster.fleet.setting, cluster.fleet.now)
    assert plan.wake_at == cluster.fleet.now + timedelta(seconds=20)
    cluster.fleet.pass_time(20)
    cluster.fleet.step()

    assert status(cluster, "Provisioned") == ("False", "AgentsNotStarted")
    told = {c["type"]: c["message"] for c in cluster.fleet.of(kinds.POOL)["p"]["status"]["conditions"]}
    assert "1 of 2 nodes; n1" in told["Provisioned"]
    assert "one of /var/lib/kvstrata/p is missing there" in told["Provisioned"]
    cluster.turn(2)
    assert status(cluster, "Provisioned")[0] == "True"


@pytest.mark.parametrize(
    ("image", "is_told"), [("host:5000/agent:1", True), ("host:5000/agent@sha256:1", False)], ids=["tag", "digest"]
)
def test_an_image_without_digest_runs_and_is_told(image: str, *, is_told: bool) -> None:
    cluster = running(1, text=template(image))

    told = {c["type"]: c["message"] for c in cluster.fleet.of(kinds.POOL)["p"]["status"]["conditions"]}
    assert status(cluster, "Provisioned") == ("True", "Provisioned")
    assert (f"agents run {image}, which names no digest" in told["Provisioned"]) == is_told


def test_an_upgrade_drains_a_node_then_replaces_its_pod_one_node_after_the_other() -> None:
    cluster = running(3)
    cluster.install(template("agent@sha256:2"))
    cluster.fleet.step()

    drains = [a for a in cluster.fleet.orders() if isinstance(a, Merge | Delete)]
    assert drains == []
    assert cluster.fleet.objects[pool_node("p", "n0")]["spec"]["drain"]["requested"]
    assert serving(cluster) == {"n1", "n2"}
    assert status(cluster, "Progressing") == ("True", "RollingOut")
    cluster.turn(20)
    assert set(cluster.revisions().values()) == {cluster.wanted()}
    assert status(cluster, "Progressing") == ("False", "Complete")
    assert status(cluster, "Ready")[0] == "True"


@pytest.mark.parametrize(
    ("tiers", "mode", "drains"),
    [
        ([tier(hostDRAM={"pageSize": "4Ki"})], "Demote", False),
        ([tier(hostDRAM={"pageSize": "4Ki", "persistence": "None"})], "Demote", True),
        ([tier(hostDRAM={"pageSize": "2Mi"})], "Demote", True),
        ([tier(hostDRAM={"pageSize": "2Mi"})], "Drop", False),
        ([tier("nvme", "NVMe")], "Demote", False),
    ],
)
def test_nothing_is_moved_where_memory_outlives_a_pod_or_may_be_lost(tiers: Any, mode: str, *, drains: bool) -> None:
    spec = pool_spec(tiers, updateStrategy={"drain": {"mode": mode}})
    cluster = running(2, spec, template(memory=True))
    cluster.install(template("agent@sha256:2", memory=True))
    cluster.fleet.step()

    asked = cluster.fleet.objects[pool_node("p", "n0")]["spec"]["drain"]["requested"]
    assert asked == drains
    cluster.turn(10)
    assert set(cluster.revisions().values()) == {cluster.wanted()}


def test_what_people_delete_themselves_is_left_to_them() -> None:
    cluster = running(2, rolling(type="OnDelete"))
    before = cluster.revisions()
    cluster.install(template("agent@sha256:2"))
    cluster.turn(5)

    assert cluster.revisions() == before
    assert status(cluster, "Progressing") == ("False", "OnDelete")
    cluster.fleet.delete(Ref(kinds.POD, cluster.pods()["n1"]["metadata"]["name"], NAMESPACE))
    cluster.turn(2)
    assert cluster.revisions()["n1"] == cluster.wanted() != cluster.revisions()["n0"]


def test_a_node_is_told_of_new_tiers_when_its_pod_can_hold_them() -> None:
    cluster = running(2)
    cluster.fleet.pool(spec=pool_spec([tier(size="2Gi")]))
    cluster.fleet.step()

    def sizes() -> dict[str, int]:
        return {n: b["spec"]["tiers"][0]["capacityBytes"] // GIB for n, b in cluster.fleet.of(kinds.POOL_NODE).items()}

    for _ in range(20):
        updated = {f"p.{n}" for n, r in cluster.revisions().items() if r == cluster.wanted()}
        assert all(size == 1 or key in updated for key, size in sizes().items())
        cluster.turn()
    assert sizes() == {"p.n0": 2, "p.n1": 2}


def test_a_tier_that_goes_is_emptied_in_the_pod_that_has_its_directory() -> None:
    cluster = running(2, pool_spec([tier(), tier("nvme", "NVMe", nvme={"path": "/mnt/a"})]))
    cluster.fleet.pool(spec=pool_spec([tier()]))
    before = {n: p["metadata"]["uid"] for n, p in cluster.pods().items()}
    cluster.fleet.settle()

    assert {len(n["spec"]["tiers"]) for n in cluster.fleet.of(kinds.POOL_NODE).values()} == {1}
    for key in ("p.n0", "p.n1"):
        cluster.fleet.report(key, TiersSettled=("False", "MovingBlocks"))
    cluster.fleet.settle()
    assert {n: p["metadata"]["uid"] for n, p in cluster.pods().items()} == before
    assert not any(n["spec"]["drain"]["requested"] for n in cluster.fleet.of(kinds.POOL_NODE).values())
    assert not any("deletionTimestamp" in p["metadata"] for p in cluster.pods().values())
    cluster.turn(20)
    assert set(cluster.revisions().values()) == {cluster.wanted()}
    assert "/mnt/a" not in str(pod_of(cluster))


def test_a_roll_stops_where_new_pods_do_not_start_and_goes_back() -> None:
    cluster = running(4, rolling(maxUnavailable=1, progressDeadlineSeconds=60))
    good = cluster.wanted()
    cluster.install(template("broken"))
    cluster.fleet.step()
    cluster.broken.add(cluster.wanted())
    cluster.turn(30)

    assert status(cluster, "Progressing") == ("False", "ProgressDeadlineExceeded")
    assert sorted(cluster.revisions().values()).count(good) == 3
    assert serving(cluster) == {"n1", "n2", "n3"}
    assert not any(n["spec"]["drain"]["requested"] for n in cluster.fleet.of(kinds.POOL_NODE).values())
    cluster.install(template())
    cluster.turn(10)
    assert set(cluster.revisions().values()) == {good}
    assert status(cluster, "Ready")[0] == "True"


def test_nobody_is_replaced_before_heartbeats_are_known() -> None:
    """An operator that has just started knows no Lease yet; nobody is dead for that."""
    cluster = running(3)
    cluster.install(template("agent@sha256:2"))
    cluster.fleet.alive.clear()
    cluster.fleet.step()

    assert not any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods().values())


def test_a_node_that_is_down_counts_as_away() -> None:
    cluster = running(3, rolling(maxUnavailable=1))
    cluster.go_down("n2")
    cluster.install(template("agent@sha256:2"))
    cluster.turn(10)

    assert serving(cluster) == {"n0", "n1"}
    cluster.come_back("n2")
    cluster.turn(20)
    assert set(cluster.revisions().values()) == {cluster.wanted()}


def test_a_node_without_a_pod_counts_as_away() -> None:
    cluster = running(2, rolling(maxUnavailable=1))
    cluster.install(template("agent@sha256:2"))
    cluster.fleet.delete(Ref(kinds.POD, cluster.pods()["n1"]["metadata"]["name"], NAMESPACE))
    cluster._end_pods()
    cluster.fleet.settle()

    assert cluster.pods().keys() == serving(cluster) == {"n0"}


def test_a_pool_that_goes_takes_its_agents_along_after_they_drained() -> None:
    cluster = running(2)
    cluster.fleet.delete(POOL)
    cluster.fleet.step()

    assert made(cluster)
    cluster.turn(5)
    assert POOL not in cluster.fleet.objects
    assert not cluster.fleet.of(kinds.DAEMON_SET)
    assert not cluster.fleet.of(kinds.BUDGET)


def test_without_a_template_by_name_others_run_agents() -> None:
    cluster = Cluster()
    cluster.fleet.setting = type(cluster.fleet.setting)("kvstrata-system", "/x/{pool}")
    cluster.install(template())
    cluster.fleet.pool()
    cluster.fleet.node("n0")
    cluster.fleet.settle()

    assert not cluster.fleet.of(kinds.DAEMON_SET)
    assert names.pool_node_name("p", "n0") in cluster.fleet.of(kinds.POOL_NODE)


def offered(pages: str | None) -> Any:
    """Status of a Node whose kubelet offers so much of hugepages-2Mi, or has not reported."""
    return {} if pages is None else {"allocatable": {"cpu": "4", "hugepages-2Mi": pages}}


def lacks(node: Any) -> bool:
    return bool(node.get("status", {}).get("allocatable", {}).get("hugepages-2Mi") == "0")


HUGE = [tier(size="1Gi", hostDRAM={"pageSize": "2Mi"})]


def mixed(*pages: str | None) -> Cluster:
    """A pool of 1Gi in huge pages on nodes that offer so many."""
    cluster = Cluster()
    cluster.install(template())
    cluster.fleet.pool(spec=pool_spec(HUGE))
    for number, has in enumerate(pages):
        cluster.fleet.node(f"n{number}", pages=has)
    cluster.turn(4)
    return cluster


def terms(cluster: Cluster, name: str) -> Any:
    made = cluster.fleet.of(kinds.DAEMON_SET)[name]["spec"]["template"]["spec"]["affinity"]
    return made["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]


def message(cluster: Cluster, type_: str) -> str:
    told = {c["type"]: c["message"] for c in cluster.fleet.of(kinds.POOL)["p"]["status"]["conditions"]}
    return str(told[type_])


BASE, SMALL = "kvstrata-agent-p", "kvstrata-agent4ki-p"


def test_a_node_that_lacks_huge_pages_gets_memory_instead_and_that_is_told() -> None:
    cluster = mixed("2Gi", "512Mi", "1Gi", None)

    assert status(cluster, "Ready") == ("True", "AllNodesReady")
    assert cluster.pods_by(BASE).keys() == {"n0", "n2", "n3"}
    (pod,) = cluster.pods_by(SMALL).values()
    (huge,) = {json.dumps(p["spec"]["containers"][0]["resources"]) for p in cluster.pods_by(BASE).values()}
    assert json.loads(huge)["limits"] == {"memory": "2Gi", "hugepages-2Mi": "1Gi"}
    assert pod["spec"]["nodeName"] == "n1"
    assert pod["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "1", "memory": "2Gi"},
        "limits": {"memory": "3Gi"},
    }
    assert "1 of 4 nodes have pages of 4Ki in place of huge ones; n1: its kubelet offers 512Mi of" in message(
        cluster, "Provisioned"
    )
    assert cluster.fleet.orders() == ()


def test_of_two_daemon_sets_the_one_with_fewer_nodes_names_them() -> None:
    few, many, all_of_them = mixed("2Gi", "2Gi", "0"), mixed("2Gi", "0", "0"), mixed("0", "0")

    assert terms(few, SMALL) == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]
    assert "matchExpressions" in terms(few, BASE)[0]
    assert terms(many, BASE) == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n0"]}]}]
    assert [e["operator"] for e in terms(many, SMALL)[0]["matchFields"]] == ["NotIn"]
    assert all_of_them.fleet.of(kinds.DAEMON_SET).keys() == {SMALL}
    assert "matchFields" not in terms(all_of_them, SMALL)[0]
    assert status(all_of_them, "Ready")[0] == "True"


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))
def test_no_more_nodes_are_named_than_a_daemon_set_can_and_others_are_of_the_larger_kind(
    with_pages: int, without: int, most: int
) -> None:
    have, lack = {f"a{n}" for n in range(with_pages)}, {f"b{n}" for n in range(without)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "NAMED_NODES_MAX", most)
        small = workloads.small_nodes(have | lack, lack)

    assert min(len(small), len(have | lack) - len(small)) <= most
    assert (small - lack if len(lack) <= len(have) else lack - small) == set()
    if min(with_pages, without) <= most:
        assert small == lack


def test_a_node_that_gets_its_pages_is_drained_and_has_them_then() -> None:
    cluster = mixed("2Gi", "0")
    before = cluster.pods()["n1"]["metadata"]["uid"]
    cluster.fleet.put(kinds.NODE, "n1", status=offered("2Gi"))
    cluster.fleet.step()

    assert cluster.fleet.of(kinds.POOL_NODE)["p.n1"]["spec"]["drain"]["requested"]
    cluster._make_pods()
    assert cluster.pods()["n1"]["metadata"]["uid"] == before
    assert "deletionTimestamp" not in cluster.pods()["n1"]["metadata"]
    cluster.turn(6)
    assert cluster.pods_by(BASE).keys() == {"n0", "n1"}
    assert cluster.fleet.of(kinds.DAEMON_SET).keys() == {BASE}
    assert status(cluster, "Ready")[0] == "True"
    assert not cluster.ended


def test_a_pod_that_waits_for_pages_that_never_come_is_replaced_at_once() -> None:
    cluster = mixed(None, None)
    cluster.broken.add(cluster.wanted())
    cluster.fleet.delete(Ref(kinds.POD, cluster.pods()["n1"]["metadata"]["name"], NAMESPACE))
    cluster.fleet.fall_silent("p.n1")
    cluster.turn(1)
    cluster.fleet.put(kinds.NODE, "n1", status=offered("0"))
    cluster.turn(3)

    assert cluster.pods_by(SMALL).keys() == {"n1"}


def test_what_older_pools_take_of_a_node_s_pages_is_not_there_for_younger_ones() -> None:
    cluster = mixed("1Gi")
    cluster.fleet.pass_time(10)
    cluster.fleet.pool("q", pool_spec(HUGE))
    cluster.turn(3)

    sets = cluster.fleet.of(kinds.DAEMON_SET)
    assert sets.keys() == {BASE, "kvstrata-agent4ki-q"}
    assert "1 of 1 nodes have pages of 4Ki" in str(cluster.fleet.of(kinds.POOL)["q"]["status"]["conditions"])
    assert "pages of 4Ki" not in message(cluster, "Provisioned")


def test_a_pool_that_goes_takes_both_its_daemon_sets_along() -> None:
    cluster = mixed("2Gi", "0")
    cluster.fleet.delete(POOL)
    cluster.turn(8)

    assert cluster.fleet.of(kinds.DAEMON_SET) == {}
    assert POOL not in cluster.fleet.objects


class Rolls(RuleBasedStateMachine):
    """Upgrades, node failures, pauses and broken images in any order."""

    @initialize(nodes=st.integers(2, 5), most=st.integers(1, 3), memory=st.booleans())
    def begin(self, nodes: int, most: int, *, memory: bool) -> None:
        self.most, self.memory, self.version = most, memory, 1
        self.cluster = running(nodes, self._spec(), template("v1", memory=memory))
        self.taken: set[str] = set()

    def _spec(self, **more: Any) -> Any:
        strategy = {"maxUnavailable": self.most, "progressDeadlineSeconds": 60, "drain": {"timeoutSeconds": 20}}
        return pool_spec([tier(size="1Gi", hostDRAM={"pageSize": "2Mi"})], updateStrategy=strategy, **more)

    @rule()
    def upgrade(self) -> None:
        self.version += 1
        self.cluster.install(template(f"v{self.version}", memory=self.memory))

    @rule()
    def upgrade_to_what_does_not_start(self) -> None:
        self.upgrade()
        self.cluster.fleet.step()
        self.cluster.broken.add(self.cluster.wanted())

    @rule(n=st.integers(0, 4))
    def lose(self, n: int) -> None:
        if f"n{n}" in self.cluster.pods():
            self.cluster.go_down(f"n{n}")
            self.taken.discard(f"n{n}")

    @rule(n=st.integers(0, 4))
    def find(self, n: int) -> None:
        self.cluster.come_back(f"n{n}")

    @rule(n=st.integers(0, 4), pages=st.sampled_from([None, "0", "2Gi"]))
    def huge_pages_come_and_go(self, n: int, pages: str | None) -> None:
        if f"n{n}" in self.cluster.fleet.of(kinds.NODE):
            self.cluster.fleet.put(kinds.NODE, f"n{n}", status=offered(pages))

    @rule(paused=st.booleans())
    def pause(self, *, paused: bool) -> None:
        self.cluster.fleet.pool(spec=self._spec(paused=paused))

    @rule()
    def only_the_operator_acts(self) -> None:
        self._step()

    @rule(seconds=st.sampled_from([1, 30, 90]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.fleet.pass_time(seconds)
        self.cluster.act()

    def _step(self) -> None:
        before, paused = serving(self.cluster), self.cluster.fleet.objects[POOL]["spec"].get("paused", False)
        self.cluster.fleet.step()
        deleted = {n for n, p in self.cluster.pods().items() if "deletionTimestamp" in p["metadata"]}
        newly = before - serving(self.cluster) | (before & (before - self.cluster.pods().keys()))
        assert not (paused and newly)
        all_nodes = len(self.cluster.fleet.of(kinds.NODE))
        if newly:
            assert all_nodes - len(serving(self.cluster)) <= self.most, (newly, deleted)

    @invariant()
    @precondition(lambda self: hasattr(self, "cluster"))
    def no_daemon_set_ends_an_agent_that_serves(self) -> None:
        assert not self.cluster.ended

    @invariant()
    @precondition(lambda self: hasattr(self, "cluster"))
    def statuses_can_always_be_told(self) -> None:
        counts = self.cluster.fleet.of(kinds.POOL)["p"]["status"]["nodes"]
        assert counts["updated"] <= counts["matched"]

    def _is_as_wanted(self) -> bool:
        """Every node has one pod, of the DaemonSet for its huge pages and as that says now."""
        nodes = self.cluster.fleet.of(kinds.NODE)
        small = {n for n, body in nodes.items() if lacks(body)}
        held = set[str]()
        for name, made in self.cluster.fleet.of(kinds.DAEMON_SET).items():
            pods = self.cluster.pods_by(name)
            labels = made["spec"]["template"]["metadata"]["labels"]
            if pods.keys() - (small if names.LABEL_PAGES in labels else nodes.keys() - small):
                return False
            if any(p["metadata"]["labels"] != labels for p in pods.values()):
                return False
            held |= pods.keys()
        return held == nodes.keys()

    def teardown(self) -> None:
        """Once pods can start, everything ends at what is wanted."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.broken.clear()
        self.cluster.down.clear()
        self.cluster.fleet.pool(spec=self._spec())
        for _ in range(60):
            self.cluster.act()
            self._step()
            self.cluster.fleet.pass_time(5)
            if self._is_as_wanted() and status(self.cluster, "Ready")[0] == "True":
                break
        assert self._is_as_wanted()
        assert status(self.cluster, "Ready")[0] == "True", json.dumps(self.cluster.fleet.objects[POOL]["status"])


TestRolls = pytest.mark.slow(Rolls.TestCase)
TestRolls.settings = settings(stateful_step_count=12)
