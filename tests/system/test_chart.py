"""The chart: what Helm makes of its values, without a server."""

import json
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from controlplane.assets import find_tool
from kvstrata_agent.app import config as agent_config
from kvstrata_api import names
from kvstrata_api.validate import validate
from kvstrata_metadata.service import main as metadata_app
from kvstrata_node import config as prepare_config
from kvstrata_operator.app import options as operator_options
from support.kube.chart_agents import daemon_set, template_of
from support.kube.chart_values import (
    CASES,
    CHART,
    EVERYTHING,
    EXTRA,
    KEK_VOLUME,
    NAMESPACE,
    QUICKSTART,
    ROOT,
    WORKLOADS,
    Object,
    foreign,
    helm,
    of_kind,
    render,
    workloads,
)
from support.operator.fleet import tier

pytestmark = pytest.mark.system

PROCESSES = {
    "DaemonSet", "Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "Secret", "ConfigMap",
}  # fmt: skip

SCHEMAS = "1.34"
"""Release of Kubernetes whose published schemas objects are held against: that of the control plane here."""


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_lint_finds_nothing(values: Object) -> None:
    done = helm("lint", str(CHART), "--strict", values=values)

    assert done.returncode == 0, done.stdout


REFUSED: tuple[tuple[Object, str], ...] = (
    ({"operator": {"replicas": 0}}, "/operator/replicas': minimum: got 0, want 1"),
    ({"operator": {"replicas": "two"}}, "/operator/replicas': got string, want integer"),
    ({"operator": {"replcas": 2}}, "/operator': additional properties 'replcas' not allowed"),
    ({"operator": {"image": {"digest": "sha256:abc"}}}, "/operator/image/digest"),
    ({"metadata": {"image": {"repository": "Not/Lower"}}}, "/metadata/image/repository"),
    (
        {"redis": {"mode": "Sentinel"}},
        "/redis/mode': value must be one of 'Embedded', 'Process', 'External', 'StatefulSet'",
    ),
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
    (
        {"kek": {"file": "/tmp/keks", "volume": {"secret": {"secretName": "s"}}}},
        "kek.file /tmp/keks: processes have something else mounted at /tmp",
    ),
    ({"quickstart": {"memory": "256MB"}}, "/quickstart/memory"),
    ({"admissionPolicies": {"agentImages": "Any"}}, "/admissionPolicies/agentImages"),
    ({"unknown": 1}, "additional properties 'unknown' not allowed"),
    ({"redis": {"existingSecrets": {"agent": "a"}}}, "redis.existingSecrets.agent needs redis.mode External"),
)


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_a_wrong_value_is_refused_with_its_path(values: Object, message: str) -> None:
    done = helm("template", "kvstrata", str(CHART), values=values)

    assert done.returncode != 0
    assert message in done.stderr


def test_without_processes_nothing_runs_and_all_identities_and_rights_are_there() -> None:
    objects = render(CASES["only rights"])

    assert not of_kind(objects, *PROCESSES)
    accounts = {o["metadata"]["name"] for o in of_kind(objects, "ServiceAccount")}
    assert accounts >= {"kvstrata-operator", "kvstrata-agent", "kvstrata-metadata"}
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
    differing = {"kvstrata-metadata"}  # It starts a Redis there.

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
    (service,) = [o for o in of_kind(objects, "Deployment") if o["metadata"]["name"] == "kvstrata-metadata"]
    budgets = {o["metadata"]["name"] for o in of_kind(objects, "PodDisruptionBudget")}

    assert service["spec"]["replicas"] == replicas
    assert service["spec"]["strategy"]["type"] == ("RollingUpdate" if replicas > 1 else "Recreate")
    assert ("kvstrata-metadata" in budgets) == (replicas > 1)


def test_an_image_follows_registry_tag_and_digest() -> None:
    pods = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in of_kind(render(EVERYTHING), "Deployment")}
    images = {name: pod["containers"][0]["image"] for name, pod in pods.items()}
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]

    assert images == {
        "kvstrata-operator": "registry.example.org/kvstrata/operator@sha256:" + "0" * 64,
        "kvstrata-metadata": f"registry.example.org/kvstrata/metadata:{version}",
    }


def container(values: Object, name: str) -> Object:
    (found,) = [o for o in of_kind(render(values), "Deployment") if o["metadata"]["name"] == name]
    return dict(found["spec"]["template"]["spec"]["containers"][0])


@pytest.mark.parametrize("case", ["defaults", "everything", "external redis", "redis as a child"])
def test_the_processes_take_the_arguments_that_the_chart_gives(case: str) -> None:
    operator, metadata = (container(CASES[case], f"kvstrata-{part}") for part in ("operator", "metadata"))
    environment = {variable["name"]: "rediss://r:6379" for variable in metadata["env"]}
    environment["KVSTRATA_REDIS_CERTIFICATES"] = "fleet"

    given = operator_options.parse(operator["args"])
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
    given = operator_options.parse(container(CASES[case], "kvstrata-operator")["args"])
    found = [o for o in of_kind(render(CASES[case]), "ConfigMap") if o["metadata"]["name"] == names.REDIS_TEMPLATE]

    assert (given.setting.redis_mode, given.setting.redis_template) == (mode, template)
    assert len(found) == (1 if template else 0)


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
    hosts = {v["name"]: v["hostPath"]["path"] for v in found["spec"]["template"]["spec"]["volumes"] if "hostPath" in v}
    assert str(given.memory_host_dir) == hosts["memory"]
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


