"""A session with a sliding window keeps its sinks and the window; what lies between leaves first."""

import json
from collections.abc import AsyncIterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.returns import SET_BACK
from kvstrata_agent.cache.eviction_candidates import EvictionRequest
from kvstrata_agent.policy.attention import EVERYTHING, Attention
from kvstrata_api import wire
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.wire import Outcome
from support.agent.doubles import BLOCK_BYTES, LAYOUT_ID, SCOPE, Clock, dict_tier, digest, make_node
from support.agent.engine import SLOTS, Engine, close, steps_until

pytestmark = pytest.mark.unit

TOKENS = 16
"""Of a block."""
SINKS, WINDOW = 2, 3
STREAMED = 12
PASSED = range(1 + SINKS, 1 + STREAMED - WINDOW)
KEPT = [*range(1, 1 + SINKS), *range(1 + STREAMED - WINDOW, 1 + STREAMED)]


@pytest.fixture(params=["ReuseAware", "LeafLRU"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    policy = {"type": request.param, "highWatermarkPercent": 100, "lowWatermarkPercent": 99}
    made = await Engine(eviction=policy).attach()
    yield made
    await close(made)


def opening(session: str = "s", parent: str = "", window: int = WINDOW) -> wire.OpenSession:
    return wire.OpenSession(1, session, parent, "", SINKS * TOKENS if window else 0, window * TOKENS)


async def streamed(engine: Engine, numbers: range, session: str = "s") -> None:
    """Blocks come one by one, as a model writes them."""
    for number in numbers:
        engine.clock.now_s += 1.0
        await engine.store(number, session=session)


def in_memory(engine: Engine, numbers: range) -> list[int]:
    node = engine.core.node
    found = {n: node.index.find(*engine.key(n)) for n in numbers}
    return [n for n, e in found.items() if e is not None and e.residence(node.tiers[0]) is not None]


async def made_room(engine: Engine, blocks: int) -> None:
    await engine.core.cache.evictor.evict(engine.core.node.tiers[0], EvictionRequest(blocks * BLOCK_BYTES, "room"))


@given(st.integers(0, 200), st.integers(1, 200), st.integers(0, 60), st.integers(0, 60), st.integers(1, 32))
def test_what_is_passed_is_neither_in_the_sinks_nor_in_the_window(
    sinks: int, window: int, blocks: int, before: int, block_tokens: int
) -> None:
    attention = Attention(sinks, window)
    passed = attention.passed(blocks, before, block_tokens)
    tokens = (before + blocks) * block_tokens
    for back in range(blocks):
        first = tokens - (back + 1) * block_tokens
        is_read = first < sinks or first + block_tokens > tokens - window
        assert (back in passed) != is_read
    assert not EVERYTHING.passed(blocks, before, block_tokens)
    assert len(attention.passed(blocks, None, block_tokens)) >= len(passed)


async def test_what_is_between_sinks_and_window_leaves_first(engine: Engine) -> None:
    await engine.ask(opening())
    await streamed(engine, range(1, 1 + STREAMED))
    await engine.store(101, 102)
    for entry in [engine.core.node.index.find(*engine.key(n)) for n in PASSED]:
        assert entry is not None
        assert engine.core.node.returns.worth(entry)[0] == SET_BACK or not engine.core.node.returns.are_followed
    await made_room(engine, 1)
    assert in_memory(engine, range(1, 1 + STREAMED)) == [*KEPT[:SINKS], *PASSED[:-1], *KEPT[SINKS:]], "from its end"
    await made_room(engine, len(PASSED) - 1)
    assert in_memory(engine, range(1, 1 + STREAMED)) == KEPT
    assert in_memory(engine, range(101, 103)) == [101, 102]


async def test_without_a_window_the_end_of_the_chain_leaves_first(engine: Engine) -> None:
    await engine.ask(opening(window=0))
    await streamed(engine, range(1, 1 + STREAMED))
    await made_room(engine, STREAMED - SINKS)
    assert in_memory(engine, range(1, 1 + STREAMED)) == list(range(1, 1 + SINKS))


async def test_a_stream_longer_than_memory_goes_on_while_it_decodes(engine: Engine) -> None:
    await engine.ask(opening())
    await engine.ask(wire.TouchSession(1, "s", "decoding"))
    engine.low.capacity_bytes = 2 * SLOTS * BLOCK_BYTES
    last = 5 * SLOTS
    await streamed(engine, range(1, 1 + last))
    here = in_memory(engine, range(1, 1 + last))
    assert here[:SINKS] == [1, 2]
    assert here[-WINDOW:] == list(range(1 + last - WINDOW, 1 + last))
    assert len(here) <= SLOTS
    cut = [e for e in engine.core.node.index if e.is_cut]
    assert len(cut) <= SLOTS, "of what left memory no block is kept apart"
    session = engine.core.node.sessions.find("a", "s")
    assert session is not None
    assert [h.digest for h in session.heads] == [digest(SINKS), digest(last)], "the end of the chain is the last head"
    acquired = await engine.acquire(*range(1 + last - WINDOW, 1 + last), session="s")
    assert len(acquired.blocks) == WINDOW


async def test_what_others_continue_stays(engine: Engine) -> None:
    await engine.ask(wire.OpenSession(1, "other"))
    await streamed(engine, range(1, 7), "other")
    await engine.ask(opening())
    await engine.ask(wire.Touch(1, SCOPE, b"".join(map(digest, range(1, 7))), "s"))
    await streamed(engine, range(7, 1 + STREAMED))
    await made_room(engine, 3)
    assert in_memory(engine, range(1, 1 + STREAMED)) == [1, 2, 3, 4, 5, 6, 10, 11, 12]


async def test_who_attends_to_all_of_it_takes_the_cut_back(engine: Engine) -> None:
    await engine.ask(opening())
    await streamed(engine, range(1, 1 + STREAMED))
    index = engine.core.node.index
    first = index.find(*engine.key(1 + STREAMED - WINDOW))
    assert first is not None
    assert first.is_cut
    assert index.parent(first) is None
    await engine.ask(wire.OpenSession(1, "other"))
    await engine.ask(wire.Touch(1, SCOPE, b"".join(map(digest, range(1, 1 + STREAMED))), "other"))
    assert not first.is_cut
    await made_room(engine, WINDOW)
    assert in_memory(engine, range(1, 1 + STREAMED)) == list(range(1, 1 + STREAMED - WINDOW)), "from its end"


async def test_a_fork_and_the_next_run_attend_to_the_same(engine: Engine) -> None:
    await engine.ask(opening())
    await streamed(engine, range(1, 1 + STREAMED))
    await engine.ask(wire.OpenSession(1, "fork", "s"))
    told = json.loads((await engine.ask(wire.Explain(1, session="fork"))).json)
    assert (told["sink_tokens"], told["window_tokens"]) == (SINKS * TOKENS, WINDOW * TOKENS)
    life, table = engine.core.cache.life, engine.core.node.sessions
    session = table.find("a", "s")
    assert session is not None
    life.publish(session)
    table.forget(session)
    again = life.find("a", session.secret, "s")
    assert again is not None
    assert again is not session
    assert again.attention == Attention(SINKS * TOKENS, WINDOW * TOKENS)
    assert [h.digest for h in again.heads] == [digest(SINKS), digest(STREAMED)]


async def test_sinks_and_window_are_archived_and_come_up_again(engine: Engine) -> None:
    await engine.ask(opening())
    await streamed(engine, range(1, 1 + STREAMED))
    archiver, session = engine.core.cache.archiver, engine.core.node.sessions.find("a", "s")
    assert session is not None
    chains = [[e.digest for e in chain] for chain in archiver.chains(session)]
    assert sorted(chains) == sorted([list(map(digest, KEPT[:SINKS])), list(map(digest, KEPT[SINKS:]))])
    await engine.push_down()
    await engine.ask(wire.TouchSession(1, "s", "tool", 0, 1.0))
    engine.core.cache.life.bring_up(engine.clock.now_s)
    await steps_until(lambda: not engine.core.cache.mover.bytes_under_way)
    assert in_memory(engine, range(1, 1 + STREAMED)) == KEPT


async def test_what_was_passed_is_found_below_and_its_record_names_its_parent(engine: Engine) -> None:
    await engine.ask(opening())
    await streamed(engine, range(1, 1 + STREAMED))
    await engine.push_down()
    for number in range(2, 1 + STREAMED):
        entry = engine.core.node.index.find(*engine.key(number))
        assert entry is not None
        assert entry.residences[0].record.parent == digest(number - 1)


@pytest.mark.parametrize(
    ("sinks", "window", "named"), [(-1, 16, "sink_tokens"), (0, 1 << 25, "window_tokens"), (16, 0, "sink_tokens")]
)
async def test_a_window_out_of_bounds_is_refused(engine: Engine, sinks: int, window: int, named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{named}: "):
        await engine.ask(wire.OpenSession(1, "s", "", "", sinks, window))


async def test_an_ended_stream_leaves_nothing_behind_that_counts(engine: Engine) -> None:
    await engine.ask(opening())
    await streamed(engine, range(1, 1 + STREAMED))
    assert (await engine.ask(wire.CloseSession(1, "s", archive=False))).outcome is Outcome.ACCEPTED
    await made_room(engine, SLOTS)
    assert not in_memory(engine, range(1, 1 + STREAMED))


@given(st.integers(0, 1 << 32))
def test_children_are_counted_as_links_are_cut_and_joined(seed: int) -> None:
    dice, node = Random(seed), make_node([dict_tier("nvme", 1 << 20, 0, 1)], Clock())
    index = node.index
    entries = [e for e in index.begin_chain(SCOPE, map(digest, range(1, 9)), b"", LAYOUT_ID, 0.0, "a") if e is not None]
    for _ in range(40):
        entry = dice.choice(entries)
        dice.choice([index.cut, index.join])(entry)
        if len(entries) > 2 and dice.random() < 0.1:
            entries.remove(entry)
            index.forget(entry)
    linked = {e.parent for e in entries if e.parent and not e.is_cut}
    assert set(index.blocks(SCOPE).children) == linked
    assert all(index.blockers(e, 8) == (e.digest in linked) for e in entries)
