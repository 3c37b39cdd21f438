"""An agent whose KVPoolNode is deleted: nobody wants it any more, but it holds what it holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane import ControlPlane
from support.kube.agent import MIB, Agent, dram, got, make_tenant, nvme, put, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture
def agent(plane: ControlPlane, kubeconfig: Path, tmp_path: Path) -> Iterator[Agent]:
    make_tenant(plane, "team-a")
    with Agent(plane, kubeconfig, tmp_path) as made:
        made.declare([dram(16 * MIB), nvme(tmp_path / "nvme", 64 * MIB)])
        made.start()
        yield made


def test_it_takes_no_new_blocks_brings_its_own_to_disk_and_serves_them_until_it_is_wanted_again(agent: Agent) -> None:
    with agent.client() as client:
        assert put(client, 1) == 16
        spec = agent.plane.api.get(f"/apis/kvstrata.io/v1alpha1/kvpoolnodes/{agent.name}")["spec"]
        agent.plane.kubectl("delete", "kvpn", agent.name)

        until(lambda: put(client, 2, 1) == 0)
        until(lambda: f'kvstrata_tier_blocks{{node="node-a",pool="{agent.pool}",tier="nvme"}} 16.0' in agent.metrics())
        assert got(client, 1)[0] == 16

        node = {"apiVersion": "kvstrata.io/v1alpha1", "kind": "KVPoolNode", "metadata": {"name": agent.name}}
        agent.plane.api.post("/apis/kvstrata.io/v1alpha1/kvpoolnodes", node | {"spec": spec})
        until(lambda: put(client, 3) == 16)
        assert got(client, 1)[0] == 16
        assert got(client, 3)[0] == 16
