"""Laws of the queues of paths: who goes next, what is bounded, what a cancelled or boosted wait leaves."""

import asyncio
import itertools
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.movement.path import (
    BYTES_AT_ONCE,
    HALF_LIFE_S,
    PathLimiter,
    Paths,
    Priority,
    QueuedMove,
    Speed,
    TrafficClass,
)
from kvstrata_agent.movement.scheduler import PIECE_BYTES_MAX, MoveScheduler
from kvstrata_agent.policy.priority import PriorityClass
from kvstrata_api.errors import InvalidInputError, RetryableError
from support.agent.doubles import BLOCK_BYTES, LAYOUT_ID, SCOPE, Clock, DictBackend, digest, dram_tier, make_node
from support.agent.engine import Engine, close, steps_until

pytestmark = pytest.mark.unit

MIB = 1 << 20
WEIGHTS_PATH = {"pool": "pool", "node": "node", "source": "nvme", "target": "dram", "traffic": "weights"}


def turn(
    priority: Priority = Priority.DEMOTE, account: str = "a", weight: int = 100, size_bytes: int = MIB
) -> QueuedMove:
    return QueuedMove(priority, account, weight, size_bytes)


async def queued(gate: PathLimiter, turns: list[QueuedMove], served: list[QueuedMove]) -> list[asyncio.Task[None]]:
    """Let turns wait at a gate; each notes itself when it comes, and goes at once."""

    async def one(mine: QueuedMove) -> None:
        async with gate.enter(mine):
            served.append(mine)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(t)) for t in turns]
    await asyncio.sleep(0)
    return tasks


async def test_the_most_urgent_move_goes_first_and_never_more_than_the_width() -> None:
    gate, served, inside = PathLimiter(2), [], 0

    async def move(mine: QueuedMove) -> None:
        nonlocal inside
        async with gate.enter(mine):
            inside += 1
            assert inside <= 2
            served.append(mine.priority)
            await asyncio.sleep(0)
            inside -= 1

    asked = (Priority.ARCHIVE, Priority.ARCHIVE, Priority.DEMOTE, Priority.ONBOARD)
    await asyncio.gather(*(move(turn(p)) for p in asked))
    assert served == [Priority.ARCHIVE, Priority.ARCHIVE, Priority.ONBOARD, Priority.DEMOTE]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 8), st.sampled_from(PriorityClass)), min_size=20, max_size=80
    ),
    st.integers(1, 400),
    st.integers(1, 400),
)
def test_two_tenants_that_always_wait_are_served_by_their_weights_whatever_classes_they_name(
    asked: list[tuple[str, int, PriorityClass]], weight_a: int, weight_b: int
) -> None:
    weights = {"a": weight_a, "b": weight_b}
    turns = [
        QueuedMove(Priority.DEMOTE, who, weights[who], size * MIB, priority_class=named) for who, size, named in asked
    ]

    async def run() -> list[QueuedMove]:
        gate, served = PathLimiter(1), list[QueuedMove]()
        async with gate.enter(turn(Priority.ONBOARD, "c")):
            tasks = await queued(gate, turns, served)
        await asyncio.gather(*tasks)
        return served

    served = asyncio.run(run())
    left = {who: sum(t.account == who for t in served) for who in "ab"}
    at = dict.fromkeys("ab", 0.0)
    most = max(t.size_bytes / t.weight for t in served)
    for t in served:
        if not all(left.values()):
            break
        at[t.account] += t.size_bytes / t.weight
        left[t.account] -= 1
        assert abs(at["a"] - at["b"]) <= 2 * most


