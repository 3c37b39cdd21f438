"""Laws of slot bookkeeping."""

import random
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.base import SlotRef
from kvstrata_agent.backends.object.object_tier import ObjectSlots
from kvstrata_agent.backends.slot_table import NOBODY, SlotTable, stride_of, target_extent_bytes
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import TierFullError

pytestmark = pytest.mark.unit

PAGE = 4096
SCOPES = [ScopeId(f"tenant/{n}/uid/v1") for n in "abc"]
sizes = st.integers(1, 40 * PAGE)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from(SCOPES), sizes),
        st.tuples(st.just("drop"), st.integers(0, 60), st.just(0)),
        st.tuples(st.just("resize"), st.integers(4, 200), st.just(0)),
        st.tuples(st.just("close"), st.integers(0, 20), st.just(0)),
    ),
    max_size=80,
)


def make_table(capacity_pages: int = 128, class_bits: int = 6, target_pages: int = 16) -> SlotTable:
    return SlotTable(
        capacity_bytes=capacity_pages * PAGE,
        target_bytes=target_pages * PAGE,
        page_bytes=PAGE,
        alignment_bytes=PAGE,
        class_bits=class_bits,
    )


def take(table: SlotTable, scope: ScopeId, size_bytes: int) -> SlotRef:
    slot = table.take(scope, size_bytes)
    if slot is None:
        table.open(scope, size_bytes)
        slot = table.take(scope, size_bytes)
    assert slot is not None
    return slot


class Model:
    """What a table promises, kept naively beside it."""

    def __init__(self) -> None:
        self.table = make_table()
        self.live: dict[SlotRef, ScopeId] = {}
        self.stamps: set[int] = set()
        self.over = False

    def apply(self, verb: str, first: object, size_bytes: int) -> None:
        if verb == "take":
            assert isinstance(first, str)
            self._take(ScopeId(first), size_bytes)
        elif verb == "drop" and self.live:
            assert isinstance(first, int)
            slot = sorted(self.live, key=lambda s: s.stamp)[first % len(self.live)]
            del self.live[slot]
            self.table.drop(slot)
        elif verb == "resize":
            assert isinstance(first, int)
            self.table.resize(first * PAGE)
        elif verb == "close":
            assert isinstance(first, int)
            self.table.close_extent(first)

    def _take(self, scope: ScopeId, size_bytes: int) -> None:
        before = (self.table.used_bytes, self.table.held_bytes, set(self.table.extents))
        try:
            slot = take(self.table, scope, size_bytes)
        except TierFullError:
            assert before == (self.table.used_bytes, self.table.held_bytes, set(self.table.extents))
            return
        assert slot.size_bytes >= size_bytes
        assert slot.stamp not in self.stamps
        self.stamps.add(slot.stamp)
        self.live[slot] = scope
        assert self.table.held_bytes <= self.table.capacity_bytes or not self.table.extents[slot.extent].is_closing

    def check(self) -> None:
        table = self.table
        assert table.used_bytes == sum(s.size_bytes for s in self.live)
        assert table.held_bytes == sum(e.size_bytes for e in table.extents.values())
        closing = sum(e.size_bytes for e in table.extents.values() if e.is_closing)
        assert table.held_bytes - closing <= table.capacity_bytes
        owners: dict[int, ScopeId] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        for slot, scope in self.live.items():
            assert table.is_live(slot)
            assert owners.setdefault(slot.extent, scope) == scope == table.extents[slot.extent].scope
            assert slot.offset + slot.size_bytes <= table.extents[slot.extent].size_bytes
            spans.setdefault(slot.extent, []).append((slot.offset, slot.offset + slot.size_bytes))
        for taken in spans.values():
            taken.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(taken))


@given(steps)
def test_no_overlap_no_mixed_scopes_and_no_byte_over_the_capacity(plan: list[tuple[str, object, int]]) -> None:
    model = Model()
    for verb, first, size_bytes in plan:
        model.apply(verb, first, size_bytes)
        model.check()


