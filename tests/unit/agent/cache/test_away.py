"""Laws of a medium that does not answer: what lies there stays, is a miss meanwhile, and is found again."""

import json
from collections.abc import AsyncIterator

import pytest

from kvstrata_agent.blocks.tier import AWAY_S, WRITE_PAUSE_S
from kvstrata_api import wire
from kvstrata_api.tiers import Lookup
from support.agent.doubles import SCOPE, digest
from support.agent.engine import Engine, close

pytestmark = pytest.mark.unit

CHAIN = (1, 2, 3, 4)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = await Engine().attach()
    await made.store(*CHAIN)
    await made.push_down()
    yield made
    await close(made)


async def states(engine: Engine) -> set[Lookup]:
    found = await engine.ask(wire.Lookup(9, SCOPE, b"".join(map(digest, CHAIN))))
    return {Lookup(state) for state in found.states}


async def test_what_does_not_answer_is_a_miss_and_is_read_once_it_does(engine: Engine) -> None:
    low = engine.core.node.tiers[1]
    engine.low.is_away = True

    assert (await engine.acquire(*CHAIN)).blocks == ()
    assert await states(engine) == {Lookup.MISS}
    assert low.phase(engine.clock()) == "Failed"
    assert (low.last_error, engine.core.node.contents(low).blocks) == ("no answer in 30.0 s", len(CHAIN))

    engine.low.is_away = False
    assert (await engine.acquire(*CHAIN)).blocks == (), "it is left alone for a while"
    engine.clock.now_s += AWAY_S
    assert await states(engine) == {Lookup.HIT}
    assert len((await engine.acquire(*CHAIN)).blocks) == len(CHAIN)
    engine.clock.now_s += WRITE_PAUSE_S
    assert low.phase(engine.clock()) == "Ready"


async def test_why_it_is_a_miss_is_known(engine: Engine) -> None:
    engine.low.is_away = True
    await engine.acquire(*CHAIN)

    answer = json.loads((await engine.ask(wire.WhyMiss(1, SCOPE, b"".join(map(digest, CHAIN))))).json)
    assert answer["reason"] == "away"
    assert "the first block lies in nvme, which does not answer: no answer in 30.0 s" in str(answer)


async def test_nobody_waits_for_a_medium_that_is_known_not_to_answer(engine: Engine) -> None:
    engine.low.is_away = True
    await engine.acquire(*CHAIN)
    asked = engine.low.reads

    await engine.acquire(*CHAIN)
    assert engine.low.reads == asked


async def test_what_has_another_copy_is_read_there(engine: Engine) -> None:
    assert len((await engine.acquire(1, 2)).blocks) == 2
    engine.low.is_away = True
    await engine.acquire(*CHAIN)

    assert len((await engine.acquire(*CHAIN)).blocks) == 2
