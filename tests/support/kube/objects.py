"""Objects and waits of tests of the agent's Kubernetes side."""

import asyncio
import base64
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from controlplane import ControlPlane
from kvstrata_agent.kube.authenticator import AgentIdentity
from kvstrata_agent.kube.kubernetes import KubeWorld
from kvstrata_api import names
from kvstrata_api.errors import (
    ApiServerAwayError,
    RetryableError,
    UnauthenticatedError,
)
from kvstrata_api.models.conditions import Condition, Status
from kvstrata_api.models.poolnode import KVPoolNodeStatus, LookupCounts, NodeTierStatus
from kvstrata_api.tiers import TierType
from kvstrata_api.trust import Identity

SYSTEM = names.SYSTEM_NAMESPACE
GROUP = f"/apis/{names.API_VERSION}"
Json = dict[str, Any]
WAIT_S = 90.0


async def eventually(check: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Return the first truthy result of `check`."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := check()):
        assert time.monotonic() < deadline_s, f"not true within {timeout_s} s"
        await asyncio.sleep(0.02)
    return result


def raising(call: Callable[[], Any], error: type[Exception]) -> Callable[[], bool]:
    """True once `call` raises `error`."""

    def check() -> bool:
        try:
            call()
        except error:
            return True
        return False

    return check


def custom(kind: str, name: str, spec: Json) -> Json:
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def make_pool(plane: ControlPlane, place: AgentIdentity) -> Json:
    tiers = [{"name": "dram", "type": "HostDRAM", "capacityPerNode": "64Mi", "hostDRAM": {}}]
    compatibility = {"model": "m", "revision": "r", "dtype": "bf16"}
    pool = custom("KVPool", place.pool, {"compatibility": compatibility, "tiers": tiers})
    made: Json = plane.api.post(f"{GROUP}/kvpools", pool)
    return made


def make_node(plane: ControlPlane, place: AgentIdentity) -> Json:
    tiers = [{"name": "dram", "type": "HostDRAM", "capacityBytes": 64 << 20, "hostDRAM": {}}]
    spec = {"poolRef": place.pool, "nodeName": place.node, "tiers": tiers, "revision": "r1"}
    node = custom("KVPoolNode", names.pool_node_name(place.pool, place.node), spec)
    made: Json = plane.api.post(f"{GROUP}/kvpoolnodes", node)
    return made


def stored_node(plane: ControlPlane, place: AgentIdentity) -> Json:
    node: Json = plane.api.get(f"{GROUP}/kvpoolnodes/{names.pool_node_name(place.pool, place.node)}")
    return node


def patch(plane: ControlPlane, resource: str, body: str, *flags: str) -> None:
    plane.kubectl("patch", resource, "--type=merge", "-p", body, *flags)


def make_namespace(plane: ControlPlane, labels: Json | None = None) -> str:
    """A namespace with one engine ServiceAccount."""
    name = f"team-{secrets.token_hex(3)}"
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels or {}}})
    plane.api.post(f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "engine"}})
    return name


def make_tenant(plane: ControlPlane, name: str, **spec: Any) -> Json:
    made: Json = plane.api.post(f"{GROUP}/kvtenants", custom("KVTenant", name, spec))
    return made


def make_team_tenant(plane: ControlPlane, team: str) -> Json:
    """A tenant named like the team, of its one engine."""
    return make_tenant(plane, team, serviceAccounts=[{"namespace": team, "name": "engine"}])


def make_scope_secret(plane: ControlPlane, kind: str, owner: Json, versions: tuple[int, ...] = (1,)) -> bytes:
    """What the operator writes for a tenant or domain; the key of the last version."""
    keys = {f"v{v}": secrets.token_bytes(32) for v in versions}
    metadata = {
        "name": names.scope_secret_name(kind, owner["metadata"]["name"]),
        "labels": {names.LABEL_SCOPE: kind},
        "annotations": {names.ANNOTATION_OWNER_UID: owner["metadata"]["uid"]},
    }
    data = {k: base64.b64encode(v).decode() for k, v in keys.items()}
    plane.api.post(f"/api/v1/namespaces/{SYSTEM}/secrets", {"metadata": metadata, "data": data})
    return keys[f"v{versions[-1]}"]


def engine_token(plane: ControlPlane, namespace: str, audience: str | None = names.AUDIENCE) -> str:
    return plane.service_account_token(namespace, "engine", audience)


async def asked_in_vain(world: KubeWorld, token: str) -> None:
    """Present a token while nobody can be asked."""

    async def away(*_: Any, **__: Any) -> Any:
        raise ApiServerAwayError("away")

    world.api.call = away  # type: ignore[method-assign]
    await world.authenticator.authenticate(token)


async def granted(world: KubeWorld, team: str) -> None:
    """Wait until the engine of a team has its grants."""
    who = Identity(team, "engine")
    await eventually(lambda: not raising(lambda: world.authenticator.authorize(who), Exception)())


async def refused(world: KubeWorld, token: str) -> None:
    """Wait until a token is refused; the API server itself remembers good ones for 10 s."""
    deadline_s = time.monotonic() + WAIT_S
    try:
        while time.monotonic() < deadline_s:
            await world.authenticator.authenticate(token)
            await asyncio.sleep(0.5)
    except UnauthenticatedError:
        return
    pytest.fail("still accepted")


def says(world: KubeWorld, team: str, words: str) -> bool:
    """Whether authorising a team fails with these words."""
    try:
        world.authenticator.authorize(Identity(team, "engine"))
    except RetryableError as e:
        return words in str(e)
    return False


def make_unknown_token(token: str) -> str:
    """A token that no memory holds and no API server accepts."""
    return token[:-6] + "AAAAAA"


def report(used_bytes: int, hit: int = 0, **conditions: Status) -> KVPoolNodeStatus:
    tier = NodeTierStatus(
        name="dram", type=TierType.HOST_DRAM, phase="Ready", capacity_bytes=1000, used_bytes=used_bytes
    )
    said = tuple(Condition(type=t, status=s, reason="Test", message="") for t, s in conditions.items())
    return KVPoolNodeStatus(
        epoch=3, agent_version="0.1.0", tiers=(tier,), conditions=said, lookups=LookupCounts(queried=100, hit=hit)
    )


def version_of(plane: ControlPlane, place: AgentIdentity) -> str:
    version: str = stored_node(plane, place)["metadata"]["resourceVersion"]
    return version
