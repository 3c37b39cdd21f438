"""KV events as a subscriber reads them: two encodings, gaps and replays, and which session chunks are reported for."""

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors import engine_events
from kvstrata_client.connectors.engine_events import (
    HEARD,
    IDLE_S,
    MISSED,
    REPLAYED,
    REPORT_S,
    UNNAMED,
    UNREADABLE,
    VAIN_WAITS_MAX,
    Batch,
    EventStream,
    Report,
    SessionBook,
    Stored,
    connect_to,
    decode,
    in_chain_order,
    page_of,
)

pytestmark = pytest.mark.unit

FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
)  # fmt: skip
"""Of a `BlockStored` of vLLM 0.32, in the order of arrays."""
ROOT = -1
GROUP = bytes(4)

hashes = st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.binary(min_size=1, max_size=40))
names = st.text(max_size=140)
stored_events = st.fixed_dictionaries(
    {
        "block_hashes": st.lists(hashes, max_size=5),
        "parent_block_hash": st.none() | hashes,
        "token_ids": st.lists(st.integers(0, 1 << 20), max_size=3),
        "block_size": st.just(16),
        "lora_id": st.none(),
        "medium": st.sampled_from([None, "GPU", "CPU", "STORAGE"]),
    },
    optional={"lora_name": st.none(), "extra_keys": st.none() | st.just([["x"]]), "session_id": st.none() | names},
)


def encoded(*events: Any, sent_s: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([sent_s, list(events), 0])


def mapped(event: dict[str, Any]) -> dict[str, Any]:
    return {"type": "BlockStored", **event}


def arrayed(event: dict[str, Any]) -> list[Any]:
    """As an encoder of arrays writes it: trailing fields that have no value are left out."""
    values = [event.get(name) for name in FIELDS]
    while values and values[-1] is None:
        values.pop()
    return ["BlockStored", *values]


def stored_of(*pages: int, parent: int = ROOT, session: str = "s") -> dict[str, Any]:
    before = None if parent == ROOT else parent
    return {"block_hashes": list(pages), "parent_block_hash": before, "medium": "GPU", "session_id": session or None}


@given(st.lists(stored_events, max_size=4))
def test_maps_and_arrays_say_the_same(events: list[dict[str, Any]]) -> None:
    by_name, by_place = decode(encoded(*map(mapped, events))), decode(encoded(*map(arrayed, events)))
    assert by_name == by_place
    assert by_name is not None
    assert by_name.unreadable == 0
    near = [e for e in events if e["medium"] in (None, "GPU") and e["block_hashes"]]
    assert [s.pages for s in by_name.stored] == [tuple(map(page_of, e["block_hashes"])) for e in near]
    assert by_name.unnamed == sum(len(e.get("session_id") or "") > 128 for e in near)
    assert all(len(s.session) <= 128 for s in by_name.stored)


def test_a_hash_is_the_same_page_as_a_number_and_as_bytes() -> None:
    whole = bytes(range(32))
    number = int.from_bytes(whole, "big") & ((1 << 64) - 1)  # As vLLM makes it.
    assert page_of(whole) == page_of(number) == page_of(number - (1 << 64))


@given(st.binary(max_size=200) | st.lists(st.binary(max_size=20) | st.integers() | st.none()).map(str).map(str.encode))
def test_whatever_comes_is_read_or_is_no_batch(payload: bytes) -> None:
    assert decode(payload) is None or isinstance(decode(payload), Batch)


def test_what_is_no_event_is_counted_and_the_others_are_read() -> None:
    good, removed = mapped(stored_of(1, 2)), ["BlockRemoved", [1], "GPU"]
    bad: list[Any] = [7, {}, [], {"type": 3}, {"type": "BlockStored", "block_hashes": "x"}, ["BlockStored", [b""]]]
    bad += [["BlockStored"], mapped(stored_of(1) | {"session_id": 5})]
    found = decode(encoded(good, removed, {"type": "OfTheFuture", "n": [1]}, "AllBlocksCleared", *bad))
    assert found is not None
    assert found.stored == (Stored((1, 2), ROOT, "s"),)
    assert found.unreadable == len(bad) + 1, "a type by itself is no event"
    assert decode(encoded(good, sent_s=float("nan"))) is None
    assert decode(b"") is None
    assert decode(msgspec.msgpack.encode({"ts": 1.0, "events": []})) is None
    assert decode(bytes(engine_events.BATCH_BYTES_MAX + 1)) is None


def batches(count: int, first_s: float = 0.0) -> list[bytes]:
    """Numbered from 0; each stores the page of its number."""
    return [encoded(mapped(stored_of(n, parent=n - 1)), sent_s=first_s + n) for n in range(count)]


class Heard:
    """A stream, what it has handed on, and a publisher that replays the batches that it was given."""

    def __init__(self, kept: dict[int, bytes] | None = None) -> None:
        self.learned: list[int] = []
        self.stream = EventStream(lambda stored: self.learned.extend(stored.pages))
        self.kept = kept or {}
        self.asked: list[int] = []

    def hear(self, number: int, payload: bytes) -> None:
        self.stream.hear(number, payload, self._replay)

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        self.asked.append(first)
        return ((n, payload) for n, payload in sorted(self.kept.items()) if n >= first)


@given(st.data())
def test_gaps_duplicates_and_replays_give_what_the_ordered_stream_gives_as_far_as_it_is_had(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 12))
    sent = batches(count)
    lost = data.draw(st.sets(st.integers(0, count - 2) if count > 1 else st.nothing()))
    forgotten = data.draw(st.sets(st.integers(0, count - 1)))
    arrivals = [n for n in range(count) if n not in lost]
    for again in data.draw(st.lists(st.sampled_from(arrivals), max_size=4)):
        arrivals.insert(data.draw(st.integers(arrivals.index(again) + 1, len(arrivals))), again)
    heard = Heard()
    for n in arrivals:
        heard.kept = {m: sent[m] for m in range(n + 1) if m not in forgotten}
        heard.hear(n, sent[n])

    had = [n for n in range(count) if n not in lost or n not in forgotten]
    assert heard.learned == had
    counts = heard.stream.counts
    assert counts[MISSED] == count - len(had)
    assert counts[HEARD] + counts[REPLAYED] == len(had)
    assert counts[UNREADABLE] == counts[UNNAMED] == 0


