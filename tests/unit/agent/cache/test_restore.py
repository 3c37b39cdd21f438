"""Laws of entering what an earlier run has left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.base import Record
from kvstrata_agent.blocks.block import Residence
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_api.blocks import BlockKey, LayoutId
from support.agent.doubles import LAYOUT_ID, LAYOUT_OTHER, SCOPE, dict_tier, digest, make_node

pytestmark = pytest.mark.unit

copies_of = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 1), st.sampled_from([LAYOUT_ID, LAYOUT_ID, LAYOUT_OTHER])),
    max_size=30,
)


def made_node() -> Node:
    return make_node([dict_tier("a", 1 << 20, 0, 1), dict_tier("b", 1 << 20, 1, 2)])


def copy_in(tier: Tier, number: int, layout_id: LayoutId, *, is_taken: bool = False) -> Residence:
    """A copy of the n-th block of a chain whose every third block starts anew; its medium has it, or it is new."""
    slot = tier.allocate(SCOPE, "a", 4096) if is_taken else tier.backend.reserve(SCOPE, 4096)
    parent = digest(number - 1) if number % 3 else b""
    record = Record(BlockKey(SCOPE, digest(number)), parent, layout_id, "raw", 4096, 4096, bytes(16), 3)
    return Residence(tier, slot, record)


def emptied(node: Node, tier: Tier) -> int:
    """Evict by the planner's own view until it knows no victim; returns how many went."""
    count = 0
    while (entry := TierCandidates(node.index, tier, EvictionRequest(1, "room"), node.clock()).pop()) is not None:
        node.drop_copy(entry, tier)
        count += 1
    return count


@given(copies_of)
def test_what_is_restored_is_what_adding_one_by_one_gives(found: list[tuple[int, int, LayoutId]]) -> None:
    restored, added = made_node(), made_node()
    count = restored.restore([copy_in(restored.tiers[level], n, layout) for n, level, layout in found])
    for n, level, layout in found:
        copy = copy_in(added.tiers[level], n, layout, is_taken=True)
        entry = added.index.find(SCOPE, digest(n))
        if entry is None:
            entry = added.index.begin(SCOPE, digest(n), copy.record.parent, layout, 0.0)
        elif entry.residence(copy.tier) is not None or entry.layout_id != layout:
            copy.tier.free(copy.slot, "a")
            continue
        added.add_copy(entry, copy)

    assert count == sum(len(e.residences) for e in restored.index)
    for one, other in zip(restored.tiers, added.tiers, strict=True):
        assert restored.contents(one).blocks == added.contents(other).blocks
        assert one.tenant_bytes == other.tenant_bytes
        assert one.backend.used_bytes == other.backend.used_bytes
    for entry in added.index:
        same = restored.index.find(SCOPE, entry.digest)
        assert same is not None
        assert (same.level, same.parent, same.layout_id) == (entry.level, entry.parent, entry.layout_id)
        for level in range(2):
            assert restored.index.blockers(same, level) == added.index.blockers(entry, level)


@given(copies_of)
def test_everything_that_is_restored_can_be_evicted_again(found: list[tuple[int, int, LayoutId]]) -> None:
    node = made_node()
    count = node.restore([copy_in(node.tiers[level], n, layout) for n, level, layout in found])

    assert sum(emptied(node, tier) for tier in node.tiers) == count
    assert len(node.index) == 0
    assert [t.backend.used_bytes for t in node.tiers] == [0, 0]


@given(copies_of, st.permutations(range(2)))
def test_tiers_may_come_back_in_any_order(found: list[tuple[int, int, LayoutId]], order: list[int]) -> None:
    node = made_node()
    count = 0
    for wanted in order:
        count += node.restore([copy_in(node.tiers[level], n, layout) for n, level, layout in found if level == wanted])

    assert sum(emptied(node, tier) for tier in node.tiers) == count
