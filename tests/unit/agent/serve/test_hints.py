"""What becomes of each hint: every outcome that it can have, and what it changes then."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstrata_agent.blocks.returns import TRUST
from kvstrata_agent.policy.prefetch import LEAD_S
from kvstrata_agent.serve.session_verbs import RETAIN_S_MAX
from kvstrata_agent.serve.verbs import PIN_S_MAX
from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from kvstrata_api.wire import Outcome
from support.agent.doubles import SCOPE, FakeAuthenticator, digest
from support.agent.engine import Engine, close, steps_until
from support.agent.process import DOMAIN, member

pytestmark = pytest.mark.unit

FORBIDDEN = ScopeId("tenant/b/uid-b/v1")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = await Engine().attach()
    yield made
    await close(made)


def keys(*numbers: int) -> bytes:
    return b"".join(map(digest, numbers))


async def outcome(engine: Engine, request: wire.AnyRequest) -> tuple[str, int]:
    done = await engine.ask(request)
    assert isinstance(done, wire.Done)
    return done.outcome, done.count


async def session_of(engine: Engine, name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((await engine.ask(wire.Explain(9, session=name))).json)
    return told


async def test_a_tool_wait_is_accepted_expired_or_unknown(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "s"))
    assert await outcome(engine, wire.TouchSession(1, "s", "tool", 0, 7.0)) == (Outcome.ACCEPTED, 1)
    assert (await session_of(engine, "s"))["expected_return_s"] == pytest.approx(7.0)
    assert await outcome(engine, wire.TouchSession(1, "s", "tool", 0, -1.0)) == (Outcome.EXPIRED, 0)
    assert (await session_of(engine, "s"))["expected_return_s"] == pytest.approx(7.0), "an expired hint changes nothing"
    assert await outcome(engine, wire.TouchSession(1, "none", "tool", 0, 7.0)) == (Outcome.UNKNOWN, 0)
    await engine.ask(wire.TouchSession(1, "s", "tool"))
    gap_s = engine.core.node.spec.policy.retention.tool_gap_seconds
    assert (await session_of(engine, "s"))["expected_return_s"] == pytest.approx(gap_s)


@pytest.mark.parametrize("archives", [True, False])
async def test_a_session_is_complete_archived_or_only_closed(archives: bool) -> None:  # noqa: FBT001  A parameter of the test.
    engine = await Engine(retention={"archive": archives}).attach()
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    assert await outcome(engine, wire.CloseSession(1, "none")) == (Outcome.UNKNOWN, 0)
    expected = Outcome.ACCEPTED if archives else Outcome.PARTIAL
    assert await outcome(engine, wire.CloseSession(1, "s")) == (expected, 1)
    await engine.ask(wire.OpenSession(1, "t"))
    assert await outcome(engine, wire.CloseSession(1, "t", archive=False)) == (Outcome.ACCEPTED, 1)
    await close(engine)


async def test_a_retained_session_is_not_finished_before_its_time(engine: Engine) -> None:
    node = engine.core.node
    idle_s = float(node.spec.policy.retention.idle_seconds)
    for name in ("kept", "other"):
        await engine.ask(wire.OpenSession(1, name))
        await engine.ask(wire.TouchSession(1, name, "idle"))
    assert await outcome(engine, wire.Retain(1, "kept", idle_s + 100.0)) == (Outcome.ACCEPTED, 1)
    assert await outcome(engine, wire.Retain(1, "other", 0.0)) == (Outcome.EXPIRED, 0)
    assert await outcome(engine, wire.Retain(1, "none", 5.0)) == (Outcome.UNKNOWN, 0)
    engine.clock.now_s += idle_s + 50.0
    assert [s.name for s in node.sessions.sweep(engine.clock.now_s, idle_s)] == ["other"]
    engine.clock.now_s += 51.0
    assert {s.name for s in node.sessions.sweep(engine.clock.now_s, idle_s)} == {"kept", "other"}
    await engine.attach()
    await engine.ask(wire.Retain(1, "kept", 1e9))
    assert (await session_of(engine, "kept"))["retained_s"] == RETAIN_S_MAX


async def test_an_expected_return_keeps_a_session_no_longer_than_a_hint_may(engine: Engine) -> None:
    node = engine.core.node
    idle_s = float(node.spec.policy.retention.idle_seconds)
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.ask(wire.TouchSession(1, "s", "idle", 0, 1e9))
    assert (await session_of(engine, "s"))["expected_return_s"] == RETAIN_S_MAX
    engine.clock.now_s += RETAIN_S_MAX + idle_s
    assert [s.name for s in node.sessions.sweep(engine.clock.now_s, idle_s)] == ["s"]


@pytest.mark.parametrize("hint", [wire.Retain(1, "s", 600.0), wire.TouchSession(1, "s", "idle", 50)])
async def test_a_word_that_is_about_to_end_is_worth_no_more_than_a_return_that_is_due(
    engine: Engine, hint: wire.AnyRequest
) -> None:
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    await engine.ask(hint)
    node = engine.core.node
    session, now_s = node.sessions.find("a", "s"), engine.clock.now_s
    assert session is not None
    ends_s = max(session.retained_until_s, session.urgent_until_s)
    assert node.returns._word(session, now_s) > 0.0
    assert node.returns._word(session, ends_s - 1e-6) == node.returns._word(session, ends_s - LEAD_S) == TRUST / LEAD_S
    assert node.returns._word(session, ends_s) == 0.0


async def test_a_retained_sessions_head_is_worth_more_until_then(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    engine.clock.now_s += 600.0
    head = engine.core.node.index.find(*engine.key(2))
    assert head is not None
    before, *_ = engine.core.node.returns.worth(head)
    await engine.ask(wire.Retain(1, "s", 30.0))
    assert engine.core.node.returns.worth(head)[0] > before
    engine.clock.now_s += 31.0
    assert engine.core.node.returns.worth(head)[0] <= before


async def test_a_pin_holds_what_is_in_memory_until_it_expires(engine: Engine) -> None:
    await engine.store(1, 2)
    node = engine.core.node
    assert await outcome(engine, wire.Pin(1, SCOPE, keys(1, 2), 5.0)) == (Outcome.ACCEPTED, 2)
    assert await outcome(engine, wire.Pin(1, SCOPE, keys(1, 2, 3), 5.0)) == (Outcome.PARTIAL, 2)
    assert await outcome(engine, wire.Pin(1, SCOPE, keys(1, 2), 0.0)) == (Outcome.EXPIRED, 0)
    assert await outcome(engine, wire.Pin(1, SCOPE, keys(7), 5.0)) == (Outcome.UNKNOWN, 0)
    assert await outcome(engine, wire.Pin(1, FORBIDDEN, keys(1), 5.0)) == (Outcome.UNKNOWN, 0), "as if it were absent"
    await engine.ask(wire.Pin(1, SCOPE, keys(1, 2), 1e9))
    entry = node.index.find(*engine.key(1))
    assert entry is not None
    assert entry.is_held
    engine.clock.now_s += PIN_S_MAX + 1.0
    node.pins.sweep(engine.clock.now_s)
    assert not entry.is_held, "a pin that does not expire"
    await engine.attach()
    await engine.push_down()
    assert await outcome(engine, wire.Pin(1, SCOPE, keys(1, 2), 5.0)) == (Outcome.REFUSED, 0), "none is in memory"


@pytest.mark.parametrize("hint", [wire.Prefetch, wire.Fetch])
async def test_a_prefetch_says_how_much_comes(engine: Engine, hint: type[wire.Prefetch]) -> None:
    await engine.store(1, 2, 3)
    await engine.push_down()
    assert await outcome(engine, hint(1, SCOPE, keys(7))) == (Outcome.UNKNOWN, 0)
    assert await outcome(engine, hint(1, FORBIDDEN, keys(1))) == (Outcome.UNKNOWN, 0)
    assert await outcome(engine, hint(1, SCOPE, keys(1, 2, 3, 4))) == (Outcome.PARTIAL, 3)
    memory = engine.core.node.contents(engine.core.node.tiers[0])
    await steps_until(lambda: memory.blocks == 3)
    assert await outcome(engine, hint(1, SCOPE, keys(1, 2, 3))) == (Outcome.ACCEPTED, 0), "all of it is up"
    engine.core.node.spec = engine.core.node.spec.model_copy(
        update={"policy": engine.core.node.spec.policy.model_copy(update={"prefetch": _NONE})}
    )
    assert await outcome(engine, hint(1, SCOPE, keys(1))) == (Outcome.REFUSED, 0), "the pool wants none"


class _NoPrefetch:
    type = "None"
    max_inflight_bytes = 1 << 30


_NONE = _NoPrefetch()


async def test_a_demoted_end_of_a_chain_has_a_copy_below_and_leaves_memory_first(engine: Engine) -> None:
    work = asyncio.create_task(engine.core.cache.archiver.run())
    memory, disk = engine.core.node.tiers
    await engine.store(1, 2, 3)
    await engine.store(101, 102)
    await engine.store(4)
    assert await outcome(engine, wire.Demote(1, SCOPE, keys(7))) == (Outcome.UNKNOWN, 0)
    assert await outcome(engine, wire.Demote(1, FORBIDDEN, keys(1))) == (Outcome.UNKNOWN, 0)
    assert await outcome(engine, wire.Demote(1, SCOPE, keys(1, 2, 3))) == (Outcome.REFUSED, 0), "4 continues it"
    leases = await engine.acquire(2)
    assert await outcome(engine, wire.Demote(1, SCOPE, keys(1, 2, 3, 4))) == (Outcome.PARTIAL, 2), "2 is read"
    await engine.release(leases)
    await steps_until(lambda: engine.core.node.contents(disk).blocks == 2)
    await engine.ask(wire.OpenSession(1, "s"))
    for first in range(200, 320, 10):
        await engine.store(first)
    here = {n for n in (1, 2, 3, 4, 101, 102) if _in(engine, n, memory)}
    assert here == {1, 2, 101, 102}, "what was demoted left before what was older"
    work.cancel()


def _in(engine: Engine, number: int, tier: Any) -> bool:
    entry = engine.core.node.index.find(*engine.key(number))
    return entry is not None and entry.residence(tier) is not None


async def test_blocks_of_a_domain_are_not_one_tenants_to_demote(engine: Engine) -> None:
    engine.verbs._attaching._authenticator = FakeAuthenticator(a=member("a", can_write=True))
    await engine.attach()
    assert await outcome(engine, wire.Demote(1, DOMAIN, keys(1))) == (Outcome.REFUSED, 0)


async def test_hints_are_counted_by_what_became_of_them(engine: Engine) -> None:
    await engine.store(1)
    await engine.ask(wire.Pin(1, SCOPE, keys(1), 5.0))
    await engine.ask(wire.Pin(1, SCOPE, keys(9), 5.0))
    await engine.ask(wire.TouchSession(1, "none", "tool"))
    counted = {
        tuple(labels): child._value.get()
        for (name, *labels), child in engine.core.node.counters._children.items()
        if name == "kvstrata_hints_total"
    }
    assert counted == {("pin", "accepted"): 1.0, ("pin", "unknown"): 1.0, ("tool_wait", "unknown"): 1.0}