@given(st.lists(st.sampled_from(PriorityClass), min_size=2, max_size=120), st.randoms())
def test_a_higher_class_goes_first_and_none_waits_for_more_than_the_factors_say(
    asked: list[PriorityClass], dice: Random
) -> None:
    turns = [QueuedMove(Priority.PREFETCH, "a", 100, MIB, priority_class=named) for named in asked]

    async def run() -> list[QueuedMove]:
        gate, served = PathLimiter(1), list[QueuedMove]()
        async with gate.enter(turn(Priority.ONBOARD, "c")):
            tasks = await queued(gate, turns, served)
            given_up = dice.sample(tasks, len(tasks) // 4)
            for task in given_up:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        return served

    served = [move.priority_class for move in asyncio.run(run())]
    assert len(served) == len(asked) - len(asked) // 4
    assert served[0] == min(served)
    for name in PriorityClass:
        places = [-1, *(i for i, found in enumerate(served) if found is name)]
        for last, place in itertools.pairwise(places):
            overtaken = Counter(served[last + 1 : place])
            assert all(n <= other.factor / name.factor + 1 for other, n in overtaken.items())


async def test_a_waiting_move_that_becomes_more_urgent_goes_before_its_like() -> None:
    gate, served = PathLimiter(1), list[QueuedMove]()
    turns = [QueuedMove(Priority.PREFETCH, "a", 100, MIB, priority_class=PriorityClass.BATCH) for _ in range(3)]
    async with gate.enter(turn()):
        tasks = await queued(gate, turns, served)
        gate.boost(turns[2], Priority.PREFETCH, "a", 100, PriorityClass.INTERACTIVE)
    await asyncio.gather(*tasks)
    assert served == [turns[2], turns[0], turns[1]]


def weights(weight: int, size_bytes: int = MIB) -> QueuedMove:
    return QueuedMove(Priority.ARCHIVE, "model", weight, size_bytes, traffic=TrafficClass.WEIGHTS)


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(Priority), st.integers(1, 8)), min_size=20, max_size=80),
    st.integers(10, 400),
)
def test_weights_and_kv_that_always_wait_share_a_path_by_their_weights_whatever_the_priorities(
    asked: list[tuple[bool, Priority, int]], weight: int
) -> None:
    turns = [weights(weight, s * MIB) if is_load else turn(p, size_bytes=s * MIB) for is_load, p, s in asked]

    async def run() -> list[QueuedMove]:
        gate, served = PathLimiter(1), list[QueuedMove]()
        async with gate.enter(weights(weight, 1)):
            tasks = await queued(gate, turns, served)
        await asyncio.gather(*tasks)
        return served

    served = asyncio.run(run())
    left = {traffic: sum(t.traffic is traffic for t in served) for traffic in TrafficClass}
    at = dict.fromkeys(TrafficClass, 0.0)
    most = max(t.size_bytes / t.class_weight for t in served)
    for t in served:
        if not all(left.values()):
            break
        at[t.traffic] += t.size_bytes / t.class_weight
        left[t.traffic] -= 1
        assert abs(at[TrafficClass.KV] - at[TrafficClass.WEIGHTS]) <= 2 * most


async def test_a_class_that_was_idle_takes_its_share_from_then_on_and_no_more() -> None:
    gate, served = PathLimiter(1), list[QueuedMove]()
    async with gate.enter(turn()):
        tasks = await queued(gate, [turn(Priority.ONBOARD) for _ in range(12)], served)
    await steps_until(lambda: len(served) >= 4)
    tasks += await queued(gate, [weights(100) for _ in range(4)], served)
    await asyncio.gather(*tasks)
    assert [t.traffic for t in served[5:11]].count(TrafficClass.WEIGHTS) == 3, "every other one, neither all nor none"


async def test_a_flood_of_one_class_leaves_the_queue_of_the_other_open() -> None:
    gate = PathLimiter(1, waiting_max=1)
    async with gate.enter(turn()):
        tasks = await queued(gate, [weights(100)], [])
        with pytest.raises(RetryableError, match="1 moves wait"):
            await gate.enter(weights(100)).__aenter__()
        assert gate.is_full(TrafficClass.WEIGHTS)
        assert not gate.is_full()
        tasks += await queued(gate, [turn()], [])
        assert gate.waiting == 2
    await asyncio.gather(*tasks)


