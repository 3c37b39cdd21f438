"""Faults of object stores: a miss or a clear error in bounded time."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.file.claim import STORE_FILE
from kvstrata_agent.backends.object import client
from kvstrata_agent.backends.object.client import WHOLE_BYTES_MAX, ObjectClient
from kvstrata_agent.backends.object.object_tier import open_object_tier
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError
from support.backends.contract import ANNA, CAPACITY_BYTES, content, get, put, record
from support.backends.damage import flip

pytestmark = pytest.mark.contract

LARGE_BYTES = WHOLE_BYTES_MAX + 4096
"""Of a block that goes up in parts."""


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
    away = ObjectClient("s3://bucket/x", settings | {"aws_endpoint": "http://127.0.0.1:9"})

    async with asyncio.timeout(60):
        with pytest.raises(BackendFailedError, match=r"get s3://bucket/x/pool-a/node-a/kvstrata-store.json: "):
            await open_object_tier(away, "pool-a", "node-a", CAPACITY_BYTES)


async def test_an_object_url_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"object\.url gopher"):
        ObjectClient("gopher://bucket")


def _objects(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name != STORE_FILE]


async def _until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not fact():  # noqa: ASYNC110  Nothing rings when an object has gone.
            await asyncio.sleep(0.01)


async def _left(directory: Path) -> tuple[list[Path], int]:
    """Objects of blocks, and how many of them the next run serves."""
    objects = _objects(directory)
    again = await open_object_tier(ObjectClient(f"file://{directory}"), "pool-a", "node-a", 2 * LARGE_BYTES)
    found = [r async for r in again.recover()]
    await again.close()
    return objects, len(found)


async def test_a_deletion_that_close_interrupts_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = await open_object_tier(ObjectClient(f"file://{tmp_path}"), "pool-a", "node-a", CAPACITY_BYTES)
    delete, has_begun = obstore.delete_async, asyncio.Event()

    async def slow(store: Any, paths: Any) -> None:
        if not has_begun.is_set():
            has_begun.set()
            await asyncio.sleep(60)
        await delete(store, paths)

    monkeypatch.setattr(obstore, "delete_async", slow)
    for slot, _ in [await put(backend, n) for n in range(3)]:
        backend.drop(slot)
    await has_begun.wait()
    await backend.close()

    assert await _left(tmp_path) == ([], 0)


@pytest.mark.parametrize("is_closed_first", [True, False])
async def test_a_large_block_that_is_dropped_before_its_upload_ends_is_gone_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_closed_first: bool
) -> None:
    backend = await open_object_tier(ObjectClient(f"file://{tmp_path}"), "pool-a", "node-a", 2 * LARGE_BYTES)
    small, _ = await put(backend, 1)
    upload, has_begun, may_end = obstore.put_async, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **how: Any) -> Any:
        has_begun.set()
        await may_end.wait()
        return await upload(*args, **how)

    monkeypatch.setattr(obstore, "put_async", slow)
    stored = memoryview(bytes(LARGE_BYTES))
    slot = backend.reserve(ANNA, LARGE_BYTES)
    writing = asyncio.create_task(backend.write(slot, record(2, stored, slot), stored))
    await has_begun.wait()
    writing.cancel()
    await asyncio.wait([writing])
    backend.drop(slot)
    backend.drop(small)
    await _until(lambda: not _objects(tmp_path))
    assert not may_end.is_set(), "others do not wait for it"
    if is_closed_first:
        closing = asyncio.create_task(backend.close())
        await asyncio.sleep(0.1)
        may_end.set()
        await closing
    else:
        may_end.set()
        await _until(lambda: backend._deleting is None)
        await backend.close()

    assert await _left(tmp_path) == ([], 0)


@pytest.mark.parametrize("name", ["aws_allow_http", "ALLOW_HTTP", "aws_timeout", "proxy_url"])
@pytest.mark.parametrize(("url", "prefix"), [("s3://b/p", "aws_"), ("gs://b/p", "google_"), ("az://b/p", "azure_")])
def test_settings_of_the_http_client_are_taken_as_such(url: str, prefix: str, name: str) -> None:
    named = name.replace("aws_", prefix)
    value = {"timeout": "30s", "proxy_url": "http://proxy"}.get(name.removeprefix("aws_"), "true")
    account = {"azure_storage_account_name": "x"} if prefix == "azure_" else {}

    assert ObjectClient(url, {named: value, **account}).scheme in url


@pytest.mark.parametrize("value", ["p4ssw0rd", "p4ssw0rd\n", "p4ssw0rd" * 50], ids=["plain", "with a newline", "long"])
def test_a_setting_that_is_of_no_use_is_refused_without_its_value(value: str) -> None:
    with pytest.raises(InvalidInputError, match="boolean") as refused:
        ObjectClient("s3://b/p", {"aws_allow_http": value})
    assert "p4ssw0rd" not in str(refused.value)


def test_a_panic_of_the_client_is_an_error_that_names_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_OF_HTTP", frozenset())
    with pytest.raises(InvalidInputError, match=r"s3://b/p: .*settings: aws_allow_http, aws_region$") as refused:
        ObjectClient("s3://b/p", {"aws_allow_http": "p4ssw0rd", "aws_region": "x"})
    assert "p4ssw0rd" not in str(refused.value)
