"""The simulator itself: it runs, it tells the same story twice, and it finds what was broken on purpose."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

from sim.campaign import is_caught
from sim.defects import DEFECTS
from sim.run import Plan, run_seed
from support.runner.alone import process

pytestmark = pytest.mark.stateful

TESTS = Path(__file__).parent.parent
PLAN = Plan(operations=400)


@pytest.fixture(scope="module")
def simulator() -> Iterator[Executor]:
    """A process for simulated worlds: they replace clock, chance and sockets of the product in theirs."""
    with process() as executor:
        yield executor


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_breaks_nothing(simulator: Executor, seed: int) -> None:
    ran = simulator.submit(run_seed, seed, PLAN).result()

    assert not ran.violations
    assert ran.tally.operations >= PLAN.operations
    assert ran.tally.hits > 0


def trace(seed: int, hash_seed: str) -> str:
    """Trace of a seed in a process of its own."""
    command = [sys.executable, "-m", "sim", "--replay", str(seed), "--operations", "400"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"seed {seed}: trace ")]
    return line


def test_a_seed_replays_exactly_in_another_process(simulator: Executor) -> None:
    ran = simulator.submit(run_seed, 3, PLAN).result()

    assert {trace(3, "1"), trace(3, "2")} == {f"seed 3: trace {ran.digest}"}, "whatever ran before it"


def test_seeds_differ(simulator: Executor) -> None:
    one, two = (simulator.submit(run_seed, seed, PLAN).result() for seed in (1, 2))

    assert one.digest != two.digest


@pytest.mark.parametrize("what", DEFECTS)
def test_a_seeded_defect_is_found(simulator: Executor, what: str) -> None:
    assert simulator.submit(is_caught, what).result()
