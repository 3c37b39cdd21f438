"""Two replicas of the metadata service on a real API server and a real Redis, and what may happen to each of them."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from controlplane import ControlPlane
from kvstrata_api import names
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_client.cli import main
from kvstrata_telemetry import ready
from support.kube.agent import make_tenant
from support.metadata.replicas import LEASE_S, SECRET, Redis, Replica, Way, agent, blocks, die, launch, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

SYSTEM = names.SYSTEM_NAMESPACE
TAKEOVER_S = LEASE_S * 1.5 + 20.0
"""A dead leader is replaced within its Lease and a look; the rest is for a busy machine."""

UNHURRIED_LEASE_S = 24
"""A third of it is the look at which a hand-over is seen; the rest is for a busy machine."""


@pytest.fixture(scope="module")
def kubeconfig(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "metadata"
    return plane.service_account_kubeconfig(SYSTEM, "kvstrata-metadata", path)


class Pair:
    """Two replicas; `leader` is asked for anew each time."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas

    @property
    def living(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.process.poll() is None]

    def leaders(self) -> list[Replica]:
        return [replica for replica in self.living if replica.leads]

    async def leader(self) -> Replica:
        await until(lambda: len(self.leaders()) == 1, "nobody leads", lambda: [r.fleet() for r in self.living])
        return self.leaders()[0]

    def other(self, one: Replica) -> Replica:
        return next(replica for replica in self.replicas if replica is not one)


@pytest.fixture
async def pair(
    plane: ControlPlane, kubeconfig: Path, redis: Redis, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Pair]:
    lease_s = getattr(request, "param", LEASE_S)
    plane.kubectl("delete", "lease", "kvstrata-metadata", "-n", SYSTEM, "--ignore-not-found")
    made = [launch(name, kubeconfig, redis, tmp_path, lease_s=lease_s) for name in ("a", "b")]
    try:
        await until(lambda: all(replica.is_up for replica in made), "not ready")
        yield Pair(made)
    finally:
        for replica in made:
            replica.end()


def hold_lease(plane: ControlPlane, node: str, duration_s: int) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": node, "leaseDurationSeconds": duration_s, "renewTime": now}
    metadata = {"name": names.agent_lease_name("p", node), "namespace": SYSTEM}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(lease))


async def test_one_leads_both_show_the_fleet_and_a_killed_leader_is_replaced(pair: Pair, redis: Redis) -> None:
    leader = await pair.leader()
    other = pair.other(leader)
    async with agent(redis, "n1", blocks(300)), agent(redis, "n2", blocks(20)):
        await until(lambda: {r.fleet()["locations"] for r in pair.replicas} == {320}, "locations were not counted")
        both_live = {"p.n1": "live", "p.n2": "live"}
        await until(lambda: leader.states() == other.states() == both_live, "somebody was not live", other.states)
        await until(lambda: other.fleet()["leader"] == leader.name, "the other knows no leader", other.fleet)
        assert other.page("/readyz") == "ok\n"

        leader.send(signal.SIGKILL)
        died_s = time.monotonic()
        await until(lambda: other.leads, "nobody took over", other.fleet)
        assert time.monotonic() - died_s < TAKEOVER_S
        await until(lambda: other.fleet()["failovers_total"] == 1, "the failover was not counted")
        await until(lambda: "kvstrata_metadata_leader 1.0" in other.page("/metrics"), "the metric does not say it")
        assert other.states() == both_live, "a failover kills nobody"


async def test_the_command_shows_the_fleet(pair: Pair, redis: Redis, capsys: pytest.CaptureFixture[str]) -> None:
    leader = await pair.leader()
    address = (ready.read(leader.ready_file) or {})["metrics"]
    async with agent(redis, "n1", blocks(30)), agent(redis, "n2", blocks(4)):
        await until(lambda: leader.fleet()["locations"] == 34, "locations were not counted")
        shown = []
        for more in ("", "-o json --state live --pool p"):
            with pytest.raises(SystemExit):
                await asyncio.to_thread(main, ["fleet", "--address", str(address), *more.split()])
            shown.append(capsys.readouterr().out)

    assert f"leader     {leader.name} (this replica)" in shown[0]
    assert "agents     2 live, 0 silent, 0 fenced" in shown[0]
    assert "p.n1   live" in shown[0]
    assert [a["locations"] for a in json.loads(shown[1])["agents"]] == [30, 4]


@pytest.mark.parametrize("pair", [UNHURRIED_LEASE_S], indirect=True)
async def test_a_leader_that_stops_hands_over_at_once(pair: Pair) -> None:
    leader = await pair.leader()
    leader.send(signal.SIGTERM)
    told_s = time.monotonic()

    await until(lambda: pair.other(leader).leads, "nobody took over")
    assert time.monotonic() - told_s < UNHURRIED_LEASE_S
    assert await asyncio.to_thread(leader.process.wait, 60) == 0


