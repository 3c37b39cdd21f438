"""Whether tiers have their huge pages, and what is in the way: the one place that decides the reasons. Pure."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from kvstrata_api.models.conditions import Condition, Status
from kvstrata_api.models.inventory import NodeHugePages
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.units import GIB, PAGE_BYTES, format_rounded
from kvstrata_node import pages_plan as pages
from kvstrata_node.discovery import HugePages, NodeFacts
from kvstrata_node.pages_plan import PageDemand, PagePool

CONDITION: Final = "HugepagesReserved"


class Reason(StrEnum):
    """Reason of condition HugepagesReserved, from bad to good."""

    NEEDS_REBOOT = "NeedsReboot"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    FRAGMENTED = "Fragmented"
    NOT_PREPARED = "NotPrepared"
    KUBELET_STALE = "KubeletStale"
    NOT_RESERVED = "NotReserved"
    RESERVED = "Reserved"
    NOT_REQUESTED = "NotRequested"

    @property
    def is_good(self) -> bool:
        """True when nothing is in the way."""
        return self in (Reason.RESERVED, Reason.NOT_REQUESTED)


Verdict = tuple[Reason, str]
"""Reason, and the same for people."""


def of_size(size: str, demand: PageDemand, facts: NodeFacts, advertised_bytes: int | None, *, tried: bool) -> Verdict:
    """Judge one page size of this machine.

    `advertised_bytes` is what the kubelet advertises, None while that is not known; `tried` is False
    where nobody may reserve pages here.
    """
    page_bytes = PAGE_BYTES[size]
    if page_bytes not in demand.sizes():
        return Reason.NOT_REQUESTED, ""
    there = [pool for pool in facts.hugepages if pool.page_bytes == page_bytes]
    if not there:
        boot = f"hugepagesz={size[:-1]} on the kernel's command line"
        return Reason.NEEDS_REBOOT, f"this kernel has no pages of {size}; boot with {boot}, or ask for another size"
    short = [pool for pool in there if pool.total < demand.at(_pool_of(pool))]
    if short:
        return _shortage(size, short, demand, facts, tried=tried)
    total_bytes = sum(pool.total for pool in there) * page_bytes
    wanted_bytes = sum(demand.at(_pool_of(pool)) for pool in there) * page_bytes
    if advertised_bytes is not None and advertised_bytes < wanted_bytes:
        return Reason.KUBELET_STALE, (
            f"the machine has {format_rounded(total_bytes)} in pages of {size}, its kubelet advertises "
            f"{format_rounded(advertised_bytes)}: it looks only when it starts (kubernetes#111757); restart the kubelet"
        )
    return Reason.RESERVED, ""


def _shortage(size: str, short: Sequence[HugePages], demand: PageDemand, facts: NodeFacts, *, tried: bool) -> Verdict:
    message = "; ".join(f"NUMA node {p.node} has {p.total} of {demand.at(_pool_of(p))} pages of {size}" for p in short)
    if pages.is_limited(demand, facts, short[0].page_bytes):
        return Reason.INSUFFICIENT_MEMORY, (
            f"{message}; huge pages take at most {pages.MEMORY_PERCENT_MAX} % of a NUMA node's memory"
        )
    if not tried:
        return Reason.NOT_PREPARED, f"{message}; reserve them, or let node preparation do it"
    if short[0].page_bytes == GIB:
        nodes = ",".join(f"{p.node}:{demand.at(_pool_of(p))}" for p in short)
        return Reason.NEEDS_REBOOT, f"{message}; boot with hugepagesz=1G hugepages={nodes}: memory is in pieces by now"
    return Reason.FRAGMENTED, f"{message}: the kernel found no more, after it has compacted the memory; a reboot helps"


def _pool_of(found: HugePages) -> PagePool:
    return PagePool(found.node, found.page_bytes)


def of_tiers(tiers: Iterable[NodeTier], known: Iterable[NodeHugePages]) -> Verdict:
    """Judge the tiers of one pool by what is known of the sizes that they ask for; the worst counts."""
    sizes = {t.host_dram.page_size for t in tiers if t.host_dram is not None} - {"4Ki"}
    found = [one for one in known if one.page_size in sizes and one.reason in set(Reason)]
    judged = [(Reason(one.reason), one.message) for one in found]
    return min(judged, key=lambda v: list(Reason).index(v[0]), default=(Reason.NOT_REQUESTED, ""))


def condition(verdict: Verdict, generation: int = 0) -> Condition:
    """Make a condition of a KVPoolNode of it."""
    reason, message = verdict
    status = Status.TRUE if reason.is_good else Status.FALSE
    return Condition(type=CONDITION, status=status, reason=reason, message=message, observed_generation=generation)
