"""KVOperations from `kubectl apply` to their end: real operator, real agent processes, kill -9 of both on the way."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane import ControlPlane
from support.kube.agent import got, keys_of, make_tenant, put, until
from support.operator.operated_fleet import Fleet, serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]


@pytest.fixture
def fleet(plane: ControlPlane, kubeconfig: Path, operator_config: Path, tmp_path: Path) -> Iterator[Fleet]:
    with serving(plane, kubeconfig, operator_config, tmp_path) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def tenant(plane: ControlPlane) -> None:
    make_tenant(plane, "team-a")


def test_a_flush_takes_what_nobody_holds_and_survives_kills_of_operator_and_agent(fleet: Fleet) -> None:
    first, second = fleet.agents
    with first.client() as one, second.client() as other:
        assert put(one, 1) == put(one, 2) == put(other, 1) == 16
        with one.acquire(keys_of(one, 2)) as held:
            second.stop(signal.SIGKILL)
            name = fleet.operate("flush", "Flush", mode="Drop")
            until(lambda: fleet.status(name).get("summary") == "1/2 nodes")
            fleet.restart_operator()
            assert fleet.status(name)["state"] == "Progressing"
            assert len(held) == 16
            assert got(one, 2)[0] == 16
            assert got(one, 1)[0] == 0
        second.start()
        status = fleet.wait(name, "Complete")

    assert status["progress"]["nodesDone"] == status["progress"]["nodesTotal"] == 2
    assert status["progress"]["blocksDone"] >= 16
    until(lambda: fleet.orders(first) == fleet.orders(second) == [])
    until(lambda: not first.status().get("orders"))
    until(lambda: {"Started", "Complete"} <= set(fleet.events(name)))
    assert 'kvstrata_orders_total{node="' in first.metrics()


def test_an_answered_order_is_not_carried_out_again_after_a_restart(fleet: Fleet) -> None:
    first, second = fleet.agents
    second.stop(signal.SIGKILL)
    name = fleet.operate("once", "Flush", tier="nvme")
    until(lambda: [a["phase"] for a in first.status().get("orders", [])] == ["Done"])
    first.stop(signal.SIGTERM)
    first.start()
    with first.client() as client:
        assert put(client, 3) == 16
    until(lambda: first.has_reported() and [a["phase"] for a in first.status()["orders"]] == ["Done"])
    assert "kvstrata_orders_total{" not in first.metrics(), "the process that was started since carried out none"
    with first.client() as client:
        assert got(client, 3)[0] == 16
    fleet.cancel(name)
    fleet.wait(name, "Cancelled")
    until(lambda: fleet.orders(first) == [])


def test_a_drained_node_takes_no_blocks_until_its_operation_is_cancelled_or_deleted(fleet: Fleet) -> None:
    first, second = fleet.agents
    with first.client() as client, second.client() as other:
        assert put(client, 1) == 16
        name = fleet.operate("drain", "Drain", nodes={"names": [first.node]})
        status = fleet.wait(name, "Complete")
        assert status["summary"] == "1/1 nodes"
        assert first.condition("Draining")["reason"] == "Drained"
        assert put(client, 2) == 0
        assert got(client, 1)[0] == 16
        assert put(other, 2) == 16
        fleet.restart_operator()
        assert first.condition("Draining")["reason"] == "Drained"

        fleet.plane.kubectl("delete", f"kvop/{name}")
        until(lambda: first.condition("Draining")["reason"] == "NotRequested")
        assert first.condition("Ready")["status"] == "True"
        assert put(client, 3) == 16


def test_a_drained_tier_is_emptied_into_the_others_and_closed_until_its_operation_is_cancelled(fleet: Fleet) -> None:
    first, _ = fleet.agents
    with first.client() as client:
        assert put(client, 1) == put(client, 2) == 16
        with client.acquire(keys_of(client, 2)) as held:
            name = fleet.operate("tier", "Drain", nodes={"names": [first.node]}, tier="dram")
            until(lambda: [f["reason"] for f in fleet.status(name).get("failures", [])] == ["BlocksHeld"])
            assert len(held) == 16
            fleet.restart_operator()
        status = fleet.wait(name, "Complete")
        assert status["summary"] == "1/1 nodes"
        assert status["progress"]["blocksDone"] == status["progress"]["blocksTotal"] >= 32
        assert put(client, 3) == 0
    first.stop(signal.SIGKILL)
    first.start()
    with first.client() as client:
        assert put(client, 3) == 0, "closed from before it came up"
        fleet.cancel(name)
        until(lambda: fleet.orders(first) == [])
        until(lambda: {t["name"]: t["phase"] for t in first.status()["tiers"]}["dram"] == "Ready")
        assert put(client, 3) == 16
        assert got(client, 1)[0] == got(client, 2)[0] == 16


def test_people_see_what_goes_on_and_what_is_wrong(fleet: Fleet) -> None:
    name = fleet.operate("typo", "Flush", tier="nvm")
    until(lambda: fleet.status(name).get("state") == "Pending")
    table = fleet.plane.kubectl("get", "kvop", name, "-o", "wide")

    assert table.splitlines()[0].split() == ["NAME", "TYPE", "POOL", "PROGRESS", "STATE", "MESSAGE", "AGE"]
    assert "has no tier nvm" in table
    fleet.cancel(name)
    fleet.wait(name, "Cancelled")