async def test_a_frozen_leader_wakes_up_deposed(pair: Pair, redis: Redis) -> None:
    """Whatever it was about to do carries a term that Redis does not obey any more."""
    leader = await pair.leader()
    other = pair.other(leader)
    async with agent(redis, "n1", blocks(50)):
        await until(lambda: redis.cli("GET", "kf:{agents}t").endswith(leader.name), "the leader was not obeyed")
        term = int(redis.cli("GET", "kf:{agents}t").split()[0])
        leader.send(signal.SIGSTOP)
        await until(lambda: other.leads, "nobody took over")
        await until(
            lambda: redis.cli("GET", "kf:{agents}t") == f"{term + 1} {other.name}", "the new leader did nothing"
        )
        leader.send(signal.SIGCONT)

        for _ in range(20):
            assert pair.leaders() == [other]
            await asyncio.sleep(0.1)
        assert redis.cli("GET", "kf:{agents}t") == f"{term + 1} {other.name}"
        assert leader.states() == other.states() == {"p.n1": "live"}


async def test_a_lease_that_somebody_deletes_makes_no_two_leaders(
    pair: Pair, plane: ControlPlane, redis: Redis
) -> None:
    leader = await pair.leader()
    await until(lambda: redis.cli("GET", "kf:{agents}t").endswith(leader.name), "the leader was not obeyed")
    term = int(redis.cli("GET", "kf:{agents}t").split()[0])
    plane.kubectl("delete", "lease", "kvstrata-metadata", "-n", SYSTEM)
    for _ in range(20):
        assert len(pair.leaders()) <= 1
        await asyncio.sleep(0.1)
    now = await pair.leader()

    await until(lambda: redis.cli("GET", "kf:{agents}t").endswith(now.name), "the leader is not obeyed")
    assert int(redis.cli("GET", "kf:{agents}t").split()[0]) > term or now is leader


async def test_the_dead_are_gone_within_the_bound_and_their_successors_stay(
    pair: Pair, plane: ControlPlane, redis: Redis
) -> None:
    """The leader is killed in between; the Lease is the agent's, whose node comes back under the same name."""
    leader = await pair.leader()
    other = pair.other(leader)
    hold_lease(plane, "n1", 1)
    async with agent(redis, "n1", blocks(100_000)) as dying, agent(redis, "n2", blocks(10)):
        die(dying)
        leader.send(signal.SIGKILL)
        await until(lambda: other.states().get("p.n1") != "live", "silence went unnoticed")
        async with agent(redis, "n1", blocks(7), epoch=2):
            await until(lambda: other.leads, "nobody took over")
            await until(lambda: other.states() == {"p.n1": "live", "p.n2": "live"}, "the dead are still there")
            await until(lambda: other.fleet()["locations"] == 17, "locations of the dead are still there", other.fleet)
            await until(lambda: other.fleet()["removed_locations_total"] == 100_000, "not counted", other.fleet)
            await asyncio.sleep(3.0)
            assert other.states() == {"p.n1": "live", "p.n2": "live"}


async def test_a_leader_that_is_cut_off_from_redis_lets_the_other_lead(
    plane: ControlPlane, kubeconfig: Path, redis: Redis, tmp_path: Path
) -> None:
    plane.kubectl("delete", "lease", "kvstrata-metadata", "-n", SYSTEM, "--ignore-not-found")
    way = Way()
    await way.open(redis)
    first = launch("a", kubeconfig, redis, tmp_path, url=way.url)
    await until(lambda: first.is_up and first.leads, "nobody leads")
    second = launch("b", kubeconfig, redis, tmp_path)
    try:
        await until(lambda: second.is_up, "not ready")
        await way.cut()
        await until(lambda: second.leads and not first.leads, "the other does not lead", second.fleet)
        await until(lambda: redis.cli("GET", "kf:{agents}t").endswith(" b"), "the other is not obeyed")
        await asyncio.sleep(3.0 * LEASE_S)
        assert second.leads
        assert not first.leads
    finally:
        first.end()
        second.end()
        await way.cut()


