"""Laws of the replay: it equals a model that counts single blocks, and nobody beats the limit."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policy.peers import LIMIT, PEERS, plain_lru
from bench.policy.synthetic import synthetic
from kvstrata_agent.policy.expected_reuse import Return
from kvstrata_agent.replay.cache import Cache, MakePolicy, Policy, replay
from kvstrata_agent.replay.chains import ROOT, ChainTree, Request, Trace, build
from kvstrata_agent.replay.reuse_aware import Hints, ReuseAware, returns

pytestmark = pytest.mark.unit

chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=40)
capacities = st.integers(1, 30)
POLICIES: dict[str, MakePolicy] = {
    **PEERS,
    "ours": ReuseAware,
    "ours, engine hints": partial(ReuseAware, hints=Hints.ENGINE),
}


def _trace(found: Sequence[Sequence[int]], step_s: float = 1.0) -> Trace:
    return build("t", 16, [Request(i * step_s, tuple(chain)) for i, chain in enumerate(found)])


@given(chains)
def test_a_tree_of_runs_gives_every_chain_back(found: list[list[int]]) -> None:
    tree = ChainTree()
    ends = [tree.add(chain) for chain in found]

    for chain, end in zip(found, ends, strict=True):
        assert sum(tree.lengths()[run] for run in tree.path(end)) == len(chain)
    together = {tuple(chain[: n + 1]) for chain in found for n in range(len(chain))}
    assert sum(tree.lengths()) == len(together)
    assert tree.parents[ROOT] == ROOT


@given(chains)
def test_blocks_have_equal_numbers_where_prefixes_are_equal(found: list[list[int]]) -> None:
    trace = _trace(found)

    numbers = {(tuple(c[: n + 1]), block) for c, blocks in zip(found, trace.chains(), strict=True)
               for n, block in enumerate(blocks)}  # fmt: skip

    assert {block for _, block in numbers} == set(range(trace.unique_blocks))
    assert len(numbers) == len({prefix for prefix, _ in numbers}) == trace.unique_blocks


@given(chains, capacities)
def test_the_replay_counts_what_a_model_of_single_blocks_counts(found: list[list[int]], capacity: int) -> None:
    outcome = replay(_trace(found), capacity, PEERS["leaf-LRU"])

    assert outcome.hit_blocks == _blockwise_leaf_lru(found, capacity)


@given(chains, capacities)
def test_plain_lru_counts_what_a_model_of_single_blocks_counts(found: list[list[int]], capacity: int) -> None:
    held: dict[tuple[int, ...], None] = {}
    hits = 0
    for chain in found:
        keys = [tuple(chain[: n + 1]) for n in range(len(chain))]
        hits += next((i for i, key in enumerate(keys) if key not in held), len(keys))
        for key in keys:
            held.pop(key, None)
            held[key] = None
        while len(held) > capacity:
            del held[next(iter(held))]

    assert plain_lru(_trace(found), capacity).hit_blocks == hits


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25)
@given(chains, capacities)
def test_nobody_has_more_hits_than_the_limit(policy: str, found: list[list[int]], capacity: int) -> None:
    trace = _trace(found)

    assert replay(trace, capacity, POLICIES[policy]).hit_blocks <= replay(trace, capacity, LIMIT).hit_blocks


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7), st.integers(1, 3))
def test_the_limit_is_what_the_best_of_all_choices_reaches(found: list[list[int]], capacity: int) -> None:
    assert replay(_trace(found), capacity, LIMIT).hit_blocks == _best_of_all(found, capacity)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25)
@given(chains, capacities)
def test_only_leaves_leave_and_the_cache_stays_within_its_capacity(
    policy: str, found: list[list[int]], capacity: int
) -> None:
    trace = _trace(found)
    watched: list[Cache] = []

    def make(trace: Trace, cache: Cache) -> Policy:
        watched.append(cache)
        return POLICIES[policy](trace, cache)

    replay(trace, capacity, make)  # `Cache.cut` asserts that what it cuts is a leaf.

    (cache,) = watched
    assert cache.used_blocks == sum(cache.held) <= capacity
    for run, held in enumerate(cache.held):
        parent = cache.parents[run]
        assert not held or parent == ROOT or cache.held[parent] == cache.lengths[parent]


@pytest.mark.slow
def test_ours_beats_leaf_lru_on_a_made_workload_and_hints_add_to_it() -> None:
    trace = synthetic(900)
    blocks = trace.unique_blocks // 20

    base = replay(trace, blocks, PEERS["leaf-LRU"]).hit_percent
    bare = replay(trace, blocks, ReuseAware).hit_percent
    hinted = replay(trace, blocks, partial(ReuseAware, hints=Hints.ENGINE)).hit_percent

    assert base < bare < hinted


def test_engine_hints_say_whether_and_when_the_private_part_comes_again() -> None:
    trace = build(
        "t", 16, [Request(0.0, (1, 2, 3)), Request(5.0, (9,)), Request(10.0, (1, 2, 3, 4, 5)), Request(400.0, (9, 8))]
    )

    assert returns(trace) == [Return.SOON, Return.LATER, Return.COMPLETE, Return.COMPLETE]


def _blockwise_leaf_lru(found: Sequence[Sequence[int]], capacity: int) -> int:
    used: dict[tuple[int, ...], int] = {}
    hits = 0
    for number, chain in enumerate(found):
        keys = [tuple(chain[: n + 1]) for n in range(len(chain))]
        hits += next((i for i, key in enumerate(keys) if key not in used), len(keys))
        used |= dict.fromkeys(keys, number)
        while len(used) > capacity:
            leaves = [key for key in used if not any(other[:-1] == key for other in used)]
            del used[min(leaves, key=lambda key: used[key])]
    return hits


def _best_of_all(found: Sequence[Sequence[int]], capacity: int) -> int:
    """Try every set of blocks, closed under parents, that a cache could keep after each request."""
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for chain in found:
        keys = [tuple(chain[: n + 1]) for n in range(len(chain))]
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for held, hits in states.items():
            now = hits + next((i for i, key in enumerate(keys) if key not in held), len(keys))
            for kept in _closed_subsets(held | frozenset(keys), capacity):
                following[kept] = max(now, following.get(kept, 0))
        states = following
    return max(states.values())


def _closed_subsets(blocks: frozenset[tuple[int, ...]], capacity: int) -> list[frozenset[tuple[int, ...]]]:
    found = {frozenset[tuple[int, ...]]()}
    for block in sorted(blocks, key=len):
        found |= {kept | {block} for kept in found if len(kept) < capacity and (len(block) == 1 or block[:-1] in kept)}
    return list(found)
