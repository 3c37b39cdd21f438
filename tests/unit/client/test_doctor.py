"""`kvstrata doctor`: each seeded fault is found, named and mended, and a cluster that is well is told nothing."""

import copy
import json
from argparse import Namespace
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvstrata_api import names, reasons
from kvstrata_api.errors import (
    AgentAwayError,
    ForbiddenError,
    InvalidInputError,
    KvStrataError,
    UnauthenticatedError,
    UnsupportedError,
)
from kvstrata_api.models.conditions import Condition
from kvstrata_api.reasons import Weight
from kvstrata_client.cli import main
from kvstrata_client.commands import doctor
from kvstrata_client.commands.doctor import Finding, Seen, findings, ordered, refusal

pytestmark = pytest.mark.unit

Json = dict[str, Any]
NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)
AGES_AGO, SECONDS_AGO = "2026-11-20T08:00:00Z", "2026-11-26T11:59:55Z"
NODE = "demo.n0"


def condition(type_: str, reason: str, status: str = "True", message: str = "", since: str = AGES_AGO) -> Json:
    made = {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}
    return Condition.model_validate(made).to_json()


def thing(kind: str, name: str, spec: Json, *conditions: Json, version: str = names.API_VERSION, **status: Any) -> Json:
    metadata = {"name": name, "uid": f"u-{name}", "generation": 1, "creationTimestamp": AGES_AGO}
    if kind == "KVPrefixShare":
        metadata["namespace"] = "team"
    stated = {"conditions": list(conditions), **status}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec, "status": stated}


def pod(name: str, *, pool: str = "") -> Json:
    made = thing("Pod", name, {}, condition("PodScheduled", "Scheduled"), version="v1")
    made["metadata"]["labels"] = {names.LABEL_POOL: pool} if pool else {"app.kubernetes.io/part-of": "kvstrata"}
    made["status"]["containerStatuses"] = [{"name": "agent", "ready": True, "state": {"running": {}}}]
    return made


def healthy() -> dict[str, Json]:
    """A cluster that is well, by kind and name."""
    every = (
        thing("KVPool", "demo", {"nodeSelector": {"gpu": "yes", "a": "b"}}, condition("Accepted", "Accepted"),
              condition("Provisioned", "Provisioned"), condition("CapacitySatisfied", "Satisfied"),
              condition("MetadataAvailable", "Available"), condition("Progressing", "Complete", "False"),
              condition("Degraded", "Healthy", "False"), condition("Ready", "AllNodesReady")),
        thing("KVPoolNode", NODE, {"poolRef": "demo", "nodeName": "n0"}, condition("AgentConnected", "Serving"),
              condition("TierReady", "AllTiersReady"), condition("HugepagesReserved", "Reserved"),
              condition("DevicePresent", "Present"), condition("MetadataAvailable", "DirectoryAnswers"),
              condition("StoresKeepUp", "KeepUp"), condition("CapacitySatisfied", "Satisfied"),
              condition("TiersSettled", "Settled"), condition("CalibrationCurrent", "NotCalibrated"),
              condition("CacheEffective", "NothingFound"), condition("Draining", "NotRequested", "False"),
              condition("Ready", "Serving"), tiers=[{"name": "dram", "type": "HostDRAM", "phase": "Ready"}]),
        thing("KVTenant", "alpha", {}, condition("Accepted", "Accepted"), condition("Ready", "Ready"),
              condition("QuotaEnforced", "Enforced"), condition("OverQuota", "WithinHard", "False"),
              condition("EraseCompleted", "Erased")),
        thing("KVTrustDomain", "lab", {}, condition("Accepted", "Accepted"), condition("Ready", "Ready"),
              condition("MembersAgreed", "Agreed")),
        thing("KVPrefixShare", "prompt", {"poolRef": "demo"}, condition("Accepted", "Accepted"),
              condition("Active", "Granted"), condition("Expired", "NotExpired", "False"),
              condition("ReadersAgreed", "Agreed")),
        thing("KVOperation", "drain", {"poolRef": "demo"}, condition("Accepted", "Accepted"),
              condition("Progressing", "Complete", "False"), condition("Complete", "Done")),
        thing("Deployment", "kvstrata-operator", {}, version="apps/v1", availableReplicas=2),
        thing("Deployment", "kvstrata-metadata", {}, version="apps/v1", availableReplicas=2),
        pod("kvstrata-agent-demo-x", pool="demo"),
        thing("Lease", names.agent_lease_name("demo", "n0"),
              {"renewTime": "2026-11-26T11:59:57.000000Z", "leaseDurationSeconds": 15},
              version="coordination.k8s.io/v1"),
    )  # fmt: skip
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in every}


