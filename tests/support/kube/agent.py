"""An agent process of one pool under its own identity at a real API server, and an engine that puts and gets blocks."""

import base64
import contextlib
import itertools
import json
import secrets
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import numpy as np

from controlplane import ApiError, ControlPlane
from kvstrata_api import names
from kvstrata_api.blocks import BlockKey, Layout, chain_keys
from kvstrata_api.checksum import checksum
from kvstrata_client.client import Client
from kvstrata_client.target import Target
from support.nursery import Program, run_program

SYSTEM = names.SYSTEM_NAMESPACE
GROUP = f"/apis/{names.API_VERSION}"
LAYOUT = Layout("m", "r", "bf16", 16, layers=8, kv_heads=2, head_dim=64, element_bytes=2)
"""Blocks of 64 KiB."""
MIB = 1 << 20
WAIT_S = 90.0
Json = dict[str, Any]
_numbers = itertools.count()


def dram(capacity_bytes: int, **settings: str) -> Json:
    # By default what is in memory ends with the agent, whatever file system its state lies on.
    host_dram = {"pageSize": "4Ki", "persistence": "None", **settings}
    return {"name": "dram", "type": "HostDRAM", "capacityBytes": capacity_bytes, "hostDRAM": host_dram}


def nvme(path: Path, capacity_bytes: int) -> Json:
    return {"name": "nvme", "type": "NVMe", "capacityBytes": capacity_bytes, "nvme": {"path": str(path)}}


def declare_tenant(plane: ControlPlane, name: str) -> Json:
    """What an administrator writes for a tenant with one engine; returns the KVTenant."""
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": name}})
    plane.api.post(f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "engine"}})
    spec = {"serviceAccounts": [{"namespace": name, "name": "engine"}]}
    tenant: Json = plane.api.post(f"{GROUP}/kvtenants", custom("KVTenant", name, spec))
    return tenant


def make_tenant(plane: ControlPlane, name: str) -> None:
    """What administrator and operator write for a tenant with one engine, where no operator runs."""
    tenant = declare_tenant(plane, name)
    metadata = {
        "name": names.scope_secret_name("tenant", name),
        "labels": {names.LABEL_SCOPE: "tenant"},
        "annotations": {names.ANNOTATION_OWNER_UID: tenant["metadata"]["uid"]},
    }
    data = {"v1": base64.b64encode(secrets.token_bytes(32)).decode()}
    plane.api.post(f"/api/v1/namespaces/{SYSTEM}/secrets", {"metadata": metadata, "data": data})


