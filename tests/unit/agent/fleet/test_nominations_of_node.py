"""What nominations do to a node: which blocks go, in which order, and which stay."""

from collections.abc import Sequence

import pytest

from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.sessions import SessionState
from kvstrata_agent.blocks.tenants import LOST_AFTER_S, ScopeMemory
from kvstrata_agent.fleet.directory.nominations import EvictionHints
from kvstrata_agent.policy.duplicates import Ruling
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_api.blocks import ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_metadata.duties.nominations import DUPLICATE, ERASED, designated_holder
from kvstrata_metadata.store.records import Location, Nomination
from support.agent.doubles import BLOCK_BYTES, LAYOUT_ID, SCOPE, Clock, bytes_of, digest, dram_tier, make_core, secret

pytestmark = pytest.mark.unit

CHAIN = [digest(n) for n in range(1, 9)]
TAG = secret(SCOPE).tag()


class Adviser:
    """A directory that knows of as many other holders as it is told."""

    def __init__(self, others: int) -> None:
        self.others = [f"pool.n{i}" for i in range(others)]
        self.nominations: list[Nomination] = []
        self.claims: list[ScopeSecret] = []
        self.is_up = True

    async def take_nominations(self, limit: int) -> Sequence[Nomination]:
        taken, self.nominations = self.nominations[:limit], self.nominations[limit:]
        return taken

    async def claim_erased(self, secret: ScopeSecret) -> bool:
        self.claims += [secret] if self.is_up else []
        return self.is_up

    async def locate(
        self, secret: ScopeSecret, digests: Sequence[bytes], *, within_s: float = LOCATE_S_MIN
    ) -> list[tuple[Location, ...]]:
        del secret, within_s
        return [tuple(Location(agent, 1, "HostDRAM", 1, 1) for agent in self.others) for _ in digests]


class Setup:
    def __init__(self, others: int) -> None:
        self.clock = Clock()
        self.core = make_core([dram_tier(1 << 20)], self.clock)
        self.keys = {SCOPE: secret(SCOPE)}
        self.adviser = Adviser(others)
        self.scopes = ScopeMemory(self.keys.get)
        self.advice = EvictionHints(self.core.node, self.adviser, self.scopes)
        place = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES)
        for made in self.core.cache.writer.reserve_now(place, b"", CHAIN):
            assert made is not None
            mappable = made.tier.backend.mappable
            assert mappable is not None
            content = bytes_of(made.entry.digest[-1])
            mappable.view(made.slot)[:BLOCK_BYTES] = content
            summed = checksum(content, made.entry.digest, self.core.node.epoch, made.slot.stamp)
            self.core.cache.writer.publish_now(1, [made.id], [summed])
        self.scopes.secret(SCOPE)
        self.rest_s = float(self.core.node.spec.policy.retention.idle_seconds) + 1.0

    @property
    def held(self) -> list[bytes]:
        return sorted(self.core.node.index.blocks(SCOPE))

    async def consider(self, digests: Sequence[bytes] = CHAIN, reason: str = DUPLICATE) -> list[Ruling]:
        return await self.advice.consider(Nomination(TAG, reason, tuple(digests)))


async def test_idle_duplicates_go_leaf_first_unless_they_are_ours_to_keep() -> None:
    for others in range(1, 6):
        at = Setup(others)
        at.clock.now_s += at.rest_s
        rulings = await at.consider(CHAIN[2:])

        if designated_holder(TAG, ("pool.node", *at.adviser.others)) == "pool.node":
            assert set(rulings) == {Ruling.KEEPER, Ruling.CONTINUED}
            assert at.held == CHAIN
        else:
            assert set(rulings) == {Ruling.DROP}
            assert at.held == CHAIN[:2]


async def test_blocks_in_use_stay_with_all_that_they_continue() -> None:
    at = Setup(others=3)
    at.clock.now_s += at.rest_s
    session = at.core.node.sessions.open("a", "s", 1, at.clock.now_s)
    head = at.core.node.index.find(SCOPE, CHAIN[-1])
    assert head is not None
    session.follow([head])
    session.enter(SessionState.DECODING)

    assert set(await at.consider()) == {Ruling.HELD, Ruling.CONTINUED}
    assert at.held == CHAIN


async def test_recent_blocks_and_last_copies_stay() -> None:
    at = Setup(others=3)
    assert (await at.consider(CHAIN[-1:])) == [Ruling.RECENT]
    at.clock.now_s += at.rest_s
    at.adviser.others = []

    assert (await at.consider(CHAIN[-1:])) == [Ruling.LAST]
    assert at.held == CHAIN


async def test_copies_in_other_pools_are_no_copies_of_ours() -> None:
    at = Setup(others=0)
    at.clock.now_s += at.rest_s
    at.adviser.others = ["poolx.n1", "poolx.n2"]

    assert (await at.consider(CHAIN[-1:])) == [Ruling.LAST]


async def test_a_scope_that_has_its_key_is_not_dropped_because_somebody_says_so() -> None:
    at = Setup(others=0)
    assert set(await at.consider([], ERASED)) == {Ruling.KNOWN_SCOPE}
    assert at.held == CHAIN
    at.keys.clear()

    assert len(await at.consider([], ERASED)) == len(CHAIN)
    assert at.held == []


async def test_a_lost_scope_is_told_once_its_blocks_are_gone_and_again_until_it_is_heard() -> None:
    at = Setup(others=0)
    at.keys.clear()
    await at.advice.poll()
    at.clock.now_s += LOST_AFTER_S
    await at.advice.poll()
    assert at.adviser.claims == []
    at.core.node.drop_scope(SCOPE)
    at.adviser.is_up = False
    await at.advice.poll()
    at.adviser.is_up = True
    await at.advice.poll()
    await at.advice.poll()

    assert at.adviser.claims == [secret(SCOPE)]


async def test_a_tag_that_nobody_here_knows_changes_nothing() -> None:
    at = Setup(others=3)
    rulings = await at.advice.consider(Nomination("0" * 16, DUPLICATE, tuple(CHAIN)))

    assert set(rulings) == {Ruling.ABSENT}
    assert at.held == CHAIN
