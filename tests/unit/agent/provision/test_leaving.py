"""Laws of tiers that are declared no more: their blocks move to others first, within a bound, and readers go on."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import WRITE_PAUSE_S
from kvstrata_agent.policy.removal import Removal
from kvstrata_agent.provision.plan import levels
from kvstrata_agent.provision.provisioner import RETRY_S
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import HostDramTier, NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from support.agent.doubles import (
    LAYOUT_ID,
    SCOPE,
    DictBackend,
    FakeAuthenticator,
    digest,
    secret,
    store_chain,
)
from support.agent.provisioned import Provisioned

pytestmark = pytest.mark.unit

MIB = 1 << 20
WITHIN_S = 60.0


def dram(capacity_bytes: int = MIB, page_size: str = "4Ki") -> NodeTier:
    settings = HostDramTier.model_validate({"page_size": page_size})
    return NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=capacity_bytes, host_dram=settings)


def disk(name: str, capacity_bytes: int = 4 * MIB) -> NodeTier:
    settings = NvmeTier(path=f"/nowhere/{name}")
    return NodeTier(name=name, type=TierType.NVME, capacity_bytes=capacity_bytes, nvme=settings)


async def make(spec: NodeTier) -> TierBackend:
    if spec.host_dram is not None:
        return open_host_dram(spec.host_dram, spec.capacity_bytes, ())
    return DictBackend(spec.capacity_bytes)


class Setup(Provisioned):
    def __init__(self) -> None:
        super().__init__(make)
        self.place = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, 4096)
        self.sweeper = Sweeper(self.core.cache, FakeAuthenticator())

    async def apply(self, *wanted: NodeTier) -> None:
        await self.provisioner.apply(wanted, WITHIN_S)

    async def tend(self, rounds: int = 4) -> None:
        for _ in range(rounds):
            await self.sweeper._tend()

    async def sink(self, numbers: list[int], *away: NodeTier) -> None:
        """Put a chain into the fastest tier and bring it down out of the tiers named."""
        assert await store_chain(self.core, self.place, numbers) == len(numbers)
        for spec in away:
            tier = self.core.node.tier(spec.name)
            assert tier is not None
            await self.core.cache.evictor.drain(tier)

    def lies(self, number: int) -> list[str]:
        entry = self.core.node.index.find(SCOPE, digest(number))
        return [r.tier.name for r in entry.residences] if entry is not None else []

    def settled(self) -> tuple[str, str]:
        found = self.condition("TiersSettled")
        return found.status, found.reason


@pytest.fixture
async def at() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    await made.close()


async def test_a_tier_between_others_brings_its_blocks_down_and_goes(at: Setup) -> None:
    await at.apply(dram(), disk("mid"), disk("low"))
    await at.sink([1, 2, 3], dram())
    assert at.lies(1) == ["mid"]

    await at.apply(dram(), disk("low"))
    assert (at.core.node.tiers[1].phase(0.0), at.settled()) == ("Draining", ("False", "RemovingTier"))
    await at.tend()
    await at.apply(dram(), disk("low"))

    assert [at.lies(n) for n in (1, 2, 3)] == [["low"]] * 3
    assert [(t.name, t.level) for t in at.core.node.tiers] == [("dram", 0), ("low", 1)]
    assert at.settled() == ("True", "Settled")


async def test_the_slowest_tier_brings_up_what_there_is_room_for_and_no_child_before_its_parent(at: Setup) -> None:
    await at.apply(dram(16 * 4096), disk("low"))
    await at.sink(list(range(1, 13)), dram(16 * 4096))
    await at.sink(list(range(101, 113)))
    assert at.lies(1) == ["low"]
    assert at.lies(101) == ["dram"]

    await at.apply(dram(16 * 4096))
    await at.tend()
    await at.apply(dram(16 * 4096))

    there = [n for n in range(1, 13) if at.lies(n) == ["dram"]]
    assert there, "room that is free is used"
    assert there == list(range(1, len(there) + 1))
    assert all(at.lies(n) == ["dram"] for n in range(101, 113)), "nothing gives way for what comes up"
    assert [t.name for t in at.core.node.tiers] == ["dram"]


async def test_a_tier_whose_time_is_up_goes_with_what_is_left(at: Setup) -> None:
    await at.apply(dram(), disk("mid"), disk("low"))
    await at.sink([1, 2], dram())
    await at.apply(dram(), disk("low"))
    at.clock.now_s += WITHIN_S
    await at.apply(dram(), disk("low"))

    assert [t.name for t in at.core.node.tiers] == ["dram", "low"]
    assert at.lies(1) == []


async def test_a_tier_that_is_wanted_again_while_it_goes_stays_with_what_it_has(at: Setup) -> None:
    await at.apply(dram(), disk("mid"), disk("low"))
    await at.sink([1, 2], dram())
    await at.apply(dram(), disk("low"))
    await at.apply(dram(), disk("mid"), disk("low"))
    await at.tend()

    assert at.lies(1) == ["mid"]
    assert [(t.name, t.level) for t in at.core.node.tiers] == [("dram", 0), ("mid", 1), ("low", 2)]
    assert at.settled() == ("True", "Settled")


async def test_what_somebody_reads_is_waited_for(at: Setup) -> None:
    await at.apply(dram(), disk("low"))
    await at.sink([1], dram())
    entry = at.core.node.index.find(SCOPE, digest(1))
    assert entry is not None
    at.core.node.leases.grant(1, entry, entry.residences[0], at.clock() + WITHIN_S)
    await at.apply(dram())
    await at.tend()
    await at.apply(dram())
    assert [t.name for t in at.core.node.tiers] == ["dram", "low"]

    at.core.node.end_owner(1)
    await at.tend()
    await at.apply(dram())
    assert at.lies(1) == ["dram"]
    assert [t.name for t in at.core.node.tiers] == ["dram"]


async def test_other_settings_wait_for_the_blocks_too_and_what_cannot_move_holds_nothing_up(at: Setup) -> None:
    await at.apply(dram(), disk("low"))
    await at.sink([1, 2])
    await at.apply(dram(page_size="2Mi"), disk("low"))
    assert await store_chain(at.core, at.place, [7]) == 0, "nothing new comes into a tier that goes"
    await at.tend()
    await at.apply(dram(page_size="2Mi"), disk("low"))
    assert at.lies(2) == ["low"]

    await at.sink([11, 12])
    await at.apply(dram(page_size="4Ki"))
    await at.tend(8)
    await at.apply(dram(page_size="4Ki"))
    assert [t.name for t in at.core.node.tiers] == ["dram"]
    (tier,) = at.core.node.tiers
    assert tier.spec.host_dram is not None
    assert tier.spec.host_dram.page_size == "4Ki"


names = st.lists(st.sampled_from("abcdef"), unique=True, max_size=6)


@given(names, names, st.data())
def test_levels_keep_the_declared_order_and_put_what_leaves_where_it_was(
    wanted: list[str], before: list[str], data: st.DataObject
) -> None:
    gone = [n for n in before if n not in wanted]
    leaving = data.draw(st.lists(st.sampled_from(gone), unique=True)) if gone else []
    found = levels([disk(n) for n in wanted], before, leaving)

    assert sorted(found.values()) == list(range(len(wanted) + len(leaving)))
    assert sorted(wanted, key=found.__getitem__) == wanted
    first = before[0] if before else ""
    assert first not in leaving or found[first] == 0


class Stubborn(DictBackend):
    """It refuses its first changes of capacity."""

    refusals = 0

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        if self.refusals:
            self.refusals -= 1
            raise InvalidInputError("other hosts have the rest")
        return await super().resize(capacity_bytes)


async def test_a_change_of_capacity_that_failed_is_tried_again() -> None:
    made = Stubborn(4 * MIB)

    async def stubborn(_: NodeTier) -> TierBackend:
        return made

    at = Provisioned(stubborn)
    await at.provisioner.apply((disk("nvme", 4 * MIB),))
    made.refusals = 2
    await at.provisioner.apply((disk("nvme", 8 * MIB),))
    assert "other hosts" in at.provisioner.states["nvme"].error
    for _ in range(2):
        await at.provisioner.apply((disk("nvme", 8 * MIB),))
        assert made.capacity_bytes == 4 * MIB, "not before it is time"
        at.clock.now_s += RETRY_S + 1
        await at.provisioner.apply((disk("nvme", 8 * MIB),))

    assert made.capacity_bytes == 8 * MIB
    assert at.provisioner.states["nvme"].error == ""
    await at.close()


async def test_what_was_kept_for_weights_of_a_pool_that_went_is_not_kept_for_the_next() -> None:
    at = Provisioned(make)
    await at.provisioner.apply((disk("nvme", 4 * MIB),))
    await at.provisioner.set_aside("nvme", MIB)

    async def wiped(_: NodeTier) -> None:
        return

    await at.provisioner.remove(Removal.RELEASE, (), wiped, lambda: None)
    await at.provisioner.apply((disk("nvme", 4 * MIB),))
    tier = at.core.node.tier("nvme")
    assert tier is not None
    assert tier.backend.capacity_bytes == 4 * MIB
    await at.close()


async def test_a_drain_keeps_what_cannot_go_down_just_now() -> None:
    at = Setup()
    await at.apply(dram(), disk("nvme"))
    assert await store_chain(at.core, at.place, [1, 2, 3, 4]) == 4
    memory, below = at.core.node.tiers
    at.core.node.is_draining = True
    at.core.node.write_failed(below, "EIO once")
    await at.core.cache.evictor.drain(memory)
    assert [at.lies(n) for n in (1, 2, 3, 4)] == [["dram"]] * 4

    at.clock.now_s += WRITE_PAUSE_S + 1
    while await at.core.cache.evictor.drain(memory):
        pass
    assert [at.lies(n) for n in (1, 2, 3, 4)] == [["nvme"]] * 4
    await at.close()