@pytest.mark.parametrize(("case", "path"), [("defaults", None), ("everything", Path("/run/kvstrata-kek/keks"))])
def test_operator_and_agents_read_their_keks_from_the_file_that_the_values_name(
    case: str, path: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_NAME", "worker-1")
    values = EVERYTHING | {"kek": CASES[case].get("kek", {})}
    objects = render(values)
    pods = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in workloads(objects)}
    arguments = {name: pod["containers"][0]["args"] for name, pod in pods.items() if "redis" not in name}
    agent = [argument.replace("$(POD_IP)", "10.0.0.7") for argument in arguments["kvstrata-agent-llama-70b"]]

    assert operator_options.parse(arguments["kvstrata-operator"]).kek_file == path
    assert agent_config.parse(agent).kek_file == path
    for name, pod in pods.items():
        mounts = [m for c in pod["containers"] for m in c["volumeMounts"] if m["name"] == "kek"]
        volumes = [v for v in pod.get("volumes", ()) if v["name"] == "kek"]
        is_reader = path is not None and name in ("kvstrata-operator", "kvstrata-agent-llama-70b")
        assert mounts == ([{"name": "kek", "mountPath": "/run/kvstrata-kek", "readOnly": True}] if is_reader else [])
        assert volumes == ([{"name": "kek", **KEK_VOLUME}] if is_reader else [])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "As it is no KVPool gets agents"),
        ({"admissionPolicies": {"agentImages": "Tag"}}, "whoever can push it decides"),
        ({"admissionPolicies": {"enabled": False}}, "whoever can push it decides"),
        ({"agent": {"image": {"digest": "sha256:" + "1" * 64}}}, ""),
    ],
)
def test_notes_warn_of_an_agent_image_without_digest(values: Object, words: str) -> None:
    done = helm("install", "kvstrata", str(CHART), "--dry-run=client", "-n", NAMESPACE, values=values)

    assert done.returncode == 0, done.stderr
    assert (words in done.stdout) if words else ("WARNING" not in done.stdout)


def test_the_quickstart_s_objects_are_accepted_and_named_in_the_notes() -> None:
    ours = [o for o in render(QUICKSTART) if o["apiVersion"] == names.API_VERSION]
    done = helm("install", "kvstrata", str(CHART), "--dry-run=client", "-n", NAMESPACE, values=QUICKSTART)

    assert {o["kind"] for o in ours} == {"KVPool", "KVTrustDomain", "KVTenant"}
    for found in ours:
        assert not validate(found)
    assert "KVPool demo and KVTenant demo were made with the release" in done.stdout


def test_every_part_takes_what_its_values_add() -> None:
    objects = render(CASES["extras"])
    found = {
        o["metadata"]["name"]: o["spec"]["template"] for o in [*workloads(objects), *of_kind(objects, "DaemonSet")]
    }
    plain = {o["metadata"]["name"]: o["spec"]["template"] for o in workloads(render({}))}

    assert found.keys() == {
        "kvstrata-operator", "kvstrata-metadata", "kvstrata-redis", "kvstrata-agent-llama-70b", "kvstrata-node",
    }  # fmt: skip
    for name, pod in found.items():
        (container,) = pod["spec"]["containers"]
        assert EXTRA["podAnnotations"].items() <= pod["metadata"]["annotations"].items()
        assert EXTRA["extraEnv"][0] in container["env"]
        assert EXTRA["extraVolumes"][0] in pod["spec"]["volumes"]
        assert EXTRA["extraVolumeMounts"][0] in container["volumeMounts"]
        assert pod["spec"]["priorityClassName"] == "high"
        if name == "kvstrata-redis":  # What is in its pods already restarts it, and nothing else does.
            checksum = "checksum/config"
            assert pod["metadata"]["annotations"][checksum] == plain[name]["metadata"]["annotations"][checksum]


def test_crds_are_kept_when_the_release_goes_and_are_all_there() -> None:
    crds = of_kind(render({}), "CustomResourceDefinition")
    originals = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]

    assert {c["metadata"]["name"] for c in crds} == {o["metadata"]["name"] for o in originals}
    assert all(c["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for c in crds)
    assert sorted(json.dumps(c["spec"]) for c in crds) == sorted(json.dumps(o["spec"]) for o in originals)
    assert all(c["metadata"]["labels"]["app.kubernetes.io/part-of"] == "kvstrata" for c in crds)
    assert not of_kind(render(CASES["no crds"]), "CustomResourceDefinition")


def test_notes_name_the_images_and_the_next_commands() -> None:
    values = {"image": {"registry": "r.example"}}
    done = helm("install", "kvstrata", str(CHART), "--dry-run=client", "-n", NAMESPACE, values=values)

    assert done.returncode == 0, done.stderr
    assert "r.example/kvstrata/operator:" in done.stdout
    assert "kubectl get kvstrata" in done.stdout


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
    builtin = [o for o in foreign(render(values)) if "coreos.com" not in o["apiVersion"]]

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
    """The suites of charts/kvstrata/tests, by helm-unittest, which is built once: five minutes on a busy machine."""
    command = [str(find_tool("helm-unittest")), "--strict", str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    suites = len(list(CHART.glob("tests/*_test.yaml")))
    assert f"Test Suites: {suites} passed, {suites} total" in done.stdout
