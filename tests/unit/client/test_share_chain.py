"""Laws of chains that begin in a share: which share counts, where the seam is, what client and agent see."""

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import shares, trust, wire
from kvstrata_api.blocks import LayoutId, ScopeId, ScopeSecret, chain_keys, prefix_digest
from kvstrata_api.names import NamedPrefix
from kvstrata_api.shares import Declared
from kvstrata_client.prompt.chain import (
    Prompt,
    Segment,
    best_route,
    listed_continuation,
    own_target,
    plan_store,
    roots,
    share_chains,
)
from kvstrata_client.verbs.calls import read_grants
from kvstrata_client.verbs.results import Scope
from support.kube.share_worlds import TENANTS, worlds

pytestmark = pytest.mark.unit

BLOCK = 4
TOKENS = np.arange(6 * BLOCK + 1, dtype=np.uint32)
PROMPT = Prompt(LayoutId(b"l" * 16), TOKENS, BLOCK)
OWN = ScopeSecret(ScopeId("tenant/a/1/v1"), b"o" * 32)


def share(number: int, *prefixes: NamedPrefix, can_write: bool = False) -> Scope:
    secret = ScopeSecret(ScopeId(f"share/x.s{number}/u/v1"), bytes([number]) * 32)
    return Scope(secret, "share", f"x.s{number}", can_write, prefixes)


def named(length: int, *, is_ours: bool = True) -> NamedPrefix:
    """A prefix of the prompt, or one of other tokens and the same length."""
    tokens = TOKENS[:length] if is_ours else TOKENS[:length] + 1
    return NamedPrefix(prefix_digest(tokens), length)


lists = st.lists(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=4), max_size=4)