@given(steps)
def test_dropping_everything_leaves_nothing_in_use_and_room_for_anyone(plan: list[tuple[str, object, int]]) -> None:
    model = Model()
    for verb, first, size_bytes in plan:
        if verb != "close":
            model.apply(verb, first, size_bytes)
    for slot in model.live:
        model.table.drop(slot)

    assert model.table.used_bytes == 0
    room_bytes = model.table.capacity_bytes
    assert take(model.table, ScopeId("tenant/new/uid/v1"), room_bytes // 2).size_bytes <= room_bytes


@given(steps)
def test_a_slot_is_dead_after_its_drop_for_ever(plan: list[tuple[str, object, int]]) -> None:
    model = Model()
    dead: set[SlotRef] = set()
    for verb, first, size_bytes in plan:
        before = set(model.live)
        model.apply(verb, first, size_bytes)
        dead |= before - set(model.live)
        used = model.table.used_bytes
        for slot in dead:
            assert not model.table.is_live(slot)
            assert model.table.drop(slot) is None
        assert model.table.used_bytes == used


@given(st.lists(st.tuples(st.sampled_from(SCOPES), sizes), min_size=1, max_size=60), sizes)
def test_emptying_what_relief_names_makes_room_for_any_scope(taken: list[tuple[ScopeId, int]], need_bytes: int) -> None:
    table = make_table(64)
    slots = []
    for scope, size_bytes in taken:
        try:
            slots.append(take(table, scope, size_bytes))
        except TierFullError:
            continue
    other = ScopeId("tenant/other/uid/v1")
    if table.has_room(other, need_bytes):
        take(table, other, need_bytes)
        return
    named = table.extents_to_free(need_bytes)
    for slot in slots:
        if slot.extent in named:
            table.drop(slot)

    assert named
    assert table.is_live(take(table, other, need_bytes))


@given(sizes, st.integers(2, 8))
def test_strides_waste_little_and_are_few(size_bytes: int, class_bits: int) -> None:
    stride = stride_of(size_bytes, PAGE, class_bits)
    aligned = -(-size_bytes // PAGE) * PAGE

    assert aligned <= stride <= aligned * (1 + 2 ** (1 - class_bits))
    assert stride % PAGE == 0
    assert stride_of(stride, PAGE, class_bits) == stride


@given(dropped=st.permutations(range(16)), count=st.integers(1, 16))
def test_what_is_taken_together_lies_together_in_whatever_order_slots_came_back(dropped: list[int], count: int) -> None:
    table = make_table()
    slots = [take(table, SCOPES[0], PAGE) for _ in range(16)]
    for index in dropped:
        table.drop(slots[index])

    taken = [take(table, SCOPES[0], PAGE).offset // PAGE for _ in range(count)]
    assert taken == list(range(count))


def test_a_shrink_closes_the_extents_with_the_fewest_live_bytes() -> None:
    table = make_table(64, target_pages=16)
    slots = [take(table, SCOPES[0], 4 * PAGE) for _ in range(16)]
    for slot in slots[1:4]:
        table.drop(slot)

    closing, released = table.resize(48 * PAGE)

    assert closing == {slots[0].extent}
    assert released == ()
    gone = table.drop(slots[0])
    assert gone is not None
    assert gone.id == slots[0].extent


def test_growing_again_reopens_what_was_closing_but_not_what_was_bad() -> None:
    table = make_table(64, target_pages=16)
    slots = [take(table, SCOPES[0], 4 * PAGE) for _ in range(16)]
    table.close_extent(slots[-1].extent)
    table.resize(16 * PAGE)
    table.resize(64 * PAGE)

    assert [e.is_closing for e in table.extents.values()] == [False, False, False, True]


@given(st.lists(st.tuples(st.sampled_from(SCOPES), sizes), min_size=20, max_size=80), st.randoms())
def test_compaction_closes_only_what_fits_elsewhere_and_gains_room(
    taken: list[tuple[ScopeId, int]], rng: random.Random
) -> None:
    table = make_table(64, target_pages=8)
    slots: dict[SlotRef, ScopeId] = {}
    for scope, size_bytes in taken:
        with suppress(TierFullError):
            slots[take(table, scope, min(size_bytes, 2 * PAGE))] = scope
    for slot in rng.sample(list(slots), len(slots) * 3 // 4):
        table.drop(slot)
        del slots[slot]

    closing = table.compact()
    extents = set(table.extents)
    for slot, scope in slots.items():
        if slot.extent in closing:
            moved = table.take(scope, slot.size_bytes)
            assert moved is not None, "there is room in another extent of the class"
            assert moved.extent in extents - closing
            table.drop(slot)

    assert closing.isdisjoint(table.extents)
    assert all(e.live * 4 <= len(e.stamps) for e in table.extents.values() if e.is_closing)


def test_compaction_leaves_a_tier_with_room_alone() -> None:
    table = make_table(64, target_pages=8)
    slots = [take(table, SCOPES[0], PAGE) for _ in range(16)]
    for slot in slots[1:9]:
        table.drop(slot)

    assert table.compact() == frozenset()


def test_adopted_slots_keep_their_stamps_and_newer_ones_lie_above() -> None:
    table = make_table()
    table.adopt(7, (SCOPES[1], NOBODY, 2 * PAGE), 16 * PAGE, np.array([500, 0, 0, 900, 0, 0, 0, 0], np.uint64))

    assert table.is_live(SlotRef(7, 6 * PAGE, 2 * PAGE, 900))
    new = take(table, SCOPES[1], PAGE + 1)
    assert (new.extent, new.stamp) == (7, 901)
    assert new.offset not in {0, 6 * PAGE}
    table.open(SCOPES[0], PAGE)
    assert max(table.extents) == 8


@given(st.integers(PAGE, 1 << 42))
def test_extents_are_neither_too_many_nor_too_few(capacity_bytes: int) -> None:
    target = target_extent_bytes(capacity_bytes, parts=16, most_bytes=64 << 20, count_max=4096)

    assert capacity_bytes // max(1, target) <= max(4096, 16) * 2
    assert target <= max(64 << 20, capacity_bytes // 4096)


@given(st.lists(st.tuples(st.sampled_from(SCOPES), st.integers(1, 5000), st.booleans()), max_size=80))
def test_shelves_hold_one_scope_each_and_never_exceed_the_capacity(plan: list[tuple[ScopeId, int, bool]]) -> None:
    shelves = ObjectSlots(50_000, first_stamp=1)
    live: dict[SlotRef, ScopeId] = {}
    for scope, size_bytes, is_drop in plan:
        if is_drop and live:
            slot = min(live, key=lambda s: s.stamp)
            del live[slot]
            assert shelves.give_back(slot)
            assert not shelves.give_back(slot)
            continue
        try:
            live[shelves.take(scope, size_bytes)] = scope
        except TierFullError:
            assert size_bytes > 50_000 - shelves.used_bytes
    owners: dict[int, ScopeId] = {}
    assert all(owners.setdefault(s.extent, scope) == scope for s, scope in live.items())
    assert shelves.used_bytes == sum(s.size_bytes for s in live) <= 50_000
