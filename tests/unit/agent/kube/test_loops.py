"""The agent's Kubernetes loops against a scripted server, in fast time: watch, heartbeat, supervision."""

import asyncio
import itertools
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.kube import heartbeat
from kvstrata_agent.kube.heartbeat import Beat, Heartbeat
from kvstrata_api import names
from kvstrata_api.errors import ApiServerAwayError
from kvstrata_kube import backoff, tasks
from kvstrata_kube.signal import Signal
from kvstrata_kube.typed_store import Known
from kvstrata_kube.watch import PAGE_TRIES, Source, Watch
from support.kube.doubles import ScriptedApi, ok

pytestmark = [pytest.mark.unit, pytest.mark.looptime]

Json = dict[str, Any]
PATH = "/api/v1/things"
AWAY = ApiServerAwayError("away")


def thing(name: str, version: int = 1) -> Json:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def page(items: list[Json], version: int, token: str = "") -> Any:
    return ok({"items": items, "metadata": {"resourceVersion": str(version), "continue": token}})


def event(kind: str, obj: Json) -> Json:
    return {"type": kind, "object": obj}


def store_of() -> Known[str]:
    return Known("Thing", lambda o: str(o["metadata"]["name"]), lambda: None)


async def follow(api: ScriptedApi, store: Known[str], for_s: float, **query: str) -> Watch[Any]:
    watch = Watch(api, Source(PATH, store.read, query), store)  # type: ignore[arg-type]
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(for_s)
    await tasks.cancel([task])
    return watch


async def test_all_pages_are_read_before_anything_is_swept() -> None:
    pages = {"": page([thing("a")], 5, "t1"), "t1": page([thing("b")], 5, "t2"), "t2": page([thing("c")], 5)}
    api, store = ScriptedApi(lambda c: pages[str((c.query).get("continue", ""))]), store_of()
    store.put(store.read(msgspec.json.encode(thing("gone"))))
    await follow(api, store, 1.0, labelSelector="x")

    assert sorted(store) == ["a", "b", "c"]
    assert [c.query["labelSelector"] for _, c in api.calls] == ["x"] * 3
    ((_, watch),) = api.watches
    assert watch.query["resourceVersion"] == "5"


async def test_a_broken_watch_goes_on_from_the_last_version_without_a_new_list() -> None:
    api, store = ScriptedApi(lambda _: page([], 5)), store_of()
    api.streams = [
        [event("ADDED", thing("a", 6)), event("BOOKMARK", {"metadata": {"resourceVersion": "9"}}), AWAY],
        [AWAY],
        [event("DELETED", thing("a", 10))],
    ]
    await follow(api, store, 5.0)

    assert list(store) == []
    assert len(api.calls) == 1
    assert [c.query["resourceVersion"] for _, c in api.watches] == ["5", "9", "9", "10"]


async def test_a_version_that_is_too_old_causes_a_list_that_finds_what_vanished() -> None:
    lists = [page([thing("a"), thing("b")], 5), page([thing("b")], 50)]
    api, store = ScriptedApi(lambda _: lists.pop(0)), store_of()
    api.streams = [[event("ERROR", {"code": 410, "message": "too old resource version"})]]
    await follow(api, store, 5.0)

    assert list(store) == ["b"]
    assert api.watches[-1][1].query["resourceVersion"] == "50"


async def test_an_expired_page_starts_the_list_again() -> None:
    replies = [page([thing("a")], 5, "t"), ok({"message": "expired"}, 410), page([thing("b")], 7)]
    api, store = ScriptedApi(lambda _: replies.pop(0)), store_of()
    await follow(api, store, 5.0)

    assert list(store) == ["b"]


async def test_a_page_that_does_not_come_is_asked_for_again_and_those_before_it_are_not() -> None:
    replies = [page([thing("a")], 5, "t"), AWAY, AWAY, page([thing("b")], 5)]
    api, store = ScriptedApi(lambda _: replies.pop(0)), store_of()
    await follow(api, store, 5.0)

    assert sorted(store) == ["a", "b"]
    assert [c.query.get("continue") for _, c in api.calls] == [None, "t", "t", "t"]


async def test_a_page_that_never_comes_ends_the_list() -> None:
    tokens: list[str | None] = []

    def answer(call: Any) -> Any:
        tokens.append(call.query.get("continue"))
        return AWAY if tokens[-1] else page([thing("a")], 5, "t")

    api, store = ScriptedApi(answer), store_of()
    await follow(api, store, 3.0)

    assert tokens[: PAGE_TRIES + 2] == [None, *["t"] * PAGE_TRIES, None]
    assert not list(store), "half a list says nothing of what has vanished"


async def test_what_is_known_stays_while_the_server_is_away_for_a_minute() -> None:
    replies: list[Any] = [page([thing("a")], 5)]
    api, store = ScriptedApi(lambda _: replies[0]), store_of()
    api.streams = [[AWAY] for _ in range(1000)]
    await follow(api, store, 60.0)

    assert list(store) == ["a"]
    waits_s = [later - earlier for (earlier, _), (later, _) in zip(api.watches, api.watches[1:], strict=False)]
    assert max(waits_s) <= backoff.LONGEST_S
    assert len(api.watches) < 20, "a server that is away is not hammered"


