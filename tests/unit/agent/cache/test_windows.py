"""A session with a sliding window keeps its sinks, the window and its anchors; what lies between leaves first."""

import json
from collections.abc import AsyncIterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.returns import SET_BACK
from kvstrata_agent.cache.eviction_candidates import EvictionRequest
from kvstrata_agent.policy.attention import ANCHORS_MAX, EVERYTHING, Attention
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
APART = 3
ANCHORS = [4, 7]
"""Blocks 3 and 6, counted from 0; 0 is a sink, and 9 the first of the window."""


@pytest.fixture(params=["ReuseAware", "LeafLRU"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    policy = {"type": request.param, "highWatermarkPercent": 100, "lowWatermarkPercent": 99}
    made = await Engine(eviction=policy).attach()
    yield made
    await close(made)


def opening(session: str = "s", parent: str = "", window: int = WINDOW, apart: int = 0) -> wire.OpenSession:
    sinks = SINKS * TOKENS if window else 0
    return wire.OpenSession(1, session, parent, "", sinks, window * TOKENS, apart * TOKENS)


async def streamed(engine: Engine, numbers: range, session: str = "s") -> None:
    """Blocks come one by one, as a model writes them."""
    for number in numbers:
        engine.clock.now_s += 1.0
        await engine.store(number, session=session)


def in_memory(engine: Engine, numbers: range) -> list[int]:
    node = engine.core.node
    found = {n: node.index.find(*engine.key(n)) for n in numbers}
    return [n for n, e in found.items() if e is not None and e.residence(node.tiers[0]) is not None]


def behind_children(engine: Engine) -> list[bytes]:
    """Blocks that hang on one in a slower tier, which could not leave there before them."""
    index = engine.core.node.index
    linked = [(entry, parent) for entry in index if (parent := index.parent(entry)) is not None]
    return [entry.digest for entry, parent in linked if parent.residences and parent.level > entry.level]


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
    for number in range(1, 1 + last):
        await streamed(engine, range(number, number + 1))
        assert not behind_children(engine)
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


@pytest.mark.parametrize(("window", "stays"), [(0, range(1, 2 + STREAMED)), (8, range(STREAMED - 6, 2 + STREAMED))])
async def test_who_reads_a_chain_and_decodes_loses_nothing_of_it_to_the_window_of_another(
    engine: Engine, window: int, stays: range
) -> None:
    await engine.ask(opening())
    await streamed(engine, range(1, 1 + STREAMED))
    engine.low.capacity_bytes = 0  # What leaves memory is lost.
    await engine.ask(opening("other", window=window))
    await engine.release(await engine.acquire(*range(1, 1 + STREAMED), session="other"))
    await engine.ask(wire.TouchSession(1, "other", "decoding"))
    await streamed(engine, range(1 + STREAMED, 2 + STREAMED), "other")
    for _ in range(3):
        await made_room(engine, len(PASSED))
    assert set(in_memory(engine, stays)) == set(stays)


async def test_who_reads_its_own_anchors_again_leaves_what_is_between_them_behind(engine: Engine) -> None:
    await engine.ask(opening(apart=APART))
    await streamed(engine, range(1, 1 + STREAMED))
    await engine.release(await engine.acquire(*ANCHORS, session="s"))
    await made_room(engine, len(PASSED) - len(ANCHORS))
    assert in_memory(engine, range(1, 1 + STREAMED)) == sorted({*KEPT, *ANCHORS})


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
    ("sinks", "window", "apart", "named"),
    [
        (-1, 16, 0, "sink_tokens"),
        (0, 1 << 25, 0, "window_tokens"),
        (16, 0, 0, "sink_tokens"),
        (0, 16, -1, "anchor_tokens"),
        (0, 0, 16, "anchor_tokens"),
    ],
)
async def test_a_window_out_of_bounds_is_refused(
    engine: Engine, sinks: int, window: int, apart: int, named: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{named}: "):
        await engine.ask(wire.OpenSession(1, "s", "", "", sinks, window, apart))


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(0, 200_000), st.integers(1, 64))
def test_anchors_are_bounded_and_those_of_a_longer_chain_were_ones_before(
    apart: int, block_tokens: int, blocks: int, more: int
) -> None:
    attention = Attention(0, 16, apart)
    anchors = [n for n in range(0, blocks, -(-apart // block_tokens)) if attention.is_anchor(n, blocks, block_tokens)]
    assert len(anchors) <= ANCHORS_MAX
    assert len(anchors) > min(blocks * block_tokens // (apart + block_tokens), ANCHORS_MAX) // 2 - 1
    assert not any(attention.is_anchor(n + 1, blocks, block_tokens) for n in anchors if apart > block_tokens)
    longer = blocks + more
    assert all(
        attention.is_anchor(n, blocks, block_tokens)
        for n in range(blocks)[:2000]
        if attention.is_anchor(n, longer, block_tokens)
    )
    assert not Attention(0, 16).is_anchor(0, blocks, block_tokens)


async def test_anchors_between_sinks_and_window_stay(engine: Engine) -> None:
    await engine.ask(opening(apart=APART))
    await streamed(engine, range(1, 1 + STREAMED))
    await engine.store(101, 102)
    leaving = [n for n in PASSED if n not in ANCHORS]
    await made_room(engine, len(leaving))
    assert in_memory(engine, range(1, 1 + STREAMED)) == sorted([*KEPT, *ANCHORS])
    assert in_memory(engine, range(101, 103)) == [101, 102]
    told = json.loads((await engine.ask(wire.Explain(1, session="s"))).json)
    assert told["anchor_tokens"] == APART * TOKENS
    kept = {bytes.fromhex(head["digest"]) for head in told["heads"] if head["is_kept"]}
    assert kept == {digest(SINKS), *map(digest, ANCHORS)}
    assert bytes.fromhex(told["heads"][-1]["digest"]) == digest(STREAMED)
    acquired = await engine.acquire(ANCHORS[0], session="s")
    assert len(acquired.blocks) == 1
    await streamed(engine, range(1 + STREAMED, 3 + STREAMED))
    assert in_memory(engine, range(1, 3 + STREAMED))[-1] == 2 + STREAMED


async def test_a_stream_longer_than_memory_keeps_its_anchors_while_it_decodes(engine: Engine) -> None:
    await engine.ask(opening(apart=4 * APART))
    await engine.ask(wire.TouchSession(1, "s", "decoding"))
    engine.low.capacity_bytes = 2 * SLOTS * BLOCK_BYTES
    last = 5 * SLOTS
    await streamed(engine, range(1, 1 + last))
    anchors = [n for n in range(1 + SINKS, 1 + last - WINDOW) if (n - 1) % (4 * APART) == 0]
    assert {1, 2, *anchors, *range(1 + last - WINDOW, 1 + last)} <= set(in_memory(engine, range(1, 1 + last)))


async def test_anchors_thin_out(engine: Engine) -> None:
    """A stream of more anchors than a session may have keeps every second one."""
    many = 2 * ANCHORS_MAX
    await engine.core.node.tiers[0].backend.resize((many + SLOTS) * BLOCK_BYTES)
    await engine.ask(opening(apart=1))
    session = engine.core.node.sessions.find("a", "s")
    assert session is not None
    for number in range(1, 1 + many):
        await engine.store(number, session="s")
        assert len(session.kept) <= ANCHORS_MAX + 1
    stay = {1, 2, *range(1, 1 + many, 2), *range(1 + many - WINDOW, 1 + many)}
    await made_room(engine, many - len(stay))
    assert in_memory(engine, range(1, 1 + many)) == sorted(stay)


async def test_anchors_are_archived_and_remembered_with_their_places(engine: Engine) -> None:
    await engine.ask(opening(apart=APART))
    await streamed(engine, range(1, 1 + STREAMED))
    archiver, table, life = engine.core.cache.archiver, engine.core.node.sessions, engine.core.cache.life
    session = table.find("a", "s")
    assert session is not None
    chains = [[e.digest for e in chain] for chain in archiver.chains(session)]
    wanted = [KEPT[:SINKS], *([n] for n in ANCHORS), KEPT[SINKS:]]
    assert sorted(chains) == sorted(list(map(digest, chain)) for chain in wanted)
    life.publish(session)
    table.forget(session)
    again = life.find("a", session.secret, "s")
    assert again is not None
    assert again.attention == Attention(SINKS * TOKENS, WINDOW * TOKENS, APART * TOKENS)
    assert {(h.digest, n) for h, n in again.heads.items()} == {(digest(n), n) for n in (SINKS, *ANCHORS, STREAMED)}
    assert {h.digest for h in again.kept} == {digest(SINKS), *map(digest, ANCHORS)}
    await streamed(engine, range(1 + STREAMED, 1 + STREAMED + WINDOW))
    assert {h.digest for h in again.kept} == {digest(SINKS), *map(digest, [*ANCHORS, 10])}, "its places go on"


async def test_a_fork_has_its_parents_anchors(engine: Engine) -> None:
    await engine.ask(opening(apart=APART))
    await streamed(engine, range(1, 1 + STREAMED))
    await engine.ask(wire.OpenSession(1, "fork", "s"))
    parent, fork = (engine.core.node.sessions.find("a", name) for name in ("s", "fork"))
    assert parent is not None
    assert fork is not None
    assert (fork.attention, fork.kept, fork.heads) == (parent.attention, parent.kept, parent.heads)
    await engine.ask(wire.CloseSession(1, "s", archive=False))
    await made_room(engine, len(PASSED) - len(ANCHORS))
    assert in_memory(engine, range(1, 1 + STREAMED)) == sorted([*KEPT, *ANCHORS])


async def test_who_attends_to_all_of_it_joins_anchors(engine: Engine) -> None:
    await engine.ask(opening(apart=APART))
    await streamed(engine, range(1, 1 + STREAMED))
    await engine.ask(wire.OpenSession(1, "other"))
    await engine.ask(wire.Touch(1, SCOPE, b"".join(map(digest, range(1, 1 + STREAMED))), "other"))
    assert not any(e.is_cut for e in engine.core.node.index)


async def test_an_ended_stream_leaves_nothing_behind_that_counts(engine: Engine) -> None:
    await engine.ask(opening(apart=APART))
    await streamed(engine, range(1, 1 + STREAMED))
    await engine.store(101, 102)
    assert (await engine.ask(wire.CloseSession(1, "s", archive=False))).outcome is Outcome.ACCEPTED
    await made_room(engine, STREAMED)
    assert not in_memory(engine, range(1, 1 + STREAMED))
    assert in_memory(engine, range(101, 103)) == [101, 102]


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