def seen_in(cluster: dict[str, Json]) -> Seen:
    ours = [one for one in cluster.values() if one["apiVersion"] == names.API_VERSION]
    return Seen(NOW, ours, [one for one in cluster.values() if one["apiVersion"] != names.API_VERSION])


def with_condition(key: str, *new: Json) -> Callable[[dict[str, Json]], None]:
    def seed(cluster: dict[str, Json]) -> None:
        stated = cluster[key]["status"]["conditions"]
        types = {one["type"] for one in new}
        stated[:] = [one for one in stated if one["type"] not in types] + list(new)

    return seed


def unscheduled(cluster: dict[str, Json]) -> None:
    message = "0/3 nodes are available: 3 Insufficient hugepages-2Mi."
    with_condition("Pod/kvstrata-agent-demo-x", condition("PodScheduled", "Unschedulable", "False", message))(cluster)


def unpulled(cluster: dict[str, Json]) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image x"}}
    cluster["Pod/kvstrata-agent-demo-x"]["status"]["containerStatuses"][0]["state"] = waiting


def silent(cluster: dict[str, Json]) -> None:
    """The agent has died, and the operator too, so that nobody says so."""
    cluster[f"Lease/{names.agent_lease_name('demo', 'n0')}"]["spec"]["renewTime"] = "2026-11-26T11:50:00.000000Z"


def without_operator(cluster: dict[str, Json]) -> None:
    del cluster["Deployment/kvstrata-operator"]["status"]["availableReplicas"]


def degraded_tier(cluster: dict[str, Json]) -> None:
    tier = {"name": "nvme", "type": "NVMe", "phase": "Degraded", "lastError": "1 of 2 devices: I/O error"}
    cluster[f"KVPoolNode/{NODE}"]["status"]["tiers"].append(tier)


