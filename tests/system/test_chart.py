"""The chart: what Helm makes of it, and what a real API server says to that."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from chart_agents import daemon_set, redis_set, template_of
from operator_fleet import tier

from controlplane import ApiError, ControlPlane, KubectlError, start
from controlplane.assets import find_tool
from controlplane.waiting import wait_until
from kvfleet_agent import config as agent_config
from kvfleet_agent.prepare import config as prepare_config
from kvfleet_api import names
from kvfleet_metadata import app as metadata_app
from kvfleet_operator import app as operator_app

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvfleet"
NAMESPACE = "kvfleet-system"
Object = dict[str, Any]

KEK_VOLUME = {"csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}}
EVERYTHING = {
    "namespace": {"create": True, "labels": {"pod-security.kubernetes.io/warn": "restricted"}},
    "metadata": {"replicas": 2},
    "redis": {"persistence": {"enabled": True, "storageClassName": "fast"}},
    "agent": {
        "image": {"repository": "kvfleet/agent", "digest": "sha256:" + "1" * 64},
        "hostPaths": {"memory": "/run/kvfleet-memory"},
    },
    "commonLabels": {"team": "inference"},
    "kek": {"file": "/run/kvfleet-kek/keks", "volume": KEK_VOLUME},
    "tracing": {"otlpEndpoint": "http://collector.monitoring:4318/v1/traces"},
    "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "runbookBaseUrl": "https://example.org/kvfleet/"},
    "grafanaDashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    "image": {"registry": "registry.example.org", "pullSecrets": [{"name": "pull"}]},
    "operator": {
        "image": {"repository": "kvfleet/operator", "digest": "sha256:" + "0" * 64},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "extraArgs": ["--resync-s=30"],
    },
}
CASES: dict[str, Object] = {
    "defaults": {},
    "everything": EVERYTHING,
    "only rights": {"processes": {"enabled": False}, "namespace": {"create": True}},
    "external redis": {"redis": {"mode": "External", "existingSecrets": {"agent": "a", "metadata": "m"}}},
    "redis as a child": {
        "redis": {"mode": "Process"},
        "metadata": {"replicas": 3},
        "networkPolicy": {"enabled": True},
    },
    "node preparation": {
        "nodePreparation": {
            "enabled": True,
            "image": {"digest": "sha256:" + "2" * 64},
            "keepFree": {"2Mi": 512},
            "dax": {"devices": ["dax0.*"], "giveBack": True},
            "seLinuxOptions": {"type": "spc_t"},
        },
        "networkPolicy": {"enabled": True},
    },
    "no crds": {"crds": {"install": False}, "userRoles": {"create": False}, "podDisruptionBudget": {"enabled": False}},
}
PROCESSES = {
    "DaemonSet", "Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "Secret", "ConfigMap",
}  # fmt: skip

SCHEMAS = "1.34"
"""Release of Kubernetes whose published schemas objects are held against: that of the control plane here."""
WORKLOADS = ("Deployment", "StatefulSet")


def helm(*args: str, values: Object | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(find_tool("helm")), *args, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), text=True, capture_output=True, check=False)


def render(values: Object) -> list[Object]:
    """Objects that the chart makes of these values."""
    done = helm("template", "kvfleet", str(CHART), "--namespace", NAMESPACE, values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [o for o in objects if o["kind"] in kinds]


def workloads(objects: list[Object]) -> list[Object]:
    """What runs with a pool `llama-70b`."""
    return [*of_kind(objects, *WORKLOADS), *redis_set(objects), daemon_set(template_of(objects), "llama-70b")]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(tmp_path_factory.mktemp("plane"), kwok=False, controllers=False) as plane:
        for namespace in (NAMESPACE, names.CA_NAMESPACE):
            plane.kubectl("create", "namespace", namespace)
        plane.kubectl("apply", "-f", str(Path(__file__).parent / "monitoring_crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")
        yield plane


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_lint_finds_nothing(values: Object) -> None:
    done = helm("lint", str(CHART), "--strict", values=values)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_a_real_api_server_takes_every_object_as_it_is(plane: ControlPlane, values: Object) -> None:
    objects = yaml.safe_dump_all(render(values))

    said = plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", "-", stdin=objects
    )

    assert len(said.splitlines()) == len(render(values))
    assert all(line.endswith("serverside-applied (server dry run)") for line in said.splitlines())


def test_a_field_that_does_not_exist_would_be_refused(plane: ControlPlane) -> None:
    """Positive control of the dry run."""
    (service, *_) = of_kind(render({}), "Service")
    service["spec"]["prots"] = []

    with pytest.raises(KubectlError, match="prots"):
        plane.kubectl(
            "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(service)
        )


REFUSED: tuple[tuple[Object, str], ...] = (
    ({"operator": {"replicas": 0}}, "/operator/replicas': minimum: got 0, want 1"),
    ({"operator": {"replicas": "two"}}, "/operator/replicas': got string, want integer"),
    ({"operator": {"replcas": 2}}, "/operator': additional properties 'replcas' not allowed"),
    ({"operator": {"image": {"digest": "sha256:abc"}}}, "/operator/image/digest"),
    ({"metadata": {"image": {"repository": "Not/Lower"}}}, "/metadata/image/repository"),
    ({"redis": {"mode": "Sentinel"}}, "/redis/mode': value must be one of 'StatefulSet', 'Process', 'External'"),
    ({"redis": {"maxMemory": "2gb"}}, "/redis': additional properties 'maxMemory' not allowed"),
    ({"redis": {"memory": {"max": "2gb"}}}, "/redis/memory/max"),
    ({"redis": {"passwords": {"agent": "short"}}}, "/redis/passwords/agent"),
    ({"redis": {"persistence": {"size": "8"}}}, "/redis/persistence/size"),
    ({"logLevel": "LOUD"}, "/logLevel': value must be one of 'debug', 'info', 'warning', 'error'"),
    ({"tracing": {"otlpEndpoint": "collector:4317"}}, "/tracing/otlpEndpoint"),
    ({"serviceMonitor": {"interval": 15}}, "/serviceMonitor/interval': got number, want string"),
    ({"networkPolicy": {"enabled": "yes"}}, "/networkPolicy/enabled': got string, want boolean"),
    ({"image": {"pullSecrets": ["pull"]}}, "/image/pullSecrets/0': got string, want object"),
    ({"admissionPolicies": {"storagePaths": ["/a/../b"]}}, "/admissionPolicies/storagePaths/0"),
    ({"agent": {"hostPaths": {"state": "/"}}}, "/agent/hostPaths/state"),
    ({"agent": {"pools": []}}, "/agent': additional properties 'pools' not allowed"),
    ({"nodePreparation": {"enabled": True}}, "nodePreparation.image.digest is missing"),
    ({"nodePreparation": {"keepFree": {"4Ki": 1}}}, "additional properties '4Ki' not allowed"),
    ({"nodePreparation": {"hugePages": "Always"}}, "/nodePreparation/hugePages"),
    ({"nodePreparation": {"dax": {"devices": ["sda"]}}}, "/nodePreparation/dax/devices/0"),
    ({"podSecurity": {"enforce": "lax"}}, "/podSecurity/enforce"),
    ({"kek": {"file": "keks"}}, "/kek/file"),
    ({"kek": {"file": "/keks"}}, "/kek/file"),
    ({"kek": {"volume": {"hostPath": {"path": "/"}}}}, "/kek/volume': additional properties 'hostPath' not allowed"),
    ({"kek": {"volume": {"secret": {"secretName": "s"}}}}, "kek.file is missing"),
    ({"unknown": 1}, "additional properties 'unknown' not allowed"),
    ({"redis": {"existingSecrets": {"agent": "a"}}}, "redis.existingSecrets.agent needs redis.mode External"),
)


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_a_wrong_value_is_refused_with_its_path(values: Object, message: str) -> None:
    done = helm("template", "kvfleet", str(CHART), values=values)

    assert done.returncode != 0
    assert message in done.stderr


def test_without_processes_nothing_runs_and_all_identities_and_rights_are_there() -> None:
    objects = render(CASES["only rights"])

    assert not of_kind(objects, *PROCESSES)
    accounts = {o["metadata"]["name"] for o in of_kind(objects, "ServiceAccount")}
    assert accounts >= {"kvfleet-operator", "kvfleet-agent", "kvfleet-metadata"}
    assert {o["kind"] for o in objects} >= {"Namespace", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}


def test_processes_do_not_change_the_rights_but_for_the_redis_secret() -> None:
    """What tests and the demo run under is what a cluster runs under."""
    roles = ("ClusterRole", "Role", "RoleBinding", "ClusterRoleBinding")

    def named(values: Object) -> dict[tuple[str, str, str], Object]:
        return {
            (o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]): o
            for o in of_kind(render(values), *roles)
        }

    local, cluster = named(CASES["only rights"]), named({})
    differing = {"kvfleet-metadata"}  # It starts a Redis there.

    assert {key for key in local if local[key] != cluster.get(key)} == {("Role", NAMESPACE, name) for name in differing}
    assert local.keys() == cluster.keys()


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_no_role_holds_a_wildcard_or_a_way_to_more_rights(values: Object) -> None:
    roles = of_kind(render(values), "ClusterRole", "Role")
    rules = [(role, rule) for role in roles for rule in role["rules"]]

    assert rules
    for role, rule in rules:
        words = {word for key in ("apiGroups", "resources", "verbs") for word in rule[key]}
        assert not words & {"*", "bind", "escalate", "impersonate", "pods/exec", "nodes/proxy"}
        assert "pods" not in words or not words & {"create", "patch", "update"}
        assert role["kind"] == "Role" or "secrets" not in rule["resources"]
        if "serviceaccounts/token" in rule["resources"]:  # Of its own account and no other.
            assert (role["kind"], rule["resourceNames"]) == ("Role", [role["metadata"]["name"]])


FORBIDDEN = {
    "kvfleet-agent": [
        ("create", "kvpools.kvfleet.io"), ("patch", "kvpoolnodes.kvfleet.io"), ("patch", "kvtenants.kvfleet.io"),
        ("list", "secrets"), ("create", "pods"), ("list", "nodes"), ("delete", "leases.coordination.k8s.io"),
        ("create", "serviceaccounts/token"),
    ],
    "kvfleet-metadata": [
        ("patch", "kvpools.kvfleet.io"), ("list", "secrets"), ("update", "leases.coordination.k8s.io"),
        ("watch", "kvtenants.kvfleet.io"), ("create", "tokenreviews.authentication.k8s.io"), ("create", "pods"),
    ],
    "kvfleet-operator": [
        ("list", "secrets"), ("create", "kvpools.kvfleet.io"), ("delete", "kvpools.kvfleet.io"),
        ("create", "tokenreviews.authentication.k8s.io"), ("patch", "nodes"),
        ("create", "pods"), ("delete", "pods"), ("create", "daemonsets.apps"),
        ("create", "clusterroles.rbac.authorization.k8s.io"),
    ],
}  # fmt: skip
ALLOWED = {
    "kvfleet-agent": [
        ("watch", "kvpools.kvfleet.io", ""), ("patch", "kvpoolnodes/status.kvfleet.io", ""),
        ("list", "secrets", NAMESPACE), ("patch", "leases.coordination.k8s.io", NAMESPACE),
        ("create", "tokenreviews.authentication.k8s.io", ""),
    ],
    "kvfleet-metadata": [
        ("list", "leases.coordination.k8s.io", NAMESPACE), ("create", "secrets", NAMESPACE),
        ("create", "leases.coordination.k8s.io", NAMESPACE), ("list", "kvtenants.kvfleet.io", ""),
    ],
    "kvfleet-operator": [
        ("patch", "kvpools.kvfleet.io", ""), ("deletecollection", "kvpoolnodes.kvfleet.io", ""), ("watch", "nodes", ""),
        ("create", "secrets", NAMESPACE), ("update", "leases.coordination.k8s.io", NAMESPACE), ("create", "events", ""),
        ("patch", "daemonsets.apps", NAMESPACE), ("delete", "pods", NAMESPACE),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def ruled(plane: ControlPlane) -> ControlPlane:
    """A plane with the chart's identities and rights in force; the API server hears of them by watches of its own."""
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(render(CASES["only rights"])))
    wait_until(lambda: not any(refusals(plane, account) for account in ALLOWED), 90.0)
    return plane


