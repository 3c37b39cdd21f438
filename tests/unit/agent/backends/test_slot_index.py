"""Laws of the notes that a store's index is made of: the same slots and records come out, whatever went in before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.file.index_format import ENTRY_BYTES, KINDS_MAX, Kinds, Listed, SegmentName, unpack_entries
from kvstrata_agent.backends.file.segment import NOTE_BYTES, TRAITS_MAX, SlotNotes, Traits
from kvstrata_agent.backends.recovered import columns_of
from kvstrata_api.blocks import BlockKey, LayoutId
from support.backends.contract import ANNA

pytestmark = pytest.mark.unit

SLOTS = 5
ONE = Record(BlockKey(ANNA, b"k" * 20), b"p" * 20, LayoutId(b"l" * 16), "raw", 4096, 4000, b"c" * 16, 9)
records = st.builds(
    Record,
    key=st.binary(min_size=20, max_size=20).map(lambda digest: BlockKey(ANNA, digest)),
    parent=st.sampled_from([b"", b"p" * 20, b"q" * 20]),
    layout_id=st.sampled_from([LayoutId(b"l" * 16), LayoutId(b"m" * 16)]),
    codec=st.sampled_from(["raw", "lossless"]),
    raw_bytes=st.sampled_from([4096, 8192]),
    stored_bytes=st.integers(1, 4096),
    checksum=st.binary(min_size=16, max_size=16),
    epoch=st.integers(1, 40),
)
steps = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.none() | records), max_size=60)


def listed(notes: SlotNotes, stamps: list[int], traits: Traits) -> dict[int, tuple[int, Record]]:
    """Stamp and record of each slot that a start would find."""
    found = unpack_entries(Listed(SegmentName(1, 8192, SLOTS), ANNA, notes.entries(stamps, traits)), traits.kinds.known)
    return {slot.offset // 8192: (slot.stamp, record) for slot, record in found.pairs()}


@given(steps)
def test_the_index_lists_what_was_noted_last(changes: list[tuple[int, Record | None]]) -> None:
    notes, traits, stamps = SlotNotes(SLOTS), Traits(Kinds()), [0] * SLOTS
    held: dict[int, tuple[int, Record]] = {}
    for stamp, (at, record) in enumerate(changes, 1):
        stamps[at] = stamp  # Taken, and not noted before it is durable: it must not be listed.
        notes.clear(at)
        held.pop(at, None)
        if record is not None:
            assert notes.set(at, record, traits)
            held[at] = (stamp, record)
    assert listed(notes, stamps, traits) == held


@given(st.lists(records, min_size=1, max_size=SLOTS))
def test_what_an_earlier_run_left_is_noted_at_once_as_one_by_one(left: list[Record]) -> None:
    places = list(range(SLOTS))[-len(left) :]
    stamps = [0] * (SLOTS - len(left)) + [at + 7 for at in places]
    alone, together = SlotNotes(SLOTS), SlotNotes(SLOTS)
    one, other = Traits(Kinds()), Traits(Kinds())
    assert all(alone.set(at, record, one) for at, record in zip(places, left, strict=True))
    assert together.set_all(columns_of(1, 8192, [(at, at + 7, r) for at, r in zip(places, left, strict=True)]), other)

    assert listed(together, stamps, other) == listed(alone, stamps, one)
    assert len(listed(together, stamps, other)) == len(left)


@pytest.mark.parametrize("stored_bytes", [2**32 - 1, 2**32])
def test_a_record_that_a_note_has_no_room_for_is_refused_and_nothing_is_noted(stored_bytes: int) -> None:
    record, notes, traits = replace(ONE, stored_bytes=stored_bytes), SlotNotes(SLOTS), Traits(Kinds())
    fits = stored_bytes < 2**32
    assert notes.set(2, record, traits) == fits
    assert (2 in listed(notes, [7] * SLOTS, traits)) == fits

    notes = SlotNotes(SLOTS)
    assert notes.set_all(columns_of(1, 8192, [(2, 7, record)]), traits) == fits
    assert (2 in listed(notes, [7] * SLOTS, traits)) == fits


def test_traits_have_an_end_and_those_that_are_known_stay() -> None:
    traits = Traits(Kinds())
    assert [traits.number(replace(ONE, epoch=n)) for n in range(TRAITS_MAX + 1)] == [*range(1, TRAITS_MAX + 1), None]
    assert traits.number(ONE) == ONE.epoch + 1
    assert traits.entries(np.array([ONE.epoch + 1], np.uint32))["epoch"].tolist() == [ONE.epoch]


def test_kinds_that_the_index_has_no_words_for_are_refused() -> None:
    notes, traits = SlotNotes(SLOTS), Traits(Kinds())
    many = [replace(ONE, layout_id=LayoutId(n.to_bytes(16, "big"))) for n in range(KINDS_MAX + 1)]
    assert [notes.set(0, r, traits) for r in many] == [True] * KINDS_MAX + [False]
    assert not notes.set_all(columns_of(1, 8192, [(0, 7, many[-1])]), traits)
    assert listed(notes, [3] * SLOTS, traits) == {0: (3, many[-2])}


def test_a_note_takes_two_thirds_of_an_entry() -> None:
    assert (NOTE_BYTES, ENTRY_BYTES) == (64, 96)
