"""T15: over-privileged manifests and bad custom resources are not admitted, and rights are those of docs/rights.md.

All of it is asked of a real API server that has the chart's definitions, rights and policies. Controls: the good
manifest that each bad one was made from is admitted, and without its binding a policy would refuse nothing.
"""

import json
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import yaml

from checks import rights, rights_used
from controlplane import ControlPlane, start
from controlplane.waiting import wait_until
from kvstrata_api import names
from kvstrata_api.schema_kinds import BY_NAME
from support.kube import bad_manifests
from support.kube.chart_agents import daemon_set, redis_set, template_of
from support.runner.outcome import Outcome, Scale
from threats import admission_cases
from threats.admission_cases import secret
from threats.admission_request import CREATOR, FORBIDDEN, GROUP, OPERATIVE, PLAIN, ROOT, SHARER, Case, custom, share

BAD: Final = 220
"""Bad custom resources of a short run; the table asks for 200."""
_THREADS: Final = 2
_ENFORCED_S: Final = 90.0
_PEOPLE: Final = {
    ROOT: ("cluster-admin", ""),
    CREATOR: ("test-creator", ""),
    SHARER: ("test-sharer", ""),
    OPERATIVE: ("test-operative", ""),
}
_ENFORCE: Final = "pod-security.kubernetes.io/enforce"
Json = dict[str, Any]


