"""Whether CXL tiers have their dax devices in the declared mode, and what is in the way. Pure."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from kvstrata_api.models.conditions import Condition, Status
from kvstrata_api.models.inventory import NodeCxl
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import format_rounded
from kvstrata_node import dax_plan as dax
from kvstrata_node.dax_plan import DEVDAX, CxlDemand, DaxState, Device, Rules

CONDITION: Final = "DevicePresent"


class Reason(StrEnum):
    """Reason of condition DevicePresent as node preparation writes it, from bad to good."""

    NOT_PERMITTED = "NotPermitted"
    BUSY = "Busy"
    WRONG_MODE = "WrongMode"
    ABSENT = "Absent"
    PRESENT = "Present"
    NOT_REQUESTED = "NotRequested"

    @property
    def is_good(self) -> bool:
        """True when nothing is in the way."""
        return self in (Reason.PRESENT, Reason.NOT_REQUESTED)


Verdict = tuple[Reason, str]
"""Reason, and the same for people."""


def of_modes(demand: CxlDemand, seen: DaxState, rules: Rules, refused: Mapping[str, Verdict]) -> dict[CxlMode, Verdict]:
    """Judge each mode that tiers ask for; `refused` has by device what the kernel did not do."""
    needed = dax.needs(demand, seen, rules)
    found = {}
    if demand.numa_bytes:
        found[CxlMode.NUMA_NODE] = _memory(demand, seen, rules, refused, needed)
    if demand.devices_bytes:
        found[CxlMode.DEV_DAX] = _mappable(demand, seen, rules, refused, needed)
    return found


def _memory(
    demand: CxlDemand, seen: DaxState, rules: Rules, refused: Mapping[str, Verdict], needed: Mapping[str, str]
) -> Verdict:
    if seen.far_bytes >= demand.numa_bytes:
        return Reason.PRESENT, ""
    message = (
        f"tiers in mode NumaNode want {format_rounded(demand.numa_bytes)}, NUMA nodes without processors have "
        f"{format_rounded(seen.far_bytes)}"
    )
    candidates = [d for d in seen.devices if d.mode is not CxlMode.NUMA_NODE and needed.get(d.name) != DEVDAX]
    return _worst(message, [_obstacle(d, rules, refused) for d in candidates])


def _mappable(
    demand: CxlDemand, seen: DaxState, rules: Rules, refused: Mapping[str, Verdict], needed: Mapping[str, str]
) -> Verdict:
    ready = [d for d in seen.devices if needed.get(d.name) == DEVDAX == d.driver]
    if len(ready) == len(demand.devices_bytes):
        return Reason.PRESENT, ""
    sizes = ", ".join(format_rounded(size_bytes) for size_bytes in demand.devices_bytes)
    message = f"tiers in mode DevDax want devices of {sizes}; {len(ready)} can be mapped"
    others = [d for d in seen.devices if d.driver != DEVDAX and d.size_bytes >= min(demand.devices_bytes)]
    kept = [f"{d.name} is memory that tiers in mode NumaNode want" for d in others if _is_kept(d, rules, needed)]
    found = [_obstacle(d, rules, refused) for d in others if not _is_kept(d, rules, needed)]
    return _worst("; ".join([message, *kept]), found)


def _is_kept(device: Device, rules: Rules, needed: Mapping[str, str]) -> bool:
    return rules.permits(device.name) and needed.get(device.name) == dax.KMEM


def _obstacle(device: Device, rules: Rules, refused: Mapping[str, Verdict]) -> Verdict:
    """What keeps one device from the mode that it is wanted in."""
    driver = f"{device.name} has {f'driver {device.driver}' if device.driver else 'no driver'}"
    if not rules.permits(device.name):
        return Reason.WRONG_MODE, f"{driver} and is not declared to be changed (--dax-device, daxctl)"
    if device.name in refused:
        return refused[device.name]
    if device.users:
        return Reason.BUSY, f"{device.name}: {device.users}"
    return Reason.WRONG_MODE, driver


def _worst(message: str, obstacles: Iterable[Verdict]) -> Verdict:
    found = sorted(obstacles, key=lambda v: list(Reason).index(v[0]))
    reason = found[0][0] if found else Reason.ABSENT
    reasons = [why for _, why in found] or ["there is no other dax device"]
    return reason, "; ".join((message, *reasons))


def of_tiers(tiers: Iterable[NodeTier], known: Iterable[NodeCxl]) -> Verdict:
    """Judge the tiers of one pool by what is known of the modes that they ask for; the worst counts."""
    modes = {t.cxl.mode for t in tiers if t.cxl is not None} - {CxlMode.EMULATED, CxlMode.POOLED}
    judged = [(Reason(one.reason), one.message) for one in known if one.mode in modes and one.reason in set(Reason)]
    return min(judged, key=lambda v: list(Reason).index(v[0]), default=(Reason.NOT_REQUESTED, ""))


def condition(verdict: Verdict, generation: int = 0) -> Condition:
    """Make a condition of a KVPoolNode of it."""
    reason, message = verdict
    status = Status.TRUE if reason.is_good else Status.FALSE
    return Condition(type=CONDITION, status=status, reason=reason, message=message, observed_generation=generation)