def test_nothing_is_asked_for_without_a_gap_and_a_replay_may_run_ahead() -> None:
    sent = batches(6)
    heard = Heard(dict(enumerate(sent)))
    heard.hear(0, sent[0])
    heard.hear(1, sent[1])
    assert heard.asked == []
    heard.hear(4, sent[4])  # The publisher has sent 5 by now.
    heard.hear(5, sent[5])
    assert heard.asked == [2]
    assert heard.learned == [0, 1, 2, 3, 4, 5]
    assert heard.stream.counts[REPLAYED] == 4


def test_a_publisher_that_begins_anew_is_heard_from_its_begin_and_an_old_batch_is_not_taken_for_one() -> None:
    heard, old, new = Heard(), batches(5), batches(4, first_s=100.0)
    for n in range(5):
        heard.hear(n, old[n])
    heard.hear(3, old[3])
    assert heard.learned == [0, 1, 2, 3, 4]
    heard.kept = dict(enumerate(new))
    heard.hear(2, new[2])
    heard.hear(3, new[3])
    assert heard.learned == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert heard.stream.counts[MISSED] == 0


def test_a_batch_that_cannot_be_read_has_its_place_in_the_order() -> None:
    heard, sent = Heard(), batches(3)
    heard.hear(0, sent[0])
    heard.hear(1, b"\xc1")
    heard.hear(2, sent[2])
    heard.hear(1, b"\xc1")
    assert heard.learned == [0, 2]
    assert heard.asked == []
    assert heard.stream.counts[UNREADABLE] == 1


def chunk(page: int, group: bytes = GROUP) -> bytes:
    return bytes(24) + page.to_bytes(8, "big") + group


def runs_of(report: Report, session: str = "s") -> list[list[int]]:
    return [[page_of(c[:-4]) for c in run] for name, run in report.runs if name == session]


