"""Laws of the outbox: bounded, in order, repeated unchanged until settled, and a loss is always reported."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_metadata.client.outbox import ERASED_MAX, ROUND_BATCHES_MAX, SEQUENCE_STRIDE, Outbox
from kvstrata_metadata.directory.shards import CHUNK, Batch, Mode
from kvstrata_metadata.store.keys import Shard, shard_index
from kvstrata_metadata.store.records import Announcement, Incarnation, Verdict

pytestmark = pytest.mark.unit

ME = Incarnation(b"12345")
TAG = "0123456789abcdef"
numbers = st.integers(0, 255)


def change(n: int, stamp: int = 1, *, is_gone: bool = False) -> Announcement:
    return Announcement(bytes([n]) * 20, "NVMe", stamp, 4096, is_gone)


def ready(limit: int = 1000) -> Outbox:
    """An outbox whose (empty) first report has been made."""
    outbox = Outbox(limit)
    outbox.restart(ME)
    report(outbox)
    return outbox


def report(outbox: Outbox, *held: Announcement) -> None:
    assert outbox.begin_report()
    outbox.report(TAG, held)
    outbox.end_report()


def drain(outbox: Outbox, verdict: Verdict = Verdict.OK) -> list[Batch]:
    sent: list[Batch] = []
    while batches := outbox.next_round():
        sent += batches
        assert outbox.settle(batches, [verdict] * len(batches))
    return sent


@given(st.lists(numbers, max_size=300))
def test_changes_of_a_shard_leave_in_order_and_once(order: list[int]) -> None:
    outbox = ready()
    for stamp, n in enumerate(order):
        outbox.add(TAG, [change(n, stamp)])

    left: dict[Shard, list[int]] = defaultdict(list)
    for batch in drain(outbox):
        left[batch.shard] += [c.stamp for c in batch.changes]

    wanted: dict[Shard, list[int]] = defaultdict(list)
    for stamp, n in enumerate(order):
        wanted[Shard(TAG, shard_index(change(n).digest))].append(stamp)
    assert left == wanted
    assert not outbox.has_work
    assert outbox.depth == 0


@given(st.lists(numbers, min_size=1, max_size=20), st.integers(0, 10))
def test_what_changes_while_all_is_owed_is_told_by_the_report_alone(order: list[int], limit: int) -> None:
    outbox = ready(limit)
    assert not outbox.owes_all
    for n in order:
        outbox.add(TAG, [change(n)])

    assert outbox.owes_all == (len(order) > limit)
    if outbox.owes_all:
        assert outbox.depth == 0
        outbox.restart(ME)
        assert outbox.owes_all
        report(outbox, change(1))
        assert not outbox.owes_all
        assert [c for batch in drain(outbox) for c in batch.changes] == [change(1)]


@given(st.lists(numbers, min_size=1, max_size=100))
def test_a_message_is_repeated_unchanged_until_it_is_settled(order: list[int]) -> None:
    outbox = ready()
    outbox.add(TAG, [change(n) for n in order])

    first = outbox.next_round()
    outbox.add(TAG, [change(n, 2) for n in order])

    assert outbox.next_round() == first
    outbox.settle(first, [Verdict.OLD] * len(first))
    assert not set(map(id, outbox.next_round())) & set(map(id, first))


@given(st.lists(st.lists(numbers, max_size=10), max_size=20))
def test_sequences_only_grow_and_a_lane_starts_with_a_reset(rounds: list[list[int]]) -> None:
    outbox = ready()
    seen: dict[Shard, int] = {}
    for order in rounds:
        outbox.add(TAG, [change(n) for n in order])
        for batch in drain(outbox):
            assert batch.sequence > seen.get(batch.shard, 0)
            assert (batch.mode is Mode.RESET) == (batch.shard not in seen)
            seen[batch.shard] = batch.sequence


@given(st.integers(1, 50), st.integers(1, 200))
def test_at_the_bound_everything_is_dropped_and_a_full_report_is_due(limit: int, count: int) -> None:
    outbox = ready(limit)
    outbox.add(TAG, [change(n % 256) for n in range(count)])

    assert outbox.depth <= limit
    assert outbox.must_report == (count > limit)
    assert outbox.dropped_total == (count if count > limit else 0)


def test_a_gap_withdraws_the_shard_and_reports_it_alone() -> None:
    outbox = ready()
    outbox.add(TAG, [change(0x10), change(0x20)])
    batches = outbox.next_round()
    outbox.settle(batches, [Verdict.GAP, Verdict.OK])
    lost = Shard(TAG, 1)

    assert outbox.must_report
    assert outbox.next_round() == []
    ((shard, sequence),) = outbox.begin_withdrawals()
    assert (shard, sequence) == (lost, 1 + SEQUENCE_STRIDE)
    outbox.withdrawn(lost, sequence + 2)
    report(outbox, change(0x10, 7), change(0x20, 7))
    (again,) = outbox.next_round()
    assert again.shard == lost
    assert again.mode is Mode.RESET
    assert again.sequence == sequence + 3, "right behind the withdrawal, which a failover may lose"
    assert [c.stamp for c in again.changes] == [7]


def test_changes_during_a_due_report_are_left_to_the_report() -> None:
    outbox = Outbox(10)
    outbox.restart(ME)
    outbox.add(TAG, [change(1)])
    assert outbox.depth == 0
    report(outbox, change(1))
    outbox.add(TAG, [change(1, is_gone=True)])

    (batch,) = outbox.next_round()
    assert [c.is_gone for c in batch.changes] == [False, True]


def test_a_report_larger_than_the_bound_is_no_overflow() -> None:
    outbox = Outbox(10)
    outbox.restart(ME)
    held = [change(n % 16) for n in range(100)]
    report(outbox, *held)
    outbox.add(TAG, [change(1)])

    assert not outbox.must_report
    assert sum(len(b.changes) for b in drain(outbox)) == 101


def test_an_empty_shard_that_was_withdrawn_starts_a_stream_all_the_same() -> None:
    outbox = ready()
    outbox.add(TAG, [change(0x10)])
    outbox.settle(outbox.next_round(), [Verdict.GAP])
    ((shard, sequence),) = outbox.begin_withdrawals()
    outbox.withdrawn(shard, sequence)
    report(outbox)

    (batch,) = outbox.next_round()
    assert (batch.mode, batch.changes) == (Mode.RESET, ())


def test_a_fenced_answer_ends_the_incarnation() -> None:
    outbox = ready()
    outbox.add(TAG, [change(1)])

    assert not outbox.settle(outbox.next_round(), [Verdict.FENCED])
    outbox.restart(Incarnation(b"54321"))
    assert outbox.must_report
    assert outbox.checks() == []


@given(st.sets(numbers, max_size=40))
def test_quiet_lanes_are_checked_at_their_last_number(order: set[int]) -> None:
    outbox = ready()
    outbox.add(TAG, [change(n) for n in sorted(order)])
    last = {b.shard: b.sequence for b in drain(outbox)}

    assert {c.shard: c.sequence for c in outbox.checks()} == last
    assert all(c.mode is Mode.CHECK and not c.changes for c in outbox.checks())


def test_a_round_is_bounded() -> None:
    outbox = ready(1_000_000)
    for scope in range(20):
        outbox.add(f"{scope:016x}", [change(n % 256) for n in range(2 * CHUNK)])

    for _ in range(5):
        batches = outbox.next_round()
        assert len(batches) <= ROUND_BATCHES_MAX
        assert all(len(b.changes) <= CHUNK for b in batches)
        outbox.settle(batches, [Verdict.OK] * len(batches))


def test_what_waited_before_a_gap_is_left_to_the_report() -> None:
    """Else an old change would leave behind the report and undo it."""
    outbox = ready()
    outbox.add(TAG, [change(0x10, 1)])
    batches = outbox.next_round()
    outbox.add(TAG, [change(0x10, 2), change(0x11, is_gone=True)])
    outbox.settle(batches, [Verdict.GAP])
    assert outbox.depth == 0

    ((shard, sequence),) = outbox.begin_withdrawals()
    outbox.withdrawn(shard, sequence)
    report(outbox, change(0x11, 3))
    assert [[c.stamp for c in b.changes] for b in drain(outbox)] == [[3]]


def test_a_report_begins_with_nothing_of_before_in_its_lanes() -> None:
    """The overflow's report too: what waits is in it."""
    outbox = ready(limit=3)
    outbox.add(TAG, [change(n) for n in range(3)])
    outbox.add(TAG, [change(9)])
    assert outbox.must_report
    for shard, sequence in outbox.begin_withdrawals():
        outbox.withdrawn(shard, sequence)
    report(outbox, change(7, 70))

    assert outbox.depth == 1
    assert [[c.stamp for c in b.changes] for b in drain(outbox)] == [[70]]