async def test_what_moves_before_a_load_counts_the_share_of_the_weights_and_not_all_of_them() -> None:
    gate = PathLimiter(1)
    async with gate.enter(turn()):
        tasks = await queued(gate, [weights(50) for _ in range(40)], [])
        tasks += await queued(gate, [turn() for _ in range(7)], [])
        assert gate.ahead_bytes(MIB) == (1 + 7 + 4) * MIB
    await asyncio.gather(*tasks)


async def test_an_account_that_was_idle_has_not_saved_up_anything() -> None:
    gate, served = PathLimiter(1), list[QueuedMove]()
    async with gate.enter(turn(account="a", size_bytes=MIB)):
        tasks = await queued(gate, [turn(account="a") for _ in range(8)], served)
    await steps_until(lambda: len(served) >= 4)
    tasks += await queued(gate, [turn(account="b") for _ in range(4)], served)
    await asyncio.gather(*tasks)
    assert {t.account for t in served[4:7]} == {"a", "b"}, "b goes beside a, not before all of it"


async def test_a_cancelled_wait_lets_the_next_one_through_and_a_full_queue_refuses() -> None:
    gate = PathLimiter(1, waiting_max=1)
    async with gate.enter(turn()):
        waiting = asyncio.create_task(gate.enter(turn()).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(RetryableError, match="1 moves wait"):
            await gate.enter(turn()).__aenter__()
        waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1), gate.enter(turn()):
        pass
    assert (gate.waiting, gate.waiting_bytes, gate.running_bytes) == (0, 0, 0)


async def test_a_move_whose_turn_does_not_come_in_time_is_refused() -> None:
    gate, late = PathLimiter(1), turn()
    late.within_s = 0.01
    async with gate.enter(turn()):
        with pytest.raises(RetryableError, match="without success"):
            await gate.enter(late).__aenter__()
    assert (gate.waiting, gate.waiting_bytes, gate.running_bytes) == (0, 0, 0)


async def test_bytes_under_way_are_bounded_and_two_moves_always_go() -> None:
    gate, running = PathLimiter(), []
    for size_bytes in (BYTES_AT_ONCE, BYTES_AT_ONCE):
        running.append(gate.enter(turn(size_bytes=size_bytes)))
        await running[-1].__aenter__()
    served: list[QueuedMove] = []
    tasks = await queued(gate, [turn(size_bytes=1)], served)
    assert not served
    await running[0].__aexit__(None, None, None)
    await asyncio.sleep(0)
    assert len(served) == 1
    await running[1].__aexit__(None, None, None)
    await asyncio.gather(*tasks)


class Crowd:
    """Moves that come, are boosted, give up and go at random."""

    def __init__(self, dice: Random) -> None:
        self.limiter = PathLimiter(2)
        self.dice = dice
        self.moves: list[tuple[QueuedMove, asyncio.Task[None]]] = []
        self.inside: list[asyncio.Event] = []

    def wait(self) -> None:
        mine = turn(self.dice.choice(list(Priority)), self.dice.choice("abc"), self.dice.randint(1, 9))
        mine.traffic = self.dice.choice(list(TrafficClass))
        mine.priority_class = self.dice.choice(list(PriorityClass))
        self.moves.append((mine, asyncio.create_task(self._pass(mine, asyncio.Event()))))

    def cancel(self) -> None:
        self.dice.choice(self.moves)[1].cancel()

    def boost(self) -> None:
        mine = self.dice.choice(self.moves)[0]
        self.limiter.boost(
            mine, self.dice.choice(list(Priority)), self.dice.choice("abc"), 5, self.dice.choice(list(PriorityClass))
        )

    def leave(self) -> None:
        while self.inside:
            self.inside.pop().set()

    async def end(self) -> None:
        while any(not task.done() for _, task in self.moves):
            self.leave()
            await asyncio.sleep(0)

    async def _pass(self, mine: QueuedMove, leaves: asyncio.Event) -> None:
        async with self.limiter.enter(mine):
            self.inside.append(leaves)
            await leaves.wait()


