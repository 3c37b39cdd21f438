"""From crowded blocks in a real Redis to advice in the right mailboxes, and what owners make of it."""

import asyncio
import time

import pytest

from controlplane import ControlPlane
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_metadata.directory.messages import MAILBOX_MAX
from kvstrata_metadata.duties.nominations import DUPLICATE, designated_holder
from support.kube.agent import GROUP, custom
from support.metadata.replicas import SECRET, WAIT_S, Redis, Replica, agent, blocks, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture(scope="module", autouse=True)
def pool(plane: ControlPlane) -> None:
    """Pool `p` wants three copies."""
    tiers = [{"name": "dram", "type": "HostDRAM", "capacityPerNode": "64Mi", "hostDRAM": {}}]
    compatibility = {"model": "m", "revision": "r", "dtype": "bf16"}
    spec = {"compatibility": compatibility, "tiers": tiers, "policy": {"retention": {"copies": 3}}}
    plane.api.post(f"{GROUP}/kvpools", custom("KVPool", "p", spec))


async def advice(directories: dict[str, RedisDirectory]) -> dict[str, set[bytes]]:
    """Everything that was nominated to each agent by now."""
    found: dict[str, set[bytes]] = {}
    for node, directory in directories.items():
        taken = await directory.take_nominations(MAILBOX_MAX)
        assert {n.reason for n in taken} <= {DUPLICATE}
        found[node] = {digest for nomination in taken for digest in nomination.digests}
    return found


async def test_the_copy_that_is_one_too_many_is_nominated_to_one_owner_and_never_to_the_keeper(
    redis: Redis, service: Replica
) -> None:
    everywhere, enough, alone = blocks(50), blocks(50), blocks(50)
    names = {f"p.{node}" for node in NODES}
    kept = designated_holder(SECRET.tag(), names).removeprefix("p.")
    held = {node: [*everywhere] for node in NODES}
    for node in NODES[:3]:
        held[node] += enough
    held["n4"] += alone
    async with (
        agent(redis, "n1", held["n1"]) as n1,
        agent(redis, "n2", held["n2"]) as n2,
        agent(redis, "n3", held["n3"]) as n3,
        agent(redis, "n4", held["n4"]) as n4,
    ):
        directories = dict(zip(NODES, (n1, n2, n3, n4), strict=True))
        total: dict[str, set[bytes]] = {node: set() for node in NODES}
        deadline_s = time.monotonic() + WAIT_S
        while len(set().union(*total.values())) < len(everywhere):
            assert time.monotonic() < deadline_s, "nothing is nominated"
            for node, digests in (await advice(directories)).items():
                total[node] |= digests
            await asyncio.sleep(0.1)

        nominated = [digest for digests in total.values() for digest in digests]
        assert sorted(nominated) == sorted(a.digest for a in everywhere)
        assert total[kept] == set()
        await until(lambda: service.fleet()["nominated_total"] == {"duplicate": 50}, "not counted", service.fleet)
        passes = service.fleet()["passes_total"]
        await until(lambda: service.fleet()["passes_total"] > passes + 40, "nothing is looked at any more")
        assert not any((await advice(directories)).values()), "owners that kept a copy are asked again"
        assert 'kvstrata_metadata_nominated_total{reason="duplicate"}' in service.page("/metrics")