@given(st.lists(st.tuples(st.booleans(), numbers), max_size=60))
def test_changes_during_a_report_leave_in_the_order_in_which_they_were_queued(steps: list[tuple[bool, int]]) -> None:
    outbox = Outbox(1000)
    outbox.restart(ME)
    assert outbox.begin_report()
    for stamp, (is_part, n) in enumerate(steps):
        if is_part:
            outbox.report(TAG, [change(n, stamp)])
        else:
            outbox.add(TAG, [change(n, stamp)])
    outbox.end_report()

    left: dict[Shard, list[int]] = defaultdict(list)
    for batch in drain(outbox):
        left[batch.shard] += [c.stamp for c in batch.changes]
    wanted: dict[Shard, list[int]] = defaultdict(list)
    for stamp, (_, n) in enumerate(steps):
        wanted[Shard(TAG, shard_index(change(n).digest))].append(stamp)
    assert left == wanted


def test_a_lane_with_a_gap_in_the_middle_of_a_report_waits_for_the_next_one() -> None:
    outbox = Outbox(1000)
    outbox.restart(ME)
    assert outbox.begin_report()
    outbox.report(TAG, [change(0x10), change(0x20)])
    batches = outbox.next_round()
    outbox.settle(batches, [Verdict.GAP, Verdict.OK])
    outbox.report(TAG, [change(0x11), change(0x21)])
    outbox.end_report()

    assert [b.shard.index for b in drain(outbox)] == [2]
    assert outbox.must_report
    assert [shard.index for shard, _ in outbox.begin_withdrawals()] == [1]


