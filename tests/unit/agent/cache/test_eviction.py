"""Laws of eviction: leaf first, least recently used first, nothing that is held."""

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.tier_contents import LeafQueue
from kvstrata_agent.policy.eviction import EvictionPlan, excess_bytes, plan_eviction

pytestmark = pytest.mark.unit


@dataclass(eq=False)
class Block:
    number: int
    size_bytes: int
    used_at_s: float
    is_free: bool
    parent: "Block | None" = None
    children: "list[Block]" = field(default_factory=list)
    born_s: float = 0.0


class Forest:
    """A reference view: a plain heap of the leaves."""

    def __init__(self, blocks: list[Block]) -> None:
        self.queue: list[tuple[float, int, Block]] = []
        for block in blocks:
            if not block.children:
                self.push(block)

    def pop(self) -> Block | None:
        return heapq.heappop(self.queue)[2] if self.queue else None

    def push(self, block: Block) -> None:
        heapq.heappush(self.queue, (block.used_at_s, block.number, block))

    def is_free(self, block: Block) -> bool:
        return block.is_free

    def size_bytes(self, block: Block) -> int:
        return block.size_bytes

    def parent(self, block: Block) -> Block | None:
        return block.parent

    def children(self, block: Block) -> int:
        return len(block.children)


def grow(drawn: list[tuple[int, int, int, bool]]) -> list[Block]:
    blocks: list[Block] = []
    for number, (place, size_bytes, used_at_s, is_free) in enumerate(drawn):
        parent = None if place >= number else blocks[place]
        block = Block(number, size_bytes, used_at_s, is_free, parent)
        if parent is not None:
            parent.children.append(block)
        blocks.append(block)
    return blocks


def forests() -> st.SearchStrategy[list[Block]]:
    shape = st.tuples(st.integers(0, 15), st.integers(1, 9), st.integers(0, 9), st.sampled_from([True, True, False]))
    return st.lists(shape, max_size=20).map(grow)


def planned(blocks: list[Block], need_bytes: int) -> EvictionPlan[Block]:
    return plan_eviction(Forest(blocks), need_bytes)


@given(forests(), st.integers(0, 120))
def test_no_parent_leaves_before_its_children(blocks: list[Block], need_bytes: int) -> None:
    gone: set[Block] = set()
    for victim in planned(blocks, need_bytes).victims:
        assert gone.issuperset(victim.children)
        gone.add(victim)


@given(forests(), st.integers(0, 120))
def test_no_held_block_is_a_victim_and_none_is_one_twice(blocks: list[Block], need_bytes: int) -> None:
    victims = planned(blocks, need_bytes).victims
    assert all(v.is_free for v in victims)
    assert len(set(victims)) == len(victims)


@given(forests(), st.integers(0, 120))
def test_a_plan_tells_exactly_what_it_frees_and_what_is_missing(blocks: list[Block], need_bytes: int) -> None:
    plan = planned(blocks, need_bytes)
    assert plan.freed_bytes == sum(v.size_bytes for v in plan.victims)
    assert plan.short_bytes == max(0, need_bytes - plan.freed_bytes)


@given(forests(), st.integers(1, 120))
def test_a_plan_has_no_victim_it_could_do_without(blocks: list[Block], need_bytes: int) -> None:
    plan = planned(blocks, need_bytes)
    if plan.victims:
        assert plan.freed_bytes - plan.victims[-1].size_bytes < need_bytes


@given(forests())
def test_a_plan_falls_short_only_when_every_block_left_is_held_or_needed_by_a_held_one(blocks: list[Block]) -> None:
    left = set(blocks) - set(planned(blocks, 10_000).victims)

    def is_needed(block: Block) -> bool:
        return not block.is_free or any(is_needed(c) for c in block.children)

    assert all(is_needed(b) for b in left)


@given(forests(), st.integers(1, 120))
def test_among_the_leaves_the_least_recently_used_goes_first(blocks: list[Block], need_bytes: int) -> None:
    gone: set[Block] = set()
    for victim in planned(blocks, need_bytes).victims:
        ready = [b for b in blocks if b not in gone and b.is_free and gone.issuperset(b.children)]
        assert (victim.used_at_s, victim.number) == min((b.used_at_s, b.number) for b in ready)
        gone.add(victim)


@given(forests(), st.integers(0, 120))
def test_held_blocks_stay_in_the_queue(blocks: list[Block], need_bytes: int) -> None:
    forest = Forest(blocks)
    held = {b for b in blocks if not b.children and not b.is_free}
    plan = plan_eviction(forest, need_bytes)
    queued = {b for _, _, b in forest.queue}
    assert held <= queued
    assert queued.isdisjoint(plan.victims)


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(2, 100))
def test_watermarks_ask_for_nothing_below_the_high_and_for_the_low_above(used: int, capacity: int, high: int) -> None:
    need = excess_bytes(used, capacity, high, high - 1)
    if used * 100 <= capacity * high:
        assert need == 0
    else:
        assert (used - need) * 100 <= capacity * (high - 1) < (used - need + 1) * 100
        assert need > 0


@given(st.lists(st.tuples(st.sampled_from(["push", "touch", "discard", "oldest"]), st.integers(0, 7)), max_size=60))
def test_the_queue_gives_out_what_was_used_least_recently_and_of_equals_the_oldest(
    steps: list[tuple[str, int]],
) -> None:
    blocks = [Block(n, 1, 0.0, is_free=True, born_s=8.0 - n) for n in range(8)]
    queue: LeafQueue[Block] = LeafQueue(lambda block: block.used_at_s)
    inside: set[Block] = set()
    now_s = 0.0
    for step, number in steps:
        block = blocks[number]
        now_s += 1.0
        if step == "push":
            queue.push(block)
            inside.add(block)
        elif step == "touch":
            block.used_at_s = now_s
        elif step == "discard":
            queue.discard(block)
            inside.discard(block)
        else:
            oldest = queue.oldest()
            assert (oldest is None) == (not inside)
            if oldest is not None:
                assert (oldest.used_at_s, oldest.born_s) == min((b.used_at_s, b.born_s) for b in inside)
                assert queue.discard(oldest)
                inside.discard(oldest)
        assert len(queue) == len(inside)
