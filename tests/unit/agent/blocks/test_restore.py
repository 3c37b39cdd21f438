"""Laws of entering what an earlier run has left, extent by extent: as block by block, whatever happens meanwhile."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sim.volume import MemoryVolume

from kvstrata_agent.backends.base import Columns, Record, SlotRef
from kvstrata_agent.backends.file.record_store import open_store
from kvstrata_agent.backends.memory.ledger import RECORD, pack_record
from kvstrata_agent.blocks.block import Entry, Residence
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.restore import NONE, Restoring, forest_of
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_api.blocks import BlockKey
from support.agent.doubles import LAYOUT_ID, SCOPE, dict_tier, digest, make_node
from support.agent.index_tree import wrong_books
from support.backends.contract import CAPACITY_BYTES, put
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit

Named = tuple[int, int]
"""A block and the parent that its record names, itself for none."""

named = st.tuples(st.integers(0, 9), st.integers(0, 9))
extents = st.lists(st.lists(named, min_size=1, max_size=8), min_size=1, max_size=4)
meanwhile = st.lists(
    st.tuples(
        st.sampled_from(["begin", "write", "drop", "pack", "read", "raise", "lower"]),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=12,
)
"""What clients do between two extents."""


def record_of(number: int, parent: int) -> Record:
    before = b"" if parent == number else digest(parent)
    return Record(BlockKey(SCOPE, digest(number)), before, LAYOUT_ID, "raw", 4096, 4096, bytes(16), 3 + number % 2)


def columns_of(tier: Tier, blocks: Sequence[Named]) -> Columns:
    """Blocks of an earlier run in slots of a tier, on nobody's account yet."""
    slots = [tier.backend.reserve(SCOPE, 4096) for _ in blocks]
    packed = (pack_record(record_of(*b), 0, 0, s.stamp) for b, s in zip(blocks, slots, strict=True))
    indices = np.array([s.offset // 4096 for s in slots], np.intp)
    return Columns(SCOPE, 0, 4096, indices, np.frombuffer(b"".join(packed), RECORD))


def do(node: Node, what: str, number: int, parent: int) -> None:
    """One thing that a client does."""
    tier, known = node.tiers[0], node.index.find(SCOPE, digest(number))
    if what == "drop" and known is not None:
        node.drop_block(known, "corrupt")
    elif what == "pack":
        del known
        node.index.pack(math.inf)
    elif what == "raise" and known is not None and known.residences and known.residence(tier) is None:
        slot = tier.allocate(SCOPE, known.tenant, 4096)
        node.add_copy(known, Residence(tier, slot, known.residences[0].record))
    elif what == "lower" and known is not None and len(known.residences) > 1:
        node.drop_copy(known, tier)
    elif what in ("begin", "write") and known is None:
        entry = node.index.begin(SCOPE, digest(number), record_of(number, parent).parent, LAYOUT_ID, 0.0, "a")
        if what == "write":
            slot = tier.allocate(SCOPE, "a", 4096)
            node.add_copy(entry, Residence(tier, slot, record_of(number, parent)))


def test_a_block_that_became_a_row_meanwhile_is_not_entered_twice() -> None:
    node = make_node([dict_tier("a", 1 << 20, 0, 1), dict_tier("b", 1 << 20, 1, 2)])
    node.index = Index(in_use_max=0)
    node.announcer = Announcer(node.index, None, lambda _: None)
    late, tier = node.tiers
    found = deque(columns_of(tier, blocks) for blocks in ([(7, 7)], [(0, 0), (1, 0)]))
    restoring = Restoring(node.index, tier, found, float)
    restoring.plan()
    restoring.prepare()
    node.restore_extent(restoring)
    node.restore([Residence(late, *pair) for pair in columns_of(late, [(1, 0), (0, 0)]).pairs()])  # A key has come.
    assert len(node.index.packed) == 1
    while not restoring.is_done:
        node.restore_extent(restoring)

    assert not list(wrong_books(node))
    assert len(node.index) == 3
    for number in (0, 1):
        entry = node.index.find(SCOPE, digest(number))
        assert entry is not None
        assert [r.tier for r in entry.residences] == [late, tier]


def test_rows_of_a_record_store_have_its_notes_for_their_identity() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        made = [await put(store, number, SCOPE) for number in range(40)]
        await store.close()
        tier, again = dict_tier("a", 1 << 20, 0, 1), await open_store(volume.kill(), CAPACITY_BYTES)
        tier.backend = again
        node = make_node([tier])
        node.index = Index(in_use_max=0)
        restoring = Restoring(node.index, tier, deque([found async for found in again.recover_columns()]), float)
        restoring.plan()
        restoring.prepare()
        while not restoring.is_done:
            node.restore_extent(restoring)
        rows = node.index.packed
        assert len(rows) == len(made) - 1, "all but the end of the chain"
        assert all(chunk.identities is None for chunk in rows._chunks)
        assert sorted(node.index.blocks(SCOPE).digests()) == [record.key.digest for _, record in made]
        for _ in range(2):
            for slot, record in made:
                entry = node.index.find(SCOPE, record.key.digest)
                assert entry is not None
                assert entry.residences[0][1:] == (slot, record)
                del entry
            node.index.pack(math.inf)

        for _, record in reversed(made):
            entry = node.index.find(SCOPE, record.key.digest)
            assert entry is not None
            node.drop_copy(entry, tier)
            del entry
            node.index.pack(math.inf)
            assert not list(wrong_books(node))
        assert len(rows) == len(rows._noted) == again.used_bytes == 0
        await again.close()

    run_virtually(scenario())


def reaches_an_end(index: Index, entry: Entry) -> bool:
    above: Entry | None = entry
    for _ in range(len(index) + 1):
        if above is None:
            return True
        above = index.parent(above)
    return False


NOTHING = [("read", 9, 9)] * 3


@given(extents, meanwhile, st.integers(0, 2), st.integers(0, 1))
@example([[(1, 0), (2, 1)]], [("begin", 0, 2)] * 3 + [("read", 1, 0)], 0, 0)  # Unfolded early, without a child.
@example([[(0, 1), (1, 2)], [(2, 0), (3, 2)]], [], 0, 0)  # A ring over two extents.
@example(
    [[(1, 0)], [(0, 5)]], [*NOTHING, ("begin", 5, 1)], 0, 0
)  # A client closes a ring before its first block comes.
@example([[(1, 0)], [(0, 5)]], [*NOTHING, ("drop", 1, 1), ("write", 5, 0)], 0, 0)  # One child in place of another.
@example([[(1, 0)], [(0, 0)]], [*NOTHING, ("raise", 1, 1)], 0, 1)  # A child in another tier than where it was counted.
def test_blocks_of_an_earlier_run_enter_whatever_clients_do(
    found: list[list[Named]], done: list[tuple[str, int, int]], before: int, level: int
) -> None:
    node = make_node([dict_tier("a", 1 << 20, 0, 1), dict_tier("b", 1 << 20, 1, 2)])
    node.index = Index(in_use_max=before)
    node.announcer = Announcer(node.index, None, lambda _: None)
    tier = node.tiers[level]
    for action in done[:3]:
        do(node, *action)
    restoring = Restoring(node.index, tier, deque(columns_of(tier, blocks) for blocks in found), lambda _: 0.0)
    restoring.plan()
    restoring.prepare()
    left = done[3:]
    while not restoring.is_done:
        node.restore_extent(restoring)
        for action in left[:3]:
            do(node, *action)
        left = left[3:]
    node.index.unpack_leaves(tier)

    assert not list(wrong_books(node))
    here = {int.from_bytes(d, "big") for d in node.index.blocks(SCOPE)}
    dropped = {number for what, number, _ in done if what == "drop"}
    assert here | dropped >= {number for blocks in found for number, _ in blocks}
    assert all(reaches_an_end(node.index, entry) for entry in node.index)
    for entry in [e for e in node.index if not e.residences]:
        node.index.forget(entry)
    for place in node.tiers:
        while (victim := TierCandidates(node.index, place, EvictionRequest(1, "room"), node.clock()).pop()) is not None:
            node.drop_copy(victim, place)
    assert len(node.index) == len(node.index.packed) == 0
    assert [t.tenant_bytes for t in node.tiers] == [{}, {}]
    assert [t.backend.used_bytes for t in node.tiers] == [0, 0]


@given(extents)
def test_extents_are_entered_as_blocks_are_one_by_one(found: list[list[Named]]) -> None:
    by_extent, one_by_one = (make_node([dict_tier("a", 1 << 20, 0, 1)]) for _ in range(2))
    by_extent.index = Index(in_use_max=0)
    by_extent.announcer = Announcer(by_extent.index, None, lambda _: None)
    columns = [columns_of(by_extent.tiers[0], blocks) for blocks in found]
    pairs: list[tuple[SlotRef, Record]] = [
        pair for blocks in found for pair in columns_of(one_by_one.tiers[0], blocks).pairs()
    ]
    restoring = Restoring(by_extent.index, by_extent.tiers[0], deque(columns), float)
    restoring.plan()
    restoring.prepare()
    while not restoring.is_done:
        by_extent.restore_extent(restoring)
    by_extent.index.unpack_leaves(by_extent.tiers[0])
    one_by_one.restore([Residence(one_by_one.tiers[0], *pair) for pair in pairs])

    assert {e.digest for e in by_extent.index} == {e.digest for e in one_by_one.index}
    assert {e.born_s for e in by_extent.index} <= {3.0, 4.0}
    assert by_extent.tiers[0].tenant_bytes == one_by_one.tiers[0].tenant_bytes
    held = [node.contents(node.tiers[0]).blocks for node in (by_extent, one_by_one)]
    assert held[0] == held[1]


@given(st.lists(named, min_size=1, max_size=40))
def test_the_forest_is_that_of_a_walk(drawn: list[Named]) -> None:
    digests = np.array([list(digest(n)) for n, _ in drawn], np.uint8)
    parents = np.array([list(digest(p)) for _, p in drawn], np.uint8)
    has_parent = np.array([n != p for n, p in drawn])

    forest = forest_of(digests, parents, has_parent)

    numbers = [n for n, _ in drawn]
    for i, (number, parent) in enumerate(drawn):
        is_twin, seen, above = numbers.count(number) > 1, {number}, (number, parent)
        while above[1] != above[0] and above[1] in numbers and above[1] not in seen:
            seen.add(above[1])
            above = drawn[numbers.index(above[1])]
        is_ring = above[1] != above[0] and above[1] in seen
        if is_twin or (is_ring and all(numbers.count(n) == 1 for n in seen)):
            assert forest.is_odd[i]
        if not forest.is_odd[i] and forest.parents[i] != NONE:
            assert drawn[forest.parents[i]][0] == parent
    kids = [int(((forest.parents == i) & ~forest.is_odd).sum()) for i in range(len(drawn))]
    assert forest.children.tolist() == kids