def test_a_part_that_is_away_rests_and_is_repeated_unchanged() -> None:
    outbox = ready()
    outbox.add(TAG, [change(0x10), change(0x20)])
    first, second = outbox.next_round()
    outbox.settle([first, second], [Verdict.AWAY, Verdict.OK])
    outbox.add(TAG, [change(0x11), change(0x21)])

    assert [b.shard.index for b in drain(outbox)] == [2]
    assert outbox.has_work
    assert outbox.is_resting
    assert outbox.checks() == [Batch(second.shard, ME, 2, Mode.CHECK)]
    outbox.wake()
    assert outbox.next_round() == [first]
    assert [len(b.changes) for b in drain(outbox)] == [1, 1]


def test_a_full_directory_is_told_until_it_takes_an_announcement_again() -> None:
    outbox = ready()
    outbox.add(TAG, [change(0x10)])
    outbox.settle(outbox.next_round(), [Verdict.FULL])
    assert outbox.is_full
    assert outbox.must_report

    for shard, sequence in outbox.begin_withdrawals():
        outbox.withdrawn(shard, sequence)
    report(outbox, change(0x10))
    drain(outbox)
    assert not outbox.is_full


def test_erased_scopes_take_no_memory_for_ever() -> None:
    outbox, scopes = ready(), 3 * ERASED_MAX
    for scope in range(scopes):
        outbox.add(f"{scope:016x}", [change(0x10)])
        outbox.settle(outbox.next_round(), [Verdict.ERASED])

    assert len(outbox._lanes) == 0
    assert len(outbox._erased) == ERASED_MAX
    outbox.add(f"{0:016x}", [change(0x10)])  # Forgotten by now, so the directory is asked again.
    (batch,) = outbox.next_round()
    outbox.settle([batch], [Verdict.ERASED])
    outbox.add(f"{0:016x}", [change(0x11)])
    assert outbox.next_round() == []
    assert not outbox.has_work


def test_an_erased_scope_is_never_mentioned_again() -> None:
    outbox = ready()
    outbox.add(TAG, [change(0x10)])
    batches = outbox.next_round()
    outbox.add(TAG, [change(0x11)])
    outbox.settle(batches, [Verdict.ERASED])
    outbox.add(TAG, [change(0x12)])
    outbox.report_everything()
    assert outbox.begin_withdrawals() == []
    report(outbox, change(0x10))

    assert outbox.next_round() == []
    assert outbox.checks() == []
    assert outbox.depth == 0
    assert not outbox.has_work
