"""Costs of one node and one block on this machine: a real redis-server, a real API server, the operator's planner."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.directory.__main__ import ADMIN, Directory
from bench.operator.agents import hold_leases, node_names
from bench.operator.cluster import SYSTEM, cpu_seconds, started
from bench.operator.cost import planner_cost
from bench.operator.writes import (
    APPLY_QUERY,
    GIB,
    KVPOOLNODES,
    KVPOOLS,
    POOL,
    bounded,
    pool_body,
    pool_node_body,
    status_body,
)
from bench.scale.model import PROMPT_BLOCKS, Costs
from kvstrata_api import names
from kvstrata_kube import leases
from kvstrata_kube.api import APPLY_PATCH, MERGE_PATCH, Call, KubeApi
from kvstrata_kube.watch import Source, list_objects
from kvstrata_metadata.directory import registry, shards
from kvstrata_metadata.directory.shards import Batch, Mode
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.keys import SHARDS, Shard
from kvstrata_metadata.store.records import Announcement, Verdict
from kvstrata_metadata.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controlplane import ControlPlane

PLANNED_NODES: Final = 1_000
AGENTS: Final = 16
"""Connections to Redis at a time: enough that it is never idle."""


async def directory_costs(locations: int, messages: int) -> dict[str, float]:
    """Server time of Redis for each location, block and heartbeat, and its memory."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        server = await embedded.start(EmbeddedConfig(Path(folder), memory_bytes=8 << 30, other_users=(ADMIN,)))
        ours = Directory(server)
        try:
            await ours.begin(locations)
            before_bytes, found = await ours.used_bytes(), dict[str, float]()
            found["announce_s"] = await _server_s(ours, ours.publish) / locations
            found["location_bytes"] = (await ours.used_bytes() - before_bytes) / locations
            found |= await _message_costs(server, ours, messages)
            found["remove_s"] = await _server_s(ours, partial(_fence, ours)) / locations
        finally:
            await ours.close()
            await server.stop()
    return found


