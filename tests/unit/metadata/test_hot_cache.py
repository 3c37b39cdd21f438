"""Laws of the memory of hot prefixes: bounded, and never older than what Redis told."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.client import location_cache
from kvstrata_metadata.client.location_cache import HotCache, TrackedStore
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.records import Copy, Incarnation

pytestmark = pytest.mark.unit

BUCKETS = (b"a", b"b", b"c")


def copies(stamp: int) -> list[Copy]:
    return [Copy(Incarnation(b"12345"), "NVMe", stamp, 1)]


@example([("read", b"a"), ("write", b"a"), ("tell", b"a"), ("end", b"a")])
@example([("read", b"a"), ("write", b"a"), ("lose", b"a"), ("end", b"a")])
@example([("read", b"a"), ("end", b"a"), ("write", b"a"), ("tell", b"a")])
@given(
    st.lists(st.tuples(st.sampled_from(["write", "begin", "read", "end", "tell", "lose"]), st.sampled_from(BUCKETS)))
)
def test_whatever_the_order_of_news_and_answers_no_old_value_is_kept(steps: list[tuple[str, bytes]]) -> None:
    """News of a change is told at some time after it; until then the old value may be answered, never after."""
    cache = HotCache()
    now = dict.fromkeys(BUCKETS, 0)
    untold: set[bytes] = set()
    reading, answer = cache.begin(), None
    for step, bucket in steps:
        if step == "write":
            now[bucket] += 1
            untold.add(bucket)
        elif step == "begin":
            cache.end(reading, {})
            reading, answer = cache.begin(), None
        elif step == "read" and answer is None:
            answer = (bucket, now[bucket])
        elif step == "end" and answer:
            cache.end(reading, {(answer[0], b"d"): copies(answer[1])})
            reading, answer = cache.begin(), None
        elif step == "tell":
            cache.forget(sorted(untold))
            untold.clear()
        elif step == "lose":
            cache.clear()
            untold.clear()
        for one in BUCKETS:
            kept = cache.get(one, b"d")
            assert kept is None or one in untold or kept[0].stamp == now[one]


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=80))
def test_no_more_is_kept_than_the_limit(limit: int, found: list[tuple[int, int]]) -> None:
    cache = HotCache(limit)
    for bucket, digest in found:
        cache.end(cache.begin(), {(bytes([bucket]), bytes([digest])): copies(1)})
        assert len(cache) <= limit


def test_absence_is_remembered_too() -> None:
    cache = HotCache()
    cache.end(cache.begin(), {(b"a", b"d"): []})

    assert cache.get(b"a", b"d") == []
    assert cache.get(b"a", b"e") is None


def test_a_bucket_is_hot_at_the_second_look() -> None:
    cache = HotCache()

    assert [cache.is_hot(b"a"), cache.is_hot(b"b"), cache.is_hot(b"a")] == [False, False, True]


async def test_a_server_that_accepts_and_says_nothing_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location_cache, "CONNECT_TIMEOUT_S", 0.2)
    writers = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    store = TrackedStore(RedisAccess(f"redis://{host}:{port}", "", "", ""), lambda _: None)

    async with asyncio.timeout(30.0):
        with pytest.raises(DirectoryAwayError):
            await store.open()

    await store.close()
    for writer in writers:
        writer.close()
    server.close()
