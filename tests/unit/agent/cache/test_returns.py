"""What leaves memory first: what requests and hints have shown to be of least use, where the pool asks for that."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.returns import SET_BACK
from kvstrata_agent.blocks.sessions import SessionState
from kvstrata_agent.blocks.signs import LOAD_S
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_agent.policy.expected_reuse import Victims
from kvstrata_agent.policy.pathology import Sign
from kvstrata_api import wire
from kvstrata_api.checksum import checksum
from support.agent.doubles import BLOCK_BYTES, SCOPE, bytes_of, digest, dram_tier
from support.agent.engine import SLOTS, Engine, close

pytestmark = pytest.mark.unit

LESSONS = 300
"""More than the records before the first classes."""
SHORT = SLOTS // 4


def played(
    play: Callable[[Engine], Coroutine[Any, Any, None]],
    eviction: str = "ReuseAware",
    placement: str = "ReuseInterval",
    cxl_slots: int = 0,
    admission: str = "Always",
    *,
    is_memory_all: bool = False,
) -> None:
    """With `is_memory_all` no tier is below it."""

    async def run() -> None:
        policy: dict[str, Any] = {
            "eviction": {"type": eviction, "highWatermarkPercent": 100, "lowWatermarkPercent": 99},
            "placement": {"type": placement},
            "admission": {"type": admission},
        }
        tiers = [dram_tier(SLOTS * BLOCK_BYTES)] if is_memory_all else None
        engine = await Engine(cxl_slots=cxl_slots, tiers=tiers, **policy).attach()
        try:
            await play(engine)
        finally:
            await close(engine)

    asyncio.run(run())


async def asked(engine: Engine, *numbers: int, session: str = "") -> None:
    await engine.ask(wire.Lookup(9, SCOPE, b"".join(map(digest, numbers)), session))


async def taught(engine: Engine) -> None:
    """Chat comes back with a longer prompt after 20 s; what comes once never does."""
    for i in range(LESSONS):
        first = 10_000 + 10 * i
        kind = "chat" if i % 2 else "once"
        await engine.ask(wire.OpenSession(6, f"{kind}-{i}", "", kind))
        await asked(engine, *range(first, first + 4), session=f"{kind}-{i}")
        engine.clock.now_s += 20.0
        if kind == "chat":
            await asked(engine, *range(first, first + 6), session=f"{kind}-{i}")
        engine.clock.now_s += 40.0
        await engine.attach()


def marks(engine: Engine, *numbers: int) -> list[int]:
    found = [engine.core.node.index.find(*engine.key(n)) for n in numbers]
    return [entry.mark for entry in found if entry is not None]


def in_memory(engine: Engine, *numbers: int) -> list[bool]:
    node = engine.core.node
    found = [node.index.find(*engine.key(n)) for n in numbers]
    return [e is not None and e.residence(node.tiers[0]) is not None for e in found]


def block(engine: Engine, number: int) -> Entry:
    entry = engine.core.node.index.find(*engine.key(number))
    assert entry is not None
    return entry


async def requested(engine: Engine, name: str, kind: str, *numbers: int) -> None:
    """A request of a new session: looked up, computed and stored."""
    await engine.ask(wire.OpenSession(6, name, "", kind))
    await asked(engine, *numbers, session=name)
    await engine.store(*numbers, session=name)


async def stored_chat_then_once(engine: Engine) -> None:
    """A chat's chain, then one that never comes back, and then so many others that one of the two has to leave."""
    await taught(engine)
    for first, kind in ((101, "chat"), (201, "once")):
        await requested(engine, kind, kind, *range(first, first + SHORT))
        engine.clock.now_s += 1.0
    for first in (301, 401, 501):
        await requested(engine, f"chat {first}", "chat", *range(first, first + SHORT))


