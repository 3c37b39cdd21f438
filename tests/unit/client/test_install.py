"""`kvstrata install --check`: each thing that is in the way is found, named and mended, and nothing else is."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import schema
from kvstrata_api.schema_kinds import KINDS
from kvstrata_client.cli import parser
from kvstrata_client.commands.install import Release, Seen, findings, merged
from support.kube.chart_values import QUICKSTART

pytestmark = pytest.mark.unit

Json = dict[str, Any]
GOOD: Json = {"agent": {"image": {"digest": "sha256:" + "1" * 64}, "hostPaths": {"create": True}}}


def node(name: str = "n0", *, pages: str = "64Gi", taints: tuple[Json, ...] = (), **labels: str) -> Json:
    offered = {"cpu": "8", "memory": "64Gi", "hugepages-2Mi": pages}
    metadata = {"name": name, "labels": {"kubernetes.io/os": "linux", **labels}}
    return {"metadata": metadata, "spec": {"taints": list(taints)}, "status": {"allocatable": offered}}


def pool(selector: dict[str, str] | None = None, page: str | None = "2Mi", size: str = "1Gi", **more: Any) -> Json:
    tier: Json = {"name": "dram", "type": "HostDRAM", "capacityPerNode": size}
    if page is not None:
        tier["hostDRAM"] = {"pageSize": page}
    labels = {"kubernetes.io/os": "linux"} if selector is None else selector
    return {"kind": "KVPool", "metadata": {"name": "p"}, "spec": {"nodeSelector": labels, "tiers": [tier], **more}}


def crd(number: int = 0, *, owner: str = "kvstrata", namespace: str = "kvstrata-system") -> Json:
    made = copy.deepcopy(schema.crd(KINDS[number]))
    if owner:
        annotations = {"meta.helm.sh/release-name": owner, "meta.helm.sh/release-namespace": namespace}
        made["metadata"]["annotations"] = annotations
    return made


def found(values: Json | None = None, pools: tuple[Json, ...] = (), **seen: Any) -> list[tuple[str, str, str, str]]:
    cluster = Seen(**{"server": (1, 34), "nodes": [node()], **seen})
    told = findings(cluster, Release("kvstrata-system", GOOD if values is None else values), pools)
    return [("FAIL" if one.is_failure else "note", one.subject, one.what, one.mend) for one in told]


def space(level: str) -> Json:
    return {"metadata": {"name": "kvstrata-system", "labels": {"pod-security.kubernetes.io/enforce": level}}}


def test_a_cluster_that_is_ready_is_told_nothing() -> None:
    ours = [crd(number) for number in range(len(KINDS))]

    assert found(pools=(pool(),), crds=ours, namespace=space("privileged")) == []
    assert [level for level, *_ in found(QUICKSTART)] == ["note"], "the tag of the agents' image"


def with_field(crd_: Json, field: str) -> Json:
    spec = crd_["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"][field] = {"type": "string"}
    return crd_


def without_field(crd_: Json) -> Json:
    spec = crd_["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"].pop(min(spec["properties"]))
    return crd_


VOLUME: Json = {**GOOD, "redis": {"persistence": {"enabled": True}}}
TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
CASES: dict[str, tuple[Json, str, str, str]] = {
    "an old API server": ({"server": (1, 29)}, "API server", "is 1.29, the chart needs 1.30", "upgrade the cluster"),
    "no rights": ({"forbidden": ("namespaces",)}, "rights", "may not create namespaces", "cluster-admin"),
    "a foreign definition": ({"crds": [crd(owner="")]}, "CRD kv", "no release's", "kubectl annotate --overwrite crd"),
    "another release's": ({"crds": [crd(namespace="x")]}, "CRD kv", "of release kvstrata in x", "kubectl label"),
    "a newer definition": (
        {"crds": [with_field(crd(), "later")]}, "CRD kv", "newer version: spec.later would", "crds.install=false"
    ),
    "an older one that others upgrade": (
        {"crds": [without_field(crd())], "values": {**GOOD, "crds": {"install": False}}},
        "CRD kv", "is of an older version: it lacks spec.", "kubectl apply --server-side",
    ),
    "restricted pods": (
        {"namespace": space("restricted")}, "namespace kvstrata-system", "level restricted", "=privileged"
    ),
    "no digest": ({"values": {}}, "agents", "no KVPool gets agents", "admissionPolicies.agentImages=Tag"),
    "no digest of node preparation": (
        {"values": {**GOOD, "nodePreparation": {"enabled": True}}},
        "node preparation", "no digest", "nodePreparation.image",
    ),
    "no default class": ({"values": VOLUME}, "Redis", "no StorageClass is the default", "persistence.enabled=false"),
    "no such class": (
        {"values": merged([VOLUME, {"redis": {"persistence": {"storageClassName": "fast"}}}])},
        "Redis", "StorageClass fast is not there; there is none", "storageClassName=NAME",
    ),
    "no node": ({"pools": (pool({"a": "b"}),)}, "KVPool p", "no node has the labels a=b", "label node NODE a=b"),
    "a taint": (
        {"pools": (pool(),), "nodes": [node(taints=(TAINT,))]}, "KVPool p", "taint gpu:NoSchedule", "tolerations"
    ),
    "no memory": (
        {"pools": (pool(page="4Ki", size="128Gi"),)}, "KVPool p", "have less than 128Gi of memory: n0", "smaller"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given_", "subject", "what", "mend"), CASES.values(), ids=CASES.keys())
def test_what_will_not_work_is_named_with_what_mends_it(given_: Json, subject: str, what: str, mend: str) -> None:
    ((level, told_subject, told_what, told_mend), *more) = found(**given_)

    assert (level, [one for one in more if one[0] == "FAIL"]) == ("FAIL", [])
    assert told_subject.startswith(subject)
    assert what in told_what
    assert mend in told_mend


@pytest.mark.parametrize(
    ("given_", "what"),
    [
        ({"pools": (pool(),), "nodes": [node(pages="0")]}, "agents there have pages of 4Ki"),
        ({"pools": (pool(page=None),), "nodes": [node(pages="0")]}, "hugepages-2Mi: n0; agents there"),
        ({"values": {"agent": {"image": {"digest": "sha256:" + "1" * 64}}}}, "have to be there on each node"),
    ],
)
def test_what_works_otherwise_than_one_may_expect_is_a_note(given_: Json, what: str) -> None:
    ((level, _, told, mend),) = found(**given_)

    assert (level, what in told, bool(mend)) == ("note", True, True)


@pytest.mark.parametrize(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": "gpu", "operator": "Exists"},
        {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
    ],
)
def test_a_taint_that_is_tolerated_is_nothing(toleration: Json) -> None:
    assert found(pools=(pool(tolerations=[toleration]),), nodes=[node(taints=(TAINT,))]) == []


def test_a_default_class_serves() -> None:
    marked = {"storageclass.kubernetes.io/is-default-class": "true"}

    assert found(VOLUME, storage_classes=[{"metadata": {"name": "fast", "annotations": marked}}]) == []


trees = st.recursive(
    st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)


@given(st.dictionaries(st.sampled_from("abc"), trees, max_size=3), st.dictionaries(st.sampled_from("abc"), trees))
def test_later_values_win_and_keep_what_they_do_not_name(first: Json, second: Json) -> None:
    both = merged([first, second])

    assert merged([both, second]) == both == merged([first, both])
    assert both.keys() == first.keys() | second.keys()


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["install"])
    assert "--check" in capsys.readouterr().err
