"""From what the agent observes to `KVPoolNode.status`, and when that is worth a write. Pure.

Facts (conditions, phases, epochs) are written at once. Counters (fill, hits) are compared rounded, and written
at most every `COUNTERS_S`: a fleet's API server carries some 300 status writes a second. Transition times are kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from kvstrata_agent.backends.base import Device
from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_agent.codec.lossy import Drift
from kvstrata_agent.policy.pathology import Finding
from kvstrata_agent.policy.removal import Removal
from kvstrata_agent.provision.provisioner import Departure
from kvstrata_api import names, units
from kvstrata_api.models import conditions
from kvstrata_api.models.conditions import Condition, Status
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.models.poolnode import (
    KVPoolNode,
    KVPoolNodeStatus,
    LookupCounts,
    ModelReport,
    NodeTier,
    NodeTierStatus,
    OrderAnswer,
    ShareHits,
    TenantBytes,
    TenantErased,
    TenantLookups,
    TierDemand,
    TierDevice,
    TierProbe,
)
from kvstrata_api.tiers import TierType
from kvstrata_kube.answers import Json
from kvstrata_node import dax_verdict
from kvstrata_node import pages_verdict as verdict
from kvstrata_node.pages_verdict import Reason

REFUSING_S: Final = 30.0
"""From here on refusals are a condition: while a store scales with its load, some are to be expected."""

ERROR_CHARS_MAX = 1024
ENGINE_CHARS_MAX: Final = 64
"""Of `Text`."""
"""`maxLength` of lastError."""

COUNTERS_S: Final = 10.0
FACTS_S: Final = 1.0
"""Shortest time between two writes, whatever they report: two writers that disagree must not race."""

_NO_FACTS: Final = {
    "lookups",
    "conditions",
    "tiers",
    "shares",
    "tenants",
    "tenant_lookups",
    "evicted_per_minute",
    "directory_backlog",
    "erased",
    "orders",
    "models",
    "node",
}
"""Counters, what is compared by itself, and what node preparation writes."""


@dataclass(frozen=True, slots=True)
class TierObserved:
    """One declared tier as it is."""

    spec: NodeTier
    phase: str
    is_up: bool
    is_absent: bool = False
    """The machine or build lacks what the tier needs."""
    medium: str = ""
    is_emulated: bool = False
    is_encrypted: bool = False
    is_mappable: bool = False
    fallback: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    recovered_blocks: int = 0
    probe: TierProbe | None = None
    devices: tuple[Device, ...] = ()
    """Where they are several."""
    refusing_s: float = 0.0
    """For so long its store has been refusing requests."""
    error: str = ""
    leaving_blocks: int = 0
    """Blocks that are still to move to other tiers, because this one was removed from the spec."""
    shrinking_blocks: int = 0
    """Blocks that lie where a resize left no room."""
    shortage: str = ""
    """Why less is granted than declared, with numbers."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that the status reports."""

    pool_node: KVPoolNode
    epoch: int
    version: str
    tiers: tuple[TierObserved, ...]
    directory: DirectoryState
    queried: int
    hit: int
    memory_bytes: int
    engine: str = ""
    """What codes, copies and digests blocks."""
    demand: Mapping[str, TierDemand] = field(default_factory=dict)
    """What reuse implies for the size of tiers that scale, by tier name."""
    share_hits: Mapping[str, int] = field(default_factory=dict)
    """Blocks that readers of prefix shares were given, by the share's uid."""
    tenants: tuple[TenantBytes, ...] = ()
    """Exact bytes, at most `TENANTS_MAX` of them."""
    tenant_lookups: tuple[TenantLookups, ...] = ()
    """Exact counts, at most `TENANTS_MAX` of them."""
    evicted_per_minute: int = 0
    directory_backlog: int = 0
    """Changes that wait to be told to the directory."""
    erased: tuple[TenantErased, ...] = ()
    orders: tuple[OrderAnswer, ...] = ()
    """Exact counts."""
    models: tuple[ModelReport, ...] = ()
    """Exact counts."""
    drain_left_blocks: int | None = None
    """Blocks that still have to leave; None when no drain was asked for."""
    is_drain_late: bool = False
    departure: Departure | None = None
    """How far the removal of all tiers has come; None when nobody asked for it."""
    node: NodeReport | None = None
    """What node preparation has reported; None where it does not run."""
    peer_address: str = ""
    """`host:port` where other agents reach this one."""
    drift: Drift | None = None
    """How far blocks are from the pool's calibration; None where it has none."""
    pathologies: tuple[Finding, ...] = ()
    """In which ways the cache brings nothing."""