@given(st.data())
def test_every_chunk_of_a_session_is_reported_in_order_whichever_comes_first(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    events = [("event", part) for part in data.draw(_parts(count))]
    jobs = [("job", part) for part in data.draw(_parts(count))]
    steps: list[tuple[str, range]] = []
    while events or jobs:
        takes_event = data.draw(st.booleans()) if events and jobs else bool(events)
        steps.append((events if takes_event else jobs).pop(0))
    book, reported = SessionBook(), []
    for kind, part in steps:
        if kind == "event":
            book.learn(Stored(tuple(part), part[0] - 1), 0.0) if data.draw(st.booleans()) else None
            book.learn(Stored(tuple(part), part[0] - 1, "s"), 0.0)
        else:
            book.keep([chunk(n) for n in part])
        if data.draw(st.booleans()):
            reported += runs_of(book.take(0.0))
    reported += runs_of(book.take(0.0))

    assert set(itertools.chain.from_iterable(reported)) == set(range(count))
    assert reported[-1][-1] == count - 1, "the session's end is reported last"
    assert all(run == list(range(run[0], run[-1] + 1)) for run in reported)
    for before, after in itertools.pairwise(reported):
        assert after[0] <= before[-1] < after[-1], "a run reaches back to what was reported before it"
    assert runs_of(book.take(0.0)) == []


@st.composite
def _parts(draw: st.DrawFn, count: int) -> list[range]:
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    return [range(a, b) for a, b in itertools.pairwise([0, *cuts, count])]


def test_sessions_that_share_a_begin_are_each_told_of_their_own_end() -> None:
    book = SessionBook()
    for session, own in (("a", range(10, 13)), ("b", range(20, 22))):
        book.learn(Stored((0, 1), ROOT, session), 0.0)
        book.learn(Stored(tuple(own), 1, session), 0.0)
        book.keep([chunk(n) for n in (0, 1, *own)])
    report = book.take(0.0)
    assert runs_of(report, "a")[-1][-1] == 12
    assert runs_of(report, "b") == [[0, 1], [1, 20, 21]]
    assert report.states == (("a", "decoding"), ("b", "decoding"))


def test_a_chunk_continues_the_chunk_before_it_of_its_own_cache_group() -> None:
    book, other = SessionBook(chunk_pages=2), b"\0\0\0\1"
    book.learn(Stored((0, 1, 2, 3), ROOT), 0.0)
    book.learn(Stored((4, 5), 3), 0.0)
    assert book.parents_of([chunk(1), chunk(3), chunk(9)]) == [b"", chunk(1), None]
    assert book.parents_of([chunk(5)]) == [None], "the chunk before it is not in the pool"
    book.keep([chunk(3), chunk(3, other)])
    assert book.parents_of([chunk(5), chunk(5, other)]) == [chunk(3), chunk(3, other)]
    assert book.session_of([chunk(1)]) == ""
    book.learn(Stored((4, 5), 3, "s"), 0.0)
    assert book.session_of([chunk(1), chunk(5), chunk(9)]) == "s"


A, B, C, D, E, F, G, H = (
    8468860364822751900, 5659426989048894505, 13165046985235928266, 4654629009659884423, 7227128982140028705,
    13050196085893058425, 1906304936317433345, 14315981431721787129,
)  # fmt: skip
RECORDED = [
    {"block_hashes": hashed, "parent_block_hash": parent, "token_ids": list(range(*tokens)), "block_size": size,
     "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * len(hashed), "group_idx": group,
     "session_id": "chat"}
    for group, size, tokens, parent, hashed in (
        (0, 16, (100, 180), None, [A, B, C, D, E]),
        (0, 16, (180, 228), E, [F, G, H]),
        (1, 16, (100, 228), None, [E, F, G, H]),
        (2, 32, (100, 228), None, [B, D, F, H]),
        (3, 16, (100, 228), None, [B, D, F, H]),
    )
]  # fmt: skip
"""What a `BlockPool` of vLLM 0.32.0 published of one prompt of 128 tokens, by its own hashes of 16: full attention in
two steps, a sliding window whose first four pages are gone, pages of 32, and every second page by a `block_mask`."""
CHAINS: dict[int, list[int]] = {0: [A, B, C, D, E, F, G, H], 1: [E, F, G, H], 2: [B, D, F, H], 3: [B, D, F, H]}
"""Pages of each cache group that end a chunk."""


def of_group(page: int, group: int) -> bytes:
    return chunk(page, group.to_bytes(4, "big"))


@pytest.mark.parametrize("encoding", [mapped, arrayed])
def test_pages_that_are_left_out_say_nothing_of_what_others_continue(encoding: Callable[[Any], Any]) -> None:
    found = decode(encoded(*map(encoding, RECORDED)))
    assert found is not None
    assert found.stored == (
        Stored((A, B, C, D, E), ROOT, "chat", 16, 0),
        Stored((F, G, H), E, "chat", 16, 0),
        Stored((E, F, G, H), None, "chat", 16, 1),
        Stored((B, D, F, H), ROOT, "chat", 32, 2),
        Stored((B, D, F, H), None, "chat", 16, 3),
    )
    wrong = [{"token_ids": 7}, {"block_size": 0}, {"block_size": 1 << 40}, {"group_idx": -1}, {"group_idx": 1 << 32}]
    found = decode(encoded(*(encoding(RECORDED[0] | one) for one in wrong)))
    assert found is not None
    assert (found.stored, found.unreadable) == ((), len(wrong))
    long = RECORDED[0] | {"block_hashes": list(range(5000)), "token_ids": [1] * 80_000}
    found = decode(encoded(encoding(long), encoding(long | {"token_ids": [1] * 80_001})))
    assert found is not None
    assert [s.parent for s in found.stored] == [ROOT, None]
    found = decode(encoded(*(encoding(RECORDED[1] | {"token_ids": said}) for said in (None, [], [1] * 47))))
    assert found is not None
    assert [s.parent for s in found.stored] == [E] * 3, "who keeps tokens back leaves no page out"


@given(st.data())
def test_cache_groups_have_a_chain_each_whichever_is_published_first(data: st.DataObject) -> None:
    batch = decode(encoded(*map(mapped, RECORDED)))
    assert batch is not None
    first, *second = batch.stored  # Events of two steps; within one the groups come in any order.
    stored = [[first], data.draw(st.permutations(second))]
    jobs = data.draw(st.permutations([[of_group(p, g) for p in pages] for g, pages in CHAINS.items()]))
    book, reported = SessionBook(), defaultdict[int, list[list[int]]](list)

    def others() -> None:
        """What comes from another thread meanwhile."""
        while jobs and bool(data.draw(st.booleans())):
            book.keep(jobs.pop())

    for step in stored:
        for event in step:
            others()
            book.learn(event, 0.0)
        others()
        if data.draw(st.booleans()):
            take(book, reported)
    while jobs:
        book.keep(jobs.pop())
    take(book, reported)

    whole, window, wide, masked = ([of_group(p, g) for p in pages] for g, pages in CHAINS.items())
    assert book.parents_of(whole) == [b"", *whole[:-1]]
    assert book.parents_of(window) == [None, *window[:-1]], "the page before it is in no chunk of the group"
    assert book.parents_of(wide) == [b"", *wide[:-1]]
    assert book.parents_of(masked) == [None] * 4
    assert {group: set(itertools.chain(*runs)) for group, runs in reported.items()} == {
        group: set(pages) for group, pages in CHAINS.items()
    }
    assert all(runs[-1][-1] == H for runs in reported.values()), "the session's end is reported last"
    assert not book.take(0.0).runs


def test_a_chunk_is_reported_also_where_another_session_or_one_that_is_told_goes_on_from_it() -> None:
    book = SessionBook()
    book.learn(Stored((0,), ROOT, "a", 16, 0), 0.0)
    book.learn(Stored((1,), 0, "b", 16, 0), 0.0)
    book.keep([chunk(0), chunk(1)])
    report = book.take(0.0)
    assert (runs_of(report, "a"), runs_of(report, "b")) == ([[0]], [[0, 1]])
    book.learn(Stored((2, 3), 1, "b", 16, 0), 0.0)
    book.keep([chunk(3)])
    assert runs_of(book.take(0.0), "b") == [[3]]
    book.keep([chunk(2), chunk(3)])
    assert runs_of(book.take(0.0), "b") == [[1, 2]]


def take(book: SessionBook, reported: dict[int, list[list[int]]]) -> None:
    """Add what is reported by now, by cache group."""
    for session, run in book.take(0.0).runs:
        assert session == "chat"
        assert len({c[-4:] for c in run}) == 1
        reported[int.from_bytes(run[0][-4:], "big")].append([page_of(c[:-4]) for c in run])


def test_larger_pages_alone_say_nothing_of_smaller_chunks() -> None:
    book = SessionBook()
    book.learn(Stored((B, D), ROOT, "s", 32, 2), 0.0)
    book.learn(Stored((D,), None, "s", 16, 0), 0.0)
    book.keep([of_group(B, 0), of_group(B, 2)])
    assert book.parents_of([of_group(D, 0), of_group(D, 2)]) == [None, of_group(B, 2)]
    book = SessionBook(chunk_pages=2)
    book.learn(Stored((A, B, C, D, E, F, G, H), ROOT, "s", 16, 0), 0.0)
    book.learn(Stored((B, D, F, H), ROOT, "s", 32, 2), 0.0)
    book.keep([of_group(p, g) for p, g in ((B, 0), (D, 0), (F, 0), (D, 2))])
    assert book.parents_of([of_group(H, 0), of_group(H, 2)]) == [of_group(F, 0), of_group(D, 2)]


def test_whoever_stores_waits_for_events_that_are_late_and_not_for_ever_where_none_come() -> None:
    book = SessionBook()
    for _ in range(VAIN_WAITS_MAX):
        assert not book.await_events([chunk(1)], 0.001)
    started_s = time.monotonic()
    assert not book.await_events([chunk(1)], 60.0)
    assert time.monotonic() - started_s < 30.0
    book.learn(Stored((0,), ROOT), 0.0)
    assert book.await_events([chunk(0)], 0.0)
    assert not book.await_events([chunk(0), chunk(1)], 0.001)
    late = threading.Timer(0.01, book.learn, (Stored((1,), 0, "s"), 0.0))
    late.start()
    assert book.await_events([chunk(0), chunk(1)], 60.0)
    late.join()
    assert book.session_of([chunk(1)]) == "s"


@given(st.permutations(range(8)), st.lists(st.integers(-1, 6), min_size=8, max_size=8))
def test_chunks_are_stored_behind_what_they_continue(shuffled: Sequence[int], before: list[int]) -> None:
    names = [chunk(n) for n in shuffled]
    parents = [chunk(before[n]) if 0 <= before[n] < n else None if before[n] < 0 else b"" for n in shuffled]
    order = in_chain_order(names, parents)
    assert sorted(order) == list(range(8))
    places = {names[i]: place for place, i in enumerate(order)}
    assert all(places[parent] < places[name] for name, parent in zip(names, parents, strict=True) if parent)
    assert sorted(in_chain_order(names[:2], names[1::-1])) == [0, 1], "a circle loses none"


def test_a_session_decodes_while_events_come_and_is_idle_when_none_came_for_a_while() -> None:
    book, states = SessionBook(), defaultdict(list)
    for second in range(100):
        if second < 20 or second == 90:
            book.learn(Stored((second,), second - 1, "s"), float(second))
        for name, state in book.take(float(second)).states:
            states[name, state].append(second)
    assert states["s", "decoding"] == [0, 5, 10, 15, 90]
    assert states["s", "idle"] == [19 + int(IDLE_S)]
    assert REPORT_S == 5.0


def test_a_session_that_comes_back_is_told_of_its_end_again_because_the_agent_may_have_forgotten_it() -> None:
    book = SessionBook()
    book.keep([chunk(0), chunk(1)])
    book.learn(Stored((0, 1), ROOT, "s"), 0.0)
    assert runs_of(book.take(0.0)) == [[0, 1]]
    book.learn(Stored((0, 1), ROOT, "s"), 1.0)
    assert runs_of(book.take(1.0)) == []
    book.take(2 * IDLE_S)
    book.learn(Stored((0, 1), ROOT, "s"), 2 * IDLE_S)
    assert runs_of(book.take(2 * IDLE_S)) == [[1]]


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abcdef"), st.booleans()), max_size=120))
def test_books_are_bounded(steps: Sequence[tuple[int, str, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_events, "SESSIONS_MAX", 3)
        patch.setattr(engine_events, "PENDING_MAX", 4)
        patch.setattr(engine_events, "RUN_MAX", 5)
        book, decoding = SessionBook(pages_max=8), set()
        for page, session, is_kept in steps:
            book.learn(Stored((page, page + 1), page - 1, session), 0.0)
            if is_kept:
                book.keep([chunk(page), chunk(page + 1)])
            assert len(book._pages) <= 8
            assert len(book._active) <= 3
            assert len(book._pending) <= 4
        report = book.take(0.0)
        assert all(1 <= len(run) <= 5 for _, run in report.runs)
        for name, state in report.states:
            decoding.add(name) if state == "decoding" else decoding.discard(name)
        assert decoding == set(book._active)


@pytest.mark.parametrize(
    ("published", "rank", "heard_at"),
    [
        ("tcp://*:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", 3, "tcp://127.0.0.1:5560"),
        ("tcp://[::]:5557", 0, "tcp://[::1]:5557"),
        ("tcp://10.0.0.1:5557", 1, "tcp://10.0.0.1:5558"),
        ("ipc:///run/e.sock", 0, "ipc:///run/e.sock"),
        ("inproc://e", 2, "inproc://e_dp2"),
    ],
)
def test_a_subscriber_connects_to_what_a_publisher_binds(published: str, rank: int, heard_at: str) -> None:
    assert connect_to(published, rank, "events") == heard_at


@pytest.mark.parametrize(
    ("published", "rank"),
    [("tcp://*:0", 0), ("tcp://*:0", 1), ("tcp://*", 0), ("*:5557", 0), ("udp://*:1", 0), ("ipc://e", 1), ("ipc://", 0),
     ("tcp://*:65535", 1), ("tcp://*:x", 0)],
)  # fmt: skip
def test_an_endpoint_that_nobody_can_connect_to_is_refused_by_setting_and_value(published: str, rank: int) -> None:
    with pytest.raises(InvalidInputError, match=r"events: .*1 to 65535"):
        connect_to(published, rank, "events")
