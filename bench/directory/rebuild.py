"""How long an emptied Redis takes to be refilled by one agent, through its real directory."""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Final

import redis
from prometheus_client import CollectorRegistry

from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.server.embedded import EmbeddedRedis
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.records import AgentRecord, Announcement
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

PART_BLOCKS: Final = 1_024
"""Blocks of one part of a report, as agents cut it."""
_POLL_S: Final = 0.005


async def rebuild(server: EmbeddedRedis, locations: int) -> dict[str, float]:
    """Seconds until the agent notices a FLUSHALL and begins, and from there until everything is told again."""
    secret = ScopeSecret(ScopeId("tenant/bench/uid/v1"), os.urandom(32))
    digests = [os.urandom(20) for _ in range(locations)]

    def holdings() -> Iterator[tuple[ScopeSecret, list[Announcement]]]:
        for i in range(0, locations, PART_BLOCKS):
            yield secret, [Announcement(d, "NVMe", i + 1, 4096) for d in digests[i : i + PART_BLOCKS]]

    async def access() -> RedisAccess:
        return server.access(Role.AGENT)

    made = RedisDirectory(
        AgentRecord("p.rebuild", 1, "127.0.0.1:1"), access, holdings, Instruments(AGENT, CollectorRegistry())
    )
    made.start()
    try:
        await _until(made, 1)
        with redis.Redis("127.0.0.1", server.port, username="admin", password="admin") as admin:  # noqa: S106
            admin.flushall()
        started_s = time.perf_counter()
        while made.reports_total < 2:  # noqa: ASYNC110 - It follows from a loop with a clock of its own.
            await asyncio.sleep(_POLL_S)
        noticed_s = time.perf_counter()
        await _until(made, 2)
        told_s = time.perf_counter()
    finally:
        await made.close()
    return {
        "rebuild_notice_s": noticed_s - started_s,
        "rebuild_s_per_million": (told_s - noticed_s) / locations * 1e6,
        "rebuild_s": told_s - started_s,
    }


async def _until(made: RedisDirectory, reports: int) -> None:
    while made.reports_total < reports or not made.is_settled:  # noqa: ASYNC110 - As above.
        await asyncio.sleep(_POLL_S)