def build_status(seen: Observed) -> KVPoolNodeStatus:
    """Write the status down."""
    generation = seen.pool_node.metadata.generation
    return KVPoolNodeStatus(
        observed_generation=generation,
        observed_revision=seen.pool_node.spec.revision,
        peer_address=seen.peer_address,
        conditions=tuple(c.model_copy(update={"observed_generation": generation}) for c in _conditions(seen)),
        epoch=seen.epoch,
        agent_version=seen.version,
        offload_engine=seen.engine[:ENGINE_CHARS_MAX],
        tiers=tuple(_tier(t, seen.demand.get(t.spec.name)) for t in seen.tiers),
        lookups=LookupCounts(queried=seen.queried, hit=seen.hit),
        shares=tuple(ShareHits(uid=uid, hits=units.coarse(hits)) for uid, hits in sorted(seen.share_hits.items())),
        tenants=tuple(t.model_copy(update={"used_bytes": units.coarse(t.used_bytes)}) for t in seen.tenants),
        tenant_lookups=tuple(_coarse_lookups(t) for t in seen.tenant_lookups),
        evicted_per_minute=units.coarse(seen.evicted_per_minute),
        directory_backlog=units.coarse(seen.directory_backlog),
        erased=seen.erased,
        orders=tuple(_rounded_answer(answer) for answer in seen.orders),
        models=tuple(_rounded_model(model) for model in seen.models),
        memory_bytes=seen.memory_bytes,
    )


def _rounded_answer(answer: OrderAnswer) -> OrderAnswer:
    counts = ("blocks_done", "blocks_total", "bytes_done", "bytes_total", "blocks_missing")
    return answer.model_copy(update={name: units.coarse(getattr(answer, name)) for name in counts})


def _rounded_model(model: ModelReport) -> ModelReport:
    """Round what grows; what is whole is exact."""
    if model.state == "Staged":
        return model
    counts = ("staged_bytes", "source_bytes", "peer_bytes", "shared_bytes")
    return model.model_copy(update={name: units.coarse(getattr(model, name)) for name in counts})


def _tier(seen: TierObserved, demand: TierDemand | None) -> NodeTierStatus:
    return NodeTierStatus.model_validate(
        {
            "name": seen.spec.name,
            "type": seen.spec.type,
            "phase": seen.phase,
            "medium": seen.medium,
            "emulated": seen.is_emulated,
            "encrypted": seen.is_encrypted,
            "capacity_bytes": seen.capacity_bytes,
            "used_bytes": seen.used_bytes,
            "blocks": seen.blocks,
            "recovered_blocks": seen.recovered_blocks,
            "probe": seen.probe,
            "demand": demand,
            "devices": tuple(_device(d) for d in seen.devices),
            "last_error": (seen.error or seen.shortage or seen.fallback)[:ERROR_CHARS_MAX],
        }
    )


def _device(seen: Device) -> TierDevice:
    return TierDevice(
        name=seen.name,
        capacity_bytes=seen.capacity_bytes,
        used_bytes=units.coarse(seen.used_bytes),
        error=seen.error[:ERROR_CHARS_MAX],
    )


def _conditions(seen: Observed) -> tuple[Condition, ...]:
    return (
        _true("AgentConnected", "Serving"),
        _tiers_ready(seen.tiers),
        _huge_pages(seen.tiers, seen.node),
        _devices(seen.tiers, seen.node),
        _metadata_available(seen.directory),
        _stores_keep_up(seen.tiers),
        _capacity(seen.tiers),
        _tiers_settled(seen.tiers),
        _calibration(seen.drift),
        _effective(seen.pathologies),
        _models(seen.models),
        _draining(seen),
        _ready(seen),
    )


_DIRECTORY_FAULTS: Final = {
    DirectoryState.AWAY: "the directory does not answer; this node serves its own",
    DirectoryState.PARTLY_AWAY: "a part of the directory does not answer; its blocks on other nodes are misses",
    DirectoryState.FULL: "Redis has no memory left; other nodes do not learn what this one stores",
}


