"""Which blocks leave a tier: leaf first, then least recently used. Pure.

A parent never leaves before its children: a prefix without its head is of no use to anybody.
"""

from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

B = TypeVar("B")

BATCH_PARTS: Final = 8
"""Room for a batch is no more than this part of the tier or of the quota, 1/8: no small one is emptied for a block."""
SCAN_MAX: Final = 4096
"""Candidates that one plan examines in the order of last use; held blocks beyond it wait for the next plan."""
DRAWN_SCAN_MAX: Final = 256
"""The same where each is drawn and judged, which takes twenty times as long: a plan holds nobody up for longer."""


class Candidates(Protocol[B]):
    """The blocks of one tier, as a queue of those that have no child left there."""

    def pop(self) -> B | None:
        """Take the least recently used one out of the queue; None when it is empty."""

    def push(self, block: B) -> None:
        """Put one in."""

    def is_free(self, block: B) -> bool:
        """True when nobody leases, pins, decodes from or moves the block."""

    def size_bytes(self, block: B) -> int:
        """Bytes that the tier gets back."""

    def parent(self, block: B) -> B | None:
        """The block before it in its chain, when it is in the same tier."""

    def children(self, block: B) -> int:
        """Children that have to leave before it."""


@dataclass(frozen=True, slots=True)
class EvictionPlan(Generic[B]):
    """Victims in the order in which they may leave; children stand before their parents."""

    victims: tuple[B, ...]
    freed_bytes: int
    short_bytes: int
    """What is missing of the need; the caller decides whether a partial eviction is worth its cost."""


def plan_eviction(
    candidates: Candidates[B], need_bytes: int, most_bytes: int | None = None, scan_max: int = SCAN_MAX
) -> EvictionPlan[B]:
    """Free at least `need_bytes`, and never more than `most_bytes`, from the least recently used free leaves.

    A parent becomes a candidate once all its children are victims of the same plan. Victims leave the queue, held
    blocks go back into it. A plan that cannot be met is still returned.
    """
    assert need_bytes >= 0
    victims: list[B] = []
    held: list[B] = []
    doomed: dict[B, int] = {}
    """Victims among the children of a block."""
    freed_bytes = 0
    while freed_bytes < need_bytes and len(victims) + len(held) < scan_max:
        block = candidates.pop()
        if block is None:
            break
        size_bytes = candidates.size_bytes(block)
        if not candidates.is_free(block) or (most_bytes is not None and freed_bytes + size_bytes > most_bytes):
            held.append(block)
            continue
        victims.append(block)
        freed_bytes += size_bytes
        parent = candidates.parent(block)
        if parent is not None:
            doomed[parent] = doomed.get(parent, 0) + 1
            if candidates.children(parent) == doomed[parent]:
                candidates.push(parent)
    for block in held:
        candidates.push(block)
    return EvictionPlan(tuple(victims), freed_bytes, max(0, need_bytes - freed_bytes))


def excess_bytes(used_bytes: int, capacity_bytes: int, high_percent: int, low_percent: int) -> int:
    """Bytes to free so that the fill falls to the low watermark; 0 while it is at most the high one."""
    if used_bytes * 100 <= capacity_bytes * high_percent:
        return 0
    return used_bytes - capacity_bytes * low_percent // 100
