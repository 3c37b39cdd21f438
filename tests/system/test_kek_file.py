"""KEKs from a file that a vault mounts: operator and agent read it, and the cluster holds no KEK."""

import asyncio
import base64
import secrets
from pathlib import Path

import pytest

from controlplane import ApiError, ControlPlane
from kvstrata_agent.kube.authenticator import AgentIdentity
from kvstrata_agent.kube.kubernetes import KubeWorld
from kvstrata_api import names
from kvstrata_api.blocks import ScopeId
from support.kube.objects import GROUP, SYSTEM, WAIT_S, custom, eventually, make_node, make_pool
from support.operator.process import Replica

pytestmark = pytest.mark.system

ACCOUNTS = {"serviceAccounts": [{"namespace": "vaulted", "name": "engine"}]}


def line(number: int) -> str:
    return f"k{number}:{base64.b64encode(secrets.token_bytes(32)).decode()}\n"


async def test_a_kek_file_serves_operator_and_agent(plane: ControlPlane, place: AgentIdentity, tmp_path: Path) -> None:
    keks = tmp_path / "keks"
    keks.write_text(line(7))
    kubeconfigs = {
        name: plane.service_account_kubeconfig(SYSTEM, name, tmp_path / name)
        for name in (names.FIELD_MANAGER_OPERATOR, names.FIELD_MANAGER_AGENT)
    }
    make_pool(plane, place)
    make_node(plane, place)
    plane.kubectl("patch", f"kvp/{place.pool}", "--type=merge", "-p", '{"spec": {"paused": true}}')
    operator = await asyncio.to_thread(
        Replica, kubeconfigs[names.FIELD_MANAGER_OPERATOR], tmp_path, "--kek-file", str(keks)
    )
    try:
        tenant = plane.api.post(f"{GROUP}/kvtenants", custom("KVTenant", "vaulted", ACCOUNTS))
        scope = ScopeId(f"tenant/vaulted/{tenant['metadata']['uid']}/v1")
        kubeconfig = kubeconfigs[names.FIELD_MANAGER_AGENT]
        async with await KubeWorld.connect(place, kubeconfig, keks) as world:
            await asyncio.wait_for(world.ready(), WAIT_S)
            key = bytes(await eventually(lambda: world.keyring.data_key(scope)))
            assert wrapped(plane).startswith("k7:")

            keks.write_text(keks.read_text() + line(8))
            await eventually(lambda: wrapped(plane).startswith("k8:"))
            assert bytes(await eventually(lambda: world.keyring.data_key(scope))) == key

            keks.unlink()
            await eventually(lambda: world.keyring.data_key(scope) is None)
        with pytest.raises(ApiError, match="404"):
            plane.api.get(f"/api/v1/namespaces/{SYSTEM}/secrets/{names.KEK_SECRET}")
    finally:
        operator.process.kill()
        operator.process.wait()


def wrapped(plane: ControlPlane) -> str:
    """The tenant's wrapped data key."""
    name = names.scope_secret_name("tenant", "vaulted")
    data = plane.api.get(f"/api/v1/namespaces/{SYSTEM}/secrets/{name}")["data"]
    return base64.b64decode(data["v1.data"]).decode()