def _metadata_available(state: DirectoryState) -> Condition:
    fault = _DIRECTORY_FAULTS.get(state)
    if state is DirectoryState.NOT_USED:
        return _true("MetadataAvailable", state, "one machine: there is nobody to share locations with")
    return _false("MetadataAvailable", state, fault) if fault else _true("MetadataAvailable", state)


def _tiers_ready(tiers: Sequence[TierObserved]) -> Condition:
    broken = [t for t in tiers if not t.is_up or t.phase == "Failed"]
    if not broken:
        other = _join(f"tier {t.spec.name}: {t.fallback}" for t in tiers if t.fallback)
        return _true("TierReady", "AllTiersReady", other)
    return _false("TierReady", "TierFailed", _join(f"tier {t.spec.name}: {t.error or t.shortage}" for t in broken))


def _huge_pages(tiers: Sequence[TierObserved], node: NodeReport | None) -> Condition:
    """What the tiers got counts; node preparation, where it runs, knows what is in the way of the rest."""
    wanted = ((t, t.spec.host_dram.page_size) for t in tiers if t.is_up and t.spec.host_dram is not None)
    asked = [(t, page_size) for t, page_size in wanted if page_size != "4Ki"]
    if not asked:
        return verdict.condition((Reason.NOT_REQUESTED, ""))
    without = [t for t, page_size in asked if not t.medium.endswith(f"-{page_size}")]
    if not without:
        return verdict.condition((Reason.RESERVED, ""))
    reason, why = verdict.of_tiers((t.spec for t in without), node.huge_pages if node is not None else ())
    message = [f"tier {t.spec.name}: {t.fallback}" for t in without]
    return verdict.condition((Reason.NOT_RESERVED if reason.is_good else reason, _join(message + [why] * bool(why))))


def _devices(tiers: Sequence[TierObserved], node: NodeReport | None) -> Condition:
    """What the tiers got counts; node preparation, where it runs, knows why a dax device is in another mode."""
    known = node.cxl if node is not None else ()
    absent = [t for t in tiers if t.is_absent or not (t.is_up or dax_verdict.of_tiers([t.spec], known)[0].is_good)]
    if absent:
        reason, why = dax_verdict.of_tiers((t.spec for t in absent), known)
        missing = [f"tier {t.spec.name}: {t.error}" for t in absent] + [why] * bool(why)
        return _false("DevicePresent", "DeviceMissing" if reason.is_good else reason, _join(missing))
    failed = [(t, d) for t in tiers for d in t.devices if d.error]
    if failed:
        message = _join(f"tier {t.spec.name}: {d.name}: {d.error}" for t, d in failed)
        return _false("DevicePresent", "DeviceFailed", message)
    return _true("DevicePresent", "Present")


def _stores_keep_up(tiers: Sequence[TierObserved]) -> Condition:
    """Refusals come and go; those that last need somebody's attention."""
    slow = [t for t in tiers if t.refusing_s >= REFUSING_S]
    if not slow:
        return _true("StoresKeepUp", "KeepUp")
    message = _join(f"tier {t.spec.name}: the store refuses requests (429, 503) and gets fewer at once" for t in slow)
    return _false("StoresKeepUp", "Throttled", message)


def _capacity(tiers: Sequence[TierObserved]) -> Condition:
    short = [t.shortage for t in tiers if t.shortage]
    if not short:
        return _true("CapacitySatisfied", "Satisfied")
    return _false("CapacitySatisfied", "InsufficientCapacity", _join(short))


def _tiers_settled(tiers: Sequence[TierObserved]) -> Condition:
    """Rounded, because a condition is written whenever it changes."""
    leaving = [t for t in tiers if t.leaving_blocks]
    if leaving:
        message = _join(
            f"tier {t.spec.name} goes: {units.coarse(t.leaving_blocks)} blocks are to move" for t in leaving
        )
        return _false("TiersSettled", "RemovingTier", message)
    shrinking = [t for t in tiers if t.shrinking_blocks]
    if shrinking:
        message = _join(
            f"tier {t.spec.name} shrinks: {units.coarse(t.shrinking_blocks)} blocks to move" for t in shrinking
        )
        return _false("TiersSettled", "ShrinkingTier", message)
    return _true("TiersSettled", "Settled")


