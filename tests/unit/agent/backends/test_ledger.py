"""Laws of the ledger of lasting memory: what was written comes back from its own place, and nothing else does."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstrata_agent.backends.base import Columns, Record, SlotRef
from kvstrata_agent.backends.memory.ledger import (
    HEADER_BYTES,
    RECORD,
    RECORD_BYTES,
    LedgerHeader,
    are_whole,
    file_bytes,
    pack_header,
    pack_record,
    unpack_header,
)
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId
from kvstrata_api.errors import InvalidInputError

pytestmark = pytest.mark.unit

SCOPE = ScopeId("tenant/a/uid/v1")
numbers = st.integers(0, (1 << 48) - 1)
extents = st.integers(0, (1 << 32) - 1)
slots = st.integers(0, (1 << 24) - 1)
records = st.builds(
    Record,
    key=st.builds(BlockKey, st.just(SCOPE), st.binary(min_size=20, max_size=20)),
    parent=st.just(b"") | st.binary(min_size=20, max_size=20),
    layout_id=st.binary(min_size=16, max_size=16).map(LayoutId),
    codec=st.sampled_from(["raw", "lossless"]),
    raw_bytes=numbers,
    stored_bytes=numbers,
    checksum=st.binary(min_size=16, max_size=16),
    epoch=numbers,
)
headers = st.builds(
    LedgerHeader,
    extent=extents,
    stride_bytes=st.integers(1, 1 << 16).map(lambda n: n * 4096),
    slots=st.integers(1, 1 << 10),
    size_bytes=st.just(1 << 40),
    boot=st.text("0123456789abcdef-", min_size=36, max_size=36),
    scope=st.text(min_size=1, max_size=100).map(ScopeId),
    writer=st.text(max_size=60),
)


def is_whole(packed: bytes, extent: int, index: int) -> bool:
    (found,) = are_whole(np.frombuffer(packed, RECORD), extent, np.array([index])).tolist()
    return bool(found)


@given(records, extents, slots, numbers)
def test_a_record_comes_back_as_it_was(record: Record, extent: int, index: int, stamp: int) -> None:
    packed = pack_record(record, extent, index, stamp)

    assert len(packed) == RECORD_BYTES
    assert is_whole(packed, extent, index)
    read = Columns(SCOPE, extent, 4096, np.array([index]), np.frombuffer(packed, RECORD))
    assert list(read.pairs()) == [(SlotRef(extent, index * 4096, 4096, stamp), record)]


@given(records, extents, slots, st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_record_with_one_bit_flipped_does_not_count(record: Record, extent: int, index: int, bit: int) -> None:
    packed = bytearray(pack_record(record, extent, index, 5))
    packed[bit // 8] ^= 1 << bit % 8

    assert not is_whole(bytes(packed), extent, index)


@given(records, records, st.lists(st.booleans(), min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_a_mixture_of_two_records_does_not_count(old: Record, new: Record, mix: list[bool]) -> None:
    before, after = pack_record(old, 1, 2, 5), pack_record(new, 1, 2, 6)
    torn = bytes(a if is_new else b for a, b, is_new in zip(after, before, mix, strict=True))

    assert not is_whole(torn, 1, 2) or torn in {before, after}


@given(records, extents, slots, extents, slots)
def test_a_record_counts_at_its_own_place_alone(
    record: Record, extent: int, index: int, other_extent: int, other_index: int
) -> None:
    found = is_whole(pack_record(record, extent, index, 5), other_extent, other_index)

    assert found == ((extent, index) == (other_extent, other_index))


@given(st.lists(st.tuples(records, st.booleans()), max_size=8), extents)
def test_each_record_is_looked_at_by_itself(written: list[tuple[Record, bool]], extent: int) -> None:
    indices = np.arange(len(written))[::-1]
    packed = [pack_record(r, extent, i + (not ok), 5) for i, (r, ok) in zip(indices.tolist(), written, strict=True)]

    found = are_whole(np.frombuffer(b"".join(packed), RECORD), extent, indices)

    assert found.tolist() == [ok for _, ok in written]


def test_a_free_slot_is_no_record() -> None:
    assert not is_whole(bytes(RECORD_BYTES), 0, 0)


@given(headers)
def test_a_header_comes_back_as_it_was(header: LedgerHeader) -> None:
    if header.stride_bytes * header.slots <= header.size_bytes:
        assert unpack_header(pack_header(header)) == header


@given(headers, st.integers(0, 600 * 8))
def test_a_header_with_one_bit_flipped_does_not_count(header: LedgerHeader, bit: int) -> None:
    page = bytearray(pack_header(header))
    page[bit // 8] ^= 1 << bit % 8

    assert unpack_header(bytes(page)) is None


def test_names_that_do_not_fit_are_refused() -> None:
    record = Record(BlockKey(SCOPE, bytes(20)), b"", LayoutId(bytes(16)), "raw", 1, 1, bytes(16), 1)
    with pytest.raises(InvalidInputError, match="at most 14 B"):
        pack_record(replace(record, codec="a-codec-with-a-long-name"), 0, 0, 1)
    with pytest.raises(InvalidInputError, match="at most 512 B"):
        pack_header(LedgerHeader(0, 4096, 1, 4096, "boot", ScopeId("s" * 513), "a"))
    with pytest.raises(InvalidInputError, match="at most 253 B"):
        pack_header(LedgerHeader(0, 4096, 1, 4096, "boot", SCOPE, "a" * 254))


@pytest.mark.parametrize(("scope", "writer"), [(SCOPE, "a"), (ScopeId("domain/d/uid/v3"), "")])
def test_memory_of_an_agent_that_noted_no_writers_is_its_tenants_or_nobodys(scope: ScopeId, writer: str) -> None:
    page = pack_header(LedgerHeader(5, 4096, 8, 1 << 20, "b" * 36, scope, ""))
    old = page[:8] + (1).to_bytes(4, "little") + page[12:598]
    header = unpack_header((old + xxhash.xxh3_64_digest(old)).ljust(HEADER_BYTES, b"\0"))

    assert header == LedgerHeader(5, 4096, 8, 1 << 20, "b" * 36, scope, writer)


def test_records_are_aligned_to_their_size() -> None:
    assert HEADER_BYTES % RECORD_BYTES == 0
    assert file_bytes(3) == HEADER_BYTES + 3 * RECORD_BYTES


def test_a_header_with_a_name_that_is_no_text_is_none_whoever_has_checked_it() -> None:
    page = bytearray(pack_header(LedgerHeader(1, 4096, 1, 4096, "b" * 36, SCOPE, "a")))
    end = 598  # Of the fixed fields and a writer of one byte.
    page[end - 1 : end] = b"\xff"
    page[end : end + 8] = xxhash.xxh3_64_digest(bytes(page[:end]))

    assert unpack_header(bytes(page)) is None
