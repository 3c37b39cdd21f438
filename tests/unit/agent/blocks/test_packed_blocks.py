"""Laws of blocks that are rows: nothing is lost or invented on the way to a row and back, and nobody notices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from kvstrata_agent.backends.base import IDENTITIES, Record
from kvstrata_agent.backends.file.index_format import Kinds
from kvstrata_agent.backends.file.segment import SlotNotes, Traits
from kvstrata_agent.blocks import packed_blocks as rows_of_blocks
from kvstrata_agent.blocks import scope_table as ancestry
from kvstrata_agent.blocks.block import TIERS_MAX, Residence
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.packed_blocks import (
    COUNT_MAX,
    FIELDS,
    PACKED_BYTES,
    PackedBlock,
    PackedKind,
    PackedTable,
)
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_api.blocks import BlockKey, ScopeId
from support.agent.doubles import LAYOUT_ID, SCOPE, DictBackend, dict_tier, digest, make_node
from support.agent.index_tree import wrong_books

pytestmark = pytest.mark.unit

TIERS = [dict_tier(name, 1 << 20, level, level) for level, name in enumerate("ab")]
SLOT, SLOTS = 4096, 8
"""Bytes of a slot, and slots of an extent, of a medium that notes."""
SCOPES = [ScopeId("tenant/a/uid/v1"), ScopeId("tenant/b/uid/v1")]

numbers = st.integers(0, (1 << 64) - 1)
words = st.integers(0, (1 << 32) - 1)
kinds = st.builds(
    PackedKind, st.sampled_from(SCOPES), st.just(LAYOUT_ID), st.sampled_from(["", "a"]), st.sampled_from(TIERS),
    st.sampled_from(["raw", "lossless"]), st.integers(0, 2), st.integers(1, 2), st.integers(1, 2), st.booleans(),
)  # fmt: skip
rows = st.builds(
    PackedBlock, kinds, st.integers(0, 40).map(digest), st.binary(min_size=20, max_size=20),
    st.binary(min_size=16, max_size=16),
    st.floats(allow_nan=False), st.floats(allow_nan=False), numbers, numbers, words, words,
    st.tuples(*[st.integers(0, COUNT_MAX)] * TIERS_MAX), numbers,
)  # fmt: skip


def is_of(scope: ScopeId, kind: PackedKind) -> bool:
    return kind.scope == scope


def normal(row: PackedBlock) -> PackedBlock:
    return row._replace(parent=b"") if row.kind.is_root else row


def fields_of(rows: Sequence[PackedBlock]) -> tuple[NDArray[np.void], NDArray[np.void]]:
    fields, identities = np.zeros(len(rows), FIELDS), np.zeros(len(rows), IDENTITIES)
    for at, row in enumerate(rows):
        fields[at] = (row.born_s, row.used_at_s, row.mark, row.stamp, row.offset, row.extent, 0, row.counts)
        identities[at] = (row.stored_bytes, *map(list, (row.checksum, row.digest, row.parent.ljust(20, b"\0"))))
    return fields, identities


class NotingBackend(DictBackend):
    """Notes what lies in its slots, as a record store does."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.segments: dict[int, SlotNotes] = {}
        self._traits = Traits(Kinds())

    @property
    def noting(self) -> "NotingBackend":
        return self

    def notes(self, extent: int) -> SlotNotes | None:
        return self.segments.get(extent)

    def note(self, row: PackedBlock) -> None:
        key = BlockKey(row.kind.scope, row.digest)
        record = Record(key, normal(row).parent, LAYOUT_ID, "raw", 4096, row.stored_bytes, row.checksum, 1)
        assert self.segments.setdefault(row.extent, SlotNotes(SLOTS)).set(row.offset // SLOT, record, self._traits)

    def forget(self, row: PackedBlock) -> None:
        self.segments[row.extent].clear(row.offset // SLOT)


@dataclass
class Model:
    by_key: dict[tuple[ScopeId, bytes], PackedBlock] = field(default_factory=dict)
    at: dict[tuple[ScopeId, bytes], int] = field(default_factory=dict)


class TableMachine(RuleBasedStateMachine):
    """A table of rows against a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.model = PackedTable(), Model()
        self.noting = NotingBackend()
        self.tier = dict_tier("c", 1 << 20, 2, 2)
        self.tier.backend = self.noting
        self.slots = count()
        self.noted: set[tuple[ScopeId, bytes]] = set()

    def placed(self, row: PackedBlock, *, is_noted: bool) -> PackedBlock:
        """The same in a slot of its own of the medium that notes, which has noted it or has not."""
        extent, index = divmod(next(self.slots), SLOTS)
        kind = row.kind._replace(tier=self.tier, slot_bytes=SLOT)
        placed = row._replace(kind=kind, extent=extent, offset=index * SLOT)
        if is_noted:
            self.noting.note(placed)
            self.noted.add((kind.scope, row.digest))
        return placed

    @rule(row=rows, is_noted=st.booleans())
    def put_where_it_is_noted(self, row: PackedBlock, *, is_noted: bool) -> None:
        if (row.kind.scope, row.digest) not in self.model.by_key:
            self.put(self.placed(row, is_noted=is_noted))

    @rule(row=rows)
    def put(self, row: PackedBlock) -> None:
        key = row.kind.scope, row.digest
        if key not in self.model.by_key:
            self.model.at[key] = self.table.put(row)
            self.model.by_key[key] = normal(row)

    @rule(drawn=st.lists(rows, min_size=1, max_size=20, unique_by=lambda row: row.digest))
    def put_all(self, drawn: list[PackedBlock]) -> None:
        new = [row for row in drawn if (row.kind.scope, row.digest) not in self.model.by_key]
        if new:
            self.enter_all(new)

    @rule(drawn=st.lists(rows, min_size=1, max_size=20, unique_by=lambda row: row.digest), all_noted=st.booleans())
    def put_all_where_they_are_noted(self, drawn: list[PackedBlock], *, all_noted: bool) -> None:
        new = [row for row in drawn if (row.kind.scope, row.digest) not in self.model.by_key]
        placed = [self.placed(row, is_noted=all_noted or at % 2 == 0) for at, row in enumerate(new)]
        for extent in {row.extent for row in placed}:
            self.enter_all([row for row in placed if row.extent == extent])

    def enter_all(self, new: list[PackedBlock]) -> None:
        numbers = self.table.put_all([row.kind for row in new], np.arange(len(new)), *fields_of(new)).tolist()
        for row, number in zip(new, numbers, strict=True):
            self.model.at[row.kind.scope, row.digest] = number
            self.model.by_key[row.kind.scope, row.digest] = normal(row)

    @rule(drawn=st.data())
    def take(self, drawn: st.DataObject) -> None:
        if self.model.by_key:
            key = drawn.draw(st.sampled_from(sorted(self.model.by_key)))
            row = self.model.by_key.pop(key)
            assert self.table.take(self.model.at.pop(key)) == row
            if key in self.noted:
                self.noted.remove(key)
                self.noting.forget(row)  # What comes down from there is read no more.

    @rule(more=st.integers(0, 5000))
    def expect(self, more: int) -> None:
        self.table.expect(more)

    @rule(drawn=st.data(), level=st.integers(0, TIERS_MAX - 1))
    def count(self, drawn: st.DataObject, level: int) -> None:
        if self.model.by_key:
            key = drawn.draw(st.sampled_from(sorted(self.model.by_key)))
            row, counts = self.model.by_key[key], list(self.model.by_key[key].counts)
            counts[level] += 1
            assert self.table.count(self.model.at[key], level, 1) == (counts[level] <= COUNT_MAX)
            if counts[level] <= COUNT_MAX:
                self.model.by_key[key] = row._replace(counts=tuple(counts))

    @invariant()
    def same(self) -> None:
        assert len(self.table) == len(self.model.by_key)
        for scope in SCOPES:
            for number in range(41):
                at = self.table.find(scope, digest(number))
                assert at == self.model.at.get((scope, digest(number)))
                if at is not None:
                    assert self.table.read(at) == self.model.by_key[scope, digest(number)]
            found = b"".join(map(self.table.digests, self.table.where(partial(is_of, scope))))
            listed = sorted(found[i : i + 20] for i in range(0, len(found), 20))
            assert listed == sorted(d for s, d in self.model.by_key if s == scope)
        relied = sum(noted.rows for noted in self.table._noted.values())
        assert relied <= len(self.noted)
        assert all(noted.rows for noted in self.table._noted.values())


TestTable = pytest.mark.slow(TableMachine.TestCase)


def test_a_table_grows_over_many_chunks_and_finds_all() -> None:
    table = PackedTable()
    kind = PackedKind(SCOPES[0], LAYOUT_ID, "a", TIERS[0], "raw", 1, 4096, 4096, is_root=True)
    row = PackedBlock(kind, b"", b"", bytes(16), 0.0, 0.0, 1, 0, 0, 4096, (0,) * TIERS_MAX)
    at = [table.put(row._replace(digest=digest(i), offset=i)) for i in range(20_000)]

    for i in range(0, 20_000, 3):
        table.take(at[i])
    assert [table.find(SCOPES[0], digest(i)) for i in range(20_000)] == [a if i % 3 else None for i, a in enumerate(at)]
    assert PACKED_BYTES == 56


def test_rows_that_come_together_are_found_where_others_have_left() -> None:
    table = PackedTable()
    kind = PackedKind(SCOPES[0], LAYOUT_ID, "a", TIERS[0], "raw", 1, 4096, 4096, is_root=True)
    row = PackedBlock(kind, b"", bytes(20), bytes(16), 0.0, 0.0, 1, 0, 0, 4096, (0,) * TIERS_MAX)
    at: dict[int, int] = {}
    for first in range(0, 20_000, 4000):
        new = range(first, first + 4000)
        made = [row._replace(digest=digest(i), offset=i) for i in new]
        if first % 8000:
            at.update(zip(new, map(table.put, made), strict=True))
        else:
            numbers = table.put_all([kind], np.zeros(len(made), np.intp), *fields_of(made))
            at.update(zip(new, numbers.tolist(), strict=True))
        for i in range(0, first + 4000, 3):
            if i in at:
                assert table.take(at.pop(i)).offset == i

    assert len(table) == len(set(at.values())) == len(at)
    assert [table.find(SCOPES[0], digest(i)) for i in range(20_000)] == [at.get(i) for i in range(20_000)]


def test_a_row_relies_on_its_medium_for_nothing_but_what_that_has_noted() -> None:
    tier, noting = dict_tier("c", 1 << 20, 2, 2), NotingBackend()
    tier.backend = noting
    kind = PackedKind(SCOPES[0], LAYOUT_ID, "a", tier, "raw", 1, 4096, SLOT, is_root=False)
    row = PackedBlock(kind, b"", digest(99), bytes(16), 0.0, 0.0, 1, 0, 0, 4096, (0,) * TIERS_MAX)
    made = [row._replace(digest=digest(i), offset=i * SLOT) for i in range(3)]
    for one in (made[0], made[1]._replace(digest=digest(7))):
        noting.note(one)
    table = PackedTable()
    at = [table.put(one) for one in made]

    assert [table.read(number) for number in at] == made
    assert [noted.rows for noted in table._noted.values()] == [1], "another block, and none, lie in the other slots"
    noting.note(made[1])
    noting.note(made[2])
    taken = [table.take(number) for number in at]
    again = [table.put(one) for one in made]
    assert taken == made == [table.take(number) for number in again]
    assert not table._noted


def test_what_is_no_key_has_no_row() -> None:
    table = PackedTable()
    kind = PackedKind(SCOPES[0], LAYOUT_ID, "a", TIERS[0], "raw", 1, 4096, 4096, is_root=True)
    row = PackedBlock(kind, b"", b"", bytes(16), 0.0, 0.0, 1, 0, 0, 4096, (0,) * TIERS_MAX)
    digests = [digest(i) for i in range(4096)]
    for number in digests:
        table.put(row._replace(digest=number))

    assert all(table.find(SCOPES[0], d[:length]) is None for d in digests for length in (0, 1, 19))


def test_a_walk_to_a_root_asks_once_for_each_block_and_remembers_a_bounded_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ancestry, "JUMPS_MAX", 8)
    index, _ = chain(40)
    index.pack(math.inf)
    asked: list[bytes] = []

    def parent_of(digest: bytes) -> bytes | None:
        asked.append(digest)
        return index.blocks(SCOPE).parent_of(digest)

    walker = ancestry.Ancestry(parent_of)
    assert not walker.is_ring(digest(77), digest(39))
    assert walker.is_ring(digest(0), digest(39))
    assert len(asked) <= 40 + 3 + 6, "the second walk is a jump"
    assert len(walker._jumps) <= 16


def test_room_for_more_rows_is_made_only_where_there_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    rebuild = PackedTable._rebuild

    def counted(table: PackedTable, shard: int, more: int = 1) -> None:
        made.append(shard)
        rebuild(table, shard, more)

    monkeypatch.setattr(PackedTable, "_rebuild", counted)
    table = PackedTable()

    table.expect(20_000)
    assert sorted(made) == list(range(256))
    for _ in range(100):
        table.expect(200)
    assert len(made) == 256


def test_nothing_comes_before_a_root() -> None:
    """Also where a block lies in the place of the table in which the empty parent of a root is looked for."""
    wanted = rows_of_blocks._SHARDS * rows_of_blocks._SLOTS_MIN - 1
    second = next(n for n in count(1) if hash(digest(n)) & wanted == hash(b"") & wanted)
    index, _ = chain(32, Index(in_use_max=0), second - 1)
    index.pack(math.inf)

    root = index.find(SCOPE, digest(second - 1))
    assert root is not None
    assert index.parent(root) is None


def chain(length: int, index: Index | None = None, first: int = 0) -> tuple[Index, Tier]:
    """One chain of blocks in a tier, which nobody uses."""
    node = make_node([dict_tier("a", 1 << 20, 0, 1)])
    index, tier = index if index is not None else Index(in_use_max=0), node.tiers[0]
    for number in range(first, first + length):
        parent = digest(number - 1) if number > first else b""
        entry = index.begin(SCOPE, digest(number), parent, LAYOUT_ID, float(number), "a")
        key = BlockKey(SCOPE, digest(number))
        record = Record(key, parent, LAYOUT_ID, "raw", 4096, 4096, number.to_bytes(16, "big"), 3)
        index.add(entry, Residence(tier, tier.allocate(SCOPE, "a", 4096), record))
    return index, tier


@given(st.integers(1, 30))
def test_all_of_a_chain_but_its_head_becomes_rows_and_entries_again(length: int) -> None:
    before, _ = chain(length)
    index, tier = chain(length)

    assert index.pack(math.inf) == length - 1
    assert index.in_use == 1
    assert len(index) == length == index.contents(tier).blocks
    assert [index.pack(math.inf) for _ in range(3)] == [0, 0, 0]
    for number in range(length):
        was, now = before.find(SCOPE, digest(number)), index.find(SCOPE, digest(number))
        assert was is not None
        assert now is not None
        assert (now.parent, now.tenant, now.level, now.born_s, now.used_at_s) == (
            was.parent, was.tenant, was.level, was.born_s, was.used_at_s,
        )  # fmt: skip
        assert now.residences[0][1:] == was.residences[0][1:]


def test_whatever_somebody_uses_stays_an_entry() -> None:
    index, _ = chain(6)
    held = index.find(SCOPE, digest(1))
    for number, what in ((2, "leases"), (3, "pins"), (4, "guards")):
        entry = index.find(SCOPE, digest(number))
        setattr(entry, what, {1})

    index.pack(math.inf)

    assert index.find(SCOPE, digest(1)) is held, "the same entry as long as somebody has it"
    assert index.in_use == 5
    del held
    assert index.pack(math.inf) == 1


def test_links_of_blocks_are_the_same_whether_they_are_rows_or_entries() -> None:
    index, _ = chain(6)
    index.begin(SCOPE, digest(6), digest(5), LAYOUT_ID, 0.0, "a")
    before = sorted(index.blocks(SCOPE).links())
    assert before == [(digest(i), digest(i - 1)) for i in range(1, 7)]

    assert index.pack(math.inf) == 6
    blocks = index.blocks(SCOPE)
    assert sorted(blocks.links()) == before
    assert [blocks.is_held(digest(i)) for i in range(7)] == [False] * 6 + [True]
    assert blocks.packed == 6, "nobody was asked for"


@given(st.floats(-1, 12), st.floats(-1, 12))
def test_older_blocks_are_found_without_entries_of_them(used_by_s: float, born_by_s: float) -> None:
    index, _ = chain(12)
    for number in range(0, 12, 2):
        entry = index.find(SCOPE, digest(number))
        assert entry is not None
        entry.used_at_s = 11.0
        del entry
    assert index.pack(math.inf) == 11

    found = set(index.blocks(SCOPE).older(used_by_s, born_by_s))

    wanted = {i for i in range(11) if (i if i % 2 else 11) <= used_by_s or i <= born_by_s} | {11}
    assert found == {digest(i) for i in wanted}
    assert index.in_use == 1


def test_blocks_in_use_lately_stay_unless_there_are_far_too_many() -> None:
    index, _ = chain(10, Index(in_use_max=8))
    assert index.pack(3.0) == 2, "as many as are too many, of those that were used before"
    assert index.pack(math.inf) == 0
    pressed, _ = chain(10, Index(in_use_max=3))
    assert pressed.pack(0.0) == 7


def test_the_last_blocks_to_leave_are_the_first_of_a_chain() -> None:
    node = make_node([dict_tier("a", 1 << 20, 0, 1)])
    node.index, tier = chain(12)
    node.tiers = [tier]
    order = []
    while True:
        node.index.pack(math.inf)
        entry = TierCandidates(node.index, tier, EvictionRequest(1, "room"), node.clock()).pop()
        if entry is None:
            break
        order.append(int.from_bytes(entry.digest, "big"))
        node.drop_copy(entry, tier)
        del entry
        assert not list(wrong_books(node))

    assert order == list(range(11, -1, -1))
    assert len(node.index.packed) == 0


def test_an_extent_gives_all_of_its_blocks_when_it_is_emptied() -> None:
    index, tier = chain(9)
    index.pack(math.inf)

    assert index.contents(tier).extents[0].bytes_by_tenant() == {"a": 9 * 4096}
    assert sorted(int.from_bytes(e.digest, "big") for e in index.contents(tier).residents()) == list(range(9))
    assert index.in_use == 9


def test_counts_are_right_after_tiers_got_other_levels() -> None:
    node = make_node([dict_tier("a", 1 << 20, 0, 1)])
    node.index, tier = chain(5)
    node.tiers = [tier]
    node.index.pack(math.inf)
    tier.level = 1

    node.index.relevel([tier])

    assert not list(wrong_books(node))
    assert {e.level for e in node.index} == {1}


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_block_may_leave_when_its_children_are_slower_now_and_its_tier_is_not(*, is_packed: bool) -> None:
    node = make_node([dict_tier(name, 1 << 20, level, level + 1) for level, name in enumerate("abc")])
    node.index = Index(in_use_max=0 if is_packed else 2)
    fast, middle, slow = node.tiers
    for number, parent, tier in ((1, digest(0), fast), (0, b"", middle)):
        entry = node.index.begin(SCOPE, digest(number), parent, LAYOUT_ID, 0.0, "a")
        record = Record(BlockKey(SCOPE, digest(number)), parent, LAYOUT_ID, "raw", 4096, 4096, bytes(16), 3)
        node.index.add(entry, Residence(tier, tier.allocate(SCOPE, "a", 4096), record))
    del entry
    assert TierCandidates(node.index, middle, EvictionRequest(1, "room"), node.clock()).pop() is None
    assert node.index.pack(math.inf) == is_packed
    fast.level, slow.level = 2, 0

    node.index.relevel(node.tiers)

    assert not list(wrong_books(node))
    victim = TierCandidates(node.index, middle, EvictionRequest(1, "room"), node.clock()).pop()
    assert victim is not None
    assert victim.digest == digest(0)


def test_a_block_with_too_many_children_for_a_row_is_counted_after_levels_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_of_blocks, "COUNT_MAX", 2)
    node = make_node([dict_tier(name, 1 << 20, level, level + 1) for level, name in enumerate("ab")])
    node.index = Index(in_use_max=0)
    fast, slow = node.tiers
    for number, before in ((0, None), (1, 0), (2, 1), (3, 1)):
        parent = b"" if before is None else digest(before)
        entry = node.index.begin(SCOPE, digest(number), parent, LAYOUT_ID, 0.0, "a")
        record = Record(BlockKey(SCOPE, digest(number)), parent, LAYOUT_ID, "raw", 4096, 4096, bytes(16), 3)
        node.index.add(entry, Residence(slow, slow.allocate(SCOPE, "a", 4096), record))
    entry = node.index.begin(SCOPE, digest(4), digest(1), LAYOUT_ID, 0.0, "a")
    assert node.index.pack(math.inf) == 2
    fast.level, slow.level = 1, 0

    node.index.relevel(node.tiers)

    assert not list(wrong_books(node))
