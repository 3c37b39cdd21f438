"""Laws of what moves together, and of what goes to a disk as one."""

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.base import Record, SlotRef, Writing
from kvstrata_agent.backends.file.engine import prefers_posix
from kvstrata_agent.backends.file.posix import joined
from kvstrata_agent.backends.file.segment_io import LaidOutRecord, coalesced, parts_of
from kvstrata_agent.policy.placement import DEPTH, GROUP_BYTES_MAX, grouped
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId
from kvstrata_api.units import KIB, MIB

pytestmark = pytest.mark.unit

PAGE_BYTES = 4096
RECORD = Record(BlockKey(ScopeId("tenant/a/u/v1"), bytes(20)), b"", LayoutId(bytes(16)), "raw", 1, 1, bytes(16), 7)
Block = tuple[str, int, int]
"""Account, number, bytes."""

blocks = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 1 << 20), st.sampled_from([4 * KIB, 256 * KIB, 2 * MIB, 16 * MIB])),
    max_size=200,
)
slots = st.lists(st.integers(0, 40), unique=True, max_size=30)


def groups_of(found: list[Block]) -> list[list[Block]]:
    return grouped(found, lambda b: b[2], lambda b: b[0])


@given(blocks)
def test_groups_hold_every_block_once_and_in_order_and_of_one_account(found: list[Block]) -> None:
    groups = groups_of(found)

    assert [block for group in groups for block in group] == found
    assert all(len({account for account, _, _ in group}) == 1 for group in groups)


@given(blocks)
def test_a_group_is_within_its_bytes_or_one_block(found: list[Block]) -> None:
    for group in groups_of(found):
        assert len(group) == 1 or sum(size_bytes for _, _, size_bytes in group) <= GROUP_BYTES_MAX


@given(st.integers(1, 400), st.sampled_from([256 * KIB, 2 * MIB]))
def test_blocks_are_put_together_only_where_a_disk_is_kept_busy_all_the_same(count: int, size_bytes: int) -> None:
    assert len(groups_of([("a", n, size_bytes) for n in range(count)])) >= min(count, DEPTH)


def laid(
    index: int, stride_bytes: int = 4 * PAGE_BYTES, size_bytes: int = 3 * PAGE_BYTES, extent: int = 1
) -> LaidOutRecord:
    whole = memoryview(mmap.mmap(-1, size_bytes))
    whole[:] = index.to_bytes(1, "big") * size_bytes
    slot = SlotRef(extent, index * stride_bytes, stride_bytes, index + 1)
    return LaidOutRecord(Writing(slot, whole, RECORD), (whole[:PAGE_BYTES], whole[PAGE_BYTES:]), lambda _: None, RECORD)


@given(slots)
def test_a_run_writes_each_record_to_its_slot_and_zeros_between_them(indices: list[int]) -> None:
    runs = coalesced(laid(i) for i in indices)

    assert sorted(one.slot.offset for run in runs for one in run) == sorted(laid(i).slot.offset for i in indices)
    for run in runs:
        written = b"".join(parts_of(run))
        for one in run:
            at = one.slot.offset - run[0].slot.offset
            assert written[at : at + one.size_bytes] == b"".join(one.parts)
            assert not any(written[at + one.size_bytes : at + one.slot.size_bytes])
        assert len(written) == len(run) * 4 * PAGE_BYTES - PAGE_BYTES, "nothing is written behind the last record"


@given(slots)
def test_neighbours_are_never_in_two_runs(indices: list[int]) -> None:
    runs = coalesced(laid(i) for i in indices)

    ends = {run[-1].slot.offset + run[-1].slot.size_bytes for run in runs}
    assert not ends & {run[0].slot.offset for run in runs}


def test_records_of_other_files_and_far_ends_break_a_run() -> None:
    assert len(coalesced([laid(0), laid(1, extent=2)])) == 2
    assert len(coalesced([laid(n, stride_bytes=MIB) for n in range(2)])) == 2


def pages_from(offset: int, size_bytes: int) -> bytes:
    """Pages that tell where in a file they lie."""
    first = offset // PAGE_BYTES
    return b"".join((first + n).to_bytes(4, "big") * (PAGE_BYTES // 4) for n in range(size_bytes // PAGE_BYTES))


@given(slots, st.integers(1, 4), st.integers(0, 60))
def test_joined_reads_fill_every_memory_from_its_own_offset(indices: list[int], pages: int, gap_pages: int) -> None:
    size_bytes, stride_bytes = pages * PAGE_BYTES, (pages + gap_pages) * PAGE_BYTES
    ranges = [(i * stride_bytes, memoryview(bytearray(size_bytes))) for i in indices]

    for offset, parts in joined(ranges):
        at = offset
        for part in parts:
            part[:] = pages_from(at, len(part))
            at += len(part)

    assert all(into == pages_from(offset, size_bytes) for offset, into in ranges)


@given(st.lists(st.floats(0.001, 10), min_size=1), st.lists(st.floats(0.001, 10), min_size=1))
def test_io_uring_is_taken_where_its_best_round_is_clearly_faster(uring_s: list[float], posix_s: list[float]) -> None:
    assert prefers_posix(uring_s, posix_s) == (min(uring_s) >= 0.75 * min(posix_s))
    assert prefers_posix(posix_s, posix_s)
