"""One tier of this node: its backend, its state, whose slots it has, and how one asks for a slot.

What lies in it, `TierContents` has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from kvstrata_agent.policy.placement import Price, TierFacts
from kvstrata_agent.policy.quota import over_hard_bytes
from kvstrata_api.errors import QuotaExceededError, TierFullError

if TYPE_CHECKING:
    from kvstrata_agent.backends.base import Device, SlotRef, TierBackend
    from kvstrata_agent.blocks.returns import Worth
    from kvstrata_api.blocks import ScopeId
    from kvstrata_api.models.poolnode import NodeTier, TierProbe


Phase = Literal["Pending", "Ready", "Degraded", "Failed", "Draining"]

WRITE_PAUSE_S: Final = 10.0
"""A tier that failed a write gets no new blocks for so long: long enough not to burn time on a full disk."""

AWAY_S: Final = 5.0
"""How long nothing is asked of a medium that did not answer: each load would only wait for a timeout."""

FAILURES_MAX: Final = 3
"""Failures in a row after which a tier counts as failed: one may be a bad sector, three are a bad disk."""

ORDINAL_SHIFT: Final = 32
"""Extent numbers of a backend stay below 2^32; above them stands which backend it was."""

BATCH_SLOTS: Final = 16
"""Slots freed at a time, because the writer that needs one will need more."""


@dataclass(slots=True, eq=False)
class Tier:
    """State of one provisioned tier. Compared by identity: a tier that was set up again is another one."""

    spec: NodeTier
    level: int
    """0 is the fastest tier of the pool."""
    backend: TierBackend
    ordinal: int
    """Unique in the life of the process, so that extents of two backends are never confused."""
    probe: TierProbe | None = None
    last_error: str = ""
    paused_until_s: float = 0.0
    """Monotonic second until which no block is written here."""
    away_until_s: float = 0.0
    """Monotonic second until which nothing is read: it did not answer."""
    failures: int = 0
    """Failed reads and writes since the last one that succeeded."""
    is_recovering: bool = False
    """True while what an earlier run left behind is entered: until then nobody knows which slots are free."""
    is_gone: bool = False
    """True once its backend is about to be closed, after which nothing may be asked of it."""
    closing: frozenset[int] = frozenset()
    """Extents that are to be empty: a shrink wants it, or they hold too little."""
    shrinking: frozenset[int] = frozenset()
    """Those of them that the last resize closed."""
    leaves_by_s: float | None = None
    """Monotonic second until which its blocks move to other tiers: it was removed from the spec. None: it stays."""
    is_drained: bool = False
    """True while a KVOperation wants its blocks in other tiers."""
    is_stuck: bool = False
    """True when a tier that is emptied has nothing that can move now."""
    rests_until_s: float = 0.0
    """Monotonic second until which a drained tier that was stuck is left alone."""
    rest_s: float = 0.0
    """How long it was left alone last; 0 after something moved."""
    tenant_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of all slots that each account has, written or not; accounts without any are absent."""
    raw_bytes_written: int = 0
    stored_bytes_written: int = 0
    price: Price = field(default_factory=Price)
    """What a place costs while there is no room."""
    shown_bytes_written: dict[str, int] = field(default_factory=dict)
    """Of the tier (no name) and of its devices, what the metrics know of."""
    recovered_blocks: int = 0
    """Blocks of an earlier run that were found when the tier came up."""
    refused_told: int = 0
    """Refused requests of its store that the metrics know of."""

    @property
    def name(self) -> str:
        """Name of the tier in the pool."""
        return self.spec.name

    @property
    def fill_ratio(self) -> float:
        """Used over capacity."""
        return self.backend.used_bytes / max(1, self.backend.capacity_bytes)

    @property
    def is_leaving(self) -> bool:
        """True while it is emptied because nobody declares it any more."""
        return self.leaves_by_s is not None

    @property
    def is_closed(self) -> bool:
        """True while it takes nothing new and is emptied, whatever for."""
        return self.is_drained or self.is_leaving

    def drain(self, *, is_wanted: bool) -> None:
        """Begin to be emptied, or take blocks again."""
        if is_wanted and not self.is_drained:
            self.is_stuck, self.rests_until_s, self.rest_s = False, 0.0, 0.0
        self.is_drained = is_wanted

    def phase(self, now_s: float) -> Phase:
        """Phase of the tier in the status."""
        if self.is_recovering:
            return "Pending"
        if self.is_closed:
            return "Draining"
        if self.failures >= FAILURES_MAX:
            return "Failed"
        is_short = now_s < self.paused_until_s or any(d.error for d in self.devices)
        return "Degraded" if self.failures or is_short else "Ready"

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices, where they are several."""
        striped = self.backend.striped
        return striped.devices if striped is not None else ()

    def failed(self, until_s: float | None = None) -> None:
        """Count a failure and give the tier no blocks until then; one of several devices leaves that to the others."""
        if any(not d.error for d in self.devices):
            return
        self.failures += 1
        if until_s is not None:
            self.paused_until_s = until_s

    def facts(self, now_s: float, low_ratio: float = 0.0) -> TierFacts:
        """Return what a placement may know; up to `low_ratio` full it has room."""
        can = self.backend.capabilities
        takes_writes = now_s >= self.paused_until_s and not self.is_recovering and not self.is_closed
        price_per_s = self.price.per_s if self.fill_ratio >= low_ratio else 0.0
        return TierFacts(self.name, self.level, takes_writes, can.survives_restart, can.is_memory, price_per_s)

    def extent_number(self, extent: int) -> int:
        """Number of an extent outside of its backend: on the wire and towards peers."""
        return self.ordinal << ORDINAL_SHIFT | extent

    def extents_to_free(self, scope: ScopeId, size_bytes: int, writer: str) -> frozenset[int]:
        """Extents that, once emptied, leave room for such a slot."""
        mappable = self.backend.mappable
        if mappable is not None:
            return mappable.extents_to_free(scope, size_bytes, writer)
        return self.backend.extents_to_free(scope, size_bytes)

    def allocate(
        self, scope: ScopeId, tenant: str, size_bytes: int, hard_bytes: int | None = None, writer: str = ""
    ) -> SlotRef:
        """Allocate a slot on a tenant's account, in one step with the check of its quota.

        `writer` is the tenant whose client is to fill the slot, empty when we do; only memory that engines map asks.
        Raises `TierFullError` when there is no room, and `QuotaExceededError` when there is none for this tenant.
        """
        if self.is_recovering:
            raise TierFullError(f"tier {self.name}: the blocks of an earlier run are still being entered", delay_s=1.0)
        if self.is_closed:
            why = "it is removed from the spec" if self.is_leaving else "it is drained"
            raise TierFullError(f"tier {self.name}: {why}, and takes no blocks", delay_s=1.0)
        used_bytes = self.tenant_bytes.get(tenant, 0)
        if hard_bytes is not None:
            slot_bytes = self.backend.slot_bytes(size_bytes)
            if over_hard_bytes(used_bytes, slot_bytes, hard_bytes):
                why = f"quota {hard_bytes} B, used {used_bytes} B, want {slot_bytes} B"
                raise QuotaExceededError(f"tenant {tenant}, tier {self.name}: {why}", delay_s=1.0)
        mappable = self.backend.mappable
        if mappable is not None:
            slot = mappable.reserve(scope, size_bytes, writer)
        else:
            slot = self.backend.reserve(scope, size_bytes)
        self.tenant_bytes[tenant] = used_bytes + slot.size_bytes
        return slot

    def allocate_run(
        self, scope: ScopeId, tenant: str, size_bytes: int, count: int, hard_bytes: int | None, writer: str
    ) -> list[SlotRef]:
        """Allocate up to `count` slots of equal size in memory that engines map; fewer where room or quota end."""
        mappable = self.backend.mappable
        assert mappable is not None
        used_bytes = self.tenant_bytes.get(tenant, 0)
        if hard_bytes is not None:
            count = min(count, (hard_bytes - used_bytes) // self.backend.slot_bytes(size_bytes))
        if count <= 0 or self.is_recovering or self.is_closed:
            return []
        slots = mappable.reserve_run(scope, size_bytes, count, writer)
        if slots:
            self.tenant_bytes[tenant] = used_bytes + len(slots) * slots[0].size_bytes
        return slots

    def charge(self, tenant: str, size_bytes: int) -> None:
        """Put slots on a tenant's account that nobody took here: an earlier run did."""
        if size_bytes:
            self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + size_bytes

    def free(self, slot: SlotRef, tenant: str) -> None:
        """Free a slot, once; with the tier, all of its slots are gone."""
        left_bytes = self.tenant_bytes[tenant] - slot.size_bytes
        if left_bytes:
            self.tenant_bytes[tenant] = left_bytes
        else:
            del self.tenant_bytes[tenant]
        if not self.is_gone:
            self.backend.drop(slot)

    def extent_released(self, extent: int) -> None:
        """Note that an extent is gone, so a shrink need not wait for it."""
        self.closing -= {extent}


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """One slot that somebody needs in a tier."""

    tier: Tier
    scope: ScopeId
    tenant: str
    """Account that it is on."""
    size_bytes: int
    writer: str = ""
    """Tenant whose client is to fill it; empty when we do."""
    slots: int = 1
    """How many like it will be taken one after the other, this one included: room is made for them at once."""
    arriving: Worth | None = None
    """What the block for it is worth: what is worth more stays. None: it is wanted anyway."""

    @property
    def is_new(self) -> bool:
        """True for bytes that an engine brings; all else is here or in the fleet already."""
        return bool(self.writer)

    @property
    def slot_bytes(self) -> int:
        """What the slot takes from the tier and from the quota: with the block, its header and rounding."""
        return self.tier.backend.slot_bytes(self.size_bytes)

    @property
    def batch_bytes(self) -> int:
        """What is freed at a time for a writer that is known, or likely, to need more slots like this one."""
        return self.slot_bytes * max(BATCH_SLOTS, self.slots)
