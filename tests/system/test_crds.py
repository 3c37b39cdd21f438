"""The CRDs on a real API server: what it accepts, what it refuses, and that it says what our validation says."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings

from controlplane import ApiError, ControlPlane, KubectlError
from kvstrata_api import names
from kvstrata_api.schema_kinds import BY_NAME, KINDS
from kvstrata_api.validate import validate
from support.kube import bad_manifests, manifest_strategies

pytestmark = pytest.mark.system

CRDS = Path(__file__).resolve().parents[2] / "crds"
EXAMPLES = bad_manifests.examples()
GROUP = f"/apis/{names.API_VERSION}"
Json = dict[str, Any]
LEAST = 200
"""Generated bad manifests that the project promises."""


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The shared plane with our CRDs, and the namespace of the one namespaced example."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    ours = [f"crd/{kind.plural}.{names.GROUP}" for kind in KINDS]
    control_plane.kubectl("wait", "--for=condition=Established", *ours, "--timeout=90s")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}}
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(namespace))
    yield control_plane
    for kind in KINDS:
        control_plane.kubectl("delete", kind.plural, "--all", "--all-namespaces" if kind.is_namespaced else "--wait")


def collection(manifest: Json) -> str:
    kind = BY_NAME[manifest["kind"]]
    within = f"namespaces/{manifest['metadata']['namespace']}/" if kind.is_namespaced else ""
    return f"{GROUP}/{within}{kind.plural}"


def refusal(plane: ControlPlane, manifest: Json) -> str | None:
    """What the API server says against a new object; None when it is valid. Nothing is stored."""
    try:
        plane.api.post(f"{collection(manifest)}?dryRun=All&fieldValidation=Strict", manifest)
    except ApiError as e:
        # A valid object may be refused only because another test has stored the one of that name.
        return None if e.reason == "AlreadyExists" else str(e)
    return None


def test_the_api_server_has_nothing_to_say_against_the_definitions(plane: ControlPlane) -> None:
    for kind in KINDS:
        crd = json.loads(plane.kubectl("get", "crd", f"{kind.plural}.{names.GROUP}", "-o", "json"))
        conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
        assert conditions["Established"] == conditions["NamesAccepted"] == "True"
        assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("stem", EXAMPLES)
def test_good_examples_are_accepted_and_stored_as_they_were_written(plane: ControlPlane, stem: str) -> None:
    wanted = EXAMPLES[stem]
    flags = ("--server-side", "--validate=strict", "--force-conflicts", "-o", "json")
    stored = json.loads(plane.kubectl("apply", "-f", "-", *flags, stdin=yaml.safe_dump(wanted)))

    assert stored["spec"] == wanted["spec"], "no default is written into the object"


def test_every_generated_bad_manifest_is_refused_with_our_own_words(plane: ControlPlane) -> None:
    bad = bad_manifests.all_bad()
    assert len(bad) >= LEAST
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda b: refusal(plane, b.manifest), bad))

    assert [b.name for b, s in zip(bad, said, strict=True) if s is None] == []
    assert [(b.name, s) for b, s in zip(bad, said, strict=True) if b.field not in str(s)] == []
    for one, words in zip(bad, said, strict=True):
        for problem in validate(one.manifest):
            assert problem.message in str(words), one.name
            assert problem.field in str(words), one.name


# Not shrunk: each example asks a server, and a variant is small as it is.
@settings(
    max_examples=150,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(manifest_strategies.any_variant)
def test_both_validations_agree_on_whatever_has_the_right_shape(plane: ControlPlane, manifest: Json) -> None:
    ours, theirs = validate(manifest), refusal(plane, manifest)

    assert bool(ours) == (theirs is not None), f"ours: {[str(p) for p in ours]}, theirs: {theirs}"
    for problem in ours:
        assert f"{problem.field}: " in f"{theirs}: "
        assert problem.message in str(theirs)


def update(plane: ControlPlane, stem: str, path: tuple[str | int, ...], value: Any) -> str | None:
    """What the API server says against a change of a stored example; None when it takes it."""
    old = EXAMPLES[stem]
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(old))
    new = bad_manifests.with_value(old, path, value)
    try:
        plane.kubectl("replace", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(new))
    except KubectlError as e:
        said: str | None = str(e)
    else:
        said = None
    ours = [problem.message for problem in validate(new, old)]
    assert bool(ours) == (said is not None)
    assert all(words in str(said) for words in ours)
    return said


TIERS = EXAMPLES["kvpool"]["spec"]["tiers"]


@pytest.mark.parametrize(
    ("stem", "path", "value", "words"),
    [
        ("kvpool", ("spec", "compatibility", "model"), "other", "compatibility is immutable"),
        ("kvpool", ("spec", "compatibility", "blockTokens"), 32, "compatibility is immutable"),
        ("kvpool", ("spec", "compatibility", "blockTokens"), bad_manifests.GONE, None),
        ("kvpool", ("spec", "tiers"), [{**TIERS[1], "name": "dram"}], "type of an existing tier is immutable"),
        ("kvpool", ("spec", "tiers"), [{**TIERS[1], "name": "fast"}, TIERS[0]], None),
        ("kvpool", ("spec", "tiers", 0, "capacityPerNode"), "32Gi", None),
        ("kvpoolnode", ("spec", "nodeName"), "worker-2", "metadata.name must be"),
        ("kvtrustdomain", ("spec", "keyVersion"), 2, None),
        ("kvtrustdomain", ("spec", "publishers"), ["team-z"], "publishers must be among tenants"),
        ("kvprefixshare", ("spec", "poolRef"), "other", "poolRef is immutable"),
        ("kvprefixshare", ("spec", "prefixes", 0, "digest"), "0" * 64, "prefixes are immutable"),
        ("kvprefixshare", ("spec", "prefixes", 0, "tokenCount"), 7, "prefixes are immutable"),
        ("kvprefixshare", ("spec", "to"), [{"tenant": "team-d"}], None),
        ("kvprefixshare", ("spec", "expiresAt"), "2028-01-01T00:00:00Z", None),
    ],
)
def test_an_update_is_refused_when_it_would_mix_incompatible_blocks(
    plane: ControlPlane, stem: str, path: tuple[str | int, ...], value: Any, words: str | None
) -> None:
    said = update(plane, stem, path, value)

    assert said is None if words is None else words in str(said)


def test_a_key_version_never_goes_down(plane: ControlPlane) -> None:
    domain = bad_manifests.with_value(EXAMPLES["kvtrustdomain"], ("metadata", "name"), "versioned")
    plane.api.post(collection(domain), domain)
    patch = '{"spec":{"keyVersion":%d}}'
    plane.kubectl("patch", "kvtd", "versioned", "--type=merge", "-p", patch % 3)
    with pytest.raises(KubectlError, match=r"spec\.keyVersion.*keyVersion must not go down"):
        plane.kubectl("patch", "kvtd", "versioned", "--type=merge", "-p", patch % 2)
    with pytest.raises(KubectlError, match="keyVersion must not go down"):
        plane.kubectl("patch", "kvtd", "versioned", "--type=json", "-p", '[{"op":"remove","path":"/spec/keyVersion"}]')


STATUSES: dict[str, tuple[Json, list[str], list[str]]] = {
    "kvpools/llama-70b": (
        {"nodesReady": "12/12", "usedOfCapacity": "1.2Ti/3Ti", "hitPercent": 87, "tenants": 4},
        ["NAME", "READY", "NODES", "USED/CAP", "HIT%", "TENANTS", "AGE"],
        ["llama-70b", "True", "12/12", "1.2Ti/3Ti", "87", "4"],
    ),
    "kvpoolnodes/llama-70b.worker-1": (
        {"tiers": [{"name": "dram", "type": "HostDRAM", "usedOfCapacity": "12Gi/64Gi"}]},
        ["NAME", "NODE", "READY", "HBM", "DRAM", "CXL", "NVME", "HEARTBEAT", "AGE"],
        ["llama-70b.worker-1", "worker-1", "True", "12Gi/64Gi", "True"],
    ),
    "kvtenants/team-a": (
        {"effectiveDomain": "research", "quota": "2Ti", "used": "1.2Ti", "hitPercent": 64, "denied": 30},
        ["NAME", "READY", "DOMAIN", "QUOTA", "USED", "HIT%", "DENIED", "AGE"],
        ["team-a", "True", "research", "2Ti", "1.2Ti", "64", "30"],
    ),
    "kvtrustdomains/research": (
        {"keyVersion": 5},
        ["NAME", "READY", "SHARING", "KEY", "AGE"],
        ["research", "All", "5"],
    ),
}


@pytest.mark.parametrize("resource", STATUSES)
def test_columns_show_what_the_conventions_promise(plane: ControlPlane, resource: str) -> None:
    status, header, cells = STATUSES[resource]
    for example in CRDS.glob("examples/*.yaml"):
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(example))
    said = {"status": "True", "reason": "Fine", "message": "all well", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    full = status | {"conditions": [{"type": t} | said for t in ("Ready", "AgentConnected")]}
    body = json.dumps({"status": full})
    plane.kubectl("patch", resource, "--type=merge", "--subresource=status", "-p", body)

    shown = plane.kubectl("get", resource).splitlines()
    assert shown[0].split() == header
    assert [cell for cell in cells if cell not in shown[1].split()] == []
    assert "all well" in plane.kubectl("get", resource, "-o", "wide")
    assert plane.kubectl("wait", "--for=condition=Ready", resource, "--timeout=5s")


def test_the_wide_columns_of_a_pool_show_evictions_and_the_backlog(plane: ControlPlane) -> None:
    for example in CRDS.glob("examples/*.yaml"):
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(example))
    body = json.dumps({"status": {"evictionsPerSecond": "1.5", "gcBacklog": 352}})
    plane.kubectl("patch", "kvpools/llama-70b", "--type=merge", "--subresource=status", "-p", body)
    columns, cells = plane.kubectl("get", "kvpools/llama-70b", "-o", "wide").splitlines()

    assert {"POLICY", "EVICT/S", "GC-BACKLOG"} <= set(columns.split())
    assert {"1.5", "352"} <= set(cells.split())


def test_short_names_and_the_category_find_the_objects(plane: ControlPlane) -> None:
    for example in CRDS.glob("examples/*.yaml"):
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(example))
    for kind in KINDS:
        flags = ("-n", "team-a") if kind.is_namespaced else ()
        assert kind.name.lower() in plane.kubectl("get", kind.short, "-o", "name", *flags)

    everything = plane.kubectl("get", names.CATEGORY, "-o", "name", "-n", "team-a")
    assert {line.partition(".")[0] for line in everything.split()} == {kind.name.lower() for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_explain_describes_every_field(plane: ControlPlane, kind: Any) -> None:
    said = plane.kubectl("explain", kind.plural, "--recursive=false")
    assert "<no description>" not in said.lower()
    fields = plane.kubectl("explain", f"{kind.plural}.spec")

    assert "<no description>" not in fields.lower()
    assert "DESCRIPTION:" in fields
    assert "Default: 92." in plane.kubectl("explain", "kvpool.spec.policy.eviction.highWatermarkPercent")


def test_a_status_has_two_writers_and_neither_loses_the_others_conditions(plane: ControlPlane) -> None:
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS / "examples/kvpoolnode.yaml"))
    base = {"status": "True", "reason": "Fine", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}

    def apply(manager: str, type_: str) -> None:
        body = {key: EXAMPLES["kvpoolnode"][key] for key in ("apiVersion", "kind")}
        body |= {"metadata": {"name": "llama-70b.worker-1"}, "status": {"conditions": [base | {"type": type_}]}}
        flags = ("--server-side", "--subresource=status", f"--field-manager={manager}", "--force-conflicts")
        plane.kubectl("apply", "-f", "-", *flags, stdin=json.dumps(body))

    apply("kvstrata-agent", "TierReady")
    apply("kvstrata-operator", "Fenced")
    stored = json.loads(plane.kubectl("get", "kvpn", "llama-70b.worker-1", "-o", "json"))
    assert {"TierReady", "Fenced"} <= {c["type"] for c in stored["status"]["conditions"]}


@pytest.mark.parametrize(
    ("resource", "status", "field"),
    [
        ("kvpoolnodes/llama-70b.worker-1", {"epoch": -1}, "status.epoch"),
        ("kvpoolnodes/llama-70b.worker-1", {"agentVersion": "x" * 65}, "status.agentVersion"),
        ("kvpools/llama-70b", {"hitPercent": 101}, "status.hitPercent"),
        ("kvpools/llama-70b", {"conditions": [{"type": "Ready", "status": "Maybe", "reason": "R"}]}, "status"),
    ],
)
def test_a_status_out_of_bounds_is_refused_by_name(
    plane: ControlPlane, resource: str, status: Json, field: str
) -> None:
    for example in CRDS.glob("examples/*.yaml"):
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(example))
    with pytest.raises(KubectlError, match=field):
        plane.kubectl("patch", resource, "--type=merge", "--subresource=status", "-p", json.dumps({"status": status}))
