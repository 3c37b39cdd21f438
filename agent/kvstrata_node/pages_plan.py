"""How many huge pages each NUMA node should have, for the tiers of all pools together. Pure.

Law: a plan never takes back a page that node preparation has not added itself, nor one that is in use.
Law: planned again after it was carried out, it is empty.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.units import PAGE_BYTES
from kvstrata_node.discovery import HugePages, NodeFacts

SIZES: Final = ("1Gi", "2Mi")
"""Larger pages first: they are harder to find room for."""
MEMORY_PERCENT_MAX: Final = 90
"""Part of a NUMA node's memory that may be huge pages, whoever asked for them: the kernel and everybody else need
the rest."""


@dataclass(frozen=True, slots=True, order=True)
class PagePool:
    """The pages of one size on one NUMA node."""

    node: int
    page_bytes: int


Pages = Mapping[PagePool, int]
"""Numbers of pages."""


@dataclass(frozen=True, slots=True)
class PageDemand:
    """What pools want of this machine."""

    pages: Pages = field(default_factory=dict)
    """Of tiers, by pool of pages."""
    others: Mapping[int, int] = field(default_factory=dict)
    """Pages on each NUMA node that pods of others use, by page size in bytes; they are kept free for them."""
    is_complete: bool = True
    """False while some pool's demand cannot be read: nothing is taken back then."""

    def at(self, pool: PagePool) -> int:
        """Pages that should be there at least; where no tier wants any, what others have is theirs to reserve."""
        own = self.pages.get(pool, 0)
        return own + self.others.get(pool.page_bytes, 0) if own else 0

    def sizes(self) -> frozenset[int]:
        """Page sizes that are wanted, in bytes."""
        return frozenset(pool.page_bytes for pool, pages in self.pages.items() if pages)


@dataclass(frozen=True, slots=True)
class SetPages:
    """Have the kernel set the number of pages of one pool."""

    pool: PagePool
    before: int
    target: int

    @property
    def is_growth(self) -> bool:
        """True when pages are added."""
        return self.target > self.before


def wanted(tiers: Iterable[NodeTier], cpu_nodes: Sequence[int]) -> dict[PagePool, int]:
    """Sum the pages of all HostDRAM tiers with huge pages, as `host_dram.placement_of` lays them out.

    `Local` is the first NUMA node, `Spread` a part on each, rounded up.
    """
    pages: Counter[PagePool] = Counter()
    for tier in tiers:
        if tier.host_dram is None or tier.host_dram.page_size == "4Ki":
            continue
        page_bytes = PAGE_BYTES[tier.host_dram.page_size]
        nodes = tuple(cpu_nodes[:1] if tier.host_dram.numa == "Local" else cpu_nodes) or (0,)
        count = -(-tier.capacity_bytes // page_bytes)
        pages.update({PagePool(node, page_bytes): -(-count // len(nodes)) for node in nodes})
    return dict(pages)


def plan(demand: PageDemand, facts: NodeFacts, added: Pages, promised: Mapping[int, int]) -> tuple[SetPages, ...]:
    """Steps towards the demand: what is not needed any more goes first.

    `added` is what earlier steps have added, `promised` how many free pages of each size are promised to mappings
    already: the kernel counts those for the whole machine, so each NUMA node keeps as many.
    """
    room_bytes = _room(facts)
    shrinks, grows = [], []
    for found in sorted(facts.hugepages, key=lambda p: (-p.page_bytes, p.node)):
        pool = PagePool(found.node, found.page_bytes)
        goal = max(foreign(found, added), demand.at(pool))
        if goal > found.total:
            grows.append(SetPages(pool, found.total, goal))
            continue
        if not demand.is_complete:
            continue
        in_use = min(found.total, found.total - found.free + promised.get(found.page_bytes, 0))
        step = SetPages(pool, found.total, max(goal, in_use))
        room_bytes[found.node] -= _more_bytes(step)
        shrinks.append(step)
    steps = shrinks + [_limited(step, room_bytes) for step in grows]
    return tuple(step for step in steps if step.target != step.before)


def _limited(step: SetPages, room_bytes: dict[int, int]) -> SetPages:
    """Grow by what there is room for, and take that away from the room."""
    pool = step.pool
    most = step.before + max(0, room_bytes[pool.node]) // pool.page_bytes
    limited = replace(step, target=min(step.target, most))
    room_bytes[pool.node] -= _more_bytes(limited)
    return limited


def _more_bytes(step: SetPages) -> int:
    return (step.target - step.before) * step.pool.page_bytes


def foreign(pool: HugePages, added: Pages) -> int:
    """Pages that somebody else has reserved, such as the boot command line."""
    return pool.total - min(pool.total, added.get(PagePool(pool.node, pool.page_bytes), 0))


def is_limited(demand: PageDemand, facts: NodeFacts, page_bytes: int) -> bool:
    """True when a NUMA node has no memory left to give, whatever the kernel would find."""
    room_bytes = _room(facts)
    return any(
        pool.total < demand.at(PagePool(pool.node, page_bytes)) and room_bytes[pool.node] < page_bytes
        for pool in facts.hugepages
        if pool.page_bytes == page_bytes
    )


def _room(facts: NodeFacts) -> dict[int, int]:
    """Bytes that may become huge pages on each NUMA node; negative where there are more already."""
    left = {node.id: node.memory_bytes * MEMORY_PERCENT_MAX // 100 for node in facts.numa}
    for pool in facts.hugepages:
        left[pool.node] = left.get(pool.node, 0) - pool.total * pool.page_bytes
    return left