def custom(kind: str, name: str, spec: Json) -> Json:
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def until(fact: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (result := fact()):
        assert time.monotonic() < deadline_s, f"not true within {within_s} s"
        time.sleep(0.05)
    return result


@dataclass
class Agent:
    """One pool on one node and its agent process."""

    plane: ControlPlane
    kubeconfig: Path
    home: Path
    pool: str = field(default_factory=lambda: f"pool-{next(_numbers)}")
    node: str = "node-a"
    memory_dir: Path | None = None
    metrics_port: int = 0
    """Of `/metrics`; 0: any free one."""
    program: Sequence[str] = ()
    """Command line that the options are put behind; without one the agent is forked from a warm process."""
    environment: Mapping[str, str] | None = None
    """Of the process; None: that of this one."""
    process: "Program | subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.stop(signal.SIGKILL)

    @property
    def socket(self) -> Path:
        return self.home / "run" / "agent.sock"

    @property
    def ready_file(self) -> Path:
        return self.home / "ready.json"

    def declare(self, tiers: list[Json], **policy: Any) -> None:
        """Make the pool and its node. Blocks are fetched always: a busy disk would be slower than to compute them."""
        compatibility = {"model": "m", "revision": "r", "dtype": "bf16", "blockTokens": 16}
        pool_tiers = [
            {k: v for k, v in t.items() if k != "capacityBytes"} | {"capacityPerNode": str(t["capacityBytes"])}
            for t in tiers
        ]
        policy = {"recompute": {"type": "AlwaysFetch", "prefillTokensPerSecond": 12_000}, **policy}
        spec = {"compatibility": compatibility, "tiers": pool_tiers, "policy": policy}
        self.plane.api.post(f"{GROUP}/kvpools", custom("KVPool", self.pool, spec))
        node_spec = {"poolRef": self.pool, "nodeName": self.node, "tiers": tiers, "revision": "r1"}
        self.plane.api.post(f"{GROUP}/kvpoolnodes", custom("KVPoolNode", self.name, node_spec))

    def redeclare(self, tiers: list[Json], **more: Any) -> None:
        body = json.dumps({"spec": {"tiers": tiers, **more}})
        self.plane.kubectl("patch", f"kvpn/{self.name}", "--type=merge", "-p", body)

    @property
    def name(self) -> str:
        return names.pool_node_name(self.pool, self.node)

    def start(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        self.launch()
        until(self.is_serving)

    def is_serving(self) -> bool:
        """Whether the process has said so; fails with its log when it has ended instead."""
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "agent.log").read_text()[-4000:]
        return self.ready_file.exists()

    def launch(self) -> None:
        options = ["--pool", self.pool, "--node", self.node, "--socket", self.socket, "--ready-file", self.ready_file]
        rest = ["--kubeconfig", self.kubeconfig, "--metrics-port", self.metrics_port]
        rest += ["--state-dir", self.home / "state"]
        if self.memory_dir is not None:
            rest += ["--memory-dir", self.memory_dir]
        given, log = list(map(str, [*options, *rest])), self.home / "agent.log"
        if not self.program:
            self.process = run_program("kvstrata_agent.app.main", given, log, self.environment)
            return
        with log.open("ab") as file:
            self.process = subprocess.Popen([*self.program, *given], stderr=file, env=self.environment)

    def stop(self, number: signal.Signals) -> int:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        status = self.process.wait(60)
        self.process = None
        return status

    @property
    def epoch(self) -> int:
        """Of the process that runs."""
        return int(json.loads(self.ready_file.read_text())["epoch"])

    def status(self) -> Json:
        found: Json = self.plane.api.get(f"{GROUP}/kvpoolnodes/{self.name}").get("status") or {}
        return found

    def has_reported(self) -> bool:
        """Whether the status is of the process that runs, and of what the API server wants now."""
        try:
            body = self.plane.api.get(f"{GROUP}/kvpoolnodes/{self.name}")
        except ApiError as e:
            if e.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        status = body.get("status") or {}
        reported = (status.get("epoch"), status.get("observedGeneration"))
        return reported == (self.epoch, body["metadata"]["generation"])

    def condition(self, kind: str) -> Json:
        found = [c for c in self.status().get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def says(self, kind: str, status: str) -> Callable[[], bool]:
        return lambda: bool(self.condition(kind).get("status") == status)

    def tier(self, name: str) -> Json:
        return next((t for t in self.status().get("tiers", []) if t["name"] == name), {})

    def metrics(self) -> str:
        address = json.loads(self.ready_file.read_text())["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            text: str = answer.read().decode()
        return text

    def client(self, tenant: str = "team-a") -> Client:
        token = self.plane.service_account_token(tenant, "engine", names.AUDIENCE)
        target = Target(self.socket, self.pool, token, LAYOUT, timeout_s=30.0, move_timeout_s=60.0, silence_s=60.0)
        client = Client.attach(target, strict=True, wait_s=60.0)
        assert client.is_attached, client.reason
        return client


def keys_of(client: Client, seed: int, blocks: int = 16) -> list[BlockKey]:
    assert client.grants is not None
    own = client.grants.own
    assert own is not None
    tokens = np.arange(seed * 100_000, seed * 100_000 + blocks * 16, dtype=np.uint32)
    return chain_keys(own.secret, LAYOUT.layout_id(), tokens, 16)


def content(seed: int, i: int) -> bytes:
    """Block bytes that compress a little, as KV does, and that no other block has."""
    generator = np.random.default_rng(seed * 1000 + i)
    return generator.normal(size=LAYOUT.block_bytes // 4).astype(np.float32).tobytes()


def put(client: Client, seed: int, blocks: int = 16, session: str = "") -> int:
    slots = client.reserve(keys_of(client, seed, blocks), session=session)
    sums = []
    for i, slot in enumerate(slots):
        if slot.view is not None:
            slot.view[:] = content(seed, i)
            sums.append(checksum(content(seed, i), slot.digest, slot.epoch, slot.stamp))
    return [int(r) for r in client.publish([s for s in slots if s.reservation], sums)].count(1)


def got(client: Client, seed: int, blocks: int = 16) -> tuple[int, set[str]]:
    """Read a prefix back, compare every byte, and tell how many blocks came from where."""
    with client.acquire(keys_of(client, seed, blocks)) as leases:
        for i, lease in enumerate(leases):
            block = bytes(lease.view)
            assert checksum(block, lease.digest, lease.epoch, lease.stamp) == lease.checksum
            assert block == content(seed, i)
        return len(leases), {lease.source for lease in leases}
