"""An External Redis that is a cluster of three real primaries: one Secret leads the service and the agents to all."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane import ControlPlane
from kvstrata_api import names
from kvstrata_metadata.store.access import RedisAccess, Role, format_access, parse_access
from support.metadata.directory_fleet import SECRET, DirectoryFleet
from support.metadata.redis_cluster import RedisCluster
from support.metadata.replicas import launch, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SYSTEM = names.SYSTEM_NAMESPACE
BLOCKS = 700


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RedisCluster]:
    made = RedisCluster(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def through_a_secret(plane: ControlPlane, access: RedisAccess) -> RedisAccess:
    """What an agent reads that finds the administrator's Secret."""
    metadata = {"name": "redis-of-others", "namespace": SYSTEM}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": format_access(access)}
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(secret))
    held = plane.api.get(f"/api/v1/namespaces/{SYSTEM}/secrets/redis-of-others")["data"]
    return parse_access({key: base64.b64decode(value) for key, value in held.items()})


async def test_a_secret_that_names_a_cluster_leads_service_and_agents_to_every_primary(
    plane: ControlPlane, cluster: RedisCluster, tmp_path: Path
) -> None:
    plane.kubectl("delete", "lease", "kvstrata-metadata", "-n", SYSTEM, "--ignore-not-found")
    account = plane.service_account_kubeconfig(SYSTEM, "kvstrata-metadata", tmp_path / "metadata")
    replica = launch("a", account, cluster, tmp_path)
    agents = DirectoryFleet(lambda: through_a_secret(plane, cluster.access(Role.AGENT)))
    try:
        # Transitions are the service's to load: before that agents take the directory as away.
        await until(lambda: replica.is_up, "the service is not ready")
        gone, stays = agents.add("p.gone", BLOCKS), agents.add("p.stays")
        await agents.settled(60.0)
        await agents.becomes_known("p.stays", "p.gone", 60.0)
        await until(lambda: set(replica.states()) == {"p.gone", "p.stays"}, "agents are not seen", replica.states)
        await until(lambda: len(replica.fleet()["redis"]["servers"]) == 3, "servers are missing", replica.fleet)

        digests = list(agents.held["p.gone"])
        await gone.close()
        agents.made.pop("p.gone")
        async with asyncio.timeout(120.0):  # Its silence is judged after 60 s: nobody holds its Lease.
            while any(await stays.locate(SECRET, digests)):  # noqa: ASYNC110 - The sweep is another process's.
                await asyncio.sleep(0.5)
    finally:
        await agents.close()
        replica.end()
