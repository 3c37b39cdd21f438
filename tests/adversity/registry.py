"""Which claims there are, and how one is proven."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Final

from support.runner.outcome import Outcome, Scale

CLAIMS: Final[dict[str, str]] = {
    "kills": "killed at every API call, the operator ends where nobody killed it, within 60 s",
    "faults": "answers that are refused, lost, cut and late change no final state",
    "stale": "frozen watches, and old lists after a restart, change no final state and no key",
    "unobserved": "events that are never told, torn or out of pages change no final state",
    "sequences": "drawn changes end where their last objects made from scratch end; bad ones are refused",
    "simulated": "the same over simulated clusters, with crashes, fail-overs and late lists in between",
}
"""Module `adversity.prove_<name>` has `run`."""


def runner(claim: str) -> Callable[[Scale], Outcome]:
    """Return what proves a claim; it blocks until that is done."""
    return partial(_run, claim)


def _run(claim: str, scale: Scale) -> Outcome:
    run: Callable[[Scale], Outcome] = import_module(f"adversity.prove_{claim}").run
    return run(scale)