Fault = tuple[Callable[[dict[str, Json]], None], str, str, str, str]
FAULTS: dict[str, Fault] = {
    "no node has the labels": (
        with_condition("KVPool/demo", condition("Provisioned", "NoMatchingNodes", "False", "no node has the labels"),
                       condition("Ready", "NoMatchingNodes", "False", "no node has the labels")),
        "KVPool demo", "NoMatchingNodes", "no node has the labels", "kubectl label node NODE a=b gpu=yes",
    ),
    "an agent's pod that fits nowhere": (
        unscheduled, "Pod kvstrata-agent-demo-x", "Unschedulable", "Insufficient hugepages-2Mi",
        "kubectl -n kvstrata-system describe pod kvstrata-agent-demo-x",
    ),
    "an image that is not there": (
        unpulled, "Pod kvstrata-agent-demo-x", "ImagePullBackOff", "Back-off pulling image x", "describe pod",
    ),
    "an agent that the operator called silent": (
        with_condition(f"KVPoolNode/{NODE}", condition("AgentConnected", "LeaseExpired", "False", "Lease l"),
                       condition("Ready", "LeaseExpired", "False", "Lease l")),
        f"KVPoolNode {NODE}", "LeaseExpired", "Lease l",
        "pods -l kvstrata.io/pool=demo -o wide --field-selector spec.nodeName=n0",
    ),
    "an agent that nobody called silent": (
        silent, f"KVPoolNode {NODE}", "LeaseExpired", "renewed 600 s ago", "kvstrata.io/pool=demo",
    ),
    "no operator": (
        without_operator, "Deployment kvstrata-operator", "NotAvailable", "no replica is available",
        "describe deployment kvstrata-operator",
    ),
    "a failed tier": (
        with_condition(f"KVPoolNode/{NODE}", condition("TierReady", "TierFailed", "False", "tier nvme: no such path")),
        f"KVPoolNode {NODE}", "TierFailed", "no such path", "logs -l kvstrata.io/pool=demo -c agent",
    ),
    "a degraded tier": (
        degraded_tier, f"KVPoolNode {NODE}", "TierDegraded", "1 of 2 devices: I/O error", "kubectl -n kvstrata-system",
    ),
    "huge pages that the kubelet has not seen": (
        with_condition(f"KVPoolNode/{NODE}", condition("HugepagesReserved", "KubeletStale", "False", "8Gi of 16Gi")),
        f"KVPoolNode {NODE}", "KubeletStale", "8Gi of 16Gi", "restart the kubelet of n0",
    ),
    "a directory that does not answer": (
        with_condition("KVPool/demo", condition("MetadataAvailable", "RedisOutOfMemory", "False", "pod r"),
                       condition("Degraded", "RedisOutOfMemory", "True", "pod r")),
        "KVPool demo", "RedisOutOfMemory", "pod r", "--set redis.memory.max=",
    ),
    "engines that two tenants claim": (
        with_condition("KVTenant/alpha", condition("Accepted", "IdentityConflict", "False", "also by tenant beta"),
                       condition("Ready", "NotAccepted", "False", "the spec is not accepted")),
        "KVTenant alpha", "IdentityConflict", "also by tenant beta", "kubectl edit kvtenant alpha",
    ),
    "a domain of one side": (
        with_condition("KVTrustDomain/lab", condition("MembersAgreed", "OneSided", "False", "beta does not join")),
        "KVTrustDomain lab", "OneSided", "beta does not join", "kubectl edit kvtrustdomain lab",
    ),
    "a share of nobody's namespace": (
        with_condition("KVPrefixShare/prompt", condition("Accepted", "NotGranted", "False", "namespace team"),
                       condition("Active", "NotGranted", "False", "namespace team")),
        "KVPrefixShare team/prompt", "NotGranted", "namespace team", "must claim namespace team",
    ),
    "a roll that does not end": (
        with_condition("KVPool/demo", condition("Ready", "NodesNotUpdated", "False", "2 of 3 nodes")),
        "KVPool demo", "NodesNotUpdated", "2 of 3 nodes", "logs deployment/kvstrata-operator",
    ),
    "a reason of another version": (
        with_condition("KVPool/demo", condition("Provisioned", "Eclipsed", "False", "by the moon")),
        "KVPool demo", "Eclipsed", "by the moon", "kubectl get kvpool demo -o yaml",
    ),
}  # fmt: skip


def test_a_cluster_that_is_well_is_told_nothing() -> None:
    cluster = healthy()
    for one in seen_in(cluster).objects:
        for c in one["status"]["conditions"]:
            assert reasons.find(one["kind"], c["type"], c["status"], c["reason"]), (one["kind"], c)

    assert findings(seen_in(cluster)) == ()


@pytest.mark.parametrize(("seed", "subject", "reason", "message", "mend"), FAULTS.values(), ids=FAULTS.keys())
def test_each_fault_is_named_once_with_what_mends_it(
    seed: Callable[[dict[str, Json]], None], subject: str, reason: str, message: str, mend: str
) -> None:
    cluster = healthy()
    seed(cluster)
    (found,) = findings(seen_in(cluster))

    assert (found.subject, found.reason) == (subject, reason)
    assert message in found.message
    assert mend in found.mend


def test_all_faults_of_different_objects_are_found_together_the_worst_first() -> None:
    cluster = healthy()
    for name, (seed, *_) in FAULTS.items():
        if name not in ("a roll that does not end", "a reason of another version"):
            seed(cluster)
    found = findings(seen_in(cluster))

    assert {"NoMatchingNodes", "LeaseExpired", "NotAvailable", "TierFailed", "TierDegraded"} <= {
        f.reason for f in found
    }
    weights = [one.weight for one in found]
    assert weights == sorted(weights, key=[Weight.BROKEN, Weight.WARNING].index)
    assert list(found) == ordered(reversed(found))


