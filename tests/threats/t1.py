"""T1: how long an answer takes does not tell a prompt of another scope from one that nobody has.

For each tier one tenant stores prompts there; another one asks for them and for prompts that nobody stored, in random
order, each once. It asks with the keys that it would have for them itself, and with the owner's scope and keys, as
though it had got hold of them. The control is the same against an agent with a seeded defect: it looks for blocks
before it asks whether they may be read, and is a tenth of a millisecond longer for those it finds.

A difference must come up in three samples in a row to count: at the full count that is p <= 0.01 or an area outside of
0.45 to 0.55, at the short one p <= 1e-4 or 0.42 to 0.58, for the machine is shared.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvstrata_api import wire
from support.agent.doubles import BLOCK_BYTES, bytes_of
from support.client.hostile import Hostile
from support.runner.outcome import Outcome, Scale
from threats.samples import Sample, auc, ks_p
from threats.served import CAPACITY_BYTES, PREFIX_TOKENS, SCOPE_A, SCOPE_B, TIERS, Remote, keys_of, serving

TRIES: Final = 3
CONTROL_TRIES: Final = 5
WARM_UP: Final = 50
BLOCKS: Final = 4
"""Of a prompt."""

Form = Callable[[int], tuple[str, bytes]]
"""Scope and joined keys by the number of a prompt."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What two equal samples may differ by."""

    p: float
    off: float
    """Of the area from one half."""
    control_p: float
    """What the control must stay below."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Two samples, compared."""

    p: float
    auc: float
    equal_answers: bool

    def is_within(self, bounds: Bounds) -> bool:
        """True when nothing can be told from it."""
        return self.p > bounds.p and abs(self.auc - 0.5) <= bounds.off and self.equal_answers


def _tokens(number: int) -> list[int]:
    count = BLOCKS * PREFIX_TOKENS
    return [number * count + i for i in range(count)]


def _own(number: int) -> tuple[str, bytes]:
    return SCOPE_B, b"".join(keys_of(SCOPE_B, _tokens(number)))


def _stolen(number: int) -> tuple[str, bytes]:
    return SCOPE_A, b"".join(keys_of(SCOPE_A, _tokens(number)))


def _asked(scope: str, keys: bytes) -> tuple[bytes, bytes]:
    return wire.encode(wire.Lookup(1, scope, keys)), wire.encode(wire.Acquire(2, scope, keys))


def _timed(client: Hostile, frames: tuple[bytes, bytes]) -> tuple[float, list[bytes]]:
    """Nanoseconds of a lookup and an acquire, and the answers."""
    began_ns = time.perf_counter_ns()
    answers = []
    for frame in frames:
        client.send(frame)
        answers.append(client.receive())
    return float(time.perf_counter_ns() - began_ns), answers


@dataclass(frozen=True, slots=True)
class Timed:
    """How long answers took, of prompts that were stored and of others."""

    present: Sample
    absent: Sample
    equal_answers: bool

    def with_more(self, more: "Timed") -> "Timed":
        """Both together."""
        present = np.concatenate((self.present, more.present))
        absent = np.concatenate((self.absent, more.absent))
        return Timed(present, absent, self.equal_answers and more.equal_answers)

    def compared(self) -> Difference:
        """What can be told from them."""
        return Difference(ks_p(self.present, self.absent), auc(self.present, self.absent), self.equal_answers)


def _sample(client: Hostile, form: Form, present: list[int], absent: list[int], rng: random.Random) -> Timed:
    """Ask for one of each, in random order within each pair."""
    times: tuple[list[float], list[float]] = ([], [])
    answers: set[tuple[bytes, ...]] = set()
    for pair in zip(present, absent, strict=True):
        frames = [_asked(*form(number)) for number in pair]
        for i in rng.sample((0, 1), 2):
            took_ns, said = _timed(client, frames[i])
            times[i].append(took_ns)
            answers.add(tuple(said))
            _end_leases(client, said[1])
    first, second = (np.array(t, np.float64) for t in times)
    return Timed(first, second, len(answers) == 1)


