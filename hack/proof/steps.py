"""What is proved of a commit: steps, and the commands into which each is divided.

A command is what is done whole or not at all: a run that was stopped begins its last command again and no other one.
Times are of two cores (docs/evidence); those measured on this machine replace them as soon as there are some.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hardware import machine
from nodes.starting import missing

ROOT: Final = Path(__file__).resolve().parents[2]
FLEET_SEEDS: Final = 11_000
"""Of 1,000 operations, some 930 reads in each: enough for the 1e7 verified reads of I1 and the 10,000 seeds of I2."""
FLEET_PART: Final = 250
CHECKED_SEEDS: Final = 1_000
CHECKED_PART: Final = 50
MUTANT_SHARDS: Final = 40
SIMULATED_SEEDS: Final = 3_000
"""Simulated clusters of `adversity`, as in its full count."""
SOAK_MINUTES: Final = 120
LEVELS: Final = ("contract", "stateful", "sim", "crash", "faults", "threats", "adversity", "system", "peers")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a step."""

    name: str
    argv: tuple[str, ...]
    """`python` is the interpreter that runs this."""
    expected_s: float
    """Until one of its step has been measured."""

    @property
    def text(self) -> str:
        """As a reader of the report would type it."""
        return " ".join(self.argv)


@dataclass(frozen=True, slots=True)
class Step:
    """One claim with all commands that it needs."""

    name: str
    shows: str
    commands: tuple[Command, ...]
    goals: Mapping[str, int] = field(default_factory=dict)
    """Counts that its commands must reach together, by their names in the last lines."""
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: Callable[[], str | None] = str
    """What this machine lacks for it; empty when nothing."""


def steps(soak_minutes: int = SOAK_MINUTES) -> tuple[Step, ...]:
    """All steps, in the order in which they run: short ones and those that find most come first."""
    return (
        Step("tests", "lint, types, contracts, drift and every test of a machine without GPU or nodes", _tests()),
        Step(
            "invariants",
            "I3 and I5 to I11 at full counts, and the controls of I1, I2 and I4 (docs/invariants.md)",
            _invariants(),
        ),
        Step(
            "fleets",
            "I1 and I2: simulated fleets, every byte that is read compared",
            _seeds("sim --operations 1000 --stop", FLEET_SEEDS, FLEET_PART, 0.8),
            {"seeds": 10_000, "reads": 10_000_000},
        ),
        Step(
            "checked-fleets",
            "I4: the same with repeated messages, all tables compared after each operation",
            _seeds("sim --operations 1000 --check-every 1 --repeats --stop", CHECKED_SEEDS, CHECKED_PART, 1.5),
            {"seeds": 1_000, "operations": 1_000_000},
        ),
        Step(
            "threats",
            "T1 to T15 at full counts (docs/isolation.md)",
            tuple(_full("threats", f"T{number}", 110) for number in range(1, 16)),
        ),
        Step("adversity", "the operator against an API server that lies, killed at every call", _adversity()),
        Step("hour", "dashboards, alerts, spans and accounts over a scripted hour", (_module("hour", "hour", 260),)),
        Step(
            "soak",
            "the whole under load and random faults: outputs, bounds of time, growth, conditions, metrics",
            (_module("soak", f"soak --minutes {soak_minutes}", 60 * soak_minutes + 120),),
        ),
        Step(
            "mutants",
            "seeded defects, each caught by the tests that it names",
            tuple(
                _module(f"shard-{k}", f"checks.mutants --jobs 2 --shard {k}/{MUTANT_SHARDS}", 120)
                for k in range(1, MUTANT_SHARDS + 1)
            ),
        ),
        Step(
            "laws",
            "laws on 5,000 new examples each",
            _laws(),
            environment={"KVSTRATA_HYPOTHESIS_PROFILE": "soak"},
        ),
        Step("guest", "CXL and NVMe tiers under a real kernel on an emulated machine", (_pytest("guest", 600),)),
        Step(
            "images",
            "images built twice with equal digests, and every process run from its image",
            (_module("make", "images", 600), _pytest("images", 600)),
            lacks=_root,
        ),
        Step("node", "the chart on real kubelets and containerd", (_pytest("node", 600),), lacks=missing),
        Step(
            "peers",
            "every engine and version in environments of their own",
            (_pytest("peers", 3_000),),
            environment={"KVSTRATA_PEERS": "all"},
        ),
        Step(
            "gpu",
            "HBM tier, paged KV and Triton kernels on a device",
            (Command("gpu", ("make", "test-gpu"), 120),),
            lacks=_device,
        ),
    )


def environment(step: Step) -> dict[str, str]:
    """Environment of a step's commands: modules come from this checkout, whatever is installed."""
    places = ("crds", "dashboards", "metadata", "operator", "agent", "hack", "tests", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / place) for place in places), **step.environment}


def _module(name: str, arguments: str, expected_s: float) -> Command:
    return Command(name, ("python", "-m", *arguments.split()), expected_s)


def _full(suite: str, name: str, expected_s: float) -> Command:
    return _module(name, f"{suite} --full --only {name}", expected_s)


def _pytest(level: str, expected_s: float) -> Command:
    return _module(level, f"pytest -q -n 0 tests/{level}", expected_s)


def _seeds(arguments: str, total: int, part: int, seed_s: float) -> tuple[Command, ...]:
    return tuple(
        _module(f"seeds-{first}-{first + part - 1}", f"{arguments} --first-seed {first} --seeds {part}", part * seed_s)
        for first in range(0, total, part)
    )


def _tests() -> tuple[Command, ...]:
    levels = (f"tests/{level}" for level in LEVELS)
    return (
        Command("static", ("make", "lint", "types", "contracts", "drift"), 90),
        _module("unit", "pytest -q -n 2 -m unit tests/unit", 150),
        Command("levels", ("python", "hack/run_tests.py", *levels, "--apart", "tests/gpu"), 1_400),
    )


def _invariants() -> tuple[Command, ...]:
    expected_s = {"I3": 530, "I5": 190, "I6": 60, "I7": 490, "I8": 290, "I9": 2_170, "I10": 610, "I11": 60}
    return (
        _module("controls", "faults --only I1 I2 I4", 60),
        *(_full("faults", name, seconds) for name, seconds in expected_s.items()),
    )


def _adversity() -> tuple[Command, ...]:
    expected_s = {"faults": 900, "stale": 600, "unobserved": 600, "sequences": 550, "simulated": 600, "kills": 1_800}
    return tuple(_full("adversity", name, seconds) for name, seconds in expected_s.items())


def _laws() -> tuple[Command, ...]:
    unit = sorted(folder.name for folder in (ROOT / "tests/unit").iterdir() if any(folder.glob("**/test_*.py")))
    places = [*(f"unit/{name}" for name in unit), "contract", "stateful"]
    return tuple(_module(place.replace("/", "-"), f"pytest -q -n 2 tests/{place}", 1_800) for place in places)


def _root() -> str:
    return "" if os.geteuid() == 0 else "root is wanted"


def _device() -> str:
    return "" if machine().gpus else "no CUDA device: nvidia-smi shows none"
