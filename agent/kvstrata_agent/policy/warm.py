"""Which blocks a warming brings to a node, and how many of them. Pure.

Laws: what is brought is closed under ancestors, for a block without those before it is found by nobody; each block
counts once, however many prefixes run through it; it all fits below the budget, so that a warming never evicts what it
brought itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata_api.blocks import LayoutId, ScopeId, ScopeSecret


@dataclass(frozen=True, slots=True)
class Chain:
    """A block with all those before it."""

    secret: ScopeSecret
    layout_id: LayoutId
    raw_bytes: int
    """Of each block."""
    digests: tuple[bytes, ...]
    """Root first."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Blocks of a chain from `start` up to, not including, `end`; those before `start` come with another portion."""

    chain: Chain
    start: int
    end: int

    def link(self, at: int) -> tuple[bytes, bytes]:
        """Digest of a block and of the one before it, empty at the root."""
        return self.chain.digests[at], self.chain.digests[at - 1] if at else b""


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """What is to be brought, in this order."""

    portions: tuple[Portion, ...]
    left_out: int
    """Blocks for which the budget is too small."""

    @property
    def blocks(self) -> int:
        """Blocks of all portions."""
        return sum(p.end - p.start for p in self.portions)

    @property
    def size_bytes(self) -> int:
        """Raw bytes of all portions."""
        return sum((p.end - p.start) * p.chain.raw_bytes for p in self.portions)


def budget_bytes(capacity_bytes: int, low_percent: int, hard_bytes: int | None, max_bytes: int) -> int:
    """Bytes that a warming may bring into a tier: below its low watermark, the tenant's quota and what was asked.

    `hard_bytes` is None for a tenant without a quota; `max_bytes` is 0 when nothing was asked.
    """
    bounds = [capacity_bytes * low_percent // 100]
    bounds += [hard_bytes] if hard_bytes is not None else []
    bounds += [max_bytes] if max_bytes > 0 else []
    return min(bounds)


def plan_warming(chains: Sequence[Chain], budget: int) -> WarmPlan:
    """Take as much of each chain, root first, as is not taken already and fits into what is left of `budget` bytes."""
    taken: set[tuple[ScopeId, bytes]] = set()
    portions: list[Portion] = []
    left_out: set[tuple[ScopeId, bytes]] = set()
    for chain in chains:
        keys = [(chain.secret.scope, digest) for digest in chain.digests]
        start = next((i for i, key in enumerate(keys) if key not in taken), len(keys))
        end = min(len(keys), start + budget // chain.raw_bytes)
        budget -= (end - start) * chain.raw_bytes
        taken.update(keys[start:end])
        left_out.update(keys[end:])
        if end > start:
            portions.append(Portion(chain, start, end))
    return WarmPlan(tuple(portions), len(left_out - taken))
