"""The agent's metrics with the pool and the node filled in, and the children remembered: two lookups each."""

from typing import Any

from kvstrata_api.models.poolnode import SHARES_MAX
from kvstrata_api.trust import Access, ScopeKind
from kvstrata_telemetry import tracing
from kvstrata_telemetry.metrics import Instruments


class Counters:
    """All metrics of one agent. Labels are given in the order of the catalogue, after pool and node."""

    def __init__(self, instruments: Instruments, pool: str, node: str) -> None:
        self._instruments = instruments
        self._own = {"pool": pool, "node": node}
        self._children: dict[tuple[str, ...], Any] = {}
        self.blocks_queried = 0
        """Blocks looked up since the start; for the status."""
        self.blocks_hit = 0
        self.share_hits: dict[str, int] = {}
        """Blocks that readers of each prefix share were given, by the share's uid, in the order of their last hits."""

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        child = self._children.get((name, *labels.values()))
        if child is None:
            child = self._instruments.counter(name, **self._own, **labels)
            self._children[(name, *labels.values())] = child
        child.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        child = self._children.get((name, *labels.values()))
        if child is None:
            child = self._instruments.gauge(name, **self._own, **labels)
            self._children[(name, *labels.values())] = child
        child.set(value)

    def observe(self, name: str, value: float, *, traceparent: str = "", **labels: str) -> None:
        """Note one value in a histogram, with the trace of `traceparent`, else the current one, as its exemplar."""
        child = self._children.get((name, *labels.values()))
        if child is None:
            child = self._instruments.histogram(name, **self._own, **labels)
            self._children[(name, *labels.values())] = child
        child.observe(value, tracing.exemplar(traceparent))

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
        if hit:
            self.add("kvstrata_lookup_blocks_total", hit, tenant=tenant, result="hit")
        if queried > hit:
            self.add("kvstrata_lookup_blocks_total", queried - hit, tenant=tenant, result="miss")