@given(lists, st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_longest_matching_prefix_of_all_shares_comes_first(
    wished: list[list[tuple[int, bool]]], writable: list[bool]
) -> None:
    scopes = [
        share(i, *(named(n, is_ours=ours) for n, ours in listed), can_write=writable[i])
        for i, listed in enumerate(wished)
    ]
    longest = {
        s.id: max((n for n, ours in listed if ours and n <= len(TOKENS)), default=0)
        for s, listed in zip(scopes, wished, strict=True)
    }
    chains = share_chains(PROMPT, scopes)

    assert {c.scope: len(c.keys) for c in chains} == {s: n // BLOCK for s, n in longest.items() if n >= BLOCK}
    lengths = [longest[c.scope] for c in chains]
    assert lengths == sorted(lengths, reverse=True)
    by_id = {s.id: s for s in scopes}
    for before, after in pairwise(chains):
        if longest[before.scope] == longest[after.scope]:
            assert by_id[before.scope].can_write >= by_id[after.scope].can_write
    for chain in chains:
        secret = by_id[chain.scope].secret
        assert list(chain.keys) == chain_keys(secret, PROMPT.layout_id, TOKENS, BLOCK)[: len(chain.keys)]


@st.composite
def situations(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[Segment, Segment, tuple[Segment, ...]]:
    """How far the share, the own chain from the root and the own continuation go."""
    (chain,) = share_chains(PROMPT, [share(1, named(draw(st.integers(BLOCK, len(TOKENS)))))])
    shared = Segment(chain, draw(st.integers(0, chain.end)))
    (own,) = roots(PROMPT, (), OWN)
    behind = listed_continuation(PROMPT, chain, OWN)
    continued = tuple(Segment(c, draw(st.integers(c.first, PROMPT.blocks))) for c in behind)
    return shared, Segment(own, draw(st.integers(0, PROMPT.blocks))), continued


Case = tuple[Segment, Segment, tuple[Segment, ...]]


@given(situations())
def test_the_seam_is_at_the_end_of_the_prefix_and_nowhere_else(case: Case) -> None:
    shared, root, continued = case
    route = best_route((shared, root), continued)

    at, parent = 0, b""
    for segment in route.segments:
        assert (segment.chain.first, segment.chain.parent) == (at, parent)
        at, parent = segment.stop, segment.chain.parent_of(segment.stop)
        if segment is not route.segments[-1]:
            assert segment.chain.is_listed
            assert segment.is_complete
    reachable = [root.stop, shared.stop, *(c.stop for c in continued if shared.is_complete)]
    assert route.blocks == max(reachable)


@given(situations(), st.integers(0, 6), st.integers(0, 7))
def test_what_is_stored_in_the_own_scope_can_be_found_again(case: Case, first: int, count: int) -> None:
    shared, root, continued = case
    route = best_route((shared, root), continued)
    goal = own_target(PROMPT, route, OWN, root)
    plan = plan_store(PROMPT, first, first + count, route, goal)
    assert goal.chain.scope == OWN.scope
    assert goal.chain.first in (0, shared.chain.end)
    if goal.chain.first:
        assert shared.is_complete, "nothing is stored behind a share with a hole"
    if plan.target is None:
        return

    assert plan.copy.stop <= max(route.blocks, plan.copy.start)
    stored = Segment(goal.chain, plan.write.stop)
    after = best_route(
        (shared, stored if goal.chain.first == 0 else root), (stored,) if goal.chain.first else continued
    )
    assert after.blocks >= plan.write.stop


@given(situations(), st.integers(0, 6), st.integers(0, 7))
def test_the_granting_tenant_writes_nothing_but_the_prefix_into_the_share(case: Case, first: int, count: int) -> None:
    shared, root, continued = case
    plan = plan_store(PROMPT, first, first + count, best_route((shared, root), continued), shared)

    if plan.target is not None:
        assert plan.copy.start == shared.stop
        assert plan.copy.stop == plan.write.start
        assert plan.write.stop <= shared.chain.end
        assert plan.write.start >= first or not plan.write


def test_behind_a_prefix_that_is_all_of_the_prompt_nothing_continues() -> None:
    whole = Prompt(PROMPT.layout_id, TOKENS[: 2 * BLOCK], BLOCK)
    (chain,) = share_chains(whole, [share(1, named(2 * BLOCK))])

    assert listed_continuation(whole, chain, OWN) == ()
    assert listed_continuation(PROMPT, chain, None) == ()
    assert share_chains(whole, [share(1, named(BLOCK - 1))]) == (), "less than a block shares nothing"


@given(worlds())
def test_the_client_sees_exactly_what_the_agent_grants(world: Declared) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for name in TENANTS:
        tenant = next(t for t in world.tenants if t.metadata.name == name)
        granted = trust.grants(tenant, world.domains, shares.accesses(tenant, world, "p", now))
        told = tuple(
            wire.ScopeGrant(a.scope, a.kind, a.name, bytes(32), a.can_write, a.prefixes) for a in granted.access
        )
        reply = wire.Granted(1, 1, name, told, granted.write_scope, 4096, 4096, 60.0)
        received = wire.decode_reply(wire.encode(reply)[4:])
        assert isinstance(received, wire.Granted)
        seen = read_grants(received)

        assert [(s.id, s.kind, s.name, s.can_write, s.prefixes) for s in seen.scopes] == [
            (a.scope, a.kind, a.name, a.can_write, a.prefixes) for a in granted.access
        ]
        assert {*seen.shares, *seen.domains, *([seen.own] if seen.own else [])} == set(seen.scopes)
        assert seen.write_scope == granted.write_scope


class FormerGrant(msgspec.Struct, frozen=True, array_like=True):
    """`wire.ScopeGrant` before there were shares."""

    scope: str
    kind: str
    name: str
    secret: bytes
    can_write: bool


def test_clients_and_agents_from_before_there_were_shares_understand_the_others() -> None:
    former = FormerGrant("domain/d/u/v1", "domain", "d", bytes(32), can_write=True)
    grant = wire.ScopeGrant("domain/d/u/v1", "domain", "d", bytes(32), can_write=True)
    listed = wire.ScopeGrant("share/a.s/u/v1", "share", "a.s", bytes(32), can_write=False, prefixes=(named(BLOCK),))

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(former), type=wire.ScopeGrant) == grant
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grant), type=FormerGrant) == former
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(listed), type=FormerGrant).kind == "share"
