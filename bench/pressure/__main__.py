"""Half an hour under pressure: whether the agent grows, and whether anybody ever reads a wrong byte.

Several engines load, compare, store and end sessions over prompts of which 120 % of all capacity would be needed, while
both tiers are squeezed again and again. Of latency there is the time of `acquire` in the agent, and the longest time
for which one piece of work held its loop. Growth is the slope of the agent's own memory (arenas are not part of it)
over the second half of the run; descriptors, entries, leases and reservations are counted when all engines have left.
There is no peer: the limit of growth is none, and of wrong bytes too.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.harness import common
from bench.harness.common import Result, publish, table
from bench.harness.drivers import ROOT, Command, Driver
from bench.harness.participants import PYTHON
from bench.pressure.client import PROMPT_BLOCKS
from kvstrata_api import __version__
from kvstrata_api.units import MIB

BLOCK_BYTES: Final = 64 << 10
DRAM_BYTES: Final = 192 * MIB
NVME_BYTES: Final = 512 * MIB
PRESSURE: Final = 1.2
"""Working set over the capacity of both tiers."""
NEW_BLOCKS: Final = PROMPT_BLOCKS * 3 // 4
"""Blocks that a prompt has beyond those of the ones before it: it has half of its blocks in common with one other."""
ENGINES: Final = 3
SQUEEZES: Final = ((0.5, 1.0), (1.0, 1.0), (1.0, 0.6), (0.6, 0.6), (1.0, 1.0))
"""Shares of the tiers' capacity, one after the other."""
MINUTES: Final = 30.0
QUICK_S: Final = 30.0
SAMPLES: Final = 120
"""Looks at the agent's memory in a run."""
LEVELS: Final = ("own_bytes", "malloc_used_bytes", "malloc_free_bytes", "python_blocks")
"""What tells a leak, which somebody holds, from memory that an allocator keeps."""
REST_S: Final = 2.0
"""For the agent to let go of what engines held when they left."""


@dataclass(slots=True)
class Course:
    """What was seen over time."""

    seconds: list[float] = field(default_factory=list)
    levels: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LEVELS})
    facts: dict[str, Any] = field(default_factory=dict)
    squeezes: int = 0

    def note(self, at_s: float, facts: dict[str, Any]) -> None:
        """Add a look."""
        self.seconds.append(at_s)
        for name, levels in self.levels.items():
            levels.append(float(facts[name]))
        self.facts = facts

    def growth_per_hour(self, name: str) -> float:
        """Slope of a level over the second half (least squares)."""
        half = len(self.seconds) // 2
        slope = np.polyfit(self.seconds[half:], self.levels[name][half:], 1)[0]
        return float(slope) * 3600.0


