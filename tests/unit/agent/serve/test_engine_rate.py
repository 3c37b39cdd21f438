"""Which rate of the engine counts: its own report, then the pool's, then what was seen of it; without any, a fetch."""

import json

import pytest

from kvstrata_agent.policy.recompute import ENGINE_S
from kvstrata_api import wire
from kvstrata_api.models.poolnode import TierProbe
from support.agent.doubles import SCOPE, digest
from support.agent.engine import Engine, close

pytestmark = pytest.mark.unit

FAST, SLOW = 1_000_000, 100
PROMPT_BLOCKS = 16


async def compute_prompts(engine: Engine, tokens_per_s: float) -> None:
    """Three prompts that are asked for in vain, computed, and stored; then all of it is brought down."""
    for first in (101, 201, 301):
        numbers = range(first, first + PROMPT_BLOCKS)
        await engine.ask(wire.Lookup(1, SCOPE, b"".join(map(digest, numbers))))
        engine.clock.now_s += PROMPT_BLOCKS * 16 / tokens_per_s - 0.01
        await engine.store(*numbers)
        await engine.push_down()


async def below(engine: Engine) -> None:
    """Three blocks in a tier that reads half a megabyte a second."""
    await engine.store(1, 2, 3)
    await engine.push_down()
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=500_000, read_latency_microseconds=50_000)


async def fetched(engine: Engine) -> int:
    return len((await engine.acquire(1, 2, 3, deadline_s=5.0)).blocks)


async def shown(engine: Engine) -> float | None:
    rate: float | None = json.loads((await engine.ask(wire.Stats(1))).json)["tenant"]["prefill_tokens_per_s"]
    return rate


async def explained(engine: Engine) -> str:
    answer = await engine.ask(wire.Explain(1, scope=SCOPE, digest=digest(1)))
    reason: str = json.loads(answer.json)["read"]["reason"]
    return reason


async def test_while_nobody_knows_how_fast_the_engine_computes_everything_is_fetched_and_said_to_be() -> None:
    engine = await Engine().attach()
    await below(engine)

    assert await explained(engine) == "unknown rate of the engine"
    assert await shown(engine) is None
    assert await fetched(engine) == 3
    await close(engine)


@pytest.mark.parametrize(("seen", "blocks"), [(10_000.0, 0), (SLOW, 3)])
async def test_what_the_agent_has_seen_of_prompts_decides_where_nothing_is_declared(seen: float, blocks: int) -> None:
    engine = await Engine().attach()
    await compute_prompts(engine, seen)
    await below(engine)

    assert await shown(engine) == pytest.approx(seen, rel=1e-3)
    assert await fetched(engine) == blocks
    await close(engine)


@pytest.mark.parametrize(("declared", "saved_s", "took_s"), [(None, 0.0, 0.0), (SLOW, 3 * 16 / SLOW, 0.5)])
async def test_savings_are_counted_by_what_was_declared_or_reported_alone(
    declared: int | None, saved_s: float, took_s: float
) -> None:
    """What was seen is a lower bound of the rate, and would claim too much; loading alone would look like a loss."""
    recompute = {"prefillTokensPerSecond": declared} if declared else {}
    engine = await Engine(recompute=recompute).attach()
    await compute_prompts(engine, 10_000.0)
    await engine.store(1, 2, 3)
    acquired = await engine.acquire(1, 2, 3)
    engine.clock.now_s += 0.5
    await engine.release(acquired)
    await engine.ask(wire.CountLoad(1, 3, 3))

    def counted(name: str) -> float:
        children = engine.core.node.counters._children.items()
        return sum(float(c._value.get()) for (of, *_), c in children if of == f"kvstrata_load_{name}_total")

    assert counted("saved_prefill_seconds") == pytest.approx(saved_s)
    assert counted("saved_prefill_tokens") == pytest.approx(saved_s * SLOW)
    assert counted("seconds") == pytest.approx(took_s)
    await close(engine)


async def test_what_is_declared_stands_before_what_was_seen_and_a_report_before_both() -> None:
    engine = await Engine(recompute={"prefillTokensPerSecond": SLOW}).attach()
    await compute_prompts(engine, 10_000.0)
    await below(engine)
    assert await explained(engine) == "cheaper"

    await engine.ask(wire.ReportEngine(1, FAST))
    assert await shown(engine) == FAST
    assert await fetched(engine) == 0
    engine.clock.now_s += ENGINE_S
    assert await fetched(engine) == 3
    await close(engine)


async def test_a_lookup_before_writing_and_one_of_a_scope_that_is_closed_to_the_caller_begin_no_prompt() -> None:
    engine = await Engine().attach()
    await engine.ask(wire.Lookup(1, SCOPE, digest(1), is_use=False))
    await engine.ask(wire.Lookup(1, "tenant/b/1/v1", digest(1)))
    assert not engine.core.node.prefill_rates._awaited

    await engine.ask(wire.Lookup(1, SCOPE, digest(1)))
    await engine.acquire(1, 2)
    assert len(engine.core.node.prefill_rates._awaited) == 1
    await close(engine)