async def test_a_server_that_ends_every_watch_at_once_is_not_hammered() -> None:
    api, store = ScriptedApi(lambda _: page([], 5)), store_of()
    api.streams = [[] for _ in range(10_000)]
    await follow(api, store, 60.0)

    assert len(api.watches) < 20


async def test_an_unreadable_event_restarts_the_watch_and_loses_nothing() -> None:
    api, store = ScriptedApi(lambda _: page([thing("a")], 5)), store_of()
    api.streams = [[{"nonsense": 1}], [event("ADDED", thing("b", 6))]]
    watch: Watch[Any] = Watch(api, Source(PATH, store.read), store)  # type: ignore[arg-type]
    task = tasks.supervise("watch", watch.run)
    await asyncio.sleep(5.0)
    await tasks.cancel([task])

    assert sorted(store) == ["a", "b"]


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_waits_grow_to_a_bound_and_never_vanish(failures: int, chance: float) -> None:
    wait_s = backoff.delay_s(failures, chance)

    assert backoff.FIRST_S / 2 <= wait_s <= backoff.LONGEST_S
    assert wait_s <= backoff.delay_s(failures + 1, chance)
    if failures >= 8:
        assert wait_s >= backoff.LONGEST_S / 2


BEAT = Beat("kvstrata-system", "pool", "node", "node_1", "uid")


def heart(api: ScriptedApi) -> Heartbeat:
    return Heartbeat(api, lambda: BEAT, asyncio.get_running_loop().time)  # type: ignore[arg-type]


async def test_the_heart_creates_its_lease_once_and_beats_every_five_seconds() -> None:
    exists = False

    def answer(call: Any) -> Any:
        nonlocal exists
        if call.method == "POST":
            exists = True
        return ok(status=200 if exists else 404)

    api = ScriptedApi(answer)
    beating = heart(api)
    assert beating.silent_s is None
    task = asyncio.create_task(beating.run())
    await asyncio.sleep(60.0)
    assert beating.silent_s is not None
    assert beating.silent_s <= heartbeat.RENEW_S
    await tasks.cancel([task])

    assert api.paths("POST") == [BEAT.collection]
    times_s = [at_s for at_s, call in api.calls if call.method == "PATCH"]
    gaps_s = [b - a for a, b in itertools.pairwise(times_s)]
    assert max(gaps_s) <= heartbeat.RENEW_S
    assert min(gaps_s) >= heartbeat.RENEW_S - heartbeat._JITTER_S


async def test_slow_and_failing_answers_neither_stretch_the_beat_nor_end_it() -> None:
    api = ScriptedApi(lambda _: AWAY)
    api.slowness_s = 3.0
    beating = heart(api)
    task = asyncio.create_task(beating.run())
    await asyncio.sleep(60.0)
    assert beating.silent_s is None
    await beating.release()
    await tasks.cancel([task])

    times_s = [at_s for at_s, _ in api.calls][:-1]
    assert all(b - a <= heartbeat.RENEW_S for a, b in itertools.pairwise(times_s))


def test_a_node_whose_name_is_too_long_for_a_label_has_a_lease_all_the_same() -> None:
    node = "ip-10-31-214-107.eu-central-1.compute.team-kv-inference.example.internal"
    labels = Beat("kvstrata-system", "pool", node, "node_1").lease(datetime(2026, 1, 1, tzinfo=UTC))["metadata"][
        "labels"
    ]

    assert labels[names.LABEL_NODE] == names.label_value(node) != node


def test_a_lease_says_who_beats_for_whom_and_goes_with_its_node() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    lease = BEAT.lease(moment)

    assert lease["metadata"]["name"] == names.agent_lease_name("pool", "node")
    assert lease["metadata"]["labels"][names.LABEL_POOL] == "pool"
    assert lease["metadata"]["ownerReferences"][0]["name"] == names.pool_node_name("pool", "node")
    assert lease["spec"].items() >= BEAT.renewal(moment)["spec"].items()
    assert lease["spec"]["renewTime"] == "2026-01-01T00:00:00.000000Z"
    assert heartbeat.DURATION_S >= 3 * heartbeat.RENEW_S
    assert heartbeat.CALL_TIMEOUT_S < heartbeat.RENEW_S


async def test_a_supervised_task_runs_again_whatever_it_did() -> None:
    runs: list[float] = []

    async def fragile() -> None:
        runs.append(asyncio.get_running_loop().time())
        if len(runs) % 2:
            raise ZeroDivisionError

    task = tasks.supervise("fragile", fragile)
    await asyncio.sleep(60.0)
    await tasks.cancel([task])

    assert 5 < len(runs) < 20
    assert task.cancelled()


async def test_a_cancellation_that_meets_the_signal_is_not_lost() -> None:
    signal = Signal()

    async def forever() -> None:
        while True:
            await signal.wait()

    task = asyncio.create_task(forever())
    await asyncio.sleep(0.1)
    signal.fire()
    await asyncio.wait_for(tasks.cancel([task]), 5.0)

    assert task.cancelled()


async def test_a_signal_wakes_all_who_wait_and_nobody_later() -> None:
    signal = Signal()
    waiting = [asyncio.create_task(signal.wait(5.0)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    signal.fire()

    assert await asyncio.gather(*waiting) == [True] * 3
    assert await signal.wait(1.0) is False