@given(st.lists(st.sampled_from(["wait", "cancel", "boost", "leave"]), max_size=60), st.randoms())
def test_whatever_happens_the_books_balance_and_nobody_waits_for_ever(steps: list[str], dice: Random) -> None:
    async def run() -> None:
        crowd = Crowd(dice)
        crowd.wait()
        for step in steps:
            getattr(crowd, step)()
            for _ in range(dice.randint(0, 2)):
                await asyncio.sleep(0)
        await crowd.end()
        assert (crowd.limiter.waiting, crowd.limiter.waiting_bytes, crowd.limiter.running_bytes) == (0, 0, 0)
        assert not any(crowd.limiter.queue(traffic)._heap for traffic in TrafficClass)

    asyncio.run(run())


def test_a_path_is_as_fast_as_it_was_while_it_moved_and_the_past_fades() -> None:
    speed = Speed()
    assert speed.bytes_per_s == 0.0
    for start_s in (0.0, 100.0):  # What lies between does not count.
        speed.begin(start_s)
        speed.begin(start_s)
        speed.end(start_s + 1.0, 100)
        speed.end(start_s + 1.0, 100)
    assert speed.bytes_per_s == pytest.approx(200, rel=0.1)
    speed.begin(200.0)
    speed.end(200.0 + 8 * HALF_LIFE_S, 0)
    assert speed.bytes_per_s < 2


async def test_paths_do_not_wait_for_each_other() -> None:
    paths = Paths()
    stuck = paths.between("dram", "cold").limiter
    moves = [stuck.enter(turn()) for _ in range(40)]
    tasks = [asyncio.create_task(move.__aenter__()) for move in moves]
    await asyncio.sleep(0)
    async with asyncio.timeout(1), paths.between("nvme", "dram").limiter.enter(turn()):
        pass
    assert paths.ahead_bytes("dram", "cold", MIB) == 40 * MIB
    assert paths.ahead_bytes("dram", "nvme", MIB) == 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class OneAtATime:
    """An engine whose blocks lie below memory, and come up one by one in the order that is noted."""

    def __init__(self, engine: Engine) -> None:
        self.order: list[bytes] = []
        self.goes = asyncio.Event()
        self._read = engine.low.read
        engine.low.read = self.read  # type: ignore[method-assign]
        self.limiter = engine.core.cache.mover.scheduler.paths.between("nvme", "dram").limiter
        self.limiter._width = 1
        found = (engine.core.node.index.find(SCOPE, digest(n)) for n in range(1, 6))
        self.entries = [e for e in found if e is not None]

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        self.order.append(record.key.digest)
        await self.goes.wait()
        await self._read(slot, record, into)


@pytest.mark.parametrize(("reads_on", "order"), [("yes", [1, 4, 2, 3, 5]), ("no", [1, 2, 3, 5, 4])])
async def test_what_a_reader_waits_for_overtakes_prefetches_until_the_reader_goes(
    reads_on: str, order: list[int]
) -> None:
    engine = await Engine().attach()
    await engine.store(1, 2, 3, 4, 5)
    await engine.push_down()
    assert isinstance(engine.low, DictBackend)
    moves = OneAtATime(engine)
    promoter = engine.core.cache.promoter
    assert all(promoter.start_prefetch(e) for e in moves.entries)
    await asyncio.sleep(0.01)
    reader = asyncio.create_task(promoter.promote(moves.entries[3], "a"))
    await asyncio.sleep(0.01)
    if reads_on == "no":
        reader.cancel()
        await asyncio.sleep(0.01)
    moves.goes.set()
    await asyncio.gather(*promoter._tasks, reader, return_exceptions=True)

    assert moves.order == [digest(n) for n in order]
    assert not engine.core.cache.mover.scheduler._waiting
    assert not engine.core.cache.mover.scheduler._readers
    await close(engine)


