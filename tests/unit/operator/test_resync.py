"""Laws of the resync: a deaf feed is noticed, a slow one is not blamed."""

import asyncio
import json
from typing import Any

import pytest

from kvstrata_kube.store import Store
from kvstrata_operator.observe import kinds, resync
from kvstrata_operator.observe.kinds import Kind
from kvstrata_operator.observe.parse import parse_declared
from kvstrata_operator.observe.records import Declared
from support.operator.fleet import pool_spec

pytestmark = pytest.mark.unit


def body(version: int, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "uid": "u", "resourceVersion": str(version)}, "spec": pool_spec(**spec)}


def pool(version: int, **spec: Any) -> Declared[Any]:
    return parse_declared(kinds.POOL, body(version, **spec))


class Lists:
    """What the API server would answer; tests change it."""

    def __init__(self) -> None:
        self.pools = [pool(1)]

    async def __call__(self, _api: Any, source: Any) -> tuple[list[Any], str]:
        return (self.pools if source.path == kinds.POOL.path() else []), "100"


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> Lists:
    lists = Lists()
    monkeypatch.setattr(resync, "list_objects", lists)
    return lists


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("told_after_s", "expected"), [(None, [kinds.POOL]), (resync.FEED_LAG_S - 1, []), (0.1, [])], ids=str
)
async def test_a_change_that_no_event_tells_in_time_means_a_deaf_feed(
    lists: Lists, told_after_s: float | None, expected: list[Kind]
) -> None:
    stores = {kind: Store[Any]() for kind in kinds.ADMINISTRATOR_KINDS}
    deaf: list[Kind] = []
    syncing = resync.Resync(None, stores, 1000.0, lambda _kind: None)  # type: ignore[arg-type]
    task = asyncio.create_task(syncing.run(deaf.append))
    await syncing.first.wait()
    assert deaf == [], "The first list is no news."

    lists.pools = [pool(2, paused=True)]
    syncing.again()
    if told_after_s is not None:
        await asyncio.sleep(told_after_s)
        syncing.on_event(kinds.POOL, is_deleted=False, body=body(2, paused=True))
    await asyncio.sleep(3 * resync.FEED_LAG_S)
    task.cancel()

    assert deaf == expected
    assert stores[kinds.POOL].items["p"].version == 2


@pytest.mark.looptime
async def test_what_vanished_without_an_event_is_swept(lists: Lists) -> None:
    stores = {kind: Store[Any]() for kind in kinds.ADMINISTRATOR_KINDS}
    syncing = resync.Resync(None, stores, 60.0, lambda _kind: None)  # type: ignore[arg-type]
    task = asyncio.create_task(syncing.run(lambda _kind: None))
    await syncing.first.wait()
    lists.pools = []
    await asyncio.sleep(61.0)
    task.cancel()

    assert stores[kinds.POOL].items == {}


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("changed_after_s", "bound_s"),
    [(0.5, resync.VIGIL_EVERY_S), (resync.VIGIL_S - 3, resync.VIGIL_EVERY_S), (resync.VIGIL_S + 5, 60.0)],
)
async def test_after_a_break_changes_are_seen_soon_though_no_event_tells_them(
    lists: Lists, changed_after_s: float, bound_s: float
) -> None:
    """The list right after the break comes too early: the change comes later, while the feed is still down."""
    stores = {kind: Store[Any]() for kind in kinds.ADMINISTRATOR_KINDS}
    syncing = resync.Resync(None, stores, 60.0, lambda _kind: None)  # type: ignore[arg-type]
    task = asyncio.create_task(syncing.run(lambda _kind: None))
    await syncing.first.wait()
    await asyncio.sleep(0.01)
    syncing.keep_vigil()
    await asyncio.sleep(changed_after_s)
    lists.pools = [pool(2)]
    await asyncio.sleep(bound_s + 0.1)
    task.cancel()

    assert stores[kinds.POOL].items["p"].version == 2


@pytest.mark.looptime
async def test_lists_that_are_asked_for_again_and_again_are_paced(lists: Lists) -> None:
    listed: list[Kind] = []
    stores = {kind: Store[Any]() for kind in kinds.ADMINISTRATOR_KINDS}
    syncing = resync.Resync(None, stores, 1000.0, listed.append)  # type: ignore[arg-type]
    task = asyncio.create_task(syncing.run(lambda _kind: None))
    await syncing.first.wait()
    await asyncio.sleep(resync.VIGIL_EVERY_S)
    lists.pools = [pool(2)]
    syncing.again()
    await asyncio.sleep(0.01)
    assert stores[kinds.POOL].items["p"].version == 2, "The first that is asked for comes at once."
    for _ in range(1000):
        syncing.again()
        await asyncio.sleep(0.01)
    task.cancel()

    assert listed.count(kinds.POOL) <= 2 + 10.0 / resync.VIGIL_EVERY_S + 1


def test_what_is_known_is_not_parsed_again_and_what_changed_is() -> None:
    store = Store[Any]()
    store.put(pool(5))
    meta = {"name": "p", "uid": "u", "resourceVersion": "5"}
    raw = {"metadata": meta, "spec": pool_spec()}

    assert resync._parse(kinds.POOL, store, json.dumps(raw).encode()) is store.items["p"]
    raw["metadata"] = meta | {"resourceVersion": "6"}
    assert resync._parse(kinds.POOL, store, json.dumps(raw).encode()).version == 6