def test_a_chain_that_returns_outlives_a_later_one_that_does_not() -> None:
    async def play(engine: Engine) -> None:
        await stored_chat_then_once(engine)
        assert all(in_memory(engine, *range(101, 101 + SHORT)))
        assert not any(in_memory(engine, *range(201, 201 + SHORT)))

    played(play)


def refused(engine: Engine, reason: str) -> float | None:
    registry = engine.core.node.counters._instruments.registry
    return registry.get_sample_value(
        "kvstrata_refused_blocks_total", {"pool": "pool", "node": "node", "reason": reason}
    )


@pytest.mark.parametrize("eviction", ["ReuseAware", "LeafLRU"])
def test_a_prompt_longer_than_the_only_tier_keeps_its_beginning(eviction: str) -> None:
    async def play(engine: Engine) -> None:
        numbers = range(1, 3 * SLOTS + 1)
        await asked(engine, *numbers)
        for first in range(1, 3 * SLOTS + 1, 5):
            if len(await engine.store(*range(first, min(first + 5, 3 * SLOTS + 1)))) < 5:
                break

        assert in_memory(engine, *numbers) == [n <= SLOTS for n in numbers]

    played(play, eviction, is_memory_all=True)


def test_what_comes_is_declined_where_what_is_there_is_worth_more() -> None:
    async def play(engine: Engine) -> None:
        await taught(engine)
        for first in range(101, 501, 100):
            await requested(engine, f"chat {first}", "chat", *range(first, first + SHORT))
        chats = [n for first in range(101, 501, 100) for n in range(first, first + SHORT)]
        assert all(in_memory(engine, *chats))

        await requested(engine, "once", "once", *range(601, 601 + SHORT))
        assert all(in_memory(engine, *chats))
        assert refused(engine, "declined") == SHORT
        assert "of more use" in engine.core.cache.explainer.block(*engine.key(601))["history"][-1]["reason"]

        await requested(engine, "chat", "chat", *range(701, 701 + SHORT))
        assert all(in_memory(engine, *range(701, 701 + SHORT)))
        assert refused(engine, "declined") == SHORT

    played(play, is_memory_all=True)


def test_what_an_engine_expects_back_is_not_declined() -> None:
    async def play(engine: Engine) -> None:
        await taught(engine)
        for first in range(101, 501, 100):
            await requested(engine, f"chat {first}", "chat", *range(first, first + SHORT))
        await engine.ask(wire.OpenSession(6, "once", "", "once"))
        await asked(engine, *range(601, 601 + SHORT), session="once")
        await engine.ask(wire.Retain(7, "once", 1.0))
        await engine.store(*range(601, 601 + SHORT), session="once")
        assert all(in_memory(engine, *range(601, 601 + SHORT)))

    played(play, is_memory_all=True)


def test_by_last_use_the_earlier_one_leaves_whatever_was_seen() -> None:
    async def play(engine: Engine) -> None:
        await stored_chat_then_once(engine)
        assert not any(in_memory(engine, *range(101, 101 + SHORT)))
        assert all(in_memory(engine, *range(201, 201 + SHORT)))

    played(play, "LeafLRU")


@pytest.mark.parametrize(("placement", "expected"), [("ReuseInterval", "nvme"), ("Cascade", "cxl")])
def test_what_is_worth_less_than_what_leaves_the_next_tier_goes_further_down(placement: str, expected: str) -> None:
    async def play(engine: Engine) -> None:
        await taught(engine)
        node = engine.core.node
        dram, cxl, _ = node.tiers
        eviction = node.spec.policy.eviction.model_copy(update={"low_watermark_percent": 0})  # It has no room.
        node.spec = node.spec.model_copy(update={"policy": node.spec.policy.model_copy(update={"eviction": eviction})})
        cxl.price.per_s = 10.0  # What leaves it is used ten times a second; a chat comes back after 20 s.
        await requested(engine, "chat", "chat", 101, 102)
        await engine.core.cache.evictor.evict(dram, EvictionRequest(dram.backend.capacity_bytes, "room"))
        assert [r.tier.name for r in block(engine, 102).residences] == [expected]

    played(play, placement=placement, cxl_slots=8)