async def test_a_reader_that_goes_leaves_the_move_of_a_group_to_those_who_still_wait() -> None:
    node = make_node([dram_tier(BLOCK_BYTES)], Clock())
    entries = [node.index.begin(SCOPE, digest(n), b"", LAYOUT_ID, 0.0) for n in (1, 2, 3)]
    scheduler = MoveScheduler(node)
    limiter = scheduler.paths.between("remote", "dram").limiter
    limiter._width = 1

    async def moved() -> None:
        async with scheduler.enter(entries, "remote", "dram", Priority.PREFETCH, 1, None):
            pass

    def goes_as() -> tuple[Priority, str]:
        head = limiter.queue(TrafficClass.KV).head()
        assert head is not None
        return head.priority, head.account

    async with limiter.enter(turn()):
        moving = asyncio.create_task(moved())
        await asyncio.sleep(0)
        begun_as = goes_as()
        scheduler.wait_for(entries[0], "b")
        for entry in entries[1:]:
            scheduler.wait_for(entry, "a")
        assert goes_as() == (Priority.ONBOARD, "b"), "of equals whoever pays by now, whatever their names are"
        for entry in entries[1:]:
            scheduler.end_wait(entry)
        assert goes_as() == (Priority.ONBOARD, "b")
        scheduler.wait_for(entries[1], "c")
        assert goes_as() == (Priority.ONBOARD, "b")
        scheduler.end_wait(entries[0])
        assert goes_as() == (Priority.ONBOARD, "c")
        scheduler.end_wait(entries[1])
        assert goes_as() == begun_as
    await moving


async def test_readers_of_a_whole_group_have_it_ranked_once() -> None:
    node = make_node([dram_tier(BLOCK_BYTES)], Clock())
    entries = [node.index.begin(SCOPE, digest(n), b"", LAYOUT_ID, 0.0) for n in range(64)]
    scheduler = MoveScheduler(node)
    limiter = scheduler.paths.between("remote", "dram").limiter
    limiter._width = 1

    async def moved() -> None:
        async with scheduler.enter(entries, "remote", "dram", Priority.PREFETCH, 1, None):
            pass

    async with limiter.enter(turn()):
        moving = asyncio.create_task(moved())
        await asyncio.sleep(0)
        ranks, rank_alone = Counter[str](), scheduler._rank_alone

        def counted(entry: Entry, priority: Priority) -> tuple[Priority, str, int, PriorityClass]:
            ranks["ranks"] += 1
            return rank_alone(entry, priority)

        scheduler._rank_alone = counted  # type: ignore[method-assign]
        scheduler.wait_for_all(entries, "a")
        scheduler.end_wait_all(entries)
        assert ranks["ranks"] == 2 * len(entries)
    await moving
    assert not scheduler._readers


async def test_weights_of_a_model_and_loads_of_blocks_share_the_path_that_both_need() -> None:
    engine = await Engine().attach()
    await engine.store(1, 2, 3, 4, 5)
    await engine.push_down()
    moves = OneAtATime(engine)
    traffic = engine.core.cache.mover.scheduler

    async def piece() -> None:
        async with traffic.weights("nvme", "dram", "model", 50, BLOCK_BYTES):
            moves.order.append(b"weights")
            await asyncio.sleep(0)

    assert all(engine.core.cache.promoter.start_prefetch(e) for e in moves.entries)
    await asyncio.sleep(0.01)
    pieces = [asyncio.create_task(piece()) for _ in range(4)]
    await asyncio.sleep(0.01)
    moves.goes.set()
    await asyncio.gather(*engine.core.cache.promoter._tasks, *pieces)

    w = b"weights"
    assert moves.order == [digest(1), w, digest(2), digest(3), w, digest(4), digest(5), w, w]
    moved = engine.core.node.counters._instruments.counter("kvstrata_moved_bytes_total", **WEIGHTS_PATH)
    assert moved._value.get() == 4 * BLOCK_BYTES
    await close(engine)


@pytest.mark.parametrize(("size_bytes", "weight"), [(0, 1), (PIECE_BYTES_MAX + 1, 1), (1, 0), (1, 10_001)])
async def test_pieces_and_weights_out_of_bounds_are_refused(size_bytes: int, weight: int) -> None:
    engine = Engine()
    with pytest.raises(InvalidInputError, match=r"wanted$"):
        await engine.core.cache.mover.scheduler.weights("nvme", "dram", "model", weight, size_bytes).__aenter__()
    await close(engine)
