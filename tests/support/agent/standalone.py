"""`kvstrata up` as a process of its own, and engines that connect to it without a cluster."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import yaml

from kvstrata import NO_TOKEN, Client, Layout, Target
from kvstrata_api.names import API_VERSION
from support.nursery import Program, run_program
from support.runner.alone import environment

LAYOUT = Layout("m", "r", "bf16", 16, layers=2, kv_heads=1, head_dim=64, element_bytes=2)
"""Blocks of 8 KiB."""
POOL = "one"
BLOCKS = 12
WAIT_S = 60.0
MIB = 1 << 20
Json = dict[str, Any]


def declared(kind: str, name: str, spec: Json, namespace: str = "") -> Json:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def pool(nvme: Path | None = None, *, encryption: str = "None", **settings: Any) -> Json:
    """A pool of any model with 32 MiB of memory, and below it 128 MiB on disk."""
    tiers: list[Json] = [
        {"name": "dram", "type": "HostDRAM", "capacityPerNode": "32Mi", "hostDRAM": {"pageSize": "4Ki"}},
    ]
    if nvme is not None:
        settings_of = {"nvme": {"path": str(nvme)}, "encryption": {"type": encryption}}
        tiers.append({"name": "nvme", "type": "NVMe", "capacityPerNode": "128Mi", **settings_of})
    compatibility = {"model": "*", "revision": "*", "dtype": "bf16"}
    # A busy disk may be slower than to compute; the rate is for what loads save.
    policy = {"recompute": {"type": "AlwaysFetch", "prefillTokensPerSecond": 12_000}}
    return declared("KVPool", POOL, {"compatibility": compatibility, "tiers": tiers, "policy": policy, **settings})


def tenant(name: str, account: str, **settings: Any) -> Json:
    namespace, _, account = account.partition("/")
    spec = {"serviceAccounts": [{"namespace": namespace, "name": account}], **settings}
    return declared("KVTenant", name, spec)


def until(fact: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (result := fact()):
        assert time.monotonic() < deadline_s, f"not true within {within_s} s"
        time.sleep(0.02)
    return result


def tokens(seed: int, blocks: int = BLOCKS) -> npt.NDArray[np.uint32]:
    return np.arange(seed * 100_000, seed * 100_000 + blocks * LAYOUT.block_tokens, dtype=np.uint32)


def content(seed: int, blocks: int = BLOCKS) -> npt.NDArray[np.uint8]:
    shape = (blocks, LAYOUT.block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@dataclass
class Up:
    """One `kvstrata up` with its state below `home`."""

    home: Path
    options: Sequence[str] = ()
    process: "Program | subprocess.Popen[bytes] | None" = None
    objects: list[Json] = field(default_factory=list)
    module: str = "kvstrata_client.cli"
    """What has kvstrata's command line. That itself is forked from a warm process, others start as they are."""
    pool: str = POOL
    environment: Mapping[str, str] = field(default_factory=dict)
    """What it gets besides that of tests."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.stop(signal.SIGKILL)

    @property
    def state(self) -> Path:
        return self.home / "state"

    @property
    def socket(self) -> Path:
        return self.state / "run" / "agent.sock"

    @property
    def manifest(self) -> Path:
        return self.home / "pool.yaml"

    @property
    def ready_file(self) -> Path:
        return self.home / "ready.json"

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    @property
    def printed(self) -> str:
        return (self.home / "out").read_text()

    def declare(self, *objects: Json) -> None:
        """Replace the manifest in one step."""
        self.objects = list(objects)
        temporary = self.home / "pool.new"
        temporary.write_text(yaml.safe_dump_all(objects))
        temporary.replace(self.manifest)

    @property
    def arguments(self) -> list[str]:
        files = ["-f", str(self.manifest)] if self.manifest.exists() else []
        return ["up", *files, "--state-dir", str(self.state), "--ready-file", str(self.ready_file), *self.options]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", self.module, *self.arguments]

    def start(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        log, out, own = self.home / "log", self.home / "out", {**environment(), **self.environment}
        if self.module == Up.module:
            self.process = run_program(self.module, self.arguments, log, own, out)
        else:
            with log.open("ab") as errors, out.open("ab") as printed:
                self.process = subprocess.Popen(self.command, stdout=printed, stderr=errors, env=own)
        until(self.is_serving)

    def is_serving(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log[-4000:]
        return self.ready_file.exists()

    def run(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """Start it beside what runs already, and wait for its end."""
        command = [*self.command, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(WAIT_S)
        self.process = None
        return status

    def status(self) -> Json:
        found: Json = json.loads((self.state / "status.json").read_text())["status"]
        return found

    def client(self, token: str | Path = NO_TOKEN, *, wait_s: float = WAIT_S) -> Client:
        """A client, attached or not; strict, so that what goes wrong is raised."""
        target = Target(self.socket, self.pool, token, LAYOUT, timeout_s=30.0, move_timeout_s=60.0, silence_s=60.0)
        return Client.attach(target, strict=True, wait_s=wait_s)