def run(scale: Scale) -> Outcome:
    """Ask everything of one control plane."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-t15-") as folder,
        start(Path(folder) / "plane", kwok=False) as plane,
    ):
        settings = {"admissionPolicies.tenantHostPaths": "{/models}", "podSecurity.enforce": "restricted"}
        rights.prepare(plane, rights.render(**rights.NODE_PREPARATION, **settings))
        _populate(plane)
        found = [*_drift(plane), *rights_used.unjustified(rights.granted(plane)), *_pod_security(plane)]
        _wait_for_policies(plane)
        cases = admission_cases.cases()
        said = _ask(plane, cases)
        found += [v for case, words in zip(cases, said, strict=True) if (v := _judge(case, words))]
        found += [f"policy {name} refuses nothing, or is not described" for name in _idle(plane, said)]
        bad = bad_manifests.all_bad()
        bad = bad[:: scale.of(1, max(1, len(bad) // BAD))]
        found += [f"admitted: {b.name}" for b, words in zip(bad, _refusals(plane, bad), strict=True) if not words]
        is_caught = _is_admitted_without_binding(plane)
    refused = sum(bool(case.words) for case in cases)
    is_caught = is_caught and 0 < refused < len(cases)
    values = {"requests": len(cases), "must_be_refused": refused, "bad_resources": len(bad)}
    return Outcome(len(bad) + len(cases), "manifests and requests", tuple(found), is_caught, values)


def _drift(plane: ControlPlane) -> Iterator[str]:
    told, kept = rights.page(plane).splitlines(), rights.PAGE.read_text(encoding="utf-8").splitlines()
    for line in sorted({*told} ^ {*kept}):
        yield f"{'granted, not in' if line in told else 'only in'} docs/rights.md: {line}"


def _populate(plane: ControlPlane) -> None:
    """Make what requests are about: labelled namespaces, people, and one object of each kind."""
    labels = {"kvstrata.io/tenant": rights.TEAM, "kvstrata.io/trust-domain": "research"}
    pools = {"kvstrata.io/pools": "llama-70b, other"}
    plane.api.patch(f"/api/v1/namespaces/{rights.TEAM}", {"metadata": {"labels": labels, "annotations": pools}})
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": PLAIN}})
    made = [*_roles(), *_objects()]
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(made))


def _roles() -> Iterator[Json]:
    api = "rbac.authorization.k8s.io"
    writes = ["get", "create", "update", "patch"]
    rules = {
        "test-creator": [
            {
                "apiGroups": [names.GROUP],
                "resources": ["kvtenants", "kvtrustdomains", "kvoperations", "kvmodelcaches"],
                "verbs": writes,
            },
        ],
        "test-operative": [
            {"apiGroups": [names.GROUP], "resources": ["kvoperations", "kvmodelcaches"], "verbs": writes},
            {
                "apiGroups": [names.GROUP],
                "resources": ["kvpools"],
                "resourceNames": ["llama-70b"],
                "verbs": ["operate"],
            },
        ],
        "test-sharer": [
            {"apiGroups": [names.GROUP], "resources": ["kvprefixshares"], "verbs": writes},
            {"apiGroups": [names.GROUP], "resources": ["kvtenants"], "resourceNames": ["team-b"], "verbs": ["share"]},
        ],
    }
    for name, granted in rules.items():
        yield {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": granted}
    for user, (role, _) in _PEOPLE.items():
        yield {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"test-{user}"},
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
        }


def _objects() -> Iterator[Json]:
    yield bad_manifests.examples()["kvpool-minimal"] | {"metadata": {"name": "llama-70b"}}
    tiers = [{"name": "dram", "type": "HostDRAM", "capacityBytes": 1 << 30, "hostDRAM": {}}]
    node = {"poolRef": "llama-70b", "nodeName": "worker-1", "tiers": tiers, "revision": "r"}
    yield custom("KVPoolNode", "llama-70b.worker-1", node)
    yield custom("KVOperation", "stored", {"type": "Flush", "poolRef": "llama-70b", "flush": {}})
    weights = {"poolRef": "other", "source": {"url": "s3://m"}, "revision": "v1"}
    yield custom("KVModelCache", "stored", weights, finalizers=["foregroundDeletion"])
    yield {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker-1", "labels": {"zone": "a"}}}
    yield custom("KVTenant", rights.TEAM, {"serviceAccounts": [{"namespace": rights.TEAM, "name": "engine"}]})
    yield custom("KVTrustDomain", "research", {"tenants": [rights.TEAM]})
    yield share({"domain": "research"}, name="stored")
    yield share({"tenant": "team-b"}, name="consented")
    yield share({"domain": "research"}, name="theirs", namespace=rights.OTHER_TEAM)
    leader = {"name": names.FIELD_MANAGER_OPERATOR, "namespace": rights.SYSTEM, "finalizers": ["foregroundDeletion"]}
    yield {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": leader}
    for made in (secret(names.scope_secret_name("tenant", rights.TEAM), scope="tenant"), secret("plain")):
        yield made | {"metadata": made["metadata"] | {"namespace": rights.SYSTEM}}


def _wait_for_policies(plane: ControlPlane) -> None:
    """The API server takes policies up a moment after they are stored: wait until each has refused something."""
    first: dict[str, Case] = {}
    for case in admission_cases.cases():
        if case.words and case.words not in {FORBIDDEN, "Invalid"}:
            first.setdefault(case.words, case)
    permitted: dict[str, Case] = {}
    for case in admission_cases.cases():
        if not case.words:  # Who may do something may do so once the API server has heard of the binding.
            permitted.setdefault(case.who, case)
    refused, allowed = list(first.values()), list(permitted.values())
    wait_until(lambda: all(_ask(plane, refused)) and not any(_ask(plane, allowed)), _ENFORCED_S)


def _ask(plane: ControlPlane, cases: list[Case]) -> list[str]:
    """What the API server says against each request; empty when it is admitted."""
    said: dict[int, str] = {}
    for who in dict.fromkeys(case.who for case in cases):
        mine = [i for i, case in enumerate(cases) if case.who == who]
        requests = [(cases[i].method, cases[i].path, cases[i].body, cases[i].content_type) for i in mine]
        errors = plane.api.acting_as(who).refusals(requests)
        said |= {i: str(error or "") for i, error in zip(mine, errors, strict=True)}
    return [said[i] for i in range(len(cases))]


def _said(plane: ControlPlane, case: Case) -> str:
    return _ask(plane, [case])[0]


def _judge(case: Case, said: str) -> str:
    if not case.words:
        return f"refused, and should not be: {case.name}: {said[:200]}" if said else ""
    if not said:
        return f"admitted: {case.name}"
    return "" if case.words in said else f"refused for another reason: {case.name}: {said[:300]}"


def _idle(plane: ControlPlane, said: list[str]) -> set[str]:
    """Policies of the chart that refused none of the requests, and those that docs/isolation.md does not name."""
    stored = plane.api.get("/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies")["items"]
    policies = {policy["metadata"]["name"] for policy in stored}
    refused = set(re.findall(r"ValidatingAdmissionPolicy '([^']+)'", "\n".join(said)))
    page = (rights.ROOT / "docs" / "isolation.md").read_text(encoding="utf-8")
    return {name for name in policies if name not in refused or f"`{name}`" not in page}


def _refusals(plane: ControlPlane, bad: list[bad_manifests.Bad]) -> list[str]:
    """What is said against bad custom resources, by the administrator of the cluster, whom no policy holds."""
    parts = [bad[i::_THREADS] for i in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS) as pool:
        said = list(pool.map(lambda part: plane.api.refusals(_creation(b.manifest) for b in part), parts))
    errors = [said[i % _THREADS][i // _THREADS] for i in range(len(bad))]
    return ["" if error is None or error.reason == "AlreadyExists" else str(error) for error in errors]


def _creation(manifest: Json) -> tuple[str, str, Json, str]:
    kind = BY_NAME[manifest["kind"]]
    within = f"namespaces/{manifest['metadata']['namespace']}/" if kind.is_namespaced else ""
    path = f"{GROUP}/{within}{kind.plural}?dryRun=All&fieldValidation=Strict"
    return "POST", path, manifest, "application/json"


def _pod_security(plane: ControlPlane) -> Iterator[str]:
    """Ask the Pod Security Standard of the chart's own namespace about every pod of the chart."""
    labels = plane.api.get(f"/api/v1/namespaces/{rights.SYSTEM}")["metadata"]["labels"]
    if labels.get(_ENFORCE) != "restricted":
        yield f"namespace without agents enforces {labels.get(_ENFORCE)}"
    for name, pod in _pods():
        if name == "kvstrata-node":
            yield from _node_preparation(plane, pod)
            continue
        is_agent = pod["spec"]["serviceAccountName"] == "kvstrata-agent"
        said = _pod_refusal(plane, pod)
        if bool(said) != is_agent:
            yield f"{name} under `restricted`: {said[:200] or 'admitted, with directories of the host'}"
        if is_agent and "restricted volume types" not in said:
            yield f"{name}: not for its directories of the host: {said[:200]}"
        kept = [v for v in pod["spec"]["volumes"] if "hostPath" not in v]
        rest = _pod_refusal(plane, pod | {"spec": pod["spec"] | {"volumes": kept}})
        # Without its volumes the mounts are wrong, which is told after the standard was met.
        if "violates PodSecurity" in rest:
            yield f"{name}: more exceptions than its directories of the host: {rest[:300]}"
    plane.api.patch(f"/api/v1/namespaces/{rights.SYSTEM}", {"metadata": {"labels": {_ENFORCE: "privileged"}}})


