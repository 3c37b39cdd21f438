"""Laws of an agent's orders: each is answered once, a flush takes nothing that somebody holds, withdrawal ends it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_agent.operations import runner as module
from kvstrata_api.models.poolnode import FlushOrder, NodeOrder, OrderAnswer
from support.agent.doubles import orders_of
from support.agent.engine import Engine, close, steps_until

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.0)


def flush(uid: str = "u", **more: str) -> NodeOrder:
    return NodeOrder(uid=uid, type="Flush", flush=FlushOrder.model_validate(more))


async def carried_out(engine: Engine, order: NodeOrder) -> OrderAnswer:
    orders = orders_of(engine.core)
    orders.follow([order], [])
    await steps_until(lambda: orders.answers()[0].phase != "Running")
    await orders.close()
    return orders.answers()[0]


@settings(max_examples=25)
@given(st.integers(0, 8), st.sampled_from(["Drop", "Demote"]), st.sampled_from([None, "dram", "nvme"]))
async def test_a_flush_takes_what_nobody_holds_and_nothing_else(held: int, mode: str, tier: str | None) -> None:
    module.POLL_INTERVAL_S = 0.0  # type: ignore[misc]  # Examples outlive a function's fixtures.
    engine = await Engine().attach()
    for number in range(1, 9):
        await engine.store(number)
    acquired = await engine.acquire(*range(1, held + 1)) if held else None
    answer = await carried_out(engine, flush(mode=mode, **({"tier": tier} if tier else {})))

    found = await engine.acquire(*range(1, 9))
    assert answer.phase == "Done"
    if mode == "Demote" or tier == "nvme":
        assert len(found.blocks) == 8, "nothing is lost"
    else:
        assert len(found.blocks) == held
        assert answer.blocks_done == 8 - held
    if acquired is not None:
        assert await engine.release(acquired) == held
    await close(engine)


async def test_an_order_is_answered_once_and_forgotten_when_it_is_withdrawn() -> None:
    engine = await Engine().attach()
    await engine.store(1, 2)
    orders = orders_of(engine.core)
    orders.follow([flush()], [])
    await steps_until(lambda: orders.answers()[0].phase == "Done")
    await engine.store(1, 2)
    orders.follow([flush()], [])
    await steps_until(lambda: orders.answers()[0].phase == "Done")

    assert len((await engine.acquire(1, 2)).blocks) == 2
    orders.follow([], [])
    assert orders.answers() == ()
    await close(engine)


async def test_an_answer_that_was_stored_counts_after_a_restart_and_one_of_work_under_way_does_not() -> None:
    engine = await Engine().attach()
    await engine.store(1, 2)
    stored = OrderAnswer(uid="u", phase="Done", blocks_done=7)
    again = orders_of(engine.core)
    again.follow([flush()], [stored])
    assert again.answers() == (stored,)
    assert len((await engine.acquire(1)).blocks) == 1

    anew = orders_of(engine.core)
    anew.follow([flush("v", tier="nvme")], [OrderAnswer(uid="v", phase="Running", blocks_done=7)])
    await steps_until(lambda: anew.answers()[0].phase == "Done")
    assert anew.answers()[0].blocks_done == 0
    await close(engine)


async def test_a_tier_that_is_not_there_is_told() -> None:
    engine = await Engine().attach()
    answer = await carried_out(engine, flush(tier="cold"))

    assert (answer.phase, answer.reason) == ("Failed", "TierAbsent")
    assert "cold" in answer.message
    await close(engine)
