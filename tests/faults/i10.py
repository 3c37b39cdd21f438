"""I10: bit rot, torn, lost, misdirected and swapped writes and stale sectors are detected: right bytes or a failure."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Final

from faults.rot import damaged_claim, damaged_round, made
from faults.rot_elsewhere import rot_elsewhere
from kvstrata_agent.backends.file import transfers
from kvstrata_agent.backends.record import layout as header
from kvstrata_agent.backends.record import layout as record_bytes
from support.runner.outcome import Outcome, Scale
from support.runner.virtual_loop import run_virtually

_CLAIMS_EACH: Final = 4
"""Markers that are damaged for each round of slots."""

_MEDIUM_ROUNDS: Final = 40
"""Rounds on one store before another one is made."""


def run(scale: Scale) -> Outcome:
    """Damage a million things, and see that the same check notices a reader that does not verify."""
    faults, violations = _damage(scale.first_seed, scale.of(900_000, 6_000))
    sealed, more = _damage(scale.first_seed, scale.of(100_000, 2_000), is_sealed=True)
    elsewhere, served = rot_elsewhere(random.Random(scale.first_seed), scale.of(50_000, 500), scale.of(5_000, 100))
    with _unverified_payloads():
        payloads = _damage(scale.first_seed, 500)[1]
    with _unverified_headers():
        headers = _damage(scale.first_seed, 2_000)[1]
    is_caught = any("other bytes" in v for v in payloads) and any("nobody wrote" in v for v in headers)
    values = {"in_memory_and_objects": elsewhere, "sealed": sealed}
    return Outcome(faults + sealed + elsewhere, "faults", (*violations, *more, *served), is_caught, values)


def _damage(first_seed: int, wanted: int, *, is_sealed: bool = False) -> tuple[int, list[str]]:
    faults, violations, seed = 0, [], first_seed
    while faults < wanted:
        count, wrong = run_virtually(_one_medium(seed, wanted - faults, is_sealed=is_sealed))
        faults += count
        violations += [f"seed {seed}: {w}" for w in wrong]
        seed += 1
        if wanted > 100_000:
            sys.stderr.write(f"I10: {faults:,} faults, {len(violations)} violations\n")
    return faults, violations


async def _one_medium(seed: int, wanted: int, *, is_sealed: bool) -> tuple[int, list[str]]:
    rng = random.Random(seed)
    medium = await made(rng, is_sealed=is_sealed)
    faults = 0
    wrong: list[str] = []
    for _ in range(_MEDIUM_ROUNDS):
        for _ in range(_CLAIMS_EACH):
            count, found = await damaged_claim(medium, rng)
            faults, wrong = faults + count, wrong + found
        count, found = await damaged_round(medium, rng)
        faults, wrong = faults + count, wrong + found
        if faults >= wanted:
            break
    return faults, wrong


@contextmanager
def _unverified_payloads() -> Iterator[None]:
    """Seeded defect: payloads are not compared with their checksum."""
    with _replaced(record_bytes, "matches", _always), _replaced(transfers, "matches", _always):
        yield


@contextmanager
def _unverified_headers() -> Iterator[None]:
    """Seeded defect: the tag of a header is not compared."""
    with _replaced(header, "hmac", SimpleNamespace(compare_digest=_always)):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    kept = vars(module)[name]
    vars(module)[name] = value
    try:
        yield
    finally:
        vars(module)[name] = kept


def _always(*_: object) -> bool:
    return True
