"""I9: a crash at any point of the NVMe store loses nothing synced and serves nothing corrupt.

Two halves: processes on a real file system that die by SIGKILL at named points (`faults.kills`), and every state that a
power loss could leave of short operation sequences (`crash.replay`).
"""

import json
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from crash.replay import Findings, replay
from crash.sequences import SCRIPTED, wandering

from faults.killing_volume import POINTS
from support.runner.outcome import Outcome, Scale

_LANES: Final = 3
"""Processes that fork writers at the same time: they mostly wait for the disk."""

_WANDERED_STEPS: Final = 30
"""Operations of each long run on a slow medium, where the scripted ones are done after three."""

_TESTS: Final = Path(__file__).resolve().parent.parent
_CONTROL_POINTS: Final = "write segment,punch,rename index"


def run(scale: Scale) -> Outcome:
    """Kill 100 writers at each point, and replay the crash states of all sequences."""
    rounds = scale.of(102, _LANES)
    with tempfile.TemporaryDirectory(prefix="kvstrata-i9-") as root, ThreadPoolExecutor(_LANES + 1) as lanes:
        control = lanes.submit(_kill, Path(root), 10_000, 1, "--has-defect", "--points", _CONTROL_POINTS)
        per_lane = rounds // _LANES
        shares = [_share(lane) if not scale.is_full else "" for lane in range(_LANES)]
        jobs = [
            lanes.submit(_kill, Path(root), scale.first_seed + lane, per_lane, "--points", shares[lane])
            for lane in range(_LANES)
        ]
        states = _replay(scale)
        kills, violations = 0, list(states.violations)
        for job in jobs:
            count, found = job.result()
            kills += count
            violations += found
        is_caught = any(v.endswith(("is lost", "is back")) for v in control.result()[1])
    values = {"points": len(POINTS), "crash_states": states.states, "crash_points": states.points}
    return Outcome(kills, "kills", tuple(violations), is_caught, values)


def _share(lane: int) -> str:
    """Points of a lane when each is visited once."""
    return ",".join(POINTS[lane::_LANES])


def _kill(root: Path, seed: int, repeats: int, *more: str) -> tuple[int, list[str]]:
    """Run the killing process; how many it killed and what was wrong."""
    command = [sys.executable, "-m", "faults.kills", str(root), "--seed", str(seed), "--repeats", str(repeats), *more]
    kills, violations = 0, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_TESTS) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            kills += said["kills"]
            violations += said["violations"]
            if kills % 1000 < said["kills"] and repeats > 1:
                sys.stderr.write(f"I9: lane {seed}, {kills:,} kills, {len(violations)} violations\n")
    if process.returncode:
        violations.append(f"the killing process ended with {process.returncode}")
    return kills, violations


def _replay(scale: Scale) -> Findings:
    """Replay every sequence; two of them in a short run: tests/crash has the rest."""
    told = list(SCRIPTED)
    total = Findings()
    for name in scale.of(told, told[1:10:8]):
        found = replay(SCRIPTED[name], most=scale.of(2000, 300), seed=scale.first_seed)
        total.states += found.states
        total.points += found.points
        total.violations += found.violations
        if scale.is_full:
            sys.stderr.write(f"I9: {total.states:,} crash states\n")
    for seed in range(scale.first_seed, scale.first_seed + scale.of(1_000, 3)):
        found = replay(wandering(random.Random(seed), _WANDERED_STEPS), most=3, seed=seed, is_slow=True)
        total.states += found.states
        total.points += found.points
        total.violations += [f"seed {seed}: {v}" for v in found.violations]
    return total
