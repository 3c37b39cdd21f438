"""Every process run from its image: a read-only root, user 65532, no capabilities, nothing of this machine's Python.

The chart is rendered with these images and applied to a real API server; Redis, operator, metadata service and agent
run as its pods would, with the chart's configuration and Secrets in their places.
"""

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane import ControlPlane, start
from controlplane.assets import find_tool
from controlplane.ports import free_ports
from debian_archive import run
from kvstrata_api import names
from support.images.container import Container
from support.kube.agent import SYSTEM, Agent, got, put, until
from support.kube.chart_agents import redis_set

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="containers are made by mounts, which needs root"),
]

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., Container]
POOL, NODE = "images", "node-a"
PYTHON = ["/usr/bin/python3"]


@pytest.fixture
def container(images: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes containers of images by name."""
    made: list[Path] = []

    def make(name: str, mounts: dict[str, Path] | None = None) -> Container:
        made.append(tmp_path / "roots" / f"{len(made)}-{name}")
        return Container(images / f"{name}.tar", made[-1], mounts)

    yield make
    for root in made:
        shutil.rmtree(root)


@pytest.mark.parametrize("name", ["operator", "metadata", "agent-cpu"])
def test_a_process_starts_as_nobody_on_a_root_that_nobody_writes(container: Make, name: str) -> None:
    made = container(name)
    told = made.run("--help")
    facts = made.run("-c", _FACTS, entrypoint=PYTHON)

    assert told.returncode == 0, told.stderr
    assert "--metrics-port" in told.stdout
    assert facts.returncode == 0, facts.stderr
    assert json.loads(facts.stdout) == {
        "ids": [65532, 65532, []], "capabilities": 0, "readonly": True, "kernels": True, "torch": False,
        "authorities": True, "bytecode": True, "python": [3, 11],
    }  # fmt: skip


def test_the_agent_with_cuda_starts_and_has_a_torch_that_loads(container: Make, images: Path) -> None:
    if not (images / "agent-cuda.tar").exists():
        pytest.skip("`make images IMAGES=agent-cuda` makes 6 GB; KVSTRATA_IMAGES=build/images then tries it as well")
    made = container("agent-cuda")
    told = made.run("--help")
    facts = made.run("-c", "import torch, kvstrata_native; print(torch.version.cuda is not None)", entrypoint=PYTHON)

    assert told.returncode == 0, told.stderr
    assert facts.stdout.strip() == "True", facts.stderr


_FACTS = """
import errno, importlib.util, json, os, ssl, sys
import kvstrata_native, kvstrata_telemetry
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
try:
    open('/usr/x', 'w')
except OSError as e:
    refused = e.errno
print(json.dumps({
    'ids': [os.getuid(), os.getgid(), os.getgroups()], 'capabilities': int(status['CapEff'], 16),
    'readonly': refused == errno.EROFS, 'kernels': kvstrata_native.level != 'python',
    'torch': importlib.util.find_spec('torch') is not None,
    'authorities': len(ssl.create_default_context().get_ca_certs()) > 100,
    'bytecode': all(os.path.exists(m.__cached__) for m in (json, ssl, kvstrata_telemetry)),
    'python': list(sys.version_info[:2]),
}))
"""


def test_nixl_reads_and_writes_files_and_talks_to_peers_from_the_agent_s_image(container: Make) -> None:
    lines = (
        "from nixl_cu12._api import nixl_agent, nixl_agent_config",
        "agent = nixl_agent('x', nixl_agent_config(backends=[]))",
        "agent.create_backend('POSIX', {})",
        "agent.create_backend('UCX', {})",
    )

    done = container("agent-cpu").run("-c", "\n".join(lines), entrypoint=PYTHON)
    assert done.returncode == 0, done.stderr


def test_the_chart_runs_from_these_images_and_a_tenant_s_blocks_come_back(
    images: Path, container: Make, tmp_path: Path
) -> None:
    with start(tmp_path / "plane") as plane:
        plane.add_fake_nodes([NODE], {"kvstrata": "yes"}, {"cpu": "8", "memory": "64Gi", "pods": "50"})
        (port,) = free_ports(1)
        install(plane, images, port)
        with (
            operator(plane, container, tmp_path),
            redis(plane, container, tmp_path, port),
            metadata(plane, container, tmp_path),
        ):
            serve_blocks(plane, container, tmp_path)


def install(plane: ControlPlane, images: Path, port: int) -> None:
    """Apply the chart for these images; Redis is on this machine's loopback, where the chart has a Service."""
    chart = [str(find_tool("helm")), "template", "kvstrata", str(ROOT / "charts/kvstrata"), "--namespace", SYSTEM]
    text = run([*chart, "--values", str(images / "values.json"), "--set", "namespace.create=true"], {})
    text = text.replace(f"rediss://kvstrata-redis.{SYSTEM}.svc:6379", f"rediss://localhost:{port}")
    objects = [one for one in yaml.safe_load_all(text) if one]
    digests = {image["digest"] for image in json.loads((images / "digests.json").read_text()).values()}
    pods = [o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment"]
    pods += [o["spec"]["template"]["spec"] for o in redis_set(objects)]
    assert {pod["containers"][0]["image"].partition("@")[2] for pod in pods} < digests
    crds = [one for one in objects if one["kind"] == "CustomResourceDefinition"]
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(crds))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))


