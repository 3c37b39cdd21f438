"""The metadata service as a process, under its own identity, on a real API server and a real Redis."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controlplane import ControlPlane
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_api import names
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_kube.api import KubeApi
from kvstrata_kube.certified import OwnCertificate
from kvstrata_metadata.duties.cluster import Cluster
from kvstrata_metadata.store.access import RedisAccess, parse_access
from kvstrata_metadata.store.records import AgentRecord, Announcement
from kvstrata_telemetry import ready
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.operator.issuer import holder, issuing

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = names.SYSTEM_NAMESPACE
SECRET = ScopeSecret(ScopeId("tenant/a/uid/v1"), b"s" * 32)
WAIT_S = 90.0
"""Bound of every wait: death is 15 s of silence, everything else takes a second on idle cores."""


@pytest.fixture(scope="module")
def kubeconfig(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plane.service_account_kubeconfig(
        SYSTEM, "kvstrata-metadata", tmp_path_factory.mktemp("identity") / "metadata"
    )


class Service:
    """One process of the service."""

    agents: OwnCertificate
    """Certificate that its agents show."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.ready_file = folder / "ready.json"
        self.log = folder / "log"
        arguments = ["--kubeconfig", str(kubeconfig), "--state-dir", str(folder / "redis"), "--metrics-port", "0"]
        command = [
            sys.executable,
            "-m",
            "kvstrata_metadata.service.main",
            *arguments,
            "--ready-file",
            str(self.ready_file),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--sweep-s", "0.5"], stderr=log)

    @property
    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.ready_file.exists()

    def page(self, name: str) -> str:
        address = (ready.read(self.ready_file) or {})["metrics"]
        with urllib.request.urlopen(f"http://{address}/{name}", timeout=30) as answer:
            return str(answer.read().decode())

    def fleet(self) -> dict[str, Any]:
        return dict(json.loads(self.page("fleet")))

    def states(self) -> dict[str, str]:
        return {agent["agent"]: agent["state"] for agent in self.fleet()["agents"]}

    def redis_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
async def service(plane: ControlPlane, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(kubeconfig, tmp_path)
    try:
        with issuing(plane, tmp_path):
            await until(lambda: made.is_up, "the service never became ready")
            async with holder(plane, tmp_path, names.agent_uri(SYSTEM, "p.n1")) as made.agents:
                await until(lambda: made.agents.credential is not None, "the agents have no certificate")
                yield made
    finally:
        made.kill()


async def until(is_so: Callable[[], bool], what: str, show: Callable[[], object] = lambda: "") -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what}: {show()}"
        await asyncio.sleep(0.05)


def read_access(plane: ControlPlane) -> RedisAccess:
    """What agents read: the Secret."""
    text = plane.kubectl("get", "secret", "-n", SYSTEM, names.REDIS_SECRET_AGENT, "-o", "json")
    from base64 import b64decode

    return parse_access({key: b64decode(value) for key, value in json.loads(text)["data"].items()})


@asynccontextmanager
async def agent(plane: ControlPlane, service: Service, node: str, blocks: int = 0) -> AsyncIterator[RedisDirectory]:
    held = [Announcement(os.urandom(20), "NVMe", 1, 1) for _ in range(blocks)]

    async def access() -> RedisAccess:
        return replace(await asyncio.to_thread(read_access, plane), contexts=service.agents.connecting_to_host)

    instruments = Instruments(AGENT, CollectorRegistry())
    record = AgentRecord(names.pool_node_name("p", node), 1, "127.0.0.1:1")
    made = RedisDirectory(record, access, lambda: [(SECRET, held)], instruments, jitter_s=0.1)
    made.start()
    try:
        await until(lambda: made.is_settled, "the agent never told everything")
        yield made
    finally:
        await made.close()


def die(directory: RedisDirectory) -> None:
    """As kill -9 would: no farewell."""
    for task in directory._tasks:
        task.cancel()
    directory._tasks = []


def is_running(pid: int) -> bool:
    """False for a zombie too: in a container nobody may reap it."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def hold_lease(plane: ControlPlane, node: str, duration_s: int) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": node, "leaseDurationSeconds": duration_s, "renewTime": now}
    metadata = {"name": names.agent_lease_name("p", node), "namespace": SYSTEM}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(lease))


async def test_agents_find_redis_through_the_secret_and_the_fleet_shows_them(
    plane: ControlPlane, service: Service
) -> None:
    async with agent(plane, service, "n1", 300), agent(plane, service, "n2", 20):
        await until(lambda: service.fleet()["locations"] == 320, "locations were not counted")

        await until(lambda: service.states() == {"p.n1": "live", "p.n2": "live"}, "somebody is not live")
        by_name = {a["agent"]: a for a in service.fleet()["agents"]}
        assert (by_name["p.n1"]["locations"], by_name["p.n2"]["locations"]) == (300, 20)
        await until(lambda: service.fleet()["leases_known"], "Leases are not known")
        counted = 'kvstrata_metadata_locations{node="n1",pool="p"} 300.0'
        await until(lambda: counted in service.page("metrics"), "the metric does not say it")
        assert read_access(plane).username == "agent"


async def test_a_farewell_removes_an_agent_at_once(plane: ControlPlane, service: Service) -> None:
    async with agent(plane, service, "n1", 100), agent(plane, service, "n2", 7) as leaving:
        await leaving.close()
        await until(lambda: service.states() == {"p.n1": "live"}, "who left is still there")
        await until(lambda: service.fleet()["locations"] == 100, "locations of who left are still there")


async def test_the_dead_are_removed_and_those_who_hold_their_lease_are_kept(
    plane: ControlPlane, service: Service
) -> None:
    hold_lease(plane, "held", 3600)
    hold_lease(plane, "expired", 1)
    async with (
        agent(plane, service, "live", 10),
        agent(plane, service, "held", 20) as held,
        agent(plane, service, "expired", 30) as expired,
    ):
        die(held)
        die(expired)
        died_s = time.monotonic()
        wanted = {"p.live": "live", "p.held": "silent"}
        await until(lambda: service.states() == wanted, "the dead were not removed", service.fleet)
        took_s = time.monotonic() - died_s

        assert took_s > 14.0
        await until(lambda: service.fleet()["locations"] == 30, "locations of the dead are still there")
        await until(lambda: service.fleet()["removed_locations_total"] >= 30, "not counted", service.fleet)


async def test_an_api_server_that_is_away_kills_nobody(plane: ControlPlane, service: Service) -> None:
    hold_lease(plane, "held", 3600)
    async with agent(plane, service, "held", 5) as held:
        await until(lambda: service.fleet()["locations"] == 5, "locations were not counted")
        plane.pause_apiserver(240.0)
        try:
            die(held)
            await until(lambda: service.states() == {"p.held": "silent"}, "silence went unnoticed")
            await until(lambda: not service.fleet()["leases_known"], "nobody noticed the API server's absence")
            await asyncio.sleep(3.0)
            assert service.states() == {"p.held": "silent"}
            assert service.page("readyz") == "ok\n"
        finally:
            plane.resume_apiserver()


async def test_a_killed_redis_comes_back_at_the_same_place_and_is_filled_again(
    plane: ControlPlane, service: Service
) -> None:
    async with agent(plane, service, "n1", 400) as directory:
        before, reports = read_access(plane), directory.reports_total
        os.kill(service.redis_pid(), signal.SIGKILL)
        await until(lambda: directory.reports_total > reports and directory.is_settled, "nothing was reported again")

        assert read_access(plane) == before
        restarted = "kvstrata_metadata_redis_restarts_total 1.0"
        await until(lambda: restarted in service.page("metrics"), "the restart was not counted")
        await until(lambda: service.fleet()["locations"] == 400, "the new Redis was not filled")


async def test_a_new_service_keeps_the_agents_password_and_leaves_no_server_behind(
    plane: ControlPlane, kubeconfig: Path, service: Service, tmp_path: Path
) -> None:
    before, pid = read_access(plane), service.redis_pid()
    service.kill()
    await until(lambda: not is_running(pid), "Redis outlived the service")
    (tmp_path / "second").mkdir()
    second = Service(kubeconfig, tmp_path / "second")
    try:
        await until(lambda: second.is_up, "the second service never became ready")
        assert read_access(plane).password == before.password
        pid = second.redis_pid()
        second.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.process.wait, 60) == 0
        assert not second.ready_file.exists()
        assert not is_running(pid)
    finally:
        second.kill()


async def test_the_role_may_touch_no_other_secret(kubeconfig: Path) -> None:
    from kvstrata_api.errors import ForbiddenError

    api = await KubeApi.connect(names.FIELD_MANAGER_METADATA, kubeconfig)
    try:
        with pytest.raises(ForbiddenError):
            await Cluster(api, SYSTEM).read_secret(names.scope_secret_name("tenant", "a"))
    finally:
        await api.close()
