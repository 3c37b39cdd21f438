"""Which invariants there are, and how one is run."""

from collections.abc import Callable
from concurrent.futures import Executor
from functools import cache, partial
from importlib import import_module
from typing import Final

from support.runner.alone import process
from support.runner.outcome import Outcome, Scale

INVARIANTS: Final[dict[str, str]] = {
    "I1": "no wrong or dangling location is ever served as data",
    "I2": "no slot is freed or overwritten while leased",
    "I3": "a decoding session's blocks are never evicted; a late reader fails loudly",
    "I4": "no negative or forgotten reference",
    "I5": "what a dead client held is free within 60 s",
    "I6": "a lost Redis is rebuilt from the agents",
    "I7": "a failover that loses acknowledged writes is harmless",
    "I8": "a restart under the same name serves no slot of the old epoch",
    "I9": "a crash at any point of the NVMe store loses nothing synced and serves nothing corrupt",
    "I10": "bit rot, torn and misdirected writes are detected",
    "I11": "ENOSPC, EIO and a failed fsync are misses",
}
"""Names are those of the invariant table in docs/invariants.md; module `faults.i<n>` runs each."""


SIMULATED: Final = frozenset({"I1", "I2", "I4"})
"""Run in simulated worlds, which replace clock, chance and sockets of their process."""


def runner(invariant: str) -> Callable[[Scale], Outcome]:
    """Return what runs an invariant; it blocks until that is done."""
    return partial(_run_alone if invariant in SIMULATED else _run, invariant)


@cache
def _simulated() -> Executor:
    """One process for all of them, because one campaign of seeds proves several."""
    return process()


def end_simulated() -> None:
    """End the process of simulated worlds, where one has started."""
    if _simulated.cache_info().currsize:
        _simulated().shutdown()
        _simulated.cache_clear()


def _run_alone(invariant: str, scale: Scale) -> Outcome:
    return _simulated().submit(_run, invariant, scale).result()


def _run(invariant: str, scale: Scale) -> Outcome:
    run: Callable[[Scale], Outcome] = import_module(f"faults.{invariant.lower()}").run
    return run(scale)
