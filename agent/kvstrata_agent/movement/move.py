"""What is to be copied, and how it can get there. Pure.

Which blocks move together: enough to share what a transfer costs, few enough to keep a disk's queue full. Pure.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstrata_api.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.block import Entry, Residence


class Move(NamedTuple):
    """One block that is to be copied."""

    entry: Entry
    source: Residence
    slot: SlotRef | None = None
    """Where it goes; None lets the target give a slot of the stored size."""


class Way(StrEnum):
    """How a block gets from one tier to another."""

    STRAIGHT = "straight"
    """As it lies, together with others."""
    CODED = "coded"
    """Through a codec, together with others."""
    ALONE = "alone"


T = TypeVar("T")

GROUP_BYTES_MAX: Final = 4 * MIB
"""One durable write of 16 neighbours of 256 KiB goes at the disk's speed, where 16 single ones go at 0.7 of it."""

DEPTH: Final = 16
"""Groups under way that saturate the measured disks: blocks are not put together while there are fewer."""


def grouped(blocks: Sequence[T], bytes_of: Callable[[T], int], account_of: Callable[[T], str]) -> list[list[T]]:
    """Cut `blocks` into groups of one account each, in order; a block over the limit is a group of its own."""
    limit_bytes = min(GROUP_BYTES_MAX, sum(map(bytes_of, blocks)) // DEPTH)
    return [group for _, run in groupby(blocks, account_of) for group in _cut(run, bytes_of, limit_bytes)]


def _cut(blocks: Iterable[T], bytes_of: Callable[[T], int], limit_bytes: int) -> list[list[T]]:
    groups: list[list[T]] = []
    left_bytes = 0
    for block in blocks:
        size_bytes = bytes_of(block)
        if not groups or size_bytes > left_bytes:
            groups.append([])
            left_bytes = limit_bytes
        groups[-1].append(block)
        left_bytes -= size_bytes
    return groups
