"""The agent follows its objects and reports, under its own identity and the chart's rights."""

import asyncio
from pathlib import Path

import pytest

from controlplane import ControlPlane
from kvstrata_agent.kube import heartbeat
from kvstrata_agent.kube.authenticator import AgentIdentity
from kvstrata_agent.kube.kubernetes import KubeWorld
from kvstrata_api import names
from kvstrata_api.models.conditions import Status
from support.kube.objects import (
    GROUP,
    SYSTEM,
    WAIT_S,
    Json,
    eventually,
    make_node,
    make_pool,
    patch,
    report,
    stored_node,
    version_of,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


async def test_an_agent_waits_until_its_pool_and_its_node_exist(
    plane: ControlPlane, kubeconfig: Path, place: AgentIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with await KubeWorld.connect(place, kubeconfig) as world:
        ready = asyncio.create_task(world.ready())
        await eventually(lambda: any(f"KVPool/{place.pool}" in getattr(r, "missing", []) for r in caplog.records))
        make_pool(plane, place)
        await eventually(
            lambda: [f"KVPoolNode/{place.pool}.{place.node}"] in [getattr(r, "missing", []) for r in caplog.records]
        )
        assert not ready.done()
        make_node(plane, place)
        await asyncio.wait_for(ready, WAIT_S)

        assert world.desired.pool.spec.compatibility.model == "m"
        assert world.desired.pool_node.spec.tiers[0].capacity_bytes == 64 << 20


async def test_a_change_of_the_spec_wakes_the_agent_and_one_of_the_status_does_not(
    plane: ControlPlane, world: KubeWorld, place: AgentIdentity
) -> None:
    before = world.desired.pool_node
    assert world.desired.pool.metadata.generation == 1
    changed = asyncio.create_task(world.desired.changed())
    patch(plane, f"kvpn/{before.metadata.name}", '{"status":{"epoch":7}}', "--subresource=status")
    patch(plane, f"kvp/{place.pool}", '{"status":{"tenants":3}}', "--subresource=status")
    await asyncio.sleep(0.5)
    assert not changed.done()

    patch(plane, f"kvpn/{before.metadata.name}", '{"spec":{"drain":{"requested":true}}}')
    await asyncio.wait_for(changed, WAIT_S)

    assert world.desired.pool_node.spec.drain.requested


async def test_a_withdrawn_node_is_noticed_and_its_last_state_stays(
    plane: ControlPlane, world: KubeWorld, place: AgentIdentity
) -> None:
    node = world.desired.pool_node
    assert world.desired.pool.metadata.name
    assert not world.desired.is_withdrawn
    plane.api.delete(f"{GROUP}/kvpoolnodes/{node.metadata.name}")
    await asyncio.wait_for(world.desired.changed(), WAIT_S)

    assert world.desired.is_withdrawn
    assert world.desired.pool_node == node


async def test_the_lease_is_created_renewed_owned_and_released(
    plane: ControlPlane, world: KubeWorld, place: AgentIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "RENEW_S", 0.6)
    world.start_heartbeat(epoch=3)
    path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{names.agent_lease_name(place.pool, place.node)}"
    assert world.heartbeat is not None
    beat = world.heartbeat
    await eventually(lambda: beat.silent_s is not None)
    first = plane.api.get(path)
    await eventually(lambda: plane.api.get(path)["spec"]["renewTime"] > first["spec"]["renewTime"])

    assert first["spec"]["holderIdentity"] == f"{place.node}_3"
    assert first["spec"]["leaseDurationSeconds"] == heartbeat.DURATION_S
    assert first["metadata"]["labels"][names.LABEL_POOL] == place.pool
    assert first["metadata"]["ownerReferences"][0]["uid"] == world.desired.pool_node.metadata.uid
    assert beat.silent_s is not None
    assert beat.silent_s < WAIT_S
    await world.close()
    assert not plane.api.get(path)["spec"].get("holderIdentity")
    assert plane.api.get(path)["spec"]["leaseDurationSeconds"] == 1


async def test_a_status_is_written_once_and_again_only_when_it_says_something_new(
    plane: ControlPlane, world: KubeWorld, place: AgentIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata_agent.kube.report.COUNTERS_S", 0.3)
    world.status.report(report(500, AgentConnected=Status.TRUE, Ready=Status.FALSE))
    assert await world.status.flush(WAIT_S)
    first, status = version_of(plane, place), stored_node(plane, place)["status"]
    assert {c["type"]: c["status"] for c in status["conditions"]} == {"AgentConnected": "True", "Ready": "False"}
    assert status["tiers"][0]["usedBytes"] == 500
    assert status["tiers"][0]["usedOfCapacity"] == "500/1000"

    for used_bytes in (501, 502, 503, 504, 500):
        world.status.report(report(used_bytes, AgentConnected=Status.TRUE, Ready=Status.FALSE))
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    assert version_of(plane, place) == first, "changes below one percent are not written"
    assert world.status.writes == 1

    for hit in range(1, 60):
        world.status.report(report(500 + hit, hit, AgentConnected=Status.TRUE, Ready=Status.TRUE))
    assert await world.status.flush(WAIT_S)
    await asyncio.sleep(0.5)
    assert world.status.writes == 2, "only the newest of many reports is written"
    after = stored_node(plane, place)["status"]
    moved = {c["type"]: c["lastTransitionTime"] for c in after["conditions"]}
    kept = {c["type"]: c["lastTransitionTime"] for c in status["conditions"]}
    assert moved["AgentConnected"] == kept["AgentConnected"]
    assert after["lookups"] == {"queried": 100, "hit": 59}


async def test_what_somebody_else_wrote_over_our_status_is_put_right(
    plane: ControlPlane, world: KubeWorld, place: AgentIdentity
) -> None:
    world.status.report(report(0, AgentConnected=Status.TRUE))
    assert await world.status.flush(WAIT_S)
    gone = {"type": "AgentConnected", "status": "False", "reason": "LeaseExpired", "message": "silent for 15 s"}
    theirs = {"type": "Fenced", "status": "True", "reason": "LeaseExpired", "message": ""}
    stamp = {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    body: Json = {"apiVersion": names.API_VERSION, "kind": "KVPoolNode"}
    body |= {"metadata": {"name": names.pool_node_name(place.pool, place.node)}}
    body |= {"status": {"conditions": [gone | stamp, theirs | stamp]}}
    flags = ("--server-side", "--subresource=status", "--force-conflicts", "--field-manager=kvstrata-operator")
    plane.kubectl("apply", "-f", "-", *flags, stdin=str(body).replace("'", '"'))

    def conditions() -> dict[str, str]:
        return {c["type"]: c["status"] for c in stored_node(plane, place)["status"]["conditions"]}

    await eventually(lambda: conditions() == {"AgentConnected": "True", "Fenced": "True"})