@pytest.mark.parametrize(
    "seed",
    [
        with_condition("KVPool/demo", condition("Ready", "NodesNotUpdated", "False", since=SECONDS_AGO)),
        with_condition("KVOperation/drain", condition("Accepted", "PoolPaused", "False")),
        lambda cluster: cluster["Pod/kvstrata-agent-demo-x"]["metadata"].update(deletionTimestamp=SECONDS_AGO),
        lambda cluster: (cluster["KVTenant/alpha"]["metadata"].update(creationTimestamp=SECONDS_AGO),
                         cluster["KVTenant/alpha"].pop("status")),
    ],
    ids=["a roll that has begun", "an operation that is over", "a pod that goes", "a tenant that was just made"],
)  # fmt: skip
def test_what_passes_is_no_finding(seed: Callable[[dict[str, Json]], None]) -> None:
    cluster = healthy()
    seed(cluster)

    assert findings(seen_in(cluster)) == ()


def test_what_nobody_has_reported_on_and_what_may_not_be_seen_is_said() -> None:
    cluster = healthy()
    del cluster[f"KVPoolNode/{NODE}"]["status"]
    whole = seen_in(cluster)
    (found,) = findings(whole)
    (unseen,) = findings(Seen(NOW, [o for o in whole.objects if o["kind"] != "KVPoolNode"], None))

    assert (found.reason, found.weight) == ("NoReport", Weight.BROKEN)
    assert (unseen.reason, unseen.weight) == ("NotSeen", Weight.WARNING)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AgentAwayError("no such file"), "AgentAway"),
        (UnauthenticatedError("token refused"), "TokenRefused"),
        (ForbiddenError("no tenant"), "NoTenant"),
        (InvalidInputError("layout.dtype: 'fp8', the pool wants 'bf16'"), "LayoutRefused"),
        (UnsupportedError("protocol 9"), "Refused"),
    ],
)
def test_what_keeps_an_engine_away_is_named(error: KvStrataError, reason: str) -> None:
    found = refusal("/run/kvstrata/demo/agent.sock", error)

    assert (found.reason, found.message, found.weight, bool(found.mend)) == (reason, str(error), Weight.BROKEN, True)


def test_wrong_usage_is_no_finding() -> None:
    with pytest.raises(InvalidInputError, match="--layout"):
        refusal("/s", InvalidInputError("--layout FILE is missing"))


@pytest.mark.parametrize("output", ["table", "json"])
def test_without_kubectl_the_agent_alone_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "token").write_text("t")
    socket = str(tmp_path / "no.sock")
    given = ("--socket", socket, "--pool", "p", "--model", "m", "--revision", "r", "--token-file")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *given, str(tmp_path / "token"), "-o", output])
    out = capsys.readouterr().out

    assert ended.value.code == 1
    if output == "json":
        (found,) = json.loads(out)["findings"]
        assert (found["reason"], found["subject"]) == ("AgentAway", f"Agent {socket}")
    else:
        assert "BROKEN  Agent" in out
        assert out.endswith("1 finding\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--socket", "/s"), "--pool"), (("--pool", "p"), "--layout FILE"), (("-o", "xml"), "invalid choice")],
)
def test_wrong_usage_has_a_status_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: Any, said: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    out, err = capsys.readouterr()

    assert (ended.value.code, out, said in err) == (2, "", True), err


def test_the_layout_of_the_pool_is_taken_from_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    compatibility = {"model": "m", "revision": "r", "dtype": "fp16", "blockTokens": 32}
    pool = thing("KVPool", "demo", {"compatibility": compatibility})
    given = Namespace(pool="demo", layout=None, model=None, revision=None, dtype="bf16", block_tokens=16, socket="/s",
                      token_file=Path("/nowhere"))  # fmt: skip
    (found,) = doctor._of_agent(given, [copy.deepcopy(pool)])

    assert (given.model, given.revision, given.dtype, given.block_tokens) == ("m", "r", "fp16", 32)
    assert isinstance(found, Finding)
