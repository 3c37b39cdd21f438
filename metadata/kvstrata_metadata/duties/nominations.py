"""Which copies the fleet could do without. Pure: no clock, no I/O. Hints only: the owner of a copy checks and decides.

Law: of all that hold a block, one never drops its copy as a duplicate, whatever hints it gets: its
`designated_holder`. Owners and service name it by the same rule from the scope and the names of holders alone, so that
two owners who each know of the other's copy cannot both let go, however stale what they know is. The rule does not
depend on the block: whole chains stay in one place, for a block is worth nothing without those that it continues.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstrata_api.tiers import TierType
from kvstrata_metadata.store.records import DEFAULT_COPIES, NOMINATED_MAX, Copy, Incarnation, Nomination

DUPLICATE: Final = "duplicate"
RETURNED: Final = "returned"
"""The holder was gone for longer than the grace time, and others have made the block again meanwhile."""
ERASED: Final = "erased"
"""The scope's key is gone."""
REASONS: Final = (DUPLICATE, RETURNED, ERASED)

SURVIVING: Final = frozenset(tier.value for tier in TierType if tier.survives_restart)
"""Media whose copies outlive the agent; an archived session lies there."""

_SPEED: Final = {tier.value: speed for speed, tier in enumerate(TierType)}
"""Media from fast to slow."""


@dataclass(frozen=True, slots=True)
class OverReplicated:
    """A block with more copies than anybody wants."""

    tag: str
    digest: bytes
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the service knows of one incarnation that lives."""

    agent: str
    """`<pool>.<node>`."""
    fill_ratio: float = 0.0
    """Bytes in the directory over the capacity that was given to the agent."""
    is_returned: bool = False
    """It was gone for longer than the grace time before this incarnation."""

    @property
    def pool(self) -> str:
        """The pool that the agent serves."""
        return self.agent.partition(".")[0]


def designated_holder(tag: str, holders: Iterable[str]) -> str:
    """Name the holder of a block that keeps its copy: another one for each scope, so that the duty is spread."""
    return min(holders, key=lambda name: hashlib.blake2b(name.encode(), key=tag.encode(), digest_size=8).digest())


def plan_nominations(
    over_replicated: Iterable[OverReplicated], facts: Mapping[Incarnation, AgentFacts], wanted: Mapping[str, int]
) -> dict[Incarnation, tuple[Nomination, ...]]:
    """Nominate copies beyond those that each pool wants. `wanted` by pool; `facts` of living incarnations alone.

    Copies of others count for nothing: nobody knows whether they are still there. At most `NOMINATED_MAX` blocks for
    each agent, scope and reason.
    """
    found: dict[Incarnation, dict[tuple[str, str], list[bytes]]] = {}
    for block in over_replicated:
        for copy in _surplus(block, facts, wanted):
            reason = RETURNED if facts[copy.incarnation].is_returned else DUPLICATE
            digests = found.setdefault(copy.incarnation, {}).setdefault((block.tag, reason), [])
            if len(digests) < NOMINATED_MAX:
                digests.append(block.digest)
    return {
        incarnation: tuple(Nomination(tag, reason, tuple(digests)) for (tag, reason), digests in sorted(by.items()))
        for incarnation, by in found.items()
    }


def _surplus(block: OverReplicated, facts: Mapping[Incarnation, AgentFacts], wanted: Mapping[str, int]) -> list[Copy]:
    """Copies of a block that its pools could do without."""
    by_pool: dict[str, list[Copy]] = {}
    for copy in block.copies:
        if copy.incarnation in facts:
            by_pool.setdefault(facts[copy.incarnation].pool, []).append(copy)
    surplus = []
    for pool, copies in by_pool.items():
        surplus += _order(block.tag, copies, facts)[max(1, wanted.get(pool, DEFAULT_COPIES)) :]
    return surplus


def _order(tag: str, copies: Sequence[Copy], facts: Mapping[Incarnation, AgentFacts]) -> list[Copy]:
    """Copies in the order in which they are kept: the designated holder's, one that survives, then by free room."""
    kept = designated_holder(tag, (facts[copy.incarnation].agent for copy in copies))

    def last(copy: Copy) -> tuple[bool, bool, float, int, bytes]:
        about = facts[copy.incarnation]
        speed = _SPEED.get(copy.tier, len(_SPEED))
        return (about.agent != kept, about.is_returned, about.fill_ratio, speed, copy.incarnation)

    first, *others = sorted(copies, key=last)
    if first.tier not in SURVIVING:
        others.sort(key=lambda copy: copy.tier not in SURVIVING)
        others[1:] = sorted(others[1:], key=last)
    return [first, *others]
