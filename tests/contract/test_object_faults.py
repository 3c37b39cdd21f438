"""Faults of object stores: a miss or a clear error in bounded time."""

import asyncio
import os
from pathlib import Path

import pytest

from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.object.client import ObjectClient
from kvstrata_agent.backends.object.object_tier import open_object_tier
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError
from support.backends.contract import CAPACITY_BYTES, content, get, put
from support.backends.damage import flip

pytestmark = pytest.mark.contract


def _object_path(directory: Path, made: Record) -> Path:
    return next(directory.rglob(f"{made.key.digest.hex()}.*"))


async def test_an_object_that_is_gone_short_or_changed_is_a_miss(tmp_path: Path) -> None:
    backend = await open_object_tier(ObjectClient(f"file://{tmp_path}"), "pool-a", "node-a", CAPACITY_BYTES)
    stored = [await put(backend, n) for n in range(4)]
    paths = [_object_path(tmp_path, made) for _, made in stored]
    paths[0].unlink()
    os.truncate(paths[1], 5000)
    flip(paths[2], 9000, 4)

    for slot, made in stored[:3]:
        with pytest.raises((BlockCorruptError, BackendFailedError)):
            await get(backend, slot, made)
    assert await get(backend, *stored[3]) == content(3)
    await backend.close()
    again = await open_object_tier(ObjectClient(f"file://{tmp_path}"), "pool-a", "node-a", CAPACITY_BYTES)
    assert len([r async for r in again.recover()]) == 2
    await again.close()


async def test_an_object_store_that_is_away_is_an_error_in_bounded_time() -> None:
    settings = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_region": "x"}
    client = ObjectClient("s3://bucket/x", settings | {"aws_endpoint": "http://127.0.0.1:9"})

    async with asyncio.timeout(60):
        with pytest.raises(BackendFailedError, match=r"get s3://bucket/x/pool-a/node-a/kvstrata-store.json: "):
            await open_object_tier(client, "pool-a", "node-a", CAPACITY_BYTES)


async def test_an_object_url_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"object\.url gopher"):
        ObjectClient("gopher://bucket")
