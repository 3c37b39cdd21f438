"""Laws of the chain across scopes: which route is read and where new blocks go."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.blocks import LayoutId, ScopeId, ScopeSecret, chain_keys
from kvstrata_client.prompt import chain
from kvstrata_client.prompt.chain import (
    REMEMBERED_CHAINS,
    Chain,
    KeyMemory,
    Prompt,
    Route,
    Segment,
    Tokens,
    best_route,
    continuations,
    own_target,
    plan_store,
    roots,
)

pytestmark = pytest.mark.unit

BLOCK_TOKENS = 4
OWN = ScopeSecret(ScopeId("tenant/a/1/v1"), b"o" * 32)
SHARED = tuple(ScopeSecret(ScopeId(f"domain/d{i}/1/v1"), bytes([i]) * 32) for i in range(2))
PROMPT = Prompt(LayoutId(b"l" * 16), np.arange(6 * BLOCK_TOKENS + 1, dtype=np.uint32), BLOCK_TOKENS)

reach = st.integers(0, PROMPT.blocks)


def found(*stops: int) -> tuple[Segment, ...]:
    """Root chains of two shared scopes and the own one, as far as a lookup found them."""
    return tuple(Segment(c, s) for c, s in zip(roots(PROMPT, SHARED, OWN), stops, strict=True))


@st.composite
def situations(draw: Callable[[st.SearchStrategy[int]], int]) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    at_roots = found(draw(reach), draw(reach), draw(reach))
    chains = continuations(PROMPT, at_roots, OWN)
    return at_roots, tuple(Segment(c, draw(st.integers(c.first, PROMPT.blocks))) for c in chains)


@given(situations())
def test_a_route_starts_at_the_root_and_has_no_gap(case: tuple[tuple[Segment, ...], tuple[Segment, ...]]) -> None:
    route = best_route(*case)

    at, parent = 0, b""
    for segment in route.segments:
        assert (segment.chain.first, segment.chain.parent) == (at, parent)
        assert segment.stop > at
        at, parent = segment.stop, segment.chain.parent_of(segment.stop)
    assert at == route.blocks


@given(situations())
def test_no_way_that_was_found_is_longer_than_the_route(
    case: tuple[tuple[Segment, ...], tuple[Segment, ...]],
) -> None:
    at_roots, continued = case

    assert best_route(at_roots, continued).blocks == max(s.stop for s in (*at_roots, *continued))


@given(situations())
def test_of_equally_long_routes_the_one_with_shared_blocks_is_taken(
    case: tuple[tuple[Segment, ...], tuple[Segment, ...]],
) -> None:
    at_roots, continued = case
    route = best_route(at_roots, continued)

    if any(s.stop == route.blocks and s.chain.is_shared and s.stop for s in at_roots):
        assert route.shared_blocks > 0


@given(situations())
def test_every_block_of_a_route_was_found_in_its_chain(
    case: tuple[tuple[Segment, ...], tuple[Segment, ...]],
) -> None:
    assert set(best_route(*case).segments) <= set(case[0]) | set(case[1])


def test_a_continuation_keys_its_first_block_with_the_shared_key_as_parent() -> None:
    (shared, _, _) = at_roots = found(2, 0, 0)
    (continued,) = continuations(PROMPT, at_roots, OWN)

    seam = shared.chain.keys[1].digest
    rest = PROMPT.tokens[2 * BLOCK_TOKENS :]
    assert list(continued.keys) == chain_keys(OWN, PROMPT.layout_id, rest, BLOCK_TOKENS, parent=seam)
    assert continued.keys != roots(PROMPT, (), OWN)[0].keys[2:]


def test_a_shared_chain_that_has_nothing_or_everything_is_not_continued() -> None:
    assert continuations(PROMPT, found(0, PROMPT.blocks, 3), OWN) == ()


def test_without_any_block_the_route_is_empty() -> None:
    assert best_route(found(0, 0, 0), ()) == Route()
    assert Route().blocks == Route().shared_blocks == 0


@given(situations(), reach, reach, st.sampled_from(["shared", "own"]))
def test_what_a_store_writes_leaves_no_gap_and_nothing_twice(
    case: tuple[tuple[Segment, ...], tuple[Segment, ...]], first: int, length: int, where: str
) -> None:
    at_roots, continued = case
    route = best_route(at_roots, continued)
    goal = at_roots[0] if where == "shared" else own_target(PROMPT, route, OWN)
    stop = min(first + length, PROMPT.blocks)
    plan = plan_store(PROMPT, first, first + length, route, goal)

    if plan.target is None:
        assert not plan.copy
        assert not plan.write
        return
    assert plan.copy.start == goal.stop
    assert plan.copy.stop == plan.write.start
    assert plan.write.stop == stop
    assert plan.copy.stop <= max(route.blocks, plan.copy.start), "copies come from the route"
    assert plan.write.start >= first or not plan.write, "the caller has no bytes before its first block"


@given(situations())
def test_whoever_holds_every_block_fills_the_shared_scope_completely(
    case: tuple[tuple[Segment, ...], tuple[Segment, ...]],
) -> None:
    at_roots, continued = case
    plan = plan_store(PROMPT, 0, PROMPT.blocks, best_route(at_roots, continued), at_roots[0])

    assert len(plan.copy) + len(plan.write) == PROMPT.blocks - at_roots[0].stop


@given(reach, reach)
def test_blocks_held_only_in_the_own_scope_are_copied_into_the_shared_one(shared: int, own: int) -> None:
    at_roots = found(shared, 0, own)
    plan = plan_store(PROMPT, own, PROMPT.blocks, best_route(at_roots, ()), at_roots[0])

    if shared < own:
        assert plan.copy == range(shared, own)
        assert plan.write == range(own, PROMPT.blocks)


@given(reach, reach)
def test_new_own_blocks_continue_the_shared_prefix_that_was_read(shared: int, own: int) -> None:
    at_roots = found(shared, 0, own)
    continued = tuple(Segment(c, c.first) for c in continuations(PROMPT, at_roots, OWN))
    route = best_route(at_roots, continued)
    goal = own_target(PROMPT, route, OWN)

    assert goal.stop == route.blocks
    assert goal.chain.scope == OWN.scope
    if shared >= own and 0 < shared < PROMPT.blocks:
        assert goal.chain.parent == at_roots[0].chain.keys[shared - 1].digest


def test_a_block_behind_a_gap_is_not_written() -> None:
    at_roots = found(1, 0, 0)
    plan = plan_store(PROMPT, 3, PROMPT.blocks, best_route(at_roots, ()), at_roots[0])

    assert plan.target is None


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_part_of_a_chain_names_the_blocks_asked_for(start: int, stop: int) -> None:
    whole = roots(PROMPT, (), OWN)[0]
    later = Chain(whole.scope, 2, whole.keys[2:], whole.keys[1].digest)

    assert later.part(start, stop) == whole.keys[max(start, 2) : stop]
    assert [later.parent_of(b) for b in range(2, 6)] == [whole.parent_of(b) for b in range(2, 6)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from((OWN, *SHARED)),
            st.lists(st.integers(0, 1), max_size=7),
            st.sampled_from([b"", b"p" * 20]),
            st.integers(0, BLOCK_TOKENS - 1),
        ),
        max_size=3 * REMEMBERED_CHAINS,
    )
)
def test_keys_that_are_remembered_are_those_that_would_be_made(
    asked: list[tuple[ScopeSecret, list[int], bytes, int]],
) -> None:
    memory = KeyMemory()
    for secret, blocks, parent, tail in asked:
        tokens = np.repeat(np.array([*blocks, 9], np.uint32), BLOCK_TOKENS)[: len(blocks) * BLOCK_TOKENS + tail]

        made = memory.keys(secret, PROMPT.layout_id, tokens, BLOCK_TOKENS, parent)

        assert list(made) == chain_keys(secret, PROMPT.layout_id, tokens, BLOCK_TOKENS, parent=parent)


def test_a_prompt_that_goes_on_is_keyed_where_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(secret: ScopeSecret, layout_id: LayoutId, tokens: Tokens, block_tokens: int, parent: bytes) -> object:
        made.append(len(tokens) // block_tokens)
        return chain_keys(secret, layout_id, tokens, block_tokens, parent=parent)

    monkeypatch.setattr(chain, "chain_keys", counted)
    memory, tokens = KeyMemory(), np.arange(100 * BLOCK_TOKENS, dtype=np.uint32)
    for blocks in (40, 40, 7, 41, 100, 100):
        memory.keys(OWN, PROMPT.layout_id, tokens[: blocks * BLOCK_TOKENS + 1], BLOCK_TOKENS, b"")

    assert made == [40, 1, 59]
