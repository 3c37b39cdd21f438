"""Whether this agent drops a copy that was nominated. Pure. The metadata service advises; the owner decides here.

Laws: what somebody uses or continues is kept; the last copy that we know of is kept, and so is that of the block's
`designated_holder`, so that two owners never both let go; a copy that survives a restart gives way only to one that
survives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstrata_metadata.duties.nominations import SURVIVING, designated_holder
from kvstrata_metadata.store.records import Location


class Ruling(StrEnum):
    """What becomes of a nominated copy; all but the first are reasons to keep it."""

    DROP = "drop"
    ABSENT = "absent"
    """Not here, or not any more."""
    HELD = "held"
    """Leased, pinned, moving, or the head of a decoding session."""
    CONTINUED = "continued"
    """Another block here continues it."""
    RECENT = "recent"
    """Used within the time after which a session counts as finished."""
    LAST = "last"
    """We know of no other living copy."""
    KEEPER = "keeper"
    """Of all holders that we know of, it is on us to keep it."""
    SURVIVOR = "survivor"
    """It outlives this agent, and no other copy that we know of outlives its own."""
    KNOWN_SCOPE = "known_scope"
    """Nominated because its scope is erased, but the scope's key is there."""


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """What we know of a nominated block."""

    tag: str
    """`ScopeSecret.tag()`."""
    is_held: bool
    children: int
    """Blocks here that continue it."""
    idle_s: float
    """Since its last use; infinite when it was sent away, as blocks of archived sessions are."""
    is_surviving: bool
    """One of its copies here outlives the agent."""


def rule_alone(own: OwnCopy | None, idle_min_s: float) -> Ruling:
    """Decide as far as that goes without knowing of other copies; `Ruling.DROP` when those decide."""
    if own is None:
        return Ruling.ABSENT
    if own.is_held:
        return Ruling.HELD
    if own.children:
        return Ruling.CONTINUED
    return Ruling.RECENT if own.idle_s < idle_min_s else Ruling.DROP


def rule(own: OwnCopy | None, idle_min_s: float, me: str, others: Sequence[Location]) -> Ruling:
    """Decide. `me` is our name, `others` the copies on living agents of our pool."""
    alone = rule_alone(own, idle_min_s)
    if own is None or alone is not Ruling.DROP:
        return alone
    if not others:
        return Ruling.LAST
    if designated_holder(own.tag, (me, *(other.agent for other in others))) == me:
        return Ruling.KEEPER
    if own.is_surviving and not any(other.tier in SURVIVING for other in others):
        return Ruling.SURVIVOR
    return Ruling.DROP