async def evicted(engine: Engine) -> list[tuple[str, ...]]:
    """Where a chat's blocks lie, and those of one that never returns, once memory had to make room time and again."""
    await taught(engine)
    dram = engine.core.node.tiers[0]
    for i in range(20):
        await requested(engine, f"chat {i}", "chat", 101 + 10 * i, 102 + 10 * i)
        await requested(engine, f"once {i}", "once", 1001 + 10 * i, 1002 + 10 * i)
        await engine.core.cache.evictor.evict(dram, EvictionRequest(dram.backend.capacity_bytes, "room"))
    found = [engine.core.node.index.find(*engine.key(n)) for n in (291, 1191)]
    return [tuple(r.tier.name for r in e.residences) if e is not None else () for e in found]


@pytest.mark.parametrize(("admission", "never_returns"), [("Auto", ()), ("Always", ("nvme",))])
def test_what_never_returns_is_not_written_where_the_pool_leaves_that_to_the_agent(
    admission: str, never_returns: tuple[str, ...]
) -> None:
    async def play(engine: Engine) -> None:
        assert await evicted(engine) == [("nvme",), never_returns]
        answer = await engine.ask(wire.WhyMiss(9, SCOPE, digest(1191)))
        assert ("spared the write" in answer.json) == (admission == "Auto")

    played(play, admission=admission)


def test_what_has_to_leave_memory_for_other_reasons_than_room_is_written_whatever_its_chances() -> None:
    async def play(engine: Engine) -> None:
        await taught(engine)
        await requested(engine, "once", "once", 201, 202)
        dram = engine.core.node.tiers[0]
        await engine.core.cache.evictor.evict(dram, EvictionRequest(dram.backend.capacity_bytes, "drain"))
        assert [r.tier.name for r in block(engine, 201).residences] == ["nvme"]

    played(play, admission="Auto")


def test_what_is_generated_is_worth_what_its_prompt_is() -> None:
    async def play(engine: Engine) -> None:
        await taught(engine)
        await requested(engine, "chat", "chat", 101, 102)
        await engine.store(103, 104, session="chat")
        prompt, made = block(engine, 102), block(engine, 104)
        assert made.mark == prompt.mark
        assert engine.core.node.returns.worth(made)[0] > 0.0

    played(play)


def test_a_session_that_is_expected_keeps_its_chain_until_that_time_has_passed() -> None:
    async def play(engine: Engine) -> None:
        node = engine.core.node
        await engine.ask(wire.OpenSession(6, "s", "", ""))
        await engine.store(1, 2, session="s")
        engine.clock.now_s += 60.0
        head = block(engine, 2)
        before, *_ = node.returns.worth(head)
        await engine.ask(wire.TouchSession(7, "s", SessionState.IDLE, 0, 5.0))
        assert node.returns.worth(head)[0] > before
        engine.clock.now_s += 5.0 + 60.0
        assert node.returns.worth(head)[0] <= before

    played(play)


def test_a_session_that_is_over_is_the_first_to_leave() -> None:
    async def play(engine: Engine) -> None:
        await engine.ask(wire.OpenSession(6, "s", "", ""))
        await engine.store(1, 2, session="s")
        await engine.ask(wire.CloseSession(8, "s", archive=False))
        assert engine.core.node.returns.worth(block(engine, 2))[0] == SET_BACK

    played(play)


