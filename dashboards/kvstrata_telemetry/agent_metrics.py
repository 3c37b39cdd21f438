"""The agent's metrics with the pool and the node filled in, and the children remembered: two lookups each.

Tenants are the one label that others make values of: the first `TENANTS_NAMED_MAX` of a run are named, and what is
counted for others is counted under one name.
"""

from dataclasses import dataclass
from typing import Any, Final

from kvstrata_api.models.poolnode import SHARES_MAX, TENANTS_MAX
from kvstrata_api.trust import Access, ScopeKind
from kvstrata_telemetry import tracing
from kvstrata_telemetry.metrics import Instruments

TENANTS_NAMED_MAX: Final = 200
"""With 8 tiers some 21,000 series of an agent at worst (`tests/unit/telemetry/test_cardinality.py`)."""
OTHERS: Final = "(others)"
"""No name of a namespace."""


@dataclass(slots=True)
class TenantCounts:
    """Blocks of one tenant since the agent started; for the status."""

    queried: int = 0
    hit: int = 0
    denied: int = 0


class Counters:
    """All metrics of one agent. Labels are given in the order of the catalogue, after pool and node."""

    def __init__(self, instruments: Instruments, pool: str, node: str) -> None:
        self._instruments = instruments
        self._own = {"pool": pool, "node": node}
        instruments.begin(**self._own)
        self._children: dict[tuple[str, ...], Any] = {}
        self._named: set[str] = set()
        self.blocks_queried = 0
        """Blocks looked up since the start; for the status."""
        self.blocks_hit = 0
        self.evicted_blocks = 0
        """Blocks dropped from the last tier that held them, since the start; for the status."""
        self.evicted_per_minute = 0
        """How much that grew within the last minute."""
        self.tenants: dict[str, TenantCounts] = {}
        """By tenant, those that asked last at the end."""
        self.share_hits: dict[str, int] = {}
        """Blocks that readers of each prefix share were given, by the share's uid, in the order of their last hits."""

    def begin_tier(self, tier: str) -> None:
        """Show a tier's counters before their first events."""
        self._instruments.begin(**self._own, tier=tier)

    def begin_model(self, model: str) -> None:
        """Show a model's counters before their first events."""
        self._instruments.begin(**self._own, model=model)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        child = self._children.get((name, *labels.values()))
        if child is None:
            if not self._is_named(labels):
                labels["tenant"] = OTHERS
            child = self._instruments.counter(name, **self._own, **labels)
            self._children[(name, *labels.values())] = child
        child.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Those of tenants that are not named are left out: the last one would stand for all."""
        child = self._children.get((name, *labels.values()))
        if child is None:
            if not self._is_named(labels):
                return
            child = self._instruments.gauge(name, **self._own, **labels)
            self._children[(name, *labels.values())] = child
        child.set(value)

    def _is_named(self, labels: dict[str, str]) -> bool:
        """Whether labels that were not seen before may be shown as they are."""
        tenant = labels.get("tenant")
        if tenant is None or tenant in self._named:
            return True
        if len(self._named) == TENANTS_NAMED_MAX:
            return False
        self._named.add(tenant)
        return True

    def forget(self, name: str, **labels: str) -> None:
        """Remove the series of a gauge whose subject is gone. Harmless when there is none."""
        self._children.pop((name, *labels.values()), None)
        self._instruments.forget(name, **self._own, **labels)

    def observe(self, name: str, value: float, *, traceparent: str = "", **labels: str) -> None:
        """Note one value in a histogram, with the trace of `traceparent`, else the current one, as its exemplar."""
        child = self._children.get((name, *labels.values()))
        if child is None:
            child = self._instruments.histogram(name, **self._own, **labels)
            self._children[(name, *labels.values())] = child
        child.observe(value, tracing.exemplar(traceparent))

    def evicted(self, tier: str, reason: str, blocks: int = 1) -> None:
        """Note blocks that were dropped from the last tier that held them."""
        self.evicted_blocks += blocks
        self.add("kvstrata_evicted_blocks_total", blocks, tier=tier, reason=reason)

    def denied(self, tenant: str, blocks: int) -> None:
        """Note blocks that a tenant asked for and may not read or write, or that its quota refused."""
        self._of(tenant).denied += blocks

    def _of(self, tenant: str) -> TenantCounts:
        counts = self.tenants[tenant] = self.tenants.pop(tenant, TenantCounts())
        if len(self.tenants) > TENANTS_MAX:
            del self.tenants[next(iter(self.tenants))]
        return counts

    def leased(self, access: Access, blocks: int) -> None:
        """Note blocks that were leased by this right. Whoever grants a share is no reader of it."""
        if blocks and access.kind is ScopeKind.SHARE and not access.can_write:
            _, _, uid, _ = access.scope.split("/")
            self.share_hits[uid] = self.share_hits.pop(uid, 0) + blocks
            if len(self.share_hits) > SHARES_MAX:  # Shares come and go; those that are read stay.
                del self.share_hits[next(iter(self.share_hits))]

    def looked_up(self, tenant: str, queried: int, hit: int) -> None:
        """Note what one lookup, or one load as a whole, asked for and found."""
        self.blocks_queried += queried
        self.blocks_hit += hit
        counts = self._of(tenant)
        counts.queried += queried
        counts.hit += hit
        if hit:
            self.add("kvstrata_lookup_blocks_total", hit, tenant=tenant, result="hit")
        if queried > hit:
            self.add("kvstrata_lookup_blocks_total", queried - hit, tenant=tenant, result="miss")
