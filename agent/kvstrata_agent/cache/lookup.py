"""What a lookup found, in the form that the wire carries. Pure; the hot path of hit checks, so no call for each key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstrata_api.tiers import Lookup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.tier import Tier

REMOTE_BIT: Final = 128
"""Bit of a place that says: on another node (`wire.Found.places`)."""

_HIT: Final = int(Lookup.HIT)
_PENDING: Final = int(Lookup.PENDING)


@dataclass(frozen=True, slots=True)
class Findings:
    """Answer to one lookup, as in `wire.Found`."""

    states: bytes
    """One `tiers.Lookup` code for each key."""
    places: bytes
    """For each leading block that is a hit the index of its tier's name, plus `REMOTE_BIT` on another node."""
    tier_names: tuple[str, ...]


def findings(entries: Sequence[Entry | None], remote: Mapping[int, str], absent: Lookup) -> Findings:
    """Put local and remote findings together.

    `entries` holds None for keys that are not here; `remote` names the tier of those among them that another agent
    has, by position; `absent` is the state of all others.
    """
    code = int(absent)
    held = [None if e is None else e.residences for e in entries]
    states = bytearray([code if r is None else _HIT if r else _PENDING for r in held])
    for position in remote:
        states[position] = _HIT
    hits = len(states) - len(states.lstrip(bytes((_HIT,))))
    tiers: list[Tier | str] = [remote[i] if r is None else r[0].tier for i, r in enumerate(held[:hits])]
    if tiers and tiers.count(tiers[0]) == hits and not isinstance(tiers[0], str):  # As nearly always.
        return Findings(bytes(states), bytes(hits), (tiers[0].name,))
    kinds = {t: t if isinstance(t, str) else t.name for t in dict.fromkeys(tiers)}
    names = tuple(dict.fromkeys(kinds.values()))
    codes = {t: names.index(name) | (REMOTE_BIT if isinstance(t, str) else 0) for t, name in kinds.items()}
    return Findings(bytes(states), bytes(map(codes.__getitem__, tiers)), names)
