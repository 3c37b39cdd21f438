"""`kvstrata status`, `tenants` and `models`: what is declared, what became of it, and an exit status for scripts."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from kvstrata_api import names
from kvstrata_client.cli import main
from kvstrata_client.commands import doctor, status
from kvstrata_client.commands.doctor import Seen
from kvstrata_client.commands.kubectl import Kubectl

pytestmark = pytest.mark.unit

Json = dict[str, Any]
NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)
LONG_AGO = "2026-11-20T08:00:00Z"
GIB = 1 << 30


def declared(kind: str, name: str, spec: Json, *, namespace: str = "", **stated: Any) -> Json:
    metadata = {"name": name, "uid": f"uid-{name}", "creationTimestamp": LONG_AGO}
    metadata |= {"namespace": namespace} if namespace else {}
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec, "status": stated}


def says(type_: str, reason: str, status_: str = "True", message: str = "") -> Json:
    return {"type": type_, "status": status_, "reason": reason, "message": message, "lastTransitionTime": LONG_AGO}


def deployment(name: str, available: int, wanted: int) -> Json:
    metadata = {"name": name, "namespace": names.SYSTEM_NAMESPACE, "creationTimestamp": LONG_AGO}
    stated = {"availableReplicas": available}
    return {"kind": "Deployment", "metadata": metadata, "spec": {"replicas": wanted}, "status": stated}


def lease(node_name: str) -> Json:
    metadata = {"name": names.agent_lease_name("demo", node_name), "creationTimestamp": LONG_AGO}
    return {"kind": "Lease", "metadata": metadata, "spec": {"renewTime": NOW.isoformat(), "leaseDurationSeconds": 15}}


def node(name: str, used: int, *, ready: Json | None = None) -> Json:
    tier = {
        "name": "dram",
        "type": "HostDRAM",
        "phase": "Ready",
        "capacityBytes": 2 * GIB,
        "usedBytes": used,
        "blocks": 7,
    }
    spec = {"poolRef": "demo", "nodeName": name}
    conditions = [ready or says("Ready", "Serving"), says("AgentConnected", "Serving")]
    return declared("KVPoolNode", f"demo.{name}", spec, conditions=conditions, tiers=[tier], agentVersion="0.1.0")


def cluster() -> list[Json]:
    pool = {
        "compatibility": {"model": "m"},
        "tiers": [{"name": "dram", "type": "HostDRAM", "capacityPerNode": "2Gi"}],
    }
    return [
        declared("KVPool", "demo", pool, conditions=[says("Ready", "AllNodesReady")], nodes={"matched": 2, "ready": 2},
                 tiers=[{"name": "dram", "capacity": "4Gi", "used": "1.5Gi"}], hitPercent=61, tenants=2),
        node("n0", GIB), node("n1", GIB // 2),
        declared("KVTenant", "alpha", {"weight": 200, "trustDomain": "lab"}, conditions=[says("Ready", "Ready")],
                 used="1.5Gi", quota="2Gi", effectiveDomain="lab", keyVersion=3,
                 usage=[{"poolRef": "demo", "tier": "dram", "used": "1.5Gi"}]),
        declared("KVTenant", "beta", {"namespaceSelector": {"matchLabels": {"of": "beta"}}},
                 conditions=[says("Ready", "Ready")], keyVersion=1),
        declared("KVTrustDomain", "lab", {"tenants": ["alpha", "beta"], "sharing": "All"},
                 conditions=[says("Ready", "Ready")], members=["alpha"]),
        share("prompt", {"domain": "lab"}, says("Active", "Granted")),
        share("over", {"tenant": "alpha"}, says("Active", "Expired", "False"), says("Expired", "Expired"),
              until=LONG_AGO),
        declared("KVOperation", "drain", {"type": "Drain", "poolRef": "demo"}, state="Progressing", summary="1/2 nodes",
                 conditions=[says("Progressing", "Running")]),
        declared("KVOperation", "done", {"type": "Flush", "poolRef": "demo"}, state="Complete",
                 conditions=[says("Complete", "Done")]),
        weights("llama", "v2", [says("Staged", "Staging", "False", "1 of 2 nodes have revision v2")]),
    ]  # fmt: skip


def share(name: str, to: Json, *conditions: Json, until: str | None = None) -> Json:
    """Of a namespace of beta's."""
    prefixes = [{"digest": "ab" * 32, "tokenCount": 64}]
    spec = {"poolRef": "demo", "prefixes": prefixes, "to": [to]} | ({"expiresAt": until} if until else {})
    return declared("KVPrefixShare", name, spec, namespace="team", conditions=list(conditions))


