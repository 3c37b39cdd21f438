"""Laws of the drain of one tier: its blocks go to others, nothing comes in, what is held stays, its end undoes it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstrata_agent.app.periodic import REST_S_MAX, Sweeper
from kvstrata_agent.blocks.tier import WRITE_PAUSE_S
from kvstrata_agent.operations import runner as draining
from kvstrata_agent.operations.runner import drained_tiers
from kvstrata_api.models.poolnode import NodeOrder, OrderAnswer, TierDrainOrder
from support.agent.doubles import orders_of
from support.agent.engine import Engine, close

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "POLL_INTERVAL_S", 0.0)


def order(tier: str, uid: str = "u") -> NodeOrder:
    return NodeOrder(uid=uid, type="Drain", drain=TierDrainOrder(tier=tier))


class Drained:
    """An engine on a node that is asked to drain tiers."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.node = engine, engine.core.node
        self.orders = orders_of(engine.core)
        self.sweeper = Sweeper(engine.core.cache, engine.authenticator)

    def follow(self, *wanted: NodeOrder, stored: tuple[OrderAnswer, ...] = ()) -> None:
        """As the process does."""
        self.node.drain_tiers(drained_tiers(wanted))
        self.orders.follow(wanted, stored)

    async def tend(self) -> OrderAnswer:
        """Let all move that can now."""
        for _ in range(8):
            self.engine.clock.now_s += REST_S_MAX
            await self.sweeper._tend()
            for _ in range(8):
                await asyncio.sleep(0)
        return self.orders.answers()[0]

    def blocks(self) -> list[int]:
        return [self.node.contents(tier).blocks for tier in self.node.tiers]


@pytest.fixture
async def at() -> AsyncIterator[Drained]:
    engine = await Engine().attach()
    await engine.store(1, 2, 3, 4)
    made = Drained(engine)
    yield made
    await made.orders.close()
    await close(engine)


async def test_blocks_go_down_nothing_comes_in_and_reads_go_on(at: Drained) -> None:
    at.follow(order("dram"))
    answer = await at.tend()

    assert (answer.phase, answer.blocks_done, answer.blocks_total) == ("Done", 4, 4)
    assert answer.bytes_done == answer.bytes_total > 0
    assert at.blocks() == [0, 4]
    assert not (await at.engine.ask_to_store(5)).slots
    assert at.node.tiers[0].phase(0.0) == "Draining"


async def test_the_slowest_tier_goes_up_and_a_cancelled_drain_takes_blocks_again(at: Drained) -> None:
    await at.engine.push_down()
    at.follow(order("nvme"))
    answer = await at.tend()
    assert (answer.phase, at.blocks()) == ("Done", [4, 0])

    at.follow()
    await at.engine.push_down()
    assert at.blocks() == [0, 4]
    assert at.orders.answers() == ()


@pytest.mark.parametrize("hold", ["lease", "guard"])
async def test_what_is_read_or_decoded_from_stays_and_holds_the_answer_up(at: Drained, hold: str) -> None:
    entry = at.node.index.find(*at.engine.key(4))
    assert entry is not None
    acquired = await at.engine.acquire(1, 2, 3, 4) if hold == "lease" else None
    if hold == "guard":
        entry.guards = {"session"}
    at.follow(order("dram"))
    answer = await at.tend()

    assert (answer.phase, answer.reason) == ("Running", "BlocksHeld")
    assert entry.residence(at.node.tiers[0]) is not None
    if acquired is not None:
        await at.engine.release(acquired)
    entry.guards = None
    assert (await at.tend()).phase == "Done"
    assert at.blocks() == [0, 4]


async def test_what_has_no_place_is_told_and_stays(at: Drained) -> None:
    at.follow(order("dram"), order("nvme", "v"))
    await at.tend()
    answer = await at.tend()

    assert (answer.phase, answer.blocks_done, answer.blocks_total) == ("Done", 0, 4)
    assert "4 blocks" in answer.message
    assert at.blocks() == [4, 0]
    acquired = await at.engine.acquire(1, 2, 3, 4)
    assert len(acquired.blocks) == 4, "what stays is read"


async def test_a_node_that_leaves_keeps_blocks_while_the_medium_for_them_pauses(at: Drained) -> None:
    drain, memory = at.engine.core.cache.evictor.drain, at.node.tiers[0]
    at.node.is_draining, at.engine.low.fails_writes = True, True
    assert await drain(memory) == 4
    at.engine.low.fails_writes = False
    assert await drain(memory) == 4, "it pauses after the write that failed"

    at.engine.clock.now_s += WRITE_PAUSE_S
    assert await drain(memory) == 0
    assert at.blocks() == [0, 4]


async def test_a_node_that_leaves_drops_what_no_medium_takes(at: Drained) -> None:
    at.node.is_draining = True
    at.node.tiers[1].drain(is_wanted=True)

    assert await at.engine.core.cache.evictor.drain(at.node.tiers[0]) == 0


async def test_a_tier_stays_drained_after_its_answer_and_over_a_restart(at: Drained) -> None:
    at.follow(order("dram"), stored=(OrderAnswer(uid="u", phase="Done"),))

    assert at.node.tiers[0].is_drained
    assert not (await at.engine.ask_to_store(5)).slots


async def test_an_absent_tier_is_told(at: Drained) -> None:
    at.follow(order("cold"))
    answer = await at.tend()

    assert (answer.phase, answer.reason) == ("Failed", "TierAbsent")
    assert "cold" in answer.message