def _calibration(drift: Drift | None) -> Condition:
    """Without numbers that move: a condition is written whenever it changes."""
    if drift is None:
        return _true("CalibrationCurrent", "NotCalibrated")
    if not drift.is_over:
        return _true("CalibrationCurrent", "Holds" if drift.blocks else "NothingStored")
    message = "many planes need a safer form than the calibration says: run `kvstrata calibrate` on newer KV"
    return _false("CalibrationCurrent", "Drifted", message)


def _effective(found: Sequence[Finding]) -> Condition:
    """The first one is the reason; the message has all."""
    if not found:
        return _true("CacheEffective", "NothingFound")
    return _false("CacheEffective", found[0].rule.pathology, _join(f.said for f in found))


def _models(models: Sequence[ModelReport]) -> Condition:
    """The first failure is the reason; the message has all. Without numbers that move while files come."""
    if not models:
        return _true("ModelsStaged", "NotRequested")
    failed = [m for m in models if m.state == "Failed"]
    if failed:
        return _false("ModelsStaged", failed[0].reason, _join(f"{m.name}: {m.message}" for m in failed))
    staging = [m.name for m in models if m.state == "Staging"]
    if staging:
        return _false("ModelsStaged", "Staging", _join(staging))
    return _true("ModelsStaged", "Staged", _join(f"{m.name} was evicted" for m in models if m.state == "Evicted"))


_LEFT: Final = {
    Removal.RELEASE: "the memory of all tiers is given back; what they keep across restarts stays",
    Removal.DESTROY: "nothing of the pool is left on this node",
}


def _draining(seen: Observed) -> Condition:
    left, departure = seen.drain_left_blocks, seen.departure
    if departure is not None and departure.is_done:
        return _false("Draining", departure.removal.value, _LEFT[departure.removal])
    if departure is not None:
        return _true("Draining", "RemovingTiers", departure.cause)
    if left is None:
        return _false("Draining", "NotRequested")
    if left == 0:
        return _false("Draining", "Drained", "every block that can survive has a copy that does")
    reason = "DeadlinePassed" if seen.is_drain_late else "MovingBlocks"
    return _true("Draining", reason, f"{left} blocks are in memory only")


def _ready(seen: Observed) -> Condition:
    if seen.departure is not None:
        return _false("Ready", seen.departure.removal.value, "the pool is deleted")
    if seen.drain_left_blocks is not None:
        return _false("Ready", "Draining", "the agent takes no new blocks")
    if any(t.is_mappable and t.phase != "Failed" for t in seen.tiers):
        return _true("Ready", "Serving")
    wanted = [t.spec.name for t in seen.tiers if t.spec.type in (TierType.HOST_DRAM, TierType.CXL)]
    if not wanted:
        return _false("Ready", "NoMemoryTier", "engines need a HostDRAM or CXL tier to exchange blocks through")
    return _false("Ready", "NoMemoryTier", _join(f"tier {t.spec.name}: {t.error or t.phase}" for t in seen.tiers))


def _join(parts: Iterable[str]) -> str:
    return "; ".join(parts)


def _true(type_: str, reason: str, message: str = "") -> Condition:
    return Condition(type=type_, status=Status.TRUE, reason=reason, message=message)


def _false(type_: str, reason: str, message: str = "") -> Condition:
    return Condition(type=type_, status=Status.FALSE, reason=reason, message=message)


class Urgency(IntEnum):
    """How soon a status should be written."""

    NONE = 0
    COUNTERS = 1
    FACTS = 2


def urgency(wanted: KVPoolNodeStatus, stored: Mapping[str, Any]) -> Urgency:
    """Compare what the agent sees with what the API server holds."""
    before = _parsed(stored)
    if before is None or _facts(wanted, wanted) != _facts(before, wanted):
        return Urgency.FACTS
    return Urgency.NONE if _counters(wanted) == _counters(before) else Urgency.COUNTERS


def due_s(need: Urgency, written_at_s: float | None, chance: float) -> float:
    """Monotonic second at which a write is due; `chance` in [0, 1) spreads counters of a fleet by half a period."""
    if written_at_s is None:
        return 0.0
    return written_at_s + (FACTS_S if need is Urgency.FACTS else COUNTERS_S * (1 + chance / 2))


