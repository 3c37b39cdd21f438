"""Which dropped records are erased now, and which wait because their slots are likely to be written again soon. Pure.

A slot that is written again needs no hole, and a slot that stays allocated is written over at the disk's full speed: on
ext4 a write into new or punched blocks costs a third more (docs/decisions.md). A tier that is full drops what it
replaces, so nearly all of its slots are used again within seconds. What belongs to a scope that has nothing left in the
tier goes at once: it was erased, or nobody uses it.

How a record store's capacity is shared out between segments, markers and the index. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstrata_agent.backends.file.index_format import BODY_OFFSET, body_bytes_max
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.slot_table import Extent, target_extent_bytes
from kvstrata_api.units import MIB

HOLD_S: Final = 20.0
"""How long the bytes of a dropped block stay on the medium at most, beyond the batch that erases them."""


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be erased."""

    extents: tuple[int, ...]
    """Empty ones, which go as a whole."""
    graves: Mapping[int, frozenset[int]]
    """Offsets of dropped records, by extent."""


def due(extents: Iterable[Extent], graves: Mapping[int, Mapping[int, float]], before_s: float) -> Due:
    """What was dropped at `before_s` or earlier, and everything of scopes that have no block left.

    `graves` maps extents to the offsets of their dropped records and when they were dropped.
    """
    known = tuple(extents)
    alive = {extent.scope for extent in known if extent.live}
    whole: list[int] = []
    parts: dict[int, frozenset[int]] = {}
    for extent in known:
        dropped = graves.get(extent.id, {})
        is_scope_gone = extent.scope not in alive
        old = frozenset(offset for offset, at_s in dropped.items() if is_scope_gone or at_s <= before_s)
        if extent.live == 0 and len(old) == len(dropped):
            whole.append(extent.id)
        elif old:
            parts[extent.id] = old
    return Due(tuple(whole), parts)


_SEGMENT_PARTS: Final = 32
_SEGMENT_BYTES_MAX: Final = 64 * MIB
_SEGMENTS_MAX: Final = 8192
"""One descriptor each."""

_MARKERS_BYTES: Final = 2 * DIRECT_BYTES
"""The store's marker, and the one that takes its place."""


def segments_bytes_max(capacity_bytes: int, segments: int, slots: int) -> int:
    """Bytes that all segments may take when there are so many of them, with so many slots.

    The rest is for the markers and for two indexes: the old one and the one that takes its place.
    """
    return capacity_bytes - _MARKERS_BYTES - 2 * (BODY_OFFSET + body_bytes_max(segments, slots))


def target_bytes(capacity_bytes: int) -> int:
    """Size that segments have where it holds one slot at least."""
    return target_extent_bytes(
        capacity_bytes, parts=_SEGMENT_PARTS, most_bytes=_SEGMENT_BYTES_MAX, count_max=_SEGMENTS_MAX
    )