def weights(name: str, revision: str, conditions: list[Json], **stated: Any) -> Json:
    spec = {"poolRef": "demo", "source": {"url": "s3://m/llama"}, "revision": revision}
    stated = {"sizeBytes": 3 * GIB, "summary": "1/2 nodes, 75%", "nodesInUse": 1, "tier": "nvme", **stated}
    made = declared("KVModelCache", name, spec, conditions=conditions, **stated)
    return made | {"metadata": made["metadata"] | {"uid": f"uid-{name}"}}


NAMESPACES = [{"kind": "Namespace", "metadata": {"name": "team", "labels": {"of": "beta"}}}]
PARTS = [deployment("kvstrata-operator", 1, 1), deployment("kvstrata-metadata", 2, 2), lease("n0"), lease("n1")]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command prints, and its exit status, of a cluster."""
    objects, parts, namespaces = cluster(), list(PARTS), [*NAMESPACES]
    monkeypatch.setattr(Kubectl, "of", classmethod(lambda cls, *_: cls(("kubectl",))))

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        return int(end.value.code or 0), "".join(capsys.readouterr())

    def observe(_: Kubectl, namespace: str) -> Seen:
        return Seen(NOW, objects, parts, namespace, call.namespaces)  # type: ignore[attr-defined]

    call.objects, call.parts, call.namespaces = objects, parts, namespaces  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor, "observe", observe)
    return call


def test_a_cluster_that_is_well_is_told_in_a_page(shown: Any) -> None:
    code, out = shown("status")

    lines = out.splitlines()
    assert lines[0] == "kvstrata-system: operator 1/1, metadata 2/2"
    assert lines[3].split() == ["demo", "yes", "2/2", "1.5Gi", "(37", "%)", "61", "%", "-", "2", "m"]
    assert lines[6].split() == ["demo", "dram", "HostDRAM", "4Gi", "4Gi", "1.5Gi", "(37", "%)"]
    assert "2 tenants (2 Ready), 1 trust domains, 1 of 2 shares active" in lines
    assert [line.split()[0] for line in lines if "Drain" in line or "Flush" in line] == ["drain"], "only what runs"
    assert (code, "0 broken" in lines[-1]) == (0, True)


def test_its_answer_is_for_programs_too(shown: Any) -> None:
    code, out = shown("status", "-o", "json")

    at = json.loads(out)
    assert (code, at["findings"]["broken"]) == (0, 0)
    sizes = {"wantedBytes": 4 * GIB, "capacityBytes": 4 * GIB, "usedBytes": 3 * GIB // 2}
    assert at["pools"][0]["tiers"] == [{"name": "dram", "type": "HostDRAM", **sizes}]
    assert [(n["node"], n["tiers"][0]["blocks"]) for n in at["nodes"]] == [("n0", 7), ("n1", 7)]
    assert shown("status", "-o", "name") == (0, "demo\n")


@pytest.mark.parametrize("what", ["pool", "node", "operator", "nothing"])
def test_the_exit_status_is_one_when_something_is_broken(shown: Any, what: str) -> None:
    if what == "pool":
        shown.objects[0]["status"]["conditions"] = [says("Ready", "NoNodes", "False", "no node matches")]
    elif what == "node":
        shown.objects[1]["status"]["conditions"][1] = says("AgentConnected", "LeaseExpired", "False", "silent for 60 s")
    elif what == "operator":
        shown.parts[0]["status"]["availableReplicas"] = 0
    else:
        shown.objects.clear()
    code, out = shown("status")

    assert code == 1
    assert {"pool": "demo: no node matches", "nothing": "no KVPool is declared"}.get(what, "doctor names them") in out


def test_tenants_stand_in_a_table(shown: Any) -> None:
    code, out = shown("tenants")

    _, alpha, beta = (line.split() for line in out.splitlines())
    assert alpha == ["alpha", "yes", "1.5Gi", "2Gi", "-", "0", "200", "lab", "v3", "0"], "it does not accept any"
    assert beta == ["beta", "yes", "0", "-", "-", "0", "100", "-", "v1", "0"]
    assert code == 0


def test_one_tenant_has_its_bytes_and_what_it_reads(shown: Any) -> None:
    next(o for o in shown.objects if o["metadata"]["name"] == "alpha")["spec"]["acceptSharesFrom"] = ["beta"]
    code, out = shown("tenants", "alpha")

    assert code == 0
    assert "reads the shares team/prompt" in out.splitlines()
    assert "shares its domain with none; kvstrata who-can-read --domain lab" in out.splitlines()
    assert out.splitlines()[-1].split() == ["demo", "dram", "1.5Gi"]


def test_what_a_tenant_reads_is_not_guessed(shown: Any) -> None:
    shown.namespaces = None

    assert shown("tenants")[1].splitlines()[1].split()[-1] == "-"
    assert "reads shares that are not known" in shown("tenants", "alpha")[1]
    assert json.loads(shown("tenants", "alpha", "-o", "json")[1])["readsShares"] is None


def test_an_unknown_tenant_is_named_with_those_that_there_are(shown: Any) -> None:
    assert shown("tenants", "gamma") == (1, "kvstrata: tenant 'gamma': the cluster has alpha, beta\n")


def test_a_tenant_that_is_not_ready_says_why(shown: Any) -> None:
    shown.objects[4]["status"]["conditions"] = [says("Ready", "NotAccepted", "False", "it claims what alpha claims")]

    code, out = shown("tenants", "beta")
    assert (code, "NotAccepted: it claims what alpha claims" in out.splitlines()) == (1, True)
    assert status.overview(Seen(NOW, shown.objects, shown.parts, "x"))["tenants"][1]["reason"] == "NotAccepted"


def test_a_pool_that_says_the_least_is_shown_with_what_that_means(shown: Any) -> None:
    shown.objects[0]["spec"] = {"tiers": [{"type": "HostDRAM", "capacityPerNode": "2Gi"}]}

    (pool,) = json.loads(shown("status", "-o", "json")[1])["pools"]
    assert (pool["model"], [tier["name"] for tier in pool["tiers"]]) == ("*", ["dram"])
    assert pool["tiers"][0]["usedBytes"] == 3 * GIB // 2


def test_a_process_outside_of_the_chart_is_known_by_its_leader_s_lease(shown: Any) -> None:
    held = {"renewTime": NOW.isoformat(), "leaseDurationSeconds": 10}
    of_operator = {"kind": "Lease", "metadata": {"name": "kvstrata-operator"}, "spec": held}
    shown.parts[:] = [lease("n0"), lease("n1"), of_operator]
    code, out = shown("status")

    assert out.splitlines()[0] == "kvstrata-system: operator leads, outside of the chart"
    assert (code, out.splitlines()[-1].startswith("0 broken, ")) == (0, True)
    held["renewTime"] = LONG_AGO
    code, out = shown("status")
    assert (code, out.splitlines()[0]) == (1, "kvstrata-system: none")


def test_weights_are_listed_with_what_is_missing(shown: Any) -> None:
    code, out = shown("models")

    head, row = out.splitlines()
    assert head.split() == ["MODEL", "POOL", "REVISION", "SIZE", "NODES", "STATE", "IN", "USE"]
    assert row.split() == ["llama", "demo", "v2", "3Gi", "1/2", "nodes,", "75%", "Staging", "1"]
    assert code == 1
    assert "llama  demo" in shown("status")[1]


def test_one_of_them_is_told_node_by_node(shown: Any) -> None:
    stranger = {"name": "llama", "uid": "uid-before", "revision": "v0", "state": "Staged"}
    for subject in shown.objects:
        if subject["kind"] == "KVPoolNode" and subject["spec"]["nodeName"] == "n1":
            sizes = {"sizeBytes": 4 * GIB, "stagedBytes": GIB, "peerBytes": GIB}
            report: Json = {
                "name": "llama",
                "uid": "uid-llama",
                "revision": "v2",
                "state": "Staging",
                "reason": "Retrying",
            }
            report |= sizes | {"path": "/d/kvstrata-models/llama/v2"}
            subject["status"]["models"] = [stranger, report]
    code, out = shown("models", "llama")

    lines = out.splitlines()
    row = ["n1", "v2", "Staging", "Retrying", "1Gi", "(25", "%)", "0", "1Gi", "0", "no", "/d/kvstrata-models/llama/v2"]
    assert (code, lines[-1].split()) == (1, row)
    assert "Staging: 1 of 2 nodes have revision v2" in lines
    assert json.loads(shown("models", "llama", "-o", "json")[1])["nodes"][0]["peerBytes"] == GIB
    assert shown("models", "-o", "name")[1] == "llama\n"
    code, out = shown("models", "other")
    assert (code, "the cluster has llama" in out) == (1, True)


def test_weights_that_are_everywhere_are_a_success(shown: Any) -> None:
    shown.objects[:] = [weights("llama", "v2", [says("Staged", "Staged")], summary="2/2 nodes")]
    assert shown("models")[0] == 0
