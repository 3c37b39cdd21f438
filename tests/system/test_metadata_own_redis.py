"""Two metadata services that each would start a Redis: there is one directory, and it moves with the Lease."""

import asyncio
import base64
import json
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from controlplane import ControlPlane
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_api import names
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_kube.certified import OwnCertificate
from kvstrata_metadata.store.access import RedisAccess, parse_access
from kvstrata_metadata.store.cluster_store import open_store
from kvstrata_metadata.store.records import AgentRecord
from kvstrata_operator.certificates.policy import Issuance
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.kube.agent import SYSTEM
from support.metadata.replicas import LEASE_S, SECRET, Replica, blocks, launch_with_redis, until
from support.operator.issuer import holder, issuing

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

RENEWED = "redis has read its certificates anew"


@pytest.fixture
async def pair(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[tuple[Replica, Replica]]:
    path = plane.service_account_kubeconfig(SYSTEM, "kvstrata-metadata", tmp_path / "metadata.kubeconfig")
    plane.kubectl("delete", "lease", "kvstrata-metadata", "-n", SYSTEM, "--ignore-not-found")
    first = launch_with_redis("a", path, tmp_path)
    started = [first]
    try:
        await until(lambda: "waiting for a certificate" in first.log, "nothing is said of what is waited for")
        assert not redis_of(first), "a Redis without a certificate"
        with issuing(plane, tmp_path):
            await until(lambda: first.is_up and first.leads, "no Redis though there is a certificate")
            started.append(launch_with_redis("b", path, tmp_path))
            yield first, started[1]
    finally:
        for replica in started:
            replica.end()


@pytest.fixture
async def own(plane: ControlPlane, pair: object, tmp_path: Path) -> AsyncIterator[OwnCertificate]:
    """Certificate of an agent."""
    async with holder(plane, tmp_path, names.agent_uri(SYSTEM, "p.n1")) as made:
        await until(lambda: made.credential is not None, "the agent has no certificate")
        yield made


def published(plane: ControlPlane) -> RedisAccess:
    text = plane.kubectl("get", "secret", "-n", SYSTEM, names.REDIS_SECRET_AGENT, "-o", "json")
    return parse_access({key: base64.b64decode(value) for key, value in json.loads(text)["data"].items()})


def directory(plane: ControlPlane, own: OwnCertificate) -> RedisDirectory:
    """An agent with ten blocks that reads the Secret for each connection."""

    async def access() -> RedisAccess:
        try:
            found = await asyncio.to_thread(published, plane)
        except KeyError as e:
            raise DirectoryAwayError("no Secret") from e
        assert found.is_fleet
        return replace(found, contexts=own.connecting_to_host)

    held = blocks(10)
    instruments = Instruments(AGENT, CollectorRegistry())
    record = AgentRecord("p.n1", 1, "127.0.0.1:1")
    return RedisDirectory(record, access, lambda: [(SECRET, held)], instruments, jitter_s=0.1)


def redis_of(replica: Replica) -> bool:
    """Whether the replica runs a server."""
    pid = replica.process.pid
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


async def test_a_standby_starts_no_redis_until_it_leads(
    plane: ControlPlane, pair: tuple[Replica, Replica], own: OwnCertificate
) -> None:
    first, second = pair
    made = directory(plane, own)
    made.start()
    try:
        await until(lambda: made.is_settled, "the agent never told everything")
        before = published(plane)
        await asyncio.sleep(2 * LEASE_S)
        assert second.process.poll() is None
        assert not redis_of(second)
        assert not second.ready_file.exists()
        assert published(plane) == before

        first.send(signal.SIGKILL)
        await until(lambda: second.is_up and second.leads, "nobody took over")
        await until(lambda: second.fleet()["locations"] == 10, "the new directory was not filled", second.fleet)
        assert published(plane).url != before.url
        assert published(plane).password == before.password
    finally:
        await made.close()


async def test_a_leader_that_was_frozen_ends_with_its_redis(plane: ControlPlane, pair: tuple[Replica, Replica]) -> None:
    first, second = pair
    before = published(plane)
    first.send(signal.SIGSTOP)
    await until(lambda: second.is_up and second.leads, "nobody took over")
    first.send(signal.SIGCONT)

    assert await asyncio.to_thread(first.process.wait, 60) == 1
    assert "its Redis is the directory" in first.log
    assert published(plane).url != before.url


async def test_an_api_server_that_is_away_ends_no_redis(plane: ControlPlane, pair: tuple[Replica, Replica]) -> None:
    first, second = pair
    before = published(plane)
    plane.pause_apiserver(240.0)
    try:
        await until(lambda: not first.leads, "a leader leads without its Lease")
        await asyncio.sleep(2.0 * LEASE_S)
        assert redis_of(first)
        assert not redis_of(second)
        assert first.fleet()["redis"]["is_up"]
    finally:
        plane.resume_apiserver()
    await until(lambda: first.leads, "the leader does not lead again")
    assert redis_of(first)
    assert not redis_of(second)
    assert published(plane) == before


async def test_a_redis_of_our_own_shows_new_certificates_and_drops_no_request(
    plane: ControlPlane, tmp_path: Path
) -> None:
    path = plane.service_account_kubeconfig(SYSTEM, "kvstrata-metadata", tmp_path / "metadata.kubeconfig")
    plane.kubectl("delete", "lease", "kvstrata-metadata", "-n", SYSTEM, "--ignore-not-found")
    plane.kubectl("delete", "secret", names.REDIS_SECRET_AGENT, "-n", SYSTEM, "--ignore-not-found")
    replica = launch_with_redis("c", path, tmp_path)
    rules = Issuance(SYSTEM, leaf_life=timedelta(seconds=15), settle=timedelta(seconds=1))
    try:
        with issuing(plane, tmp_path, rules):
            async with holder(plane, tmp_path, names.agent_uri(SYSTEM, "p.n1")) as own:
                await until(lambda: replica.is_up and own.credential is not None, "no Redis")
                access = replace(published(plane), contexts=own.connecting_to_host)
                old = open_store(access)
                shown: set[str] = set()
                ends_s = time.monotonic() + 150.0
                while len(shown) < 3 or replica.log.count(RENEWED) < 2:
                    assert time.monotonic() < ends_s, "certificates were hardly renewed"
                    fresh = open_store(access)
                    for store in (old, fresh):  # Of the beginning, and of now.
                        assert await store.ask([("PING",)]) == [True]
                    await fresh.close()
                    shown.add((tmp_path / "c-redis" / "tls.crt").read_text())
                    await asyncio.sleep(0.1)
                await old.close()
    finally:
        replica.end()
