"""Laws of the packed form: what comes out went in, and what was damaged is a miss."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.tiers import TierType
from kvstrata_metadata.store.keys import SHARDS, Shard, by_shard, parse_shard, session_digest, shard_index
from kvstrata_metadata.store.records import (
    CHANGE_BYTES,
    INCARNATION_BYTES,
    LOCATION_BYTES,
    OTHER_TIER,
    STAMP_MAX,
    STORED_BYTES_MAX,
    Announcement,
    Copy,
    Incarnation,
    SessionRecord,
    pack_changes,
    pack_epoch,
    pack_session,
    unpack_copies,
    unpack_nomination,
    unpack_registration,
    unpack_session,
)

pytestmark = pytest.mark.unit

digests = st.binary(min_size=20, max_size=20)
incarnations = st.binary(min_size=INCARNATION_BYTES, max_size=INCARNATION_BYTES).map(Incarnation)
changes = st.builds(
    Announcement,
    digest=digests,
    tier=st.sampled_from([t.value for t in TierType]),
    stamp=st.integers(0, STAMP_MAX),
    stored_bytes=st.integers(0, STORED_BYTES_MAX),
)


def stored(incarnation: Incarnation, change: Announcement) -> bytes:
    """What announce.lua makes of one change."""
    return incarnation + pack_changes(incarnation, [change])[20:]


@given(incarnations, changes)
def test_a_location_comes_out_as_it_went_in(incarnation: Incarnation, change: Announcement) -> None:
    value = stored(incarnation, change)

    assert len(value) == LOCATION_BYTES
    assert unpack_copies(change.digest, value) == [Copy(incarnation, change.tier, change.stamp, change.stored_bytes)]


@given(incarnations, changes, st.integers(0, LOCATION_BYTES * 8 - 1))
def test_any_flipped_bit_makes_a_location_a_miss(incarnation: Incarnation, change: Announcement, bit: int) -> None:
    value = bytearray(stored(incarnation, change))
    value[bit // 8] ^= 1 << (bit % 8)

    assert unpack_copies(change.digest, bytes(value)) == []


@given(incarnations, changes, st.integers(0, 159))
def test_a_location_is_of_its_block_alone(incarnation: Incarnation, change: Announcement, bit: int) -> None:
    other = bytearray(change.digest)
    other[bit // 8] ^= 1 << (bit % 8)

    assert unpack_copies(bytes(other), stored(incarnation, change)) == []


@given(st.lists(st.tuples(incarnations, changes), min_size=1, max_size=5), st.data())
def test_one_corrupt_copy_takes_no_other_with_it(
    pairs: list[tuple[Incarnation, Announcement]], data: st.DataObject
) -> None:
    digest = pairs[0][1].digest
    same = [(i, Announcement(digest, c.tier, c.stamp, c.stored_bytes)) for i, c in pairs]
    values = [bytearray(stored(i, c)) for i, c in same]
    hit = data.draw(st.integers(0, len(values) - 1))
    values[hit][-1] ^= 0x55

    found = unpack_copies(digest, b"".join(values))

    assert found == [Copy(i, c.tier, c.stamp, c.stored_bytes) for n, (i, c) in enumerate(same) if n != hit]


@given(digests, st.binary(max_size=200))
def test_bytes_that_are_no_locations_are_misses_and_never_errors(digest: bytes, value: bytes) -> None:
    if len(value) % LOCATION_BYTES:
        assert unpack_copies(digest, value) == []
    else:
        unpack_copies(digest, value)


@given(incarnations, st.lists(changes, max_size=20))
def test_changes_have_a_fixed_size(incarnation: Incarnation, several: list[Announcement]) -> None:
    assert len(pack_changes(incarnation, several)) == CHANGE_BYTES * len(several)


def test_an_unknown_medium_is_announced_as_another_one() -> None:
    incarnation = Incarnation(b"12345")
    value = stored(incarnation, Announcement(b"d" * 20, "drum memory", 1, 2))

    assert [c.tier for c in unpack_copies(b"d" * 20, value)] == [OTHER_TIER]


@pytest.mark.parametrize(("stamp", "size"), [(-1, 0), (STAMP_MAX + 1, 0), (0, -1), (0, STORED_BYTES_MAX + 1)])
def test_numbers_that_do_not_fit_are_refused_where_they_arise(stamp: int, size: int) -> None:
    with pytest.raises(AssertionError):
        Announcement(b"d" * 20, "NVMe", stamp, size)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_epochs_compare_as_text_like_numbers(a: int, b: int) -> None:
    assert (pack_epoch(a) < pack_epoch(b)) == (a < b)


@given(st.binary(max_size=60))
@example(b"\x93\xa1\xff\xa0\xc4\x00")  # A text that is no UTF-8.
def test_a_damaged_record_is_unknown_and_never_an_error(packed: bytes) -> None:
    unpack_registration(packed, 0.0)
    unpack_session(packed)
    unpack_nomination(packed)


@given(
    st.builds(
        SessionRecord,
        tenant=st.text(max_size=20),
        priority=st.text(max_size=20),
        state=st.sampled_from(["open", "idle"]),
        parent=st.binary(max_size=20),
        head=st.just(b"") | digests,
        agent=st.text(max_size=20),
        urgency=st.integers(0, 100),
        expected_return_s=st.floats(0, 1e6),
    )
)
def test_a_session_comes_out_as_it_went_in(record: SessionRecord) -> None:
    assert unpack_session(pack_session(record)) == record


def test_a_session_whose_head_names_no_block_is_unknown() -> None:
    assert unpack_session(pack_session(SessionRecord("a", "", "idle", head=b"h" * 40))) is None


@given(st.lists(digests, max_size=50))
def test_shards_partition_the_blocks_of_a_scope(several: list[bytes]) -> None:
    cut = by_shard(several)

    assert sorted(i for places in cut.values() for i in places) == list(range(len(several)))
    assert all(shard_index(several[i]) == index < SHARDS for index, places in cut.items() for i in places)


@given(st.text("0123456789abcdef", min_size=16, max_size=16), st.integers(0, SHARDS - 1))
def test_a_shard_is_read_from_its_name(tag: str, index: int) -> None:
    shard = Shard(tag, index)

    assert parse_shard(shard.name) == shard
    assert shard.key.count(b"{") == shard.key.count(b"}") == 1


@given(st.text(max_size=30))
def test_a_name_that_is_no_shard_is_none(name: str) -> None:
    shard = parse_shard(name)
    assert shard is None or shard.name == name


def test_a_session_has_another_name_in_each_scope() -> None:
    a, b = (ScopeSecret(ScopeId(name), name.encode() * 32) for name in "ab")

    assert session_digest(a, "s") != session_digest(b, "s")
    assert b"s" * 4 not in session_digest(a, "ssss")