async def _message_costs(server: EmbeddedRedis, ours: Directory, messages: int) -> dict[str, float]:
    """What agents send all the time, each over a connection of its own: a beat, a prompt's flush, a prompt's lookup."""
    stores = [Store(server.access(Role.AGENT), timeout_s=60.0) for _ in range(AGENTS)]
    numbers = itertools.count(1_000_000)

    async def beat(store: Store) -> None:
        assert await registry.heartbeat(store, ours.incarnation) is Verdict.OK

    async def look_up(store: Store) -> None:
        at = random.randrange(len(ours.digests) - PROMPT_BLOCKS)
        await shards.locate(store, ours.secret.tag(), ours.digests[at : at + PROMPT_BLOCKS])

    async def flush(store: Store) -> None:
        await shards.announce(store, _prompt(ours, next(numbers)))

    async def by_all(act: Callable[[Store], Awaitable[None]], each: int) -> float:
        async def every() -> None:
            await asyncio.gather(*(_repeated(partial(act, store), each) for store in stores))

        return await _server_s(ours, every) / (each * AGENTS)

    try:
        await asyncio.gather(*(beat(store) for store in stores))  # Connects.
        each = messages // AGENTS
        found = {"beat_s": await by_all(beat, each)}
        found["lookup_s"] = await by_all(look_up, max(1, each // SHARDS))
        found["flush_s"] = await by_all(flush, max(1, each // SHARDS))
    finally:
        for store in stores:
            await store.close()
    return found


async def _fence(ours: Directory) -> None:
    """Remove what the agent has announced, as when it is gone for good."""
    assert await registry.fence(ours.care, ours.incarnation, 0.0) is Verdict.OK
    every = [Shard(ours.secret.tag(), i) for i in range(SHARDS)]
    assert await shards.drop_everywhere(ours.care, every, ours.incarnation) >= len(ours.digests)


async def _repeated(act: Callable[[], Awaitable[None]], times: int) -> None:
    for _ in range(times):
        await act()


def _prompt(ours: Directory, number: int) -> list[Batch]:
    """The locations of a new prompt, in a message for each shard."""
    made: list[list[Announcement]] = [[] for _ in range(SHARDS)]
    for stamp in range(PROMPT_BLOCKS):
        digest = os.urandom(20)
        made[digest[0] >> 4].append(Announcement(digest, "NVMe", stamp, 4096))
    tag = ours.secret.tag()
    return [Batch(Shard(tag, i), ours.incarnation, number, Mode.CONTINUE, (*part,)) for i, part in enumerate(made)]


async def _server_s(ours: Directory, act: Callable[[], Awaitable[None]]) -> float:
    began_s = ours.server_s()
    await act()
    return ours.server_s() - began_s


def api_costs(nodes: int, rounds: int) -> dict[str, float]:
    """Processor time of API server and etcd for each renewal, status and listed Lease, and ours for a Lease."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder, started(Path(folder)) as plane:
        return asyncio.run(_api_costs(plane, nodes, rounds))


async def _api_costs(plane: ControlPlane, nodes: int, rounds: int) -> dict[str, float]:
    api = await KubeApi.connect(names.FIELD_MANAGER_AGENT, plane.kubeconfig)
    every, found = node_names(nodes), dict[str, float]()

    def server_s() -> float:
        return sum(cpu_seconds(part.pid) for part in plane.status().values())

    async def renew(node: str) -> None:
        path = leases.lease_path(SYSTEM, names.agent_lease_name(POOL, node))
        body = {"spec": leases.renewal(node, 15.0, datetime.now(UTC))}
        (await api.call(Call("PATCH", path, body=body, content_type=MERGE_PATCH))).content()

    async def report(node: str, used: int) -> None:
        body = status_body(names.pool_node_name(POOL, node), spec)
        body["status"]["memoryBytes"] = used * GIB
        call = Call("PATCH", f"{KVPOOLNODES}/{body['metadata']['name']}/status", APPLY_QUERY, body, APPLY_PATCH)
        (await api.call(call)).content()

    async def make(node: str) -> None:
        (await api.call(Call("POST", KVPOOLNODES, body=pool_node_body(POOL, node, spec)))).content()

    spec = {"revision": "r", "tiers": [{"name": "dram", "type": "HostDRAM", "capacityBytes": GIB, "hostDRAM": {}}]}
    try:
        (await api.call(Call("POST", KVPOOLS, body=pool_body()))).content()
        await hold_leases(api, SYSTEM, POOL, every)
        began_s = server_s()
        for _ in range(rounds):
            await bounded(partial(renew, node) for node in every)
        found["renew_s"] = (server_s() - began_s) / (nodes * rounds)
        await bounded(partial(make, node) for node in every)
        began_s = server_s()
        for used in range(1, rounds + 1):
            await bounded(partial(report, node, used) for node in every)
        found["status_s"] = (server_s() - began_s) / (nodes * rounds)
        source = Source(leases.lease_path(SYSTEM), leases.parse_lease, {"labelSelector": names.LABEL_POOL})
        lists, began_s, own_s = rounds * 4, server_s(), time.process_time()
        for _ in range(lists):
            listed, _version = await list_objects(api, source)
            assert len(listed) == nodes
        found["list_s"] = (server_s() - began_s) / (nodes * lists)
        found["parse_s"] = (time.process_time() - own_s) / (nodes * lists)
    finally:
        await api.close()
    return found


def measured(*, is_quick: bool, say: Callable[[str], None]) -> Costs:
    """Measure all of it; a minute, half of it when quick."""
    say("Redis")
    found = asyncio.run(directory_costs(100_000 if is_quick else 1_000_000, 20_000))
    say("API server")
    found |= api_costs(200 if is_quick else 1_000, 3)
    say("operator")
    planned = planner_cost([PLANNED_NODES])
    plan_s = planned[f"plan_cpu_s_{PLANNED_NODES}"] + planned[f"status_cpu_s_{PLANNED_NODES}"]
    return Costs(**found, plan_s=plan_s)