def test_a_pruned_branch_leaves_at_once_and_parents_of_live_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a plan looks at few of many leaves."""
    monkeypatch.setattr("kvstrata_agent.cache.eviction_candidates.DRAWN", 1)
    monkeypatch.setattr("kvstrata_agent.policy.expected_reuse.Victims.SAMPLE", 1)

    async def play(engine: Engine) -> None:
        memory = engine.core.node.tiers[0]
        await engine.ask(wire.OpenSession(6, "root"))
        await engine.store(1, 2, session="root")
        for branch, first in (("pruned", 11), ("live", 21)):
            await engine.ask(wire.OpenSession(6, branch, "root"))
            await stored_behind(engine, 2, first, branch)
        await engine.ask(wire.CloseSession(8, "root", archive=False))
        assert block(engine, 2).used_at_s > 0.0, "branches continue it"
        for first in range(101, 101 + SLOTS - 4):
            await engine.store(first)
        before = engine.core.node.contents(memory).blocks
        assert before >= SLOTS - 1
        await engine.ask(wire.TouchSession(7, "live", "decoding"))
        await engine.ask(wire.CloseSession(8, "pruned", archive=False))
        await engine.core.cache.evictor.evict(memory, EvictionRequest(1, "room"))
        assert in_memory(engine, 11, 1, 2, 21) == [False, True, True, True], "in one step, and nothing else for it"
        assert engine.core.node.contents(memory).blocks == before - 1
        await engine.core.cache.evictor.evict(memory, EvictionRequest(memory.backend.capacity_bytes, "room"))
        assert in_memory(engine, 1, 2, 21) == [True, True, True], "a live branch runs through them"
        assert engine.core.node.contents(memory).blocks == 3

    played(play)


async def stored_behind(engine: Engine, parent: int, number: int, session: str) -> None:
    """One block that continues another one."""
    reserved = await engine.ask(wire.Reserve(2, SCOPE, digest(parent), digest(number), session))
    (slot,) = reserved.slots
    held = {r.id: r for r in engine.core.node.reservations.owned(1)}[slot.reservation]
    assert held.tier.backend.mappable is not None
    held.tier.backend.mappable.view(held.slot)[:BLOCK_BYTES] = bytes_of(number)
    sums = checksum(bytes_of(number), digest(number), reserved.epoch, slot.stamp)
    assert (await engine.ask(wire.Publish(3, (slot.reservation,), (sums,)))).results == b"\x01"


def test_asking_for_a_load_of_what_was_just_looked_up_is_no_second_use() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(1, 2, 3)
        await asked(engine, 1, 2, 3)
        before = marks(engine, 1, 2, 3)
        await engine.acquire(1, 2)
        await engine.acquire(3)
        assert before == marks(engine, 1, 2, 3)

    played(play)


def test_a_load_without_a_lookup_is_a_use_of_its_own() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(1, 2, 3)
        before = marks(engine, 1, 2, 3)
        engine.clock.now_s += 60.0
        await engine.acquire(1, 2, 3)
        assert not set(before) & set(marks(engine, 1, 2, 3))

    played(play)


def test_a_writers_question_is_no_use_and_a_polling_engines_is_one() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(1, 2, 3)
        await asked(engine, 1, 2, 3)
        before = marks(engine, 1, 2, 3)
        for _ in range(5):
            engine.clock.now_s += 1.0
            await asked(engine, 1, 2, 3)
        assert before == marks(engine, 1, 2, 3)
        engine.clock.now_s += 60.0
        keys = b"".join(map(digest, (1, 2, 3)))
        await engine.ask(wire.Lookup(9, SCOPE, keys, is_probe=True, is_use=False))
        assert before == marks(engine, 1, 2, 3)
        await asked(engine, 1, 2, 3)
        assert not set(before) & set(marks(engine, 1, 2, 3))

    played(play)


def test_what_is_asked_for_after_a_load_or_a_store_is_used_again() -> None:
    async def play(engine: Engine) -> None:
        async def is_new_use() -> bool:
            before = marks(engine, 1, 2)
            engine.clock.now_s += 0.1
            await asked(engine, 1, 2, 3)
            return before != marks(engine, 1, 2)

        await engine.store(1, 2)
        assert await is_new_use()
        assert not await is_new_use()
        await engine.release(await engine.acquire(1, 2))
        assert await is_new_use()
        assert not await is_new_use()
        await engine.store(3)
        assert await is_new_use()
        assert not await is_new_use()
        engine.core.node.is_draining = True
        await engine.store(4)
        assert not await is_new_use(), "that was of another chain"

    played(play)


def test_what_is_touched_is_used_however_often() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(1, 2)
        for i in range(10):
            engine.clock.now_s += 1.0
            await engine.store(100 * i + 101, 100 * i + 102)
            await engine.ask(wire.Touch(9, SCOPE, digest(1) + digest(2)))
        engine.clock.now_s += 0.5
        await engine.ask(wire.Touch(9, SCOPE, digest(1) + digest(2)))
        worth = engine.core.node.returns.worth
        assert worth(block(engine, 2)) > worth(block(engine, 1002))

    played(play)


def test_explain_names_the_record_that_a_block_is_judged_by() -> None:
    async def play(engine: Engine) -> None:
        await taught(engine)
        await requested(engine, "chat", "chat", 101, 102, 103)
        known = engine.core.cache.explainer.block(*engine.key(102))["expected_reuse"]
        assert known["policy"] == "ReuseAware"
        assert known["uses_per_s"] > 0.0
        assert known["point"] == "own"
        assert known["turn"] == 0

    played(play)


async def low_and_old(engine: Engine, old: int, count: int) -> Tier:
    """A chain in the lower tier alone, and one that is in both and was used later; returns the lower tier."""
    await requested(engine, "old", "chat", *range(old, old + count))
    await engine.push_down()
    engine.clock.now_s += 5.0
    await requested(engine, "new", "chat", *range(101, 101 + SLOTS - 4))
    await engine.push_down()
    await engine.release(await engine.acquire(*range(101, 101 + SLOTS - 4)))
    return engine.core.node.tiers[1]


def test_where_a_chain_came_down_its_end_alone_may_leave() -> None:
    async def play(engine: Engine) -> None:
        low = await low_and_old(engine, 1, 8)
        contents = engine.core.node.contents(low)
        assert [contents.is_queued(block(engine, n)) for n in range(1, 9)] == [False] * 7 + [True]
        assert all(contents.is_queued(block(engine, n)) for n in range(101, 101 + SLOTS - 4)), "memory has them too"
        await requested(engine, "longer", "chat", 9)
        assert not contents.is_queued(block(engine, 8))

    played(play)


def test_what_nothing_continues_any_more_may_leave() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(1, 2, 3)
        await engine.push_down()
        node = engine.core.node
        node.drop_block(block(engine, 3), "dropped")
        contents = node.contents(node.tiers[1])
        assert [contents.is_queued(block(engine, n)) for n in (1, 2)] == [False, True]

    played(play)


def test_what_the_evicted_end_of_a_chain_continued_may_leave() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(1, 2, 3, 4)
        node = engine.core.node
        node.evict([block(engine, 4), block(engine, 3)], node.tiers[0], "room")
        contents = node.contents(node.tiers[0])
        assert [contents.is_queued(block(engine, n)) for n in (1, 2)] == [False, True]

    played(play)


@pytest.mark.parametrize("seed", range(8))
def test_copies_of_what_memory_has_do_not_hide_a_leaf_from_a_small_sample(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chain that memory has too each block may leave a slower tier, of one that it has not only the last."""
    monkeypatch.setattr("kvstrata_agent.cache.eviction_candidates.DRAWN", 2)
    monkeypatch.setattr(Victims, "SAMPLE", 2)

    async def play(engine: Engine) -> None:
        low, node = await low_and_old(engine, 1, 1), engine.core.node
        node.returns.random.seed(seed)
        candidates = TierCandidates(
            node.index, low, EvictionRequest(BLOCK_BYTES, "room"), engine.clock.now_s, node.returns
        )
        assert candidates.pop() is block(engine, 1)

    played(play)