def refusals(plane: ControlPlane, account: str) -> list[str]:
    """What an identity needs and may not do."""
    return [f"{v} {r}" for v, r, namespace in ALLOWED[account] if not may(plane, account, v, r, namespace)]


def may(plane: ControlPlane, account: str, verb: str, resource: str, namespace: str) -> bool:
    name, _, group = resource.partition(".")
    name, _, subresource = name.partition("/")
    attributes = {"verb": verb, "resource": name, "subresource": subresource, "group": group, "namespace": namespace}
    spec = {"user": f"system:serviceaccount:{NAMESPACE}:{account}", "resourceAttributes": attributes}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    return bool(plane.api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)["status"]["allowed"])


@pytest.mark.parametrize("account", FORBIDDEN)
def test_an_identity_may_not_reach_beyond_its_part(ruled: ControlPlane, account: str) -> None:
    """In `default`: nobody may read Secrets outside the system namespace."""
    allowed = [f"{v} {r}" for v, r in FORBIDDEN[account] if may(ruled, account, v, r, "default")]

    assert not allowed


@pytest.mark.parametrize("account", ALLOWED)
def test_an_identity_may_do_its_part(ruled: ControlPlane, account: str) -> None:
    assert not refusals(ruled, account)


@pytest.fixture(scope="module")
def restricted(plane: ControlPlane) -> str:
    """A namespace that admits only pods of the Pod Security Standard `restricted`."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": "restricted", "labels": labels}
    plane.api.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    for account in ("default", "kvfleet-operator", "kvfleet-metadata", "kvfleet-redis"):
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
        plane.api.post("/api/v1/namespaces/restricted/serviceaccounts", body)
    return "restricted"


def dry_run_pod(plane: ControlPlane, namespace: str, workload: Object) -> None:
    claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())]
    spec = workload["spec"]["template"]["spec"]
    spec["volumes"] += [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    plane.api.post(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)


@pytest.mark.parametrize("case", ["defaults", "everything"])
def test_every_pod_meets_the_restricted_standard(plane: ControlPlane, restricted: str, case: str) -> None:
    objects = render(CASES[case])
    workloads = [*of_kind(objects, "Deployment"), *redis_set(objects)]

    assert len(workloads) == 3
    for workload in workloads:
        dry_run_pod(plane, restricted, workload)


def test_a_pod_that_may_be_root_would_be_refused(plane: ControlPlane, restricted: str) -> None:
    """Positive control of the standard."""
    (workload, *_) = of_kind(render({"podSecurityContext": {"runAsNonRoot": None}}), "Deployment")

    with pytest.raises(ApiError, match="restricted"):
        dry_run_pod(plane, restricted, workload)


def test_every_selector_finds_the_pods_of_one_workload() -> None:
    objects = render(EVERYTHING)
    pods = [o["spec"]["template"]["metadata"]["labels"] for o in workloads(objects)]
    selectors = [o["spec"]["selector"] for o in of_kind(objects, "Service")]
    selectors += [o["spec"]["selector"]["matchLabels"] for o in of_kind(objects, "PodDisruptionBudget")]
    networks = [o["spec"]["podSelector"] for o in of_kind(objects, "NetworkPolicy")]
    selectors += [selector["matchLabels"] for selector in networks if selector]

    assert selectors
    assert {sum(selector.items() <= labels.items() for labels in pods) for selector in selectors} == {1}


@pytest.mark.parametrize(
    ("case", "replicas"), [("defaults", 2), ("everything", 2), ("external redis", 2), ("redis as a child", 1)]
)
def test_the_metadata_service_has_a_standby_unless_redis_is_its_child(case: str, replicas: int) -> None:
    objects = render(CASES[case])
    (service,) = [o for o in of_kind(objects, "Deployment") if o["metadata"]["name"] == "kvfleet-metadata"]
    budgets = {o["metadata"]["name"] for o in of_kind(objects, "PodDisruptionBudget")}

    assert service["spec"]["replicas"] == replicas
    assert service["spec"]["strategy"]["type"] == ("RollingUpdate" if replicas > 1 else "Recreate")
    assert ("kvfleet-metadata" in budgets) == (replicas > 1)


def test_an_image_follows_registry_tag_and_digest() -> None:
    pods = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in of_kind(render(EVERYTHING), "Deployment")}
    images = {name: pod["containers"][0]["image"] for name, pod in pods.items()}
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]

    assert images == {
        "kvfleet-operator": "registry.example.org/kvfleet/operator@sha256:" + "0" * 64,
        "kvfleet-metadata": f"registry.example.org/kvfleet/metadata:{version}",
    }


def container(values: Object, name: str) -> Object:
    (found,) = [o for o in of_kind(render(values), "Deployment") if o["metadata"]["name"] == name]
    return dict(found["spec"]["template"]["spec"]["containers"][0])


@pytest.mark.parametrize("case", ["defaults", "everything", "external redis", "redis as a child"])
def test_the_processes_take_the_arguments_that_the_chart_gives(case: str) -> None:
    operator, metadata = (container(CASES[case], f"kvfleet-{part}") for part in ("operator", "metadata"))
    environment = {variable["name"]: "rediss://r:6379" for variable in metadata["env"]}
    environment["KVFLEET_REDIS_CERTIFICATES"] = "fleet"

    given = operator_app._parser().parse_args(operator["args"])
    options = metadata_app.options_of(metadata_app._parser().parse_args(metadata["args"]), environment)
    assert (given.metrics_host, given.metrics_port) == ("0.0.0.0", operator["ports"][0]["containerPort"])
    assert (options.metrics_host, options.metrics_port) == ("0.0.0.0", metadata["ports"][0]["containerPort"])
    if case == "redis as a child":
        assert options.embedded is not None
        assert options.embedded.port == metadata["ports"][1]["containerPort"]
    else:
        assert set(metadata_app.EXTERNAL_VARIABLES.values()) <= {variable["name"] for variable in metadata["env"]}


@pytest.mark.parametrize(
    ("case", "mode", "template"),
    [
        ("defaults", "Embedded", names.REDIS_TEMPLATE),
        ("redis as a child", "Embedded", ""),
        ("external redis", "External", ""),
    ],
)
def test_the_operator_is_told_whose_redis_it_is(case: str, mode: str, template: str) -> None:
    given = operator_app._parser().parse_args(container(CASES[case], "kvfleet-operator")["args"])
    found = [o for o in of_kind(render(CASES[case]), "ConfigMap") if o["metadata"]["name"] == names.REDIS_TEMPLATE]

    assert (given.redis_mode, given.redis_template) == (mode, template)
    assert len(found) == (1 if template else 0)


@pytest.mark.parametrize("case", ["defaults", "everything"])
def test_a_real_api_server_takes_the_redis_that_the_operator_makes_of_the_template(
    plane: ControlPlane, case: str
) -> None:
    (made,) = redis_set(render(CASES[case]))

    said = plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(made)
    )
    assert said.strip() == f"statefulset.apps/{names.REDIS} serverside-applied (server dry run)"
    (redis,) = made["spec"]["template"]["spec"]["containers"]
    assert redis["env"] == [{"name": names.REDIS_MEMORY_VARIABLE, "value": str(256 << 20)}]
    assert (redis["resources"]["requests"]["memory"], redis["resources"]["limits"]["memory"]) == ("320Mi", "384Mi")


def test_an_agent_takes_the_arguments_that_the_chart_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = [tier("flash", "RemoteFlash", remoteFlash={"path": "/mnt/flash"})]
    found = daemon_set(template_of(render(EVERYTHING)), "llama-70b", tiers=tiers)
    (agent,) = found["spec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
    monkeypatch.setenv("NODE_NAME", "worker-1")

    given = agent_config.parse([argument.replace("$(POD_IP)", "10.0.0.7") for argument in agent["args"]])
    assert (given.pool, given.node, given.requires_bound_tokens) == ("llama-70b", "worker-1", True)
    assert (given.metrics_port, given.peer_port) == tuple(port["containerPort"] for port in agent["ports"])
    assert str(given.socket.parent) == mounts["sockets"]
    assert given.state_dir.is_relative_to(mounts["storage"])
    assert str(given.memory_dir) == mounts["memory"]
    assert str(given.peer_token) == f"{mounts['token']}/token"
    assert mounts["tier-0"] == "/mnt/flash"


def test_node_preparation_takes_the_arguments_that_the_chart_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = of_kind(render(CASES["node preparation"]), "DaemonSet")
    (node,) = found["spec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in node["volumeMounts"]}
    monkeypatch.setenv("NODE_NAME", "worker-1")

    given = prepare_config.parse(node["args"])
    assert (given.node, given.reserves, given.others, given.take_back_s) == ("worker-1", True, {2 << 20: 512}, 60.0)
    assert str(given.state_dir) == mounts["state"]
    assert mounts["pages"] == "/sys/devices/system/node"
    assert node["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not of_kind(render({}), "DaemonSet")


@pytest.mark.parametrize(("case", "path"), [("defaults", None), ("everything", Path("/run/kvfleet-kek/keks"))])
def test_operator_and_agents_read_their_keks_from_the_file_that_the_values_name(
    case: str, path: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_NAME", "worker-1")
    values = EVERYTHING | {"kek": CASES[case].get("kek", {})}
    objects = render(values)
    pods = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in workloads(objects)}
    arguments = {name: pod["containers"][0]["args"] for name, pod in pods.items() if "redis" not in name}
    agent = [argument.replace("$(POD_IP)", "10.0.0.7") for argument in arguments["kvfleet-agent-llama-70b"]]

    assert operator_app._parser().parse_args(arguments["kvfleet-operator"]).kek_file == path
    assert agent_config.parse(agent).kek_file == path
    for name, pod in pods.items():
        mounts = [m for c in pod["containers"] for m in c["volumeMounts"] if m["name"] == "kek"]
        volumes = [v for v in pod.get("volumes", ()) if v["name"] == "kek"]
        is_reader = path is not None and name in ("kvfleet-operator", "kvfleet-agent-llama-70b")
        assert mounts == ([{"name": "kek", "mountPath": "/run/kvfleet-kek", "readOnly": True}] if is_reader else [])
        assert volumes == ([{"name": "kek", **KEK_VOLUME}] if is_reader else [])


def test_crds_are_kept_when_the_release_goes_and_are_all_there() -> None:
    crds = of_kind(render({}), "CustomResourceDefinition")
    originals = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]

    assert {c["metadata"]["name"] for c in crds} == {o["metadata"]["name"] for o in originals}
    assert all(c["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for c in crds)
    assert sorted(json.dumps(c["spec"]) for c in crds) == sorted(json.dumps(o["spec"]) for o in originals)
    assert all(c["metadata"]["labels"]["app.kubernetes.io/part-of"] == "kvfleet" for c in crds)
    assert not of_kind(render(CASES["no crds"]), "CustomResourceDefinition")


def test_notes_name_the_images_and_the_next_commands() -> None:
    values = {"image": {"registry": "r.example"}}
    done = helm("install", "kvfleet", str(CHART), "--dry-run=client", "-n", NAMESPACE, values=values)

    assert done.returncode == 0, done.stderr
    assert "r.example/kvfleet/operator:" in done.stdout
    assert "kubectl get kvfleet" in done.stdout


def test_the_catalogue_is_told_of_every_custom_resource_and_every_image() -> None:
    facts = yaml.safe_load((CHART / "Chart.yaml").read_text())
    said = {key: yaml.safe_load(facts["annotations"][f"artifacthub.io/{key}"]) for key in ("crds", "images")}
    pods = [o["spec"]["template"]["spec"] for o in of_kind(render({}), *WORKLOADS)]

    assert {c["name"] for c in said["crds"]} == {
        c["metadata"]["name"] for c in of_kind(render({}), "CustomResourceDefinition")
    }
    assert {i["image"] for i in said["images"]} >= {c["image"] for pod in pods for c in pod["containers"]}
    assert facts["version"] == facts["appVersion"]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_every_built_in_object_meets_the_published_schemas_without_a_server(values: Object) -> None:
    builtin = [o for o in render(values) if "coreos.com" not in o["apiVersion"]]

    for found in builtin:
        kubernetes_validate.validate(found, SCHEMAS, strict=True)


def test_the_published_schemas_refuse_a_field_that_does_not_exist() -> None:
    """Positive control."""
    (service, *_) = of_kind(render({}), "Service")
    service["spec"]["prots"] = []

    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        kubernetes_validate.validate(service, SCHEMAS, strict=True)


@pytest.mark.timeout(1200)
def test_the_chart_s_own_suites_pass() -> None:
    """The suites of charts/kvfleet/tests, by helm-unittest, which is built once: five minutes on a busy machine."""
    command = [str(find_tool("helm-unittest")), "--strict", str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    suites = len(list(CHART.glob("tests/*_test.yaml")))
    assert f"Test Suites: {suites} passed, {suites} total" in done.stdout
