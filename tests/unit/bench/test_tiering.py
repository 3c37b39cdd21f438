"""The simulation of bench.tiering: queues, tiers and their figures."""

import json
from itertools import count

import pytest

from bench.policy.synthetic import synthetic
from bench.tiering import flash
from bench.tiering.__main__ import ALONE, CASCADE, LIMIT, OURS, PEERS, Cell, contenders, main, summary
from kvstrata_agent.replay.chains import Request, Trace, build
from kvstrata_agent.replay.machine import TIERS, Engine, Machine
from kvstrata_agent.replay.planning import fitting
from kvstrata_agent.replay.simulation import Outcome, Simulation
from kvstrata_agent.replay.tiers import Ours, Rules, Source, Tiers, WriteThrough

pytestmark = pytest.mark.unit

ENGINE = Engine()
MACHINE = Machine(ENGINE)


def _trace(*requests: tuple[float, range]) -> Trace:
    return build("made", 16, [Request(at_s, tuple(blocks)) for at_s, blocks in requests])


def _run(trace: Trace, capacities: list[int], name: str = CASCADE) -> Outcome:
    contender = contenders(1.0)[name]
    return Simulation(trace, 1.0, MACHINE, capacities, contender.make, contender.policy).run()


def _always(tier: int, blocks: int) -> bool:
    return True


def test_a_prompt_alone_takes_its_own_time_and_a_later_one_waits_for_it() -> None:
    trace = _trace((0.0, range(1000)), (0.0, range(2000, 3000)))
    first_s, second_s = _run(trace, [10_000]).ttft_s

    assert first_s == pytest.approx(ENGINE.load.compute_s(0, 16_000))
    assert second_s >= 2 * first_s


def test_attention_makes_the_second_half_of_a_prompt_slower() -> None:
    load = ENGINE.load

    assert load.compute_s(0, 20_000) == pytest.approx(load.compute_s(0, 10_000) + load.compute_s(10_000, 10_000))
    assert load.compute_s(10_000, 10_000) > 1.2 * load.compute_s(0, 10_000)


def test_what_a_tier_has_is_loaded_at_its_rate_and_not_computed() -> None:
    trace = _trace((0.0, range(1000)), (10.0, range(5000, 6000)), (20.0, range(1000)))
    outcome = _run(trace, [1000, 4000])

    assert outcome.fetched_blocks == [0, 1000, 0, 0]
    expected_s = 16_000 * ENGINE.kv_bytes_per_token / TIERS[1].read_bytes_per_s + TIERS[1].latency_s + ENGINE.step_s
    assert outcome.ttft_s[2] == pytest.approx(expected_s)
    assert outcome.computed_tokens == 32_000 + 1


def test_loads_of_one_tier_wait_for_each_other() -> None:
    trace = _trace(
        (0.0, range(1000)), (10.0, range(2000, 3000)), (20.0, range(4000, 5000)),
        (30.0, range(1000)), (30.0, range(2000, 3000)),
    )  # fmt: skip
    *_, one_s, both_s = _run(trace, [1000, 4000]).ttft_s

    load_s = 16_000 * ENGINE.kv_bytes_per_token / TIERS[1].read_bytes_per_s
    assert both_s - one_s == pytest.approx(load_s, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Tiers, WriteThrough, Ours])
def test_no_level_holds_more_than_it_may_and_slower_ones_hold_what_faster_ones_do(make: type[Tiers]) -> None:
    trace = synthetic(200)
    tiers = make(trace, [300, 1000, 3000], _always)
    for number, path in enumerate(trace.paths):
        tiers.asked(number, path, trace.at_s[number])
        found = tiers.sources(path)
        assert [s.tier for s in found[1:] if s.blocks <= 0] == []
        tiers.used(number, path, trace.at_s[number])
        assert all(tiers.used_blocks(tier) <= level.capacity_blocks for tier, level in enumerate(tiers.levels))
    for faster, slower in zip(tiers.levels, tiers.levels[1:], strict=False):
        assert all(a <= b for a, b in zip(faster.held, slower.held, strict=True))


