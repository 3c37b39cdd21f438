"""Replicas of the metadata service as processes on one external Redis, and agents that only hold a directory's lane."""

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from controlplane.ports import free_ports
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.records import AgentRecord, Announcement
from kvstrata_telemetry import ready
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.nursery import Program, run_program

SECRET = ScopeSecret(ScopeId("tenant/a/uid/v1"), b"s" * 32)
LEASE_S = 5
"""Of the leader: short, so that tests wait little, and not so short that a busy machine deposes a living leader."""
WAIT_S = 90.0
ADMIN = "user admin on >admin allkeys allchannels +@all"


async def until(is_so: Callable[[], bool], what: str, show: Callable[[], object] = lambda: "") -> None:
    """Poll in a thread: agents of this process beat while a replica takes long to answer."""
    deadline_s = time.monotonic() + WAIT_S
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < deadline_s, f"{what}: {show()}"
        await asyncio.sleep(0.05)


class Redis:
    """A server that outlives its replicas, at one address with the same passwords however often it is started."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self._config = EmbeddedConfig(
            folder / "redis", port=port, agent_password="agent" * 4, metadata_password="metadata" * 3,
            other_users=(ADMIN,),
        )  # fmt: skip
        self.server: EmbeddedRedis

    async def start(self) -> None:
        self.server = await embedded.start(self._config)

    def kill(self) -> None:
        """As kill -9 would; `start` brings it back, empty."""
        os.kill(self.server.pid, signal.SIGKILL)
        asyncio.run(self.server.stop())  # Nobody else waits for its end.

    def access(self, role: Role) -> RedisAccess:
        return self.server.access(role)

    def cli(self, *command: str) -> str:
        login = ["redis-cli", "--no-auth-warning", "-p", str(self.server.port), "--user", "admin", "--pass", "admin"]
        done = subprocess.run([*login, *command], capture_output=True, check=True, timeout=10)
        return done.stdout.decode(errors="replace").strip()  # Names of keys are bytes.

    def keys(self, tag: str) -> list[str]:
        """Keys of a scope but for the marks that nothing may be written to it."""
        return [key for key in self.cli("KEYS", f"kf:{{{tag}.*").splitlines() if not key.endswith("}x")]


class Reached(Protocol):
    """A Redis that others run, one server or a cluster."""

    def access(self, role: Role) -> RedisAccess:
        """How a role reaches it."""


class Way:
    """A way to Redis that can be cut."""

    def __init__(self) -> None:
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server
        self.url = ""

    async def open(self, redis: Redis) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", redis.server.port)
            self._writers |= {writer, far_writer}
            await asyncio.gather(pour(reader, far_writer), pour(far_reader, writer))

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while content := await reader.read(65_536):
            writer.write(content)
            await writer.drain()
    writer.close()


@dataclass
class Replica:
    """One process of the service."""

    name: str
    folder: Path
    process: Program

    @property
    def ready_file(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()

    @property
    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log
        return self.ready_file.exists()

    def page(self, path: str, timeout_s: float = 30.0) -> str:
        address = (ready.read(self.ready_file) or {})["metrics"]
        with urllib.request.urlopen(f"http://{address}{path}", timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def fleet(self) -> dict[str, Any]:
        return dict(json.loads(self.page("/v1/fleet")))

    def states(self) -> dict[str, str]:
        return {agent["agent"]: agent["state"] for agent in json.loads(self.page("/v1/agents"))["agents"]}

    @property
    def leads(self) -> bool:
        return bool(self.fleet()["is_leader"])

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def launch(
    name: str,
    kubeconfig: Path | None,
    redis: Reached,
    folder: Path,
    *more: str,
    url: str = "",
    lease_s: float = LEASE_S,
) -> Replica:
    """Start a replica on a Redis that others run, and return at once; `url` leads there by another way.

    Without a kubeconfig it is alone, and leads.
    """
    access = redis.access(Role.METADATA)
    environment = {
        "KVSTRATA_REDIS_URL": url or access.url,
        "KVSTRATA_REDIS_USERNAME": access.username,
        "KVSTRATA_REDIS_PASSWORD": access.password,
    }
    return _launch(name, kubeconfig, folder, ["--redis", "external", *more], environment, lease_s)


def launch_with_redis(name: str, kubeconfig: Path, folder: Path) -> Replica:
    """Start a replica that starts Redis itself, and return at once."""
    options = ["--redis", "embedded", "--state-dir", str(folder / f"{name}-redis")]
    return _launch(name, kubeconfig, folder, options, {})


def _launch(
    name: str,
    kubeconfig: Path | None,
    folder: Path,
    own: list[str],
    environment: dict[str, str],
    lease_s: float = LEASE_S,
) -> Replica:
    cluster = ["--kubeconfig", str(kubeconfig)] if kubeconfig else ["--without-kubernetes"]
    options = [*cluster, "--metrics-port", "0", "--identity", name]
    rest = ["--ready-file", str(folder / f"{name}.json"), "--sweep-s", "0.5", "--lease-duration-s", str(lease_s)]
    given, log = [*options, *rest, *own], folder / f"{name}.log"
    process = run_program("kvstrata_metadata.service.main", given, log, {**os.environ, **environment})
    return Replica(name, folder, process)


@asynccontextmanager
async def agent(
    redis: Redis, node: str, held: list[Announcement], *, epoch: int = 1, secret: ScopeSecret = SECRET
) -> AsyncIterator[RedisDirectory]:
    """An agent that has announced `held` to the directory."""

    async def access() -> RedisAccess:
        return redis.access(Role.AGENT)

    instruments = Instruments(AGENT, CollectorRegistry())
    record = AgentRecord(f"p.{node}", epoch, "127.0.0.1:1")
    made = RedisDirectory(record, access, lambda: [(secret, held)], instruments, jitter_s=0.1)
    made.start()
    try:
        await until(lambda: made.is_settled, "the agent never told everything")
        yield made
    finally:
        await made.close()


def blocks(count: int) -> list[Announcement]:
    return [Announcement(os.urandom(20), "NVMe", 1, 4096) for _ in range(count)]


def die(directory: RedisDirectory) -> None:
    """As kill -9 would: no farewell."""
    for task in directory._tasks:
        task.cancel()
    directory._tasks = []
