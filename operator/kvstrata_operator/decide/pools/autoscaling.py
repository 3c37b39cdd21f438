"""How large tiers with a policy `autoscale` should be. Pure, level-triggered: all state is the pool's own status.

Laws: a size is never outside of its bounds nor below what leases hold; a step is a quarter at most, and none follows
another within the cooldown; while reuse stays as it is, sizes come to rest and never go back and forth: a step up is
made for at least `minGainPermille`, and what costs more than half of that is never given up again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from kvstrata_api import units
from kvstrata_api.models.pool import EvictionPolicy, KVPool, PoolTier, TierAutoscale, TierScale
from kvstrata_api.tiers import step_down, step_up
from kvstrata_operator.decide.plan.actions import Note
from kvstrata_operator.decide.pools.placement import policy_of, size_of
from kvstrata_operator.observe.kinds import format_time, parse_time
from kvstrata_operator.observe.records import Declared, PoolNodeSeen, TierSeen

SETTLED_PERCENT: Final = 2
"""A node whose tier is this close to the size asked for has it: arenas round to extents."""

_SMALL_GRAIN_BYTES: Final = 2 * units.MIB


@dataclass(frozen=True, slots=True)
class Signal:
    """What the nodes of a pool report of one tier."""

    gain_permille: int
    """Mean over nodes that have been asked for enough blocks."""
    loss_permille: int
    held_bytes: int
    """Under leases, on the node that holds most."""
    is_full: bool
    """On average it is filled to the low watermark at least."""
    is_short: bool
    """Some node cannot give what is asked for already."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change of size."""

    capacity_bytes: int
    why: str


def decide(policy: TierAutoscale, now_bytes: int, signal: Signal, grain_bytes: int) -> Step | None:
    """Make one step, or none. `grain_bytes` is the page size: sizes are whole pages where bounds are (`policy_of`)."""
    limit = policy.min_gain_permille
    if signal.gain_permille >= limit:
        up = min(policy.max_per_node, step_up(now_bytes, grain_bytes))
        if not signal.is_full or signal.is_short or up <= now_bytes:
            return None
        return Step(
            up, f"a step up finds {signal.gain_permille} more of 1000 blocks asked for; minGainPermille {limit}"
        )
    floor_bytes = max(policy.min_per_node, _round_up(signal.held_bytes, grain_bytes))
    down = max(floor_bytes, step_down(now_bytes, grain_bytes))
    if 2 * signal.loss_permille > limit or down >= now_bytes:
        return None
    why = f"a step down loses {signal.loss_permille} of 1000 blocks asked for, at most half of minGainPermille {limit}"
    return Step(down, why)


def scale(pool: Declared[KVPool], seen: Mapping[str, PoolNodeSeen], now: datetime) -> tuple[TierScale, ...]:
    """Sizes of the pool's tiers that scale, each with at most one step more than the stored status has."""
    assert pool.model is not None
    spec, stored = pool.model.spec, {s.get("tier"): s for s in _stored(pool.status)}
    kept = [(t, policy_of(t), _kept(t, stored.get(t.name, {}))) for t in spec.tiers]
    return tuple(
        before if spec.paused else _scaled(tier, policy, before, seen, spec.policy.eviction, now)
        for tier, policy, before in kept
        if policy is not None
    )


def signal_of(scale: TierScale, seen: Mapping[str, PoolNodeSeen], eviction: EvictionPolicy) -> Signal | None:
    """Put together what nodes report of a tier; None while a node still changes it, or where none was asked enough."""
    here = [(node, t) for node in seen.values() for t in node.tiers if t.name == scale.tier]
    demands = [t.demand for _, t in here if t.demand is not None]
    is_short = any(node.is_false("CapacitySatisfied") for node, _ in here)
    is_changing = any(node.is_false("TiersSettled") or node.drain.requested for node, _ in here)
    is_there = is_short or all(is_at(t, scale.capacity_per_node) for _, t in here)
    if not demands or is_changing or not is_there:
        return None
    used, capacity = sum(t.used_bytes for _, t in here), sum(t.capacity_bytes for _, t in here)
    return Signal(
        gain_permille=sum(d.gain_permille for d in demands) // len(demands),
        loss_permille=-(-sum(d.loss_permille for d in demands) // len(demands)),
        held_bytes=max(d.held_bytes for d in demands),
        is_full=100 * used >= eviction.low_watermark_percent * capacity,
        is_short=is_short,
    )


def notes_of(pool: Declared[Any], wanted: Iterable[Mapping[str, Any]]) -> tuple[Note, ...]:
    """Make one Event for each step that the stored status has not."""
    known = {(s.get("tier"), s.get("steppedAt", "")) for s in _stored(pool.status)}
    return tuple(
        Note(pool.ref, pool.uid, "TierScaled", f"tier {s['tier']}: {s['message']}")
        for s in wanted
        if s.get("steppedAt") and (s["tier"], s["steppedAt"]) not in known
    )


def _scaled(
    tier: PoolTier,
    policy: TierAutoscale,
    before: TierScale,
    seen: Mapping[str, PoolNodeSeen],
    eviction: EvictionPolicy,
    now: datetime,
) -> TierScale:
    stepped_at = parse_time(before.stepped_at)
    if stepped_at is not None and abs(now - stepped_at) < timedelta(seconds=policy.cooldown_seconds):
        return before  # Later than now, if only by a little: operators' clocks differ.
    signal, now_bytes = signal_of(before, seen, eviction), before.capacity_per_node
    step = decide(policy, now_bytes, signal, grain_of(tier)) if signal is not None else None
    if step is None:
        return before
    way = "grown" if step.capacity_bytes > now_bytes else "shrunk"
    sizes = f"{units.format_rounded(now_bytes)} to {units.format_rounded(step.capacity_bytes)} on each node"
    return TierScale(
        tier=tier.name,
        capacity_per_node=step.capacity_bytes,
        stepped_at=format_time(now),
        message=f"{way} from {sizes}: {step.why}",
    )


def _kept(tier: PoolTier, stored: Mapping[str, Any]) -> TierScale:
    scales = {tier.name: int(stored["capacityPerNode"])} if "capacityPerNode" in stored else {}
    return TierScale(
        tier=tier.name,
        capacity_per_node=size_of(tier, scales) or 0,
        stepped_at=str(stored.get("steppedAt", "")),
        message=str(stored.get("message", "")),
    )


def is_at(tier: TierSeen, size_bytes: int) -> bool:
    """True when a node has the size that is asked for."""
    return 100 * abs(tier.capacity_bytes - size_bytes) <= SETTLED_PERCENT * size_bytes


def grain_of(tier: PoolTier) -> int:
    """Sizes of a tier are multiples of this."""
    return units.PAGE_BYTES[tier.host_dram.page_size] if tier.host_dram is not None else _SMALL_GRAIN_BYTES


def _stored(status: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = status.get("autoscaling") or ()
    return found


def _round_up(size_bytes: int, grain_bytes: int) -> int:
    return -(-size_bytes // grain_bytes) * grain_bytes