def test_a_copy_that_stayed_is_not_written_again() -> None:
    written: list[tuple[int, int]] = []

    def write(tier: int, blocks: int) -> bool:
        written.append((tier, blocks))
        return True

    trace = _trace((0.0, range(100)), (1.0, range(200, 300)), (2.0, range(100)), (3.0, range(200, 300)))
    tiers = Tiers(trace, [100, 1000], write)
    for number, path in enumerate(trace.paths):
        tiers.used(number, path, float(number))

    assert written == [(1, 100), (1, 100)]
    assert tiers.sources(trace.paths[0]) == [Source(1, 100)]


def test_what_cannot_be_written_in_time_is_lost() -> None:
    def refuse(tier: int, blocks: int) -> bool:
        return False

    trace = _trace((0.0, range(100)), (1.0, range(200, 300)))
    tiers = Tiers(trace, [100, 1000], refuse)
    for number, path in enumerate(trace.paths):
        tiers.used(number, path, float(number))

    assert tiers.sources(trace.paths[0]) == []
    assert tiers.sources(trace.paths[1]) == [Source(0, 100)]


def test_prompts_over_the_context_are_left_out() -> None:
    kept, left_out = fitting(_trace((0.0, range(100)), (1.0, range(500)), (2.0, range(100))), 1600, 10)

    assert (len(kept.paths), left_out) == (2, 1)


def test_figures_are_of_ours_over_the_best_of_the_others() -> None:
    peers = dict(zip(PEERS, (9.0, 4.0, 5.0, 6.0), strict=True))
    cells = [
        Cell("t", "A 0.3", peers | {OURS: 2.0, LIMIT: 1.0}, peers | {OURS: 3.0, LIMIT: 1.0}),
        Cell("t", "C 1.0", peers | {OURS: 8.0, LIMIT: 1.0}, peers | {OURS: 3.0, LIMIT: 1.0}),
    ]
    found = summary(cells)

    assert found["p99_ttft_vs_best_peer"] == pytest.approx((0.5 + 2.0) / 2)
    assert found["worst_p99_ttft_vs_best_peer"] == pytest.approx(2.0)
    assert found["worst_p99_ttft_vs_engine_alone"] == pytest.approx(8 / 9)
    assert found["limit_p99_ttft_vs_best_peer"] == pytest.approx(0.25)
    assert found["mean_ttft_vs_best_peer"] == pytest.approx(0.75)
    assert found["limit_mean_ttft_vs_best_peer"] == pytest.approx(0.25)
    assert cells[0].best_peer != ALONE


@pytest.mark.slow
def test_the_last_line_has_the_agreed_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny"]) == 0

    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["bench"], last["quick"]) == ("tiering", True)
    assert {"p99_ttft_vs_best_peer", "worst_p99_ttft_vs_engine_alone"} <= last["values"].keys()


@pytest.mark.parametrize("arguments", [["--hbm-percent", "0"], ["--requests", "0"], ["--nvme-gb-per-s", "-1"]])
def test_a_size_that_is_none_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def _once_and_again(rounds: int = 1500) -> Trace:
    """In each round ten prompts that never come again, and one of 20 conversations goes on: longer, so it is known."""
    requests, blocks = [], count(10_000)
    talks: list[list[int]] = [[next(blocks) for _ in range(64)] for _ in range(20)]
    for i in range(rounds):
        at_s = 10.0 * i
        requests += [(at_s + 0.1 * k, [next(blocks) for _ in range(4)]) for k in range(10)]
        talks[i % 20].append(next(blocks))
        requests.append((at_s + 5.0, talks[i % 20]))
    return build("once and again", 16, [Request(at_s, tuple(prompt)) for at_s, prompt in requests])


@pytest.mark.slow
def test_what_never_comes_again_is_hardly_written_to_flash() -> None:
    cell = flash.measure(_once_and_again(), 1)

    assert cell.flows[flash.OURS].written < cell.flows[flash.ALL].written / 1.4
    assert cell.spared(flash.OURS) >= 7
    assert cell.lost_points(flash.OURS) <= flash.LOSS_POINTS / 2


@pytest.mark.slow
@pytest.mark.parametrize("size_percent", [1, 10])
def test_the_limit_writes_least_for_each_block_read(size_percent: int) -> None:
    cell = flash.measure(synthetic(200), size_percent)

    assert cell.flows[flash.LIMIT].written_per_read <= cell.flows[flash.ALL].written_per_read