@contextlib.contextmanager
def engines(socket: Path, seconds: float) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start the engines; they end by themselves."""
    prompts = int(PRESSURE * (DRAM_BYTES + NVME_BYTES) / (NEW_BLOCKS * BLOCK_BYTES))
    command = [str(PYTHON), "-m", "bench.pressure.client", "--socket", str(socket), "--block-bytes", str(BLOCK_BYTES)]
    command += ["--prompts", str(prompts), "--seconds", str(seconds)]
    started = [
        subprocess.Popen((*command, "--seed", str(seed)), stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for seed in range(ENGINES)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def squeeze(agent: Driver, turn: int) -> None:
    """Give both tiers their next capacity."""
    dram, nvme = SQUEEZES[turn % len(SQUEEZES)]
    agent.ask("resize", dram_bytes=int(dram * DRAM_BYTES), nvme_bytes=int(nvme * NVME_BYTES))


def run(seconds: float) -> tuple[Course, Counter[str]]:
    """Put the agent under pressure; returns its course and what all engines have seen."""
    course, seen = Course(), Counter[str]()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-")))
        arguments = ("--directory", str(directory), "--dram-bytes", str(DRAM_BYTES), "--nvme-bytes", str(NVME_BYTES))
        agent = stack.enter_context(Driver(Command("agent", PYTHON, "bench.pressure.node", arguments)))
        agent.read()
        working = stack.enter_context(engines(directory / "agent.sock", seconds))
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < seconds:
            course.note(passed_s, agent.ask("facts"))
            if passed_s / seconds * SAMPLES // 4 > course.squeezes:
                squeeze(agent, course.squeezes)
                course.squeezes += 1
            say(passed_s, course)
            time.sleep(seconds / SAMPLES)
        for process in working:
            seen += _last_counts(process)
        time.sleep(REST_S)
        course.facts = agent.ask("facts")
    return course, seen


def _last_counts(process: "subprocess.Popen[str]") -> Counter[str]:
    """Counts of an engine that has come to its end. Raises `RuntimeError` for one that broke off."""
    output, _ = process.communicate()
    counts: dict[str, int] = json.loads(output.splitlines()[-1]) if output else {}
    if process.returncode or not counts.pop("is_done", 0):
        raise RuntimeError(f"an engine ended with {process.returncode} after {counts}")
    return Counter(counts)


def say(passed_s: float, course: Course) -> None:
    """Tell how far we are."""
    facts = course.facts
    used = ", ".join(f"{name} {used / facts['capacity_bytes'][name]:.0%}" for name, used in facts["used_bytes"].items())
    own = f"{facts['own_bytes'] / MIB:.1f} MiB of its own, {facts['entries']} blocks"
    print(f"[bench.pressure {passed_s:6.1f} s] {own}, {used}", file=sys.stderr, flush=True)


def values_of(course: Course, seen: Counter[str], seconds: float) -> dict[str, float]:
    """Figures of the last line."""
    own_bytes = course.levels["own_bytes"]
    return {
        "seconds": seconds,
        "squeezes": float(course.squeezes),
        "turns": float(seen["turns"]),
        "compared_blocks": float(seen["compared"]),
        "wrong_blocks": float(seen["wrong"]),
        "corrupt_blocks": float(seen["corrupt"]),
        "lost_blocks": float(seen["lost"]),
        "refused_blocks": float(seen["refused"]),
        "hit_ratio": seen["loaded"] / max(1, seen["wanted"]),
        "acquires": float(course.facts["acquires"]),
        **{f"acquire_{name}_ms": 1e3 * took_s for name, took_s in course.facts["acquire_s"].items()},
        "loop_held_ms_at_most": 1e3 * course.facts["loop_held_s"],
        "own_mib_after_a_tenth": own_bytes[len(own_bytes) // 10] / MIB,
        "own_mib_at_the_end": own_bytes[-1] / MIB,
        "own_mib_max": max(own_bytes) / MIB,
        "growth_mib_per_hour": course.growth_per_hour("own_bytes") / MIB,
        "malloc_used_growth_mib_per_hour": course.growth_per_hour("malloc_used_bytes") / MIB,
        "malloc_free_growth_mib_per_hour": course.growth_per_hour("malloc_free_bytes") / MIB,
        "python_blocks_growth_per_hour": course.growth_per_hour("python_blocks"),
        "descriptors_at_the_end": float(course.facts["descriptors"]),
        "leases_at_the_end": float(course.facts["leases"]),
        "reservations_at_the_end": float(course.facts["reservations"]),
    }


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--minutes", type=float, help=f"how long; default: {MINUTES:g}, or half of one when quick")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line; ends with status 1 when anybody read a wrong byte."""
    chosen = choose(arguments)
    seconds = chosen.minutes * 60.0 if chosen.minutes else QUICK_S if chosen.quick else MINUTES * 60.0
    course, seen = run(seconds)
    values = values_of(course, seen, seconds)
    print(table(("what", "value"), [(name, f"{value:,.6g}") for name, value in values.items()]))
    for name, error in course.facts["errors"].items():
        print(f"tier {name} said: {error}")
    publish(Result("pressure", bool(chosen.quick), {"kvstrata": __version__}, {}, values), chosen.json)
    if seen["wrong"]:
        raise SystemExit(f"{seen['wrong']} blocks were read with wrong bytes")


if __name__ == "__main__":
    main()