async def test_a_stopped_redis_kills_nobody_and_no_replica(pair: Pair, redis: Redis) -> None:
    await pair.leader()
    async with agent(redis, "n1", blocks(40)), agent(redis, "n2", blocks(2)):
        await until(lambda: pair.replicas[0].fleet()["locations"] == 42, "locations were not counted")
        os.kill(redis.server.pid, signal.SIGSTOP)
        try:
            for replica in pair.replicas:
                await until(lambda r=replica: not r.fleet()["redis"]["is_up"], "nobody noticed")  # type: ignore[misc]
                assert "kvstrata_metadata_redis_up 0.0" in replica.page("/metrics")
            await asyncio.sleep(16.0)
        finally:
            os.kill(redis.server.pid, signal.SIGCONT)
        await until(lambda: all(r.fleet()["redis"]["is_up"] for r in pair.replicas), "Redis is not up again")
        await asyncio.sleep(3.0)

        assert [r.fleet()["fenced_total"] for r in pair.replicas] == [0, 0]
        await until(lambda: set(pair.replicas[0].states().values()) == {"live"}, "agents did not beat again")
        await until(lambda: pair.replicas[0].fleet()["locations"] == 42, "locations were lost", pair.replicas[0].fleet)
        await pair.leader()


async def test_a_killed_redis_is_filled_again_and_obeys_the_leader_again(pair: Pair, redis: Redis) -> None:
    leader = await pair.leader()
    async with agent(redis, "n1", blocks(40)) as directory:
        reports, run_id = directory.reports_total, ""
        await until(lambda: bool(leader.fleet()["redis"]["servers"]), "Redis was not looked at")
        run_id = leader.fleet()["redis"]["servers"][0]["run_id"]
        os.kill(redis.server.pid, signal.SIGKILL)
        await redis.server.stop()
        await redis.start()
        await until(lambda: directory.reports_total > reports and directory.is_settled, "nothing was reported again")

        def is_new() -> bool:
            servers = leader.fleet()["redis"]["servers"]
            return bool(servers and servers[0]["run_id"] not in ("", run_id))

        await until(is_new, "the new Redis was not looked at", leader.fleet)
        await until(lambda: leader.fleet()["locations"] == 40, "the new Redis was not filled", leader.fleet)
        await until(lambda: redis.cli("GET", "kf:{agents}t").endswith(" " + leader.name), "the leader is not obeyed")
        assert [r.fleet()["fenced_total"] for r in pair.replicas] == [0, 0]


async def test_an_api_server_that_is_away_deposes_the_leader_and_kills_nobody(
    pair: Pair, plane: ControlPlane, redis: Redis
) -> None:
    await pair.leader()
    hold_lease(plane, "cut-off", 3600)
    async with agent(redis, "live", blocks(5)), agent(redis, "cut-off", blocks(9)) as cut_off:
        await until(lambda: pair.replicas[0].fleet()["locations"] == 14, "locations were not counted")
        die(cut_off)
        plane.pause_apiserver(240.0)
        try:
            await until(lambda: not pair.leaders(), "a leader leads without its Lease")
            silent = {"p.live": "live", "p.cut-off": "silent"}
            for replica in pair.replicas:
                await until(lambda r=replica: r.states() == silent, "silence went unnoticed", replica.states)  # type: ignore[misc]
                await until(lambda r=replica: not r.fleet()["leases_known"], "Leases are known")  # type: ignore[misc]
            await asyncio.sleep(3.0)  # Several sweeps.
            for replica in pair.replicas:
                assert replica.states() == silent
                assert not replica.fleet()["leases_known"]
                assert replica.page("/readyz") == "ok\n"
        finally:
            plane.resume_apiserver()
        leader = await pair.leader()
        await until(lambda: leader.fleet()["leases_known"], "Leases are not known again")
        await asyncio.sleep(2.0)

        assert [r.fleet()["fenced_total"] for r in pair.replicas] == [0, 0]
        assert leader.states() == {"p.live": "live", "p.cut-off": "silent"}
        assert len(redis.keys(SECRET.tag())) > 0


async def test_a_claim_that_waits_is_shown_by_who_leads_and_no_longer_by_who_did(
    plane: ControlPlane, pair: Pair, redis: Redis
) -> None:
    """The alert takes the most that any replica says: it would fire for ever."""
    make_tenant(plane, "waiting")
    uid = plane.api.get(f"/apis/{names.API_VERSION}/kvtenants/waiting")["metadata"]["uid"]
    living = ScopeSecret(ScopeId(f"tenant/waiting/{uid}/v1"), b"l" * 32)

    def shows(replica: Replica) -> bool:
        return "kvstrata_metadata_erase_claims 1.0" in replica.page("/metrics")

    async with agent(redis, "n1", blocks(1), secret=living) as directory:
        assert await directory.claim_erased(living)
        first = await pair.leader()
        second = pair.other(first)
        await until(lambda: shows(first), "the claim was not seen")

        first.send(signal.SIGSTOP)
        await until(lambda: shows(second), "nobody took over")
        first.send(signal.SIGCONT)
        await until(lambda: not shows(first), "it goes on saying what it saw when it led")
        assert shows(second)