@pytest.mark.slow
def test_declined_blocks_leave_those_that_flash_has_of_the_same_run() -> None:
    trace = _once_and_again(300)
    tiers = Ours(trace, [300, 4500], _always, rules=Rules(memories=1))
    for number, path in enumerate(trace.paths):
        tiers.asked(number, path, trace.at_s[number])
        tiers.used(number, path, trace.at_s[number])
        slow, fast = tiers.levels[1], tiers.levels[0]
        in_flash = [held - quick for held, quick in zip(slow.held, fast.held, strict=True)]
        assert all(blocks <= stored for blocks, stored in zip(in_flash, tiers.stored[1], strict=True)), number


@pytest.mark.slow
@pytest.mark.parametrize(("eviction", "is_spared"), [("ReuseAware", True), ("LeafLRU", False)])
def test_writes_are_spared_only_where_the_agent_learns_what_returns(
    eviction: str, *, is_spared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, under any policy, where hardly anything is ever read: that is left out here."""
    trace, offered = _once_and_again(300), 0

    def counted(tier: int, blocks: int) -> bool:
        nonlocal offered
        offered += blocks
        return True

    tiers = Ours(trace, [300, 4500], counted, rules=Rules(eviction=eviction, memories=1))
    monkeypatch.setattr(tiers._pollution, "judge", lambda _now_s: None)
    for number, path in enumerate(trace.paths):
        tiers.asked(number, path, trace.at_s[number])
        tiers.used(number, path, trace.at_s[number])

    everything = trace.unique_blocks - tiers.levels[0].used_blocks
    assert offered < everything / 1.5 if is_spared else offered >= everything


@pytest.mark.parametrize(("has_admission", "old", "new"), [(True, 60, 40), (False, 40, 60)])
def test_what_is_new_above_the_high_watermark_goes_down(*, has_admission: bool, old: int, new: int) -> None:
    trace = _trace((0.0, range(60)), (1.0, range(100, 160)), (2.0, range(100, 160)))
    tiers = Ours(trace, [1, 100, 1000], _always, rules=Rules(eviction="LeafLRU", has_admission=has_admission))
    for number, path in enumerate(trace.paths[:2]):
        tiers.used(number, path, float(number))

    assert [tiers.levels[1].held[run] for (run,) in trace.paths[:2]] == [old, new]
    assert tiers.used_blocks(2) == 20
    tiers.used(2, trace.paths[2], 2.0)
    assert tiers.levels[1].held[trace.paths[2][0]] == 60, "it came again"


def _played(trace: Trace, capacities: list[int], rules: Rules) -> tuple[Ours, int]:
    """Also how many blocks were found."""
    tiers = Ours(trace, capacities, _always, rules=rules)
    return tiers, sum(tiers.play(trace))


@pytest.mark.parametrize("eviction", ["LeafLRU", "ReuseAware"])
def test_what_lay_above_on_arrival_leaves_memory_first_and_the_rest_in_its_turn(eviction: str) -> None:
    trace = _trace((0.0, range(60)), (5.0, range(100, 160)), (6.0, range(200, 210)), (10.0, range(60)))
    tiers, found = _played(trace, [100, 1000], Rules(eviction=eviction, engine_levels=0, memories=1))

    assert found == 60
    assert tiers.sources(trace.paths[1]) == [Source(0, 40), Source(1, 20)], "what is newer did not displace it"
    assert tiers.sources(trace.paths[2]) == [Source(1, 10)]


@pytest.mark.parametrize("eviction", ["LeafLRU", "ReuseAware"])
def test_what_waits_to_leave_memory_first_has_its_turn_in_the_tier_below(eviction: str) -> None:
    trace = _trace((0.0, range(60)), (5.0, range(100, 160)))
    tiers, _ = _played(trace, [100, 1000], Rules(eviction=eviction, engine_levels=0, memories=1, full_part=1.3))
    tiers.levels[0].insert(trace.paths[1])
    memory, below = tiers.levels
    (run,) = trace.paths[1]

    assert (tiers.passing_blocks(memory, run), tiers.passing_blocks(below, run)) == (20, 0)


@pytest.mark.parametrize("eviction", ["LeafLRU", "ReuseAware"])
@pytest.mark.parametrize("oldest", [0, 1, 2])
def test_of_equal_worth_the_least_recently_used_leaves(eviction: str, oldest: int) -> None:
    """All three were used a hundred seconds ago and come in turn; ages that near each other are one."""
    order = [oldest, (oldest + 1) % 3, (oldest + 2) % 3]
    requests = [(0.01 * i, range(100 * n, 100 * n + 30)) for i, n in enumerate((*range(3), *order))]
    trace = _trace(*requests, (100.0, range(400, 425)))
    tiers, _ = _played(trace, [100, 1000], Rules(eviction, engine_levels=0, memories=1, has_admission=False))

    assert [tiers.levels[0].held[trace.paths[n][0]] for n in range(3)] == [15 if n == oldest else 30 for n in range(3)]


def test_where_nothing_is_read_again_files_keep_what_they_have_of_a_loop() -> None:
    """A loop over twice as many blocks as there is room for: whoever writes all of it finds nothing of it again."""
    trace = _trace(*((4.0 * n, range(1000 * (n % 100), 1000 * (n % 100) + 40)) for n in range(600)))

    tiers, found = _played(trace, [200, 1600], Rules("LeafLRU", engine_levels=0, memories=1))
    _, nothing = _played(trace, [200, 1600], Rules("LeafLRU", engine_levels=0, memories=1, has_admission=False))
    assert found > 0.03 * trace.accesses
    assert nothing == 0
    assert tiers.used_blocks(1) <= 1600


@pytest.mark.parametrize("eviction", ["LeafLRU", "ReuseAware"])
@pytest.mark.parametrize(("new", "step", "kept"), [(10, 28, 60), (90, 7, 60), (90, 28, 41), (90, 56, 32), (400, 28, 0)])
def test_a_step_that_is_more_than_an_eighth_of_a_tier_takes_places_of_others(
    eviction: str, new: int, step: int, kept: int
) -> None:
    """Of a tier of 112 blocks that may have 100: 60 are old, so 52 are free, and half of steps of 28 finds others."""
    trace = _trace((0.0, range(60)), (5.0, range(100, 100 + new)))
    rules = Rules(eviction, engine_levels=0, memories=1, full_part=1.12, step_tokens=step * trace.block_tokens)
    tiers, _ = _played(trace, [100, 1000], rules)

    assert tiers.levels[0].held[trace.paths[0][0]] == kept
    assert tiers.levels[0].used_blocks == min(100, 60 + new)
    assert tiers.levels[1].used_blocks == 60 + new, "and nothing is lost"


@pytest.mark.parametrize("eviction", ["LeafLRU", "ReuseAware"])
def test_copies_of_what_memory_has_leave_files_whatever_continues_them(eviction: str) -> None:
    trace = _trace((0.0, range(40)), (5.0, range(50)))
    tiers = Ours(trace, [60, 80], _always, rules=Rules(eviction, engine_levels=0, memories=1))
    for number, path in enumerate(trace.paths):
        tiers.used(number, path, 5.0 * number)
    head, end = trace.paths[1]
    tiers.keep(1, head, 40)
    assert tiers.used_blocks(1) == 40
    tiers.levels[1].capacity_blocks = tiers.floors[1] = 20
    tiers.shrink(1)

    assert (tiers.stored[1][head], tiers.used_blocks(1)) == (20, 20)
    assert (tiers.levels[0].held[head], tiers.levels[0].held[end]) == (40, 10)


def test_a_tier_that_has_more_than_it_may_is_emptied_to_its_floor_at_once() -> None:
    trace = _trace((0.0, range(90)), (5.0, range(100, 111)), (10.0, range(200, 290)))
    tiers = Ours(trace, [100, 1000], _always, rules=Rules("LeafLRU", engine_levels=0, memories=1, low_part=0.8))
    used = []
    for number, path in enumerate(trace.paths):
        tiers.used(number, path, float(number))
        used.append(tiers.levels[0].used_blocks)

    assert used == [90, 80, 80]
