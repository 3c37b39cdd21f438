"""Laws of the tree of blocks whatever parents are named: it has no rings, and all of it can be evicted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.base import Record
from kvstrata_agent.blocks.block import Entry, Residence
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey
from kvstrata_api.checksum import checksum
from support.agent.doubles import LAYOUT_ID, SCOPE, bytes_of, dict_tier, digest, make_node
from support.agent.engine import SLOTS, Engine, close

pytestmark = pytest.mark.unit

named = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from(["begin", "restore", "adopt", "drop"]))
)
"""Blocks, the parents that somebody names for them, and how they come, or that they go."""


def copy_in(tier: Tier, number: int, parent: int, *, is_taken: bool) -> Residence:
    slot = tier.allocate(SCOPE, "a", 4096) if is_taken else tier.backend.reserve(SCOPE, 4096)
    key = BlockKey(SCOPE, digest(number))
    return Residence(tier, slot, Record(key, digest(parent), LAYOUT_ID, "raw", 4096, 4096, bytes(16), 3))


def come(node: Node, number: int, parent: int, how: str) -> None:
    tier, known = node.tiers[0], node.index.find(SCOPE, digest(number))
    if how == "drop" and known is not None:
        node.drop_block(known, "corrupt")
    elif how == "restore":
        node.restore([copy_in(tier, number, parent, is_taken=False)])
    elif known is None and how != "drop":
        first = b"" if how == "adopt" else digest(parent)
        entry = node.index.begin(SCOPE, digest(number), first, LAYOUT_ID, 0.0, "a")
        if how == "adopt":
            node.index.adopt(entry, digest(parent))
        node.add_copy(entry, copy_in(tier, number, parent, is_taken=True))


def reaches_an_end(index: Index, entry: Entry) -> bool:
    steps = 0
    above: Entry | None = entry
    while above is not None and steps <= len(index):
        above, steps = index.parent(above), steps + 1
    return above is None


@given(named)
def test_every_chain_ends_and_all_of_it_can_be_evicted(drawn: list[tuple[int, int, str]]) -> None:
    node = make_node([dict_tier("a", 1 << 20, 0, 1)])
    for number, parent, how in drawn:
        come(node, number, parent, how)

    assert all(reaches_an_end(node.index, entry) for entry in node.index)
    while (
        entry := TierCandidates(node.index, node.tiers[0], EvictionRequest(1, "room"), node.clock()).pop()
    ) is not None:
        node.drop_copy(entry, node.tiers[0])
    assert len(node.index) == 0


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), unique_by=lambda pair: pair[0]))
def test_a_parent_that_makes_no_ring_is_believed(drawn: list[tuple[int, int]]) -> None:
    index, named_by = Index(), dict(drawn)
    for number, parent in drawn:
        index.begin(SCOPE, digest(number), digest(parent), LAYOUT_ID, 0.0)

    for number, parent in drawn:
        seen = {number}
        while parent in named_by and parent not in seen:
            seen.add(parent)
            parent = named_by[parent]  # noqa: PLW2901  The walk from this block.
        entry = index.find(SCOPE, digest(number))
        assert entry is not None
        if parent not in seen:  # Its chain ends, so nobody had a reason to cut it.
            assert entry.parent == digest(named_by[number])


def test_a_walk_of_a_long_chain_is_remembered() -> None:
    index, blocks = Index(), 20_000
    for number in range(1, blocks, 2):
        index.begin(SCOPE, digest(number), digest(number - 1), LAYOUT_ID, 0.0)
    for number in range(0, blocks, 2):  # Each comes after its child and continues all that stand before it.
        index.begin(SCOPE, digest(number), digest(number - 1) if number else b"", LAYOUT_ID, 0.0)

    last = index.find(SCOPE, digest(blocks - 1))
    assert last is not None
    depth = 1
    while (last := index.parent(last)) is not None:
        depth += 1
    assert depth == blocks


async def publish(engine: Engine, number: int, parent: int) -> bytes:
    """Write one block behind a parent that may come later."""
    reserved = await engine.ask(wire.Reserve(2, SCOPE, digest(parent), digest(number), "s"))
    (reservation,) = engine.core.node.reservations.owned(1)
    mappable = reservation.tier.backend.mappable
    assert mappable is not None
    with mappable.view(reservation.slot) as view:
        view[: len(bytes_of(number))] = bytes_of(number)
    told = checksum(bytes_of(number), digest(number), reserved.epoch, reserved.slots[0].stamp)
    published = await engine.ask(wire.Publish(3, (reserved.slots[0].reservation,), (told,)))
    return bytes(published.results)


async def test_rings_of_a_client_take_no_room_from_anybody() -> None:
    engine = await Engine().attach()
    await engine.ask(wire.OpenSession(1, "s"))
    for number in range(100, 100 + SLOTS, 2):
        assert await publish(engine, number, number + 1) == bytes([1])
        assert await publish(engine, number + 1, number) == bytes([1])
    await engine.ask(wire.CloseSession(6, "s"))

    stored = await engine.store(*range(1, SLOTS + 1))

    assert stored == bytes([1] * SLOTS)
    await close(engine)