@pytest.mark.parametrize("eviction", ["ReuseAware", "LeafLRU"])
def test_what_a_load_has_not_come_to_yet_outlives_copies_of_what_it_has_read(eviction: str) -> None:
    chain = range(1, 2 * SLOTS + 1)
    read = chain[: SLOTS // 2]

    async def play(engine: Engine) -> None:
        for first in chain[:: SLOTS // 2]:
            await engine.store(*range(first, first + SLOTS // 2))
        await engine.push_down()
        engine.clock.now_s += 60.0
        await asked(engine, *chain)
        engine.clock.now_s += 1.0
        await engine.release(await engine.acquire(*read))
        node = engine.core.node
        returns = node.returns if node.returns.are_followed else None
        request = EvictionRequest(len(read) * BLOCK_BYTES, "room")
        candidates = TierCandidates(node.index, node.tiers[1], request, engine.clock.now_s, returns)

        assert {candidates.pop() for _ in read} == {block(engine, n) for n in read}

    played(play, eviction)


def test_a_read_is_part_of_the_use_that_a_lookup_began_unless_that_was_long_ago() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(1, 2)
        engine.clock.now_s += 60.0
        await asked(engine, 1, 2)
        asked_s = engine.clock.now_s
        engine.clock.now_s += LOAD_S / 2
        await engine.acquire(1)
        assert block(engine, 1).used_at_s == block(engine, 2).used_at_s == asked_s
        engine.clock.now_s += LOAD_S
        await engine.acquire(1)
        assert block(engine, 1).used_at_s == engine.clock.now_s

    played(play, "LeafLRU")


def test_a_prefetch_that_ends_after_its_prompt_was_asked_for_is_no_waste() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(1)
        engine.clock.now_s += 60.0
        await asked(engine, 1)
        engine.clock.now_s += 0.1
        engine.core.node.signs.raised([block(engine, 1)], "dram", for_reader=False)
        engine.clock.now_s += 0.1
        await engine.release(await engine.acquire(1))
        engine.core.node.signs.left(block(engine, 1), had_its_chance=False)
        assert not engine.core.node.signs._recent.counts[Sign.PREFETCH_WASTED]

    played(play)


def test_blocks_that_were_packed_are_asked_for_like_others() -> None:
    async def play(engine: Engine) -> None:
        await engine.store(*range(1, 9))
        before = marks(engine, *range(1, 9))
        await engine.push_down()
        index = engine.core.node.index
        index._in_use_max = 0
        engine.clock.now_s += 60.0
        index.pack(engine.clock.now_s)
        assert index.blocks(SCOPE).packed > 0
        await asked(engine, *range(1, 9))
        assert not set(before) & set(marks(engine, *range(1, 9)))

    played(play)


@pytest.mark.parametrize("is_used", [False, True])
def test_of_a_new_prompt_what_lies_above_the_watermark_is_the_first_to_leave(*, is_used: bool) -> None:
    """Whatever pieces it comes in, and whatever has left between them."""

    async def run() -> None:
        half = {"highWatermarkPercent": 50, "lowWatermarkPercent": 49}
        engine = await Engine(eviction=half, admission={"type": "Auto"}).attach()
        try:
            await engine.store(*range(1, SLOTS - 3))
            passing = [block(engine, n).passed is not None for n in range(1, SLOTS - 3)]
            assert passing == [False] * (SLOTS // 2) + [True] * (SLOTS // 2 - 4)

            end, node = block(engine, SLOTS - 4), engine.core.node
            eviction = node.spec.policy.eviction.model_copy(update={"high_watermark_percent": 100})
            policy = node.spec.policy.model_copy(update={"eviction": eviction})
            node.spec = node.spec.model_copy(update={"policy": policy})
            if is_used:
                end.used_at_s += 1.0
            await engine.store(SLOTS - 3, SLOTS - 2)
            assert [block(engine, n).passed is not None for n in (SLOTS - 3, SLOTS - 2)] == [not is_used] * 2
        finally:
            await close(engine)

    asyncio.run(run())