def _node_preparation(plane: ControlPlane, pod: Json) -> Iterator[str]:
    """Four exceptions, each of which the standard names, and nothing without them."""
    said = _pod_refusal(plane, pod)
    named = ("AppArmor", "restricted volume types", "runAsNonRoot", "runAsUser=0")
    yield from (f"kvstrata-node: no exception for {words}: {said[:200]}" for words in named if words not in said)
    (container,) = pod["spec"]["containers"]
    security = container["securityContext"] | {"runAsUser": 65532, "runAsNonRoot": True, "appArmorProfile": None}
    tamed = [container | {"securityContext": security}]
    rest = _pod_refusal(plane, pod | {"spec": pod["spec"] | {"containers": tamed, "volumes": []}})
    if "violates PodSecurity" in rest:
        yield f"kvstrata-node: more exceptions than four: {rest[:300]}"


def _pods() -> Iterator[tuple[str, Json]]:
    digest = "sha256:" + "1" * 64
    chart = rights.render(
        **{
            "processes.enabled": "true",
            "agent.image.digest": digest,
            "agent.hostPaths.memory": "/run/kvstrata-memory",
            **rights.NODE_PREPARATION,
        }
    )
    objects = [o for o in yaml.safe_load_all(chart) if o]
    for made in (*objects, *redis_set(objects), daemon_set(template_of(objects), "llama-70b")):
        if made["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
            template = made["spec"]["template"]
            metadata = {"name": "p", "labels": template["metadata"]["labels"]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            yield made["metadata"]["name"], json.loads(json.dumps(pod))


def _pod_refusal(plane: ControlPlane, pod: Json) -> str:
    return _said(plane, Case("pod", ROOT, "POST", f"/api/v1/namespaces/{rights.SYSTEM}/pods?dryRun=All", pod))


def _is_admitted_without_binding(plane: ControlPlane) -> bool:
    """The control: with its binding gone, what a policy refuses is admitted."""
    kind = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    plane.api.delete(f"{kind}/kvstrata-tenant-pods")
    (case,) = [c for c in admission_cases.cases() if c.name == "engine: processes of the host"]
    until_s = time.monotonic() + _ENFORCED_S
    while time.monotonic() < until_s:
        if not _said(plane, case):
            return True
        time.sleep(0.2)
    return False
