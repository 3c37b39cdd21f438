"""Which dropped records are erased now, and which wait because their slots are likely to be written again soon. Pure.

A slot that is written again needs no hole, and a slot that stays allocated is written over at the disk's full speed: on
ext4 a write into new or punched blocks costs a third more (docs/decisions.md). A tier that is full drops what it
replaces, so nearly all of its slots are used again within seconds. What belongs to a scope that has nothing left in the
tier goes at once: it was erased, or nobody uses it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstrata_agent.backends.slot_table import Extent

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
