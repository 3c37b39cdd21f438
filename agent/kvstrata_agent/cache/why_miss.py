"""Why is a prompt not found, or not as far as it could be? The first cause along its chain, in words. No I/O.

Whoever asks for what it may not read gets the answer of a scope in which nothing was ever stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvstrata_agent.blocks.history import What
from kvstrata_agent.policy.recompute import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.history import Decision, Event
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.cache.load import Reader
    from kvstrata_metadata.store.records import Location

_WHY: Final = {
    "room": "to make room",
    "watermark": "because the tier was above its high watermark",
    "quota": "to keep its tenant within its quota",
    "shrink": "because the tier became smaller",
    "drain": "because the tier was emptied",
    "removed": "because the tier was taken away",
    "dropped": "because its tenant dropped it",
    "retention": "because its tenant keeps no blocks for so long",
    "migrated": "because it was moved to another pool",
    "flush": "because the tier was flushed",
    "duplicate": "because other nodes have enough copies",
    "returned": "because other nodes have copies",
}


@dataclass(frozen=True, slots=True)
class Miss:
    """The answer for one chain in one scope."""

    blocks: int
    """Asked for."""
    hit_blocks: int
    """Of the unbroken beginning that would be loaded."""
    reason: str
    """`hit`, `recompute`, `pending`, `layout`, `away`, `unknown`, or what was decided (`blocks.history.What`)."""
    said: str
    history: tuple[dict[str, Any], ...] = ()
    """Last decisions on the first block that is missing, the latest first."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What the choice not to load rests on."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A chain of one scope, and what a lookup of it has found."""

    context: RequestContext | None
    """None for a scope that the caller may not read, in which nothing is found."""
    digests: Sequence[bytes]
    entries: Sequence[Entry | None]
    located: Mapping[int, Location]
    """What other nodes have, by position."""
    is_alone: bool
    """Other nodes may have blocks and could not be asked."""


def why_miss(node: Node, reader: Reader, asked: Asked) -> Miss:
    """Find the first cause."""
    count, entries = len(asked.digests), asked.entries
    there = next(
        (i for i, e in enumerate(entries) if not (e.residences if e is not None else i in asked.located)), count
    )
    if asked.context is not None and there:
        loaded = reader.worth_fetching(asked.context, entries[:there])
        if loaded < there:
            return _slow(reader, asked.context, entries, loaded)
    if there == count:
        return Miss(count, count, "hit", f"all {count} blocks are found")
    behind = f"the first {there} of {count} blocks are found; block {there + 1}" if there else "the first block"
    if entries[there] is not None:
        return Miss(count, there, "pending", f"{behind} is being written or is on its way just now")
    return _absent(node, asked, there, behind)


def _absent(node: Node, asked: Asked, there: int, behind: str) -> Miss:
    """The chain ends here with a block that nobody has."""
    count, now_s, digest = len(asked.digests), node.clock(), asked.digests[there]
    scope = asked.context.scope if asked.context is not None else None
    events = node.history.of(scope, digest) if scope is not None else []
    other = node.index.find(scope, digest) if scope is not None else None
    if other is not None and node.is_away(other):
        tier = other.residences[0].tier
        return Miss(count, there, "away", f"{behind} lies in {tier.name}, which does not answer: {tier.last_error}")
    if other is not None:
        return Miss(count, there, "layout", f"{behind} is here in another layout, for another model or type")
    if events:
        rows = tuple(event_row(event, now_s) for event in events)
        return Miss(count, there, events[0].decision.what.value, f"{behind} {said_of(events[0], now_s)}", rows)
    said = f"{behind} is not known: it was never stored, is not yours to read, or went longer ago than is remembered"
    if asked.is_alone:
        said += "; other nodes could not be asked"
    return Miss(count, there, "unknown", said)


def event_row(event: Event, now_s: float) -> dict[str, Any]:
    """One decision as JSON values."""
    decision = event.decision
    row: dict[str, Any] = {"what": decision.what.value, "reason": decision.reason, "ago_s": now_s - decision.at_s}
    row |= {k: v for k in ("tier", "target", "policy") if (v := getattr(decision, k))}
    if decision.inputs:
        row["inputs"] = dict(decision.inputs)
    if decision.what in _LEFT:
        row["idle_s"] = event.idle_s
    if event.uses_per_s is not None:
        row["uses_per_s"] = event.uses_per_s
    if event.is_kept_told and decision.kept is not None:
        row["kept_instead"] = {"uses_per_s": decision.kept.uses_per_s, "idle_s": decision.kept.idle_s}
    return row


_LEFT: Final = frozenset({What.EVICTED, What.DEMOTED, What.DROPPED, What.LOST})
"""Decisions on blocks that were here."""


def said_of(event: Event, now_s: float) -> str:
    """One decision in words, behind the block's name."""
    decision, ago = event.decision, f"{now_s - event.decision.at_s:.1f} s ago"
    why, tier = (
        _WHY.get(decision.reason, f"({decision.reason})"),
        f" from tier {decision.tier}" if decision.tier else "",
    )
    idle = f"{event.idle_s:.1f} s after its last use"
    match decision.what:
        case What.EVICTED:
            declined = f"; {spared}" if (spared := decision.inputs.get("declined")) else ""
            return f"was evicted{tier} {ago} {why}, {idle}{_weighed(event, decision)}{declined}"
        case What.DEMOTED:
            return f"went{tier} to {decision.target} {ago} {why}, {idle}, and is not there any more"
        case What.DROPPED:
            return f"was dropped {ago} {why}, {idle}"
        case What.LOST:
            return f"was lost{tier} {ago}: {decision.reason}"
        case What.REFUSED:
            return f"was brought {ago} and refused: {decision.reason}"
        case What.UNPUBLISHED:
            return f"was about to be written {ago} and never came: {decision.reason}"


def _weighed(event: Event, decision: Decision) -> str:
    """What the policy saw in a victim and in what it kept."""
    kept = decision.kept if event.is_kept_told else None
    if decision.policy != "ReuseAware" or event.uses_per_s is None:
        return f"; what stayed was used {kept.idle_s:.1f} s before" if kept is not None else ""
    if event.uses_per_s < 0:
        return "; its session was not going to need it again, or it was left by an earlier run"
    worth = f"; {decision.policy} expected {event.uses_per_s:.3g} uses a second of it"
    return worth + (f", and {kept.uses_per_s:.3g} of what stayed" if kept is not None else "")


def _slow(reader: Reader, context: RequestContext, entries: Sequence[Entry | None], loaded: int) -> Miss:
    """The chain goes on here, and computing it is estimated to take less time."""
    entry, count = entries[loaded], len(entries)
    cost = reader.cost([entry], context) if entry is not None else None
    where = entry.residences[0].tier.name if entry is not None and entry.residences else "another node"
    said = f"the first {loaded} of {count} blocks are loaded; block {loaded + 1} lies in {where}, and computing it is "
    if cost is None or cost.source is not Source.RECOMPUTE:
        said += "estimated to take less time than to fetch it with those behind it"
        return Miss(count, loaded, "recompute", said)
    said += f"estimated to take {cost.recompute_s:.4f} s, fetching it {cost.fetch_s:.4f} s"
    inputs = {"fetch_s": cost.fetch_s, "recompute_s": cost.recompute_s, "rule": cost.reason}
    return Miss(count, loaded, "recompute", said, inputs=inputs)