def _end_leases(client: Hostile, said: bytes) -> None:
    acquired = wire.decode_reply(said)
    if isinstance(acquired, wire.Acquired) and acquired.blocks:
        client.raw(wire.Release(3, tuple(b.lease for b in acquired.blocks)))


@dataclass
class Tier:
    """One tier under attack."""

    agent: Remote
    pairs: int
    rng: random.Random
    stored: int = 0

    def store(self, owner: Hostile) -> list[int]:
        """Numbers of fresh prompts that the owner stored; those `10**5` and more above were stored by nobody."""
        numbers = list(range(self.stored, self.stored + self.pairs))
        self.stored += self.pairs
        for number in numbers:
            keys = keys_of(SCOPE_A, _tokens(number))
            assert len(owner.store(SCOPE_A, keys, bytes_of(number))) == BLOCKS
        return numbers

    def attack(self, attacker: Hostile, form: Form, present: list[int], bounds: Bounds) -> list[Difference]:
        """Samples until one shows nothing; one for each try that showed something."""
        found = []
        for attempt in range(TRIES):
            absent = [10**5 * (attempt + 1) + n for n in present]
            found.append(_sample(attacker, form, present, absent, self.rng).compared())
            if found[-1].is_within(bounds):
                break
        return found

    def control(self, attacker: Hostile, present: list[int], bounds: Bounds) -> Difference:
        """The same against the seeded defect, by as many samples together as it takes, for the machine is shared."""
        self.agent.tell("leak")
        found: Timed | None = None
        for attempt in range(CONTROL_TRIES):
            absent = [10**5 * (attempt + 4) + n for n in present]
            more = _sample(attacker, _stolen, present, absent, self.rng)
            found = found.with_more(more) if found is not None else more
            if found.compared().p < bounds.control_p:
                break
        assert found is not None
        return found.compared()


@dataclass
class Report:
    """What was found in all tiers."""

    violations: list[str]
    values: dict[str, float]
    controls: list[bool]


def _run_tier(name: str, directory: Path, pairs: int, bounds: Bounds, seed: int, report: Report) -> None:
    with serving(directory, name) as agent, Hostile(agent.path, "a") as owner, Hostile(agent.path, "b") as attacker:
        tier = Tier(agent, pairs, random.Random(seed))
        present = tier.store(owner)
        if name != "dram":
            agent.tell("down")
        _sample(
            attacker, _own, list(range(10**6, 10**6 + WARM_UP)), list(range(2 * 10**6, 2 * 10**6 + WARM_UP)), tier.rng
        )
        for form in (_own, _stolen):
            tried = tier.attack(attacker, form, present, bounds)
            last = tried[-1]
            what = f"{name}{form.__name__}"
            report.values |= {f"{what}_p": last.p, f"{what}_auc": last.auc}
            if not last.is_within(bounds):
                report.violations.append(f"seed {seed}, {what}: p {last.p:.2g}, AUC {last.auc:.3f}, {last}")
        control = tier.control(attacker, present, bounds)
        report.values[f"{name}_control_p"] = control.p
        report.controls.append(control.p < bounds.control_p)
        sys.stderr.write(f"T1 {name}: {report.values}\n" if pairs >= 1000 else "")


def run(scale: Scale) -> Outcome:
    """Ask each tier."""
    pairs = scale.of(1_000, 250)
    bounds = scale.of(Bounds(0.01, 0.05, 1e-8), Bounds(1e-4, 0.08, 1e-5))
    report = Report([], {}, [])
    with tempfile.TemporaryDirectory(prefix="kvstrata-t1-") as directory:
        for name in TIERS:
            _run_tier(name, Path(directory), pairs, bounds, scale.first_seed, report)
    return Outcome(pairs, "pairs of each tier", tuple(report.violations), all(report.controls), report.values)


assert 1_000 * BLOCKS * BLOCK_BYTES < CAPACITY_BYTES / 4, "no block has to leave its tier, where it takes a page more"