def document(name: str, wanted: KVPoolNodeStatus, stored: Mapping[str, Any], now: str) -> Json:
    """Build the server-side apply document that makes the stored status what is wanted.

    Transition times are kept wherever the stored condition has the same status, also across agent restarts.
    """
    before = _parsed(stored)
    ours = {c.type for c in wanted.conditions}
    kept = [c for c in before.conditions if c.type in ours] if before else []
    merged = {c.type: c for c in conditions.merge(kept, wanted.conditions, now)}
    ordered = tuple(merged[c.type] for c in wanted.conditions)
    status = _rounded(wanted).model_copy(update={"conditions": ordered})
    return {
        "apiVersion": names.API_VERSION,
        "kind": "KVPoolNode",
        "metadata": {"name": name},
        "status": status.to_json(),
    }


def round_used(tier: NodeTierStatus) -> int:
    """Round used bytes to whole hundredths of the capacity; a tier that holds something never shows 0.

    To the nearest byte, so that what was rounded stays as it is when it is rounded again.
    """
    if tier.capacity_bytes <= 0 or tier.used_bytes <= 0:
        return 0
    percent = max(1, min(100, round(tier.used_bytes * 100 / tier.capacity_bytes)))
    return (tier.capacity_bytes * percent + 50) // 100


def hit_percent(status: KVPoolNodeStatus) -> int:
    """Hits per hundred lookups, 0 without lookups."""
    queried = status.lookups.queried
    return round(status.lookups.hit * 100 / queried) if queried > 0 else 0


def _coarse_lookups(counts: TenantLookups) -> TenantLookups:
    coarse = {name: units.coarse(getattr(counts, name)) for name in ("queried", "hit", "denied")}
    return counts.model_copy(update=coarse)


def _parsed(stored: Mapping[str, Any]) -> KVPoolNodeStatus | None:
    """Parse a stored status; None when it was never written or cannot be read, so that it is written again."""
    if not stored:
        return None
    try:
        return KVPoolNodeStatus.model_validate(stored)
    except ValueError:
        return None


def _rounded(status: KVPoolNodeStatus) -> KVPoolNodeStatus:
    """Round the fills and write them out for the printer columns."""
    return status.model_copy(update={"tiers": tuple(_rounded_tier(t) for t in status.tiers)})


def _rounded_tier(tier: NodeTierStatus) -> NodeTierStatus:
    """Round one fill."""
    used_bytes = round_used(tier)
    shown = f"{units.format_rounded(used_bytes)}/{units.format_rounded(tier.capacity_bytes)}"
    return tier.model_copy(update={"used_bytes": used_bytes, "used_of_capacity": shown})


def _facts(status: KVPoolNodeStatus, ours: KVPoolNodeStatus) -> Json:
    """Everything but counters and transition times; of the conditions only the types that `ours` has.

    Confirmations and answers that nobody waits for any more go with the next write.
    """
    types = {c.type for c in ours.conditions}
    facts = status.model_dump(exclude=_NO_FACTS)
    facts["erased"] = sorted((e.uid, e.key_version) for e in status.erased if e in ours.erased)
    asked = {answer.uid for answer in ours.orders}
    facts["orders"] = sorted((a.uid, a.phase, a.reason, a.message) for a in status.orders if a.uid in asked)
    counts = {"staged_bytes", "source_bytes", "peer_bytes", "shared_bytes"}
    facts["models"] = [m.model_dump(exclude=counts) for m in status.models]
    facts["tiers"] = [
        t.model_dump(exclude={"used_bytes", "used_of_capacity", "blocks", "demand"}) for t in status.tiers
    ]
    written = (c.model_dump(exclude={"last_transition_time"}) for c in status.conditions if c.type in types)
    facts["conditions"] = {c["type"]: c for c in written}
    return facts


def _counters(status: KVPoolNodeStatus) -> tuple[object, ...]:
    """Fill of and demand for each tier, the hit ratio and the use of shares and of room by tenants, rounded.

    Block counts ride along but cause no write; what rises and falls causes one where it doubled or halved.
    """
    tenants = sorted((t.tenant, t.tier, t.used_bytes, t.over_hard) for t in status.tenants)
    asked = sorted((t.tenant, t.queried, t.hit, t.denied) for t in status.tenant_lookups)
    fills = ((round_used(t), t.demand) for t in status.tiers)
    return (
        *fills,
        hit_percent(status),
        *status.shares,
        *tenants,
        *asked,
        status.evicted_per_minute.bit_length(),
        status.directory_backlog.bit_length(),
        *status.erased,
        *status.orders,
        *status.models,
    )
