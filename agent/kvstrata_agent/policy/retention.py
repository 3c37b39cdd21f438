"""How long blocks of a tenant may stay, and in which order they go when their time is up. Pure.

Laws: nothing that is held goes, nor what a held block continues; children go before their parents; at the end of its
longest life a block takes along what continues it, because nobody can find that any more; one that was only idle
waits until nothing continues it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

B = TypeVar("B")


class Due(StrEnum):
    """Why a block has to go; values of a metric's label."""

    IDLE = "idle"
    OLD = "old"


@dataclass(frozen=True, slots=True)
class Retention:
    """`KVTenant.spec.retention`."""

    idle_s: float | None = None
    max_s: float | None = None
    is_zeroized: bool = False
    """Slots in memory are overwritten when they are freed."""

    @property
    def is_bounded(self) -> bool:
        """True when time alone makes blocks go."""
        return self.idle_s is not None or self.max_s is not None


KEEP: Final = Retention()


def due(retention: Retention, *, idle_s: float, age_s: float) -> Due | None:
    """Decide whether the time of a block is up; `age_s` counts from its writing, `idle_s` from its last use."""
    if retention.max_s is not None and age_s >= retention.max_s:
        return Due.OLD
    if retention.idle_s is not None and idle_s >= retention.idle_s:
        return Due.IDLE
    return None


def horizon(rules: Iterable[Retention], now_s: float) -> tuple[float, float]:
    """Last use and birth, as seconds like `now_s`, after which no block is due under any of the rules."""
    idle_s = max_s = math.inf
    for rule in rules:
        idle_s = idle_s if rule.idle_s is None else min(idle_s, rule.idle_s)
        max_s = max_s if rule.max_s is None else min(max_s, rule.max_s)
    return now_s - idle_s, now_s - max_s


def plan_drops(
    wanted: Mapping[B, Due], children: Callable[[B], Sequence[B]], is_held: Callable[[B], bool]
) -> tuple[B, ...]:
    """Blocks that go now, children before their parents. `wanted` names those whose time is up."""
    doomed = _with_children([block for block, why in wanted.items() if why is Due.OLD], children)
    marked = doomed | wanted.keys()
    verdicts: dict[B, bool] = {}
    order: list[B] = []
    for root in marked:
        stack = [root]
        while stack:
            block = stack[-1]
            waiting = [c for c in children(block) if c in marked and c not in verdicts]
            if waiting and block not in verdicts:
                stack += waiting
                continue
            stack.pop()
            if block not in verdicts:
                goes = not is_held(block) and all(verdicts.get(c, False) for c in children(block))
                verdicts[block] = goes
                order += [block] * goes
    return tuple(order)


def _with_children(roots: Iterable[B], children: Callable[[B], Sequence[B]]) -> set[B]:
    found: set[B] = set()
    stack = list(roots)
    while stack:
        block = stack.pop()
        if block not in found:
            found.add(block)
            stack += children(block)
    return found