def home(plane: ControlPlane, folder: Path, account: str) -> Path:
    """Folder of one container, with the kubeconfig of its account."""
    folder.mkdir()
    plane.service_account_kubeconfig(SYSTEM, account, folder / "kubeconfig")
    return folder


def secret(plane: ControlPlane, name: str) -> dict[str, str]:
    held: dict[str, Any] = plane.api.get(f"/api/v1/namespaces/{SYSTEM}/secrets/{name}")["data"]
    return {key: base64.b64decode(value).decode() for key, value in held.items()}


def operator(plane: ControlPlane, container: Make, tmp_path: Path) -> Any:
    at = home(plane, tmp_path / "operator", "kvstrata-operator")
    options: list[str | Path] = [
        "--kubeconfig",
        at / "kubeconfig",
        "--metrics-port",
        "0",
        "--redis-host=localhost",
        "--identity=one",
    ]
    return container("operator", {str(at): at}).running(tmp_path / "operator.log", *options)


def redis(plane: ControlPlane, container: Make, tmp_path: Path, port: int) -> Any:
    """Redis by the chart's own script, once the operator has issued its certificate."""
    until(lambda: names.REDIS_SECRET_TLS in plane.kubectl("get", "secret", "-n", SYSTEM, "-o", "name"))
    configuration = plane.api.get(f"/api/v1/namespaces/{SYSTEM}/configmaps/kvstrata-redis")["data"]
    configuration["redis.conf"] = configuration["redis.conf"].replace("tls-port 6379", f"tls-port {port}")
    parts = {
        "/etc/kvstrata-redis": configuration | secret(plane, "kvstrata-redis-acl"),
        "/etc/kvstrata-redis-tls": secret(plane, names.REDIS_SECRET_TLS),
        "/run/kvstrata-redis": {},
        "/data": {},
    }
    mounts = {}
    for number, (inside, files) in enumerate(parts.items()):
        mounts[inside] = tmp_path / f"redis-{number}"
        mounts[inside].mkdir()
        for name, text in files.items():
            (mounts[inside] / name).write_text(text)
    start_script = ["sh", "/etc/kvstrata-redis/start.sh"]
    environment = {"KVSTRATA_PORT": str(port), names.REDIS_MEMORY_VARIABLE: str(64 << 20)}
    return container("redis", mounts).running(tmp_path / "redis.log", entrypoint=start_script, environment=environment)


def metadata(plane: ControlPlane, container: Make, tmp_path: Path) -> Any:
    at = home(plane, tmp_path / "metadata", "kvstrata-metadata")
    held = secret(plane, "kvstrata-redis-metadata")
    environment = {
        f"KVSTRATA_REDIS_{key.upper()}": held[key] for key in ("url", "username", "password", "certificates")
    }
    options: list[str | Path] = [
        "--redis=external",
        "--kubeconfig",
        at / "kubeconfig",
        "--metrics-port=0",
        "--identity=one",
    ]
    return container("metadata", {str(at): at}).running(tmp_path / "metadata.log", *options, environment=environment)


def declare(plane: ControlPlane) -> None:
    """A pool on the one node and a tenant; the operator makes the KVPoolNode and the tenant's key."""
    plane.kubectl("create", "namespace", "team-a")
    plane.kubectl("create", "serviceaccount", "engine", "-n", "team-a")
    spec = {
        "nodeSelector": {"kvstrata": "yes"},
        "compatibility": {"model": "m", "revision": "r", "dtype": "bf16", "blockTokens": 16},
        "tiers": [
            {
                "name": "dram",
                "type": "HostDRAM",
                "capacityPerNode": "16Mi",
                "hostDRAM": {"pageSize": "4Ki", "persistence": "None"},
            }
        ],
        "policy": {"recompute": {"type": "AlwaysFetch"}},
    }
    accounts = {"serviceAccounts": [{"namespace": "team-a", "name": "engine"}]}
    for kind, name, wanted in (("KVPool", POOL, spec), ("KVTenant", "team-a", accounts)):
        body = {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": wanted}
        plane.api.post(f"/apis/{names.API_VERSION}/{kind.lower()}s", body)


def serve_blocks(plane: ControlPlane, container: Make, tmp_path: Path) -> None:
    """The agent finds the directory, an engine stores 16 blocks, and a client that comes later has them back."""
    at = home(plane, tmp_path / "agent", names.AGENT_SERVICE_ACCOUNT)
    (at / "run").mkdir()
    made = container("agent-cpu", {str(at): at})
    declare(plane)
    with Agent(
        plane, at / "kubeconfig", at, POOL, NODE, program=made.command(), environment=made.environment()
    ) as agent:
        until(lambda: agent.name in plane.kubectl("get", "kvpoolnodes", "-o", "name"))
        agent.start()
        until(agent.says("MetadataAvailable", "True"))
        with agent.client() as client:
            assert put(client, 1) == 16
        with agent.client() as client:
            assert got(client, 1) == (16, {"dram"})
