"""Laws of nominations: what an owner keeps whatever it is told, and that two owners never both let go."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.tenants import LOST_AFTER_S, ScopeMemory
from kvstrata_agent.policy.duplicates import OwnCopy, Ruling, rule
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_metadata.duties.nominations import (
    SURVIVING,
    AgentFacts,
    OverReplicated,
    designated_holder,
    plan_nominations,
)
from kvstrata_metadata.store.records import NOMINATED_MAX, Copy, Incarnation, Location, Nomination

pytestmark = pytest.mark.unit

IDLE_S = 3_600.0
AGENTS = [f"p.n{i}" for i in range(6)]
tiers = st.sampled_from(["HostDRAM", "CXL", "NVMe", "Object"])
tags = st.sampled_from(["t1", "t2", "t3"])


def number(agent: str) -> Incarnation:
    return Incarnation(AGENTS.index(agent).to_bytes(5, "big"))


@st.composite
def own_copies(draw: st.DrawFn) -> OwnCopy:
    idle_s = draw(st.one_of(st.floats(0, 10_000), st.just(math.inf)))
    return OwnCopy(draw(tags), draw(st.booleans()), draw(st.integers(0, 2)), idle_s, draw(st.booleans()))


others = st.lists(st.builds(Location, st.sampled_from(AGENTS[1:]), st.just(1), tiers, st.just(1), st.just(1)))


@given(own_copies(), others)
def test_an_owner_keeps_what_is_used_continued_recent_or_last(own: OwnCopy, seen: list[Location]) -> None:
    if rule(own, IDLE_S, AGENTS[0], seen) is Ruling.DROP:
        assert not own.is_held
        assert not own.children
        assert own.idle_s >= IDLE_S
        assert seen
        assert not own.is_surviving or any(other.tier in SURVIVING for other in seen)


@given(others)
def test_what_is_not_here_is_absent(seen: list[Location]) -> None:
    assert rule(None, IDLE_S, AGENTS[0], seen) is Ruling.ABSENT


@given(tags, st.sets(st.sampled_from(AGENTS), min_size=1), st.data())
def test_of_all_holders_one_keeps_its_copy_however_little_each_knows(
    tag: str, holders: set[str], data: st.DataObject
) -> None:
    """Each knows of any of the others."""
    rulings = {}
    for me in sorted(holders):
        known = data.draw(st.sets(st.sampled_from(sorted(holders)))) - {me}
        seen = [Location(agent, 1, "NVMe", 1, 1) for agent in sorted(known)]
        own = OwnCopy(tag, is_held=False, children=0, idle_s=math.inf, is_surviving=False)
        rulings[me] = rule(own, IDLE_S, me, seen)

    assert rulings[designated_holder(tag, holders)] in (Ruling.KEEPER, Ruling.LAST)


@st.composite
def crowds(draw: st.DrawFn) -> list[OverReplicated]:
    made = []
    for i in range(draw(st.integers(0, 3))):
        holders = draw(st.sets(st.sampled_from(AGENTS)))
        copies = tuple(Copy(number(agent), draw(tiers), 1, 1) for agent in sorted(holders))
        made.append(OverReplicated("t", bytes([i]) + draw(st.sampled_from([b"a", b"b", b"c"])) * 19, copies))
    return made


facts = st.dictionaries(st.sampled_from(AGENTS), st.tuples(st.floats(0, 1), st.booleans()), min_size=1).map(
    lambda known: {number(a): AgentFacts(a, fill, returned) for a, (fill, returned) in known.items()}
)


def by_block(planned: dict[Incarnation, tuple[Nomination, ...]]) -> dict[tuple[str, bytes], set[Incarnation]]:
    found: dict[tuple[str, bytes], set[Incarnation]] = {}
    for incarnation, nominations in planned.items():
        for nomination in nominations:
            for digest in nomination.digests:
                found.setdefault((nomination.tag, digest), set()).add(incarnation)
    return found


def survivors(block: OverReplicated, kept: Sequence[Copy]) -> bool:
    return any(copy.tier in SURVIVING for copy in kept) or not any(copy.tier in SURVIVING for copy in block.copies)


@given(crowds(), facts, st.integers(1, 3))
def test_the_wanted_copies_stay_and_the_keepers_among_them(
    over_replicated: list[OverReplicated], known: dict[Incarnation, AgentFacts], wanted: int
) -> None:
    nominated = by_block(plan_nominations(over_replicated, known, {"p": wanted}))
    for block in over_replicated:
        living = [copy for copy in block.copies if copy.incarnation in known]
        dropped = nominated.get((block.tag, block.digest), set())
        kept = [copy for copy in living if copy.incarnation not in dropped]

        assert dropped <= {copy.incarnation for copy in living}
        assert len(kept) == min(len(living), wanted) or len(dropped) == 0
        if living:
            first = designated_holder(block.tag, (known[copy.incarnation].agent for copy in living))
            assert first in {known[copy.incarnation].agent for copy in kept}
        if wanted > 1 and living:
            assert survivors(OverReplicated(block.tag, block.digest, tuple(living)), kept)


def test_the_fullest_and_the_returned_are_asked_first() -> None:
    digest = bytes(20)
    kept = designated_holder("t", AGENTS)
    rest = [agent for agent in AGENTS if agent != kept]
    known = {number(a): AgentFacts(a, fill_ratio=i / 10) for i, a in enumerate(AGENTS)}
    known[number(rest[0])] = AgentFacts(rest[0], 0.0, is_returned=True)
    block = OverReplicated("t", digest, tuple(Copy(number(a), "HostDRAM", 1, 1) for a in AGENTS))

    asked = by_block(plan_nominations([block], known, {"p": 5}))["t", digest]
    assert asked == {number(rest[0])}
    asked = by_block(plan_nominations([block], known, {"p": 4}))["t", digest]
    assert asked == {number(rest[0]), number(rest[-1])}


def test_a_nomination_is_bounded() -> None:
    known = {number(a): AgentFacts(a) for a in AGENTS[:2]}
    blocks = [
        OverReplicated("t", i.to_bytes(20, "big"), tuple(Copy(number(a), "NVMe", 1, 1) for a in AGENTS[:2]))
        for i in range(3 * NOMINATED_MAX)
    ]
    planned = plan_nominations(blocks, known, {"p": 1})

    assert {len(n.digests) for nominations in planned.values() for n in nominations} == {NOMINATED_MAX}


def test_a_lost_key_is_told_after_the_grace_and_remembered_until_then() -> None:
    scope = ScopeId("tenant/a/uid/v1")
    secret = ScopeSecret(scope, b"k" * 32)
    keys = {scope: secret}
    memory = ScopeMemory(keys.get)

    assert memory.lost([scope], 0.0) == []
    keys.clear()
    assert memory.lost([], 1.0) == []
    assert memory.lost([], 1.0 + LOST_AFTER_S - 0.1) == []
    keys[scope] = secret
    assert memory.lost([], 100.0) == []
    keys.clear()
    assert memory.lost([], 200.0) == []
    assert memory.lost([], 200.0 + LOST_AFTER_S) == [secret]
    assert memory.secret(scope) == secret
    assert memory.by_tag(secret.tag()) == scope
    memory.forget(scope)
    assert memory.secret(scope) is None
