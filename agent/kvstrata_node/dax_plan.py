"""Which mode each dax device should have, for the CXL tiers of all pools together, and the steps there. Pure.

Law: a device that is not declared as node preparation's to change has no steps.
Law: a device, or memory of one, that a tier needs in the mode it has is not taken from it.
Law: no driver is taken from a device while a block of its memory is online, or while it may be open: the kernel does so
all the same, and keeps that memory until the next boot (drivers/dax/kmem.c, dev_dax_kmem_remove), or ends mappings.
Law: planned again after it was carried out, or from any step in between, it goes on to the same end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import CxlMode, TierType

KMEM: Final = "kmem"
"""The driver that puts a device online as memory (Documentation/ABI/testing/sysfs-bus-dax)."""
DEVDAX: Final = "device_dax"
"""The driver that makes it a character device."""
NO_DRIVER: Final = ""
_KNOWN: Final = frozenset({KMEM, DEVDAX, NO_DRIVER})


@dataclass(frozen=True, slots=True)
class Block:
    """One block of memory that the kernel can put online or take offline as a whole."""

    number: int
    is_online: bool
    is_movable: bool = True
    """True when nothing lies there that the kernel cannot move, so that it can go offline again."""


@dataclass(frozen=True, slots=True)
class Device:
    """One dax device, as it is now."""

    name: str
    size_bytes: int
    driver: str
    blocks: tuple[Block, ...] = ()
    """Its memory, while driver kmem has it."""
    block_bytes: int = 0
    users: str = ""
    """Who has it open, or may have; empty when nobody has."""

    @property
    def online_bytes(self) -> int:
        """Memory of it that is online."""
        return sum(block.is_online for block in self.blocks) * self.block_bytes

    @property
    def mode(self) -> CxlMode | None:
        """The mode of tiers that it serves; None when no tier can use it as it is."""
        if self.driver == DEVDAX:
            return CxlMode.DEV_DAX
        return CxlMode.NUMA_NODE if self.driver == KMEM and all(b.is_online for b in self.blocks) else None


@dataclass(frozen=True, slots=True)
class CxlDemand:
    """What CXL tiers of all pools want of this machine."""

    numa_bytes: int = 0
    """Memory of tiers in mode NumaNode."""
    devices_bytes: tuple[int, ...] = ()
    """Sizes of tiers in mode DevDax; each takes a device of its own."""
    is_complete: bool = True
    """False while some pool's demand cannot be read: nothing is taken away then."""


@dataclass(frozen=True, slots=True)
class DaxState:
    """What the machine has for CXL tiers at one time."""

    devices: tuple[Device, ...]
    far_bytes: int
    """Memory of NUMA nodes without processors, wherever it comes from."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What node preparation has done to one device since the machine booted."""

    before: str
    """The driver that it had."""
    after: str
    """The driver that it was to get."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an administrator permits."""

    patterns: tuple[str, ...] = ()
    """Names of devices that may be changed, `*` and `?` as in a shell."""
    gives_back: bool = False
    """True when a device gets its former driver back as soon as no tier wants it."""
    changed: Mapping[str, Changed] = field(default_factory=dict)
    """By device: what was done so far."""

    def permits(self, device: str) -> bool:
        """True when a device may be changed."""
        return any(fnmatchcase(device, pattern) for pattern in self.patterns)


class Verb(StrEnum):
    """One thing that the kernel is asked for."""

    OFFLINE = "Offline"
    ONLINE = "Online"
    UNBIND = "Unbind"
    BIND = "Bind"


@dataclass(frozen=True, slots=True)
class Step:
    """One change of one device."""

    verb: Verb
    device: str
    driver: str
    """The driver that is taken or given; for blocks the one that they belong to."""
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Goal:
    """What one device is to become, and the steps that can be seen from here."""

    device: Device
    target: str
    """The driver that it should have."""
    steps: tuple[Step, ...]
    is_return: bool
    """True when no tier needs it and its former driver is given back."""


def wanted(tiers: Iterable[NodeTier], *, is_complete: bool = True) -> CxlDemand:
    """Sum what CXL tiers of all pools ask for; Emulated needs no device, Pooled one that is nobody's to change."""
    asked = [(t.cxl.mode, t.capacity_bytes) for t in tiers if t.type is TierType.CXL and t.cxl is not None]
    return CxlDemand(
        sum(size_bytes for mode, size_bytes in asked if mode is CxlMode.NUMA_NODE),
        tuple(sorted((size_bytes for mode, size_bytes in asked if mode is CxlMode.DEV_DAX), reverse=True)),
        is_complete,
    )


def needs(demand: CxlDemand, seen: DaxState, rules: Rules) -> dict[str, str]:
    """Return the driver that each device should have which tiers need; others are not in it.

    What is in the right mode already counts first, whoever has put it there.
    """
    spare_bytes = seen.far_bytes - demand.numa_bytes
    chosen: dict[str, str] = {}
    for size_bytes in demand.devices_bytes:
        device = _mappable(size_bytes, seen, rules, frozenset(chosen), spare_bytes)
        if device is not None:
            chosen[device.name] = DEVDAX
            spare_bytes -= device.online_bytes
    for device in _memory(-spare_bytes, seen, rules, frozenset(chosen)):
        chosen[device.name] = KMEM
    if demand.numa_bytes:
        chosen |= {d.name: KMEM for d in seen.devices if d.driver == KMEM and d.name not in chosen}
    return chosen


def _mappable(size_bytes: int, seen: DaxState, rules: Rules, taken: frozenset[str], spare_bytes: int) -> Device | None:
    """The device for one tier in mode DevDax: one that can be mapped, else one without a driver, else spare memory."""
    fit = [d for d in seen.devices if d.name not in taken and d.size_bytes >= size_bytes]
    free = [
        d
        for d in fit
        if d.driver == DEVDAX
        or (rules.permits(d.name) and (d.driver == NO_DRIVER or (d.driver == KMEM and d.online_bytes <= spare_bytes)))
    ]
    order = (DEVDAX, NO_DRIVER, KMEM)
    return min(free, key=lambda d: (order.index(d.driver), d.size_bytes, d.name), default=None)


def _memory(short_bytes: int, seen: DaxState, rules: Rules, taken: frozenset[str]) -> list[Device]:
    """Devices to put online until nothing is short: those that wait for it, those without a driver, mappable ones."""
    found: list[Device] = []
    order = (KMEM, NO_DRIVER, DEVDAX)
    may = [d for d in seen.devices if d.name not in taken and d.driver in _KNOWN and rules.permits(d.name)]
    for device in sorted(may, key=lambda d: (order.index(d.driver), -d.size_bytes, d.name)):
        if short_bytes <= 0:
            break
        if device.mode is not CxlMode.NUMA_NODE:
            found.append(device)
            short_bytes -= device.size_bytes - device.online_bytes
    return found


def _former(device: Device, rules: Rules) -> str | None:
    """The driver to give back; None for a device that is left as it is."""
    change = rules.changed.get(device.name)
    if change is None or not rules.gives_back or not rules.permits(device.name):
        return None
    # One that somebody else has given another driver meanwhile is theirs now.
    return change.before if device.driver in {change.before, change.after, NO_DRIVER} else None


def steps(device: Device, target: str, rules: Rules, *, is_complete: bool = True) -> tuple[Step, ...]:
    """Steps of one device to a driver, as far as they can be seen: blocks of memory are there after kmem is bound.

    None for what may not be changed, for drivers that are not known here, and for a device that is open.
    """
    if not rules.permits(device.name) or device.driver not in _KNOWN:
        return ()
    if device.driver == target:
        return _put_online(device, rules) if target == KMEM else ()
    found: list[Step] = []
    if device.driver != NO_DRIVER:
        if device.users or not is_complete:
            return ()
        online = tuple(b.number for b in device.blocks if b.is_online)
        if online:
            found.append(Step(Verb.OFFLINE, device.name, device.driver, online))
        found.append(Step(Verb.UNBIND, device.name, device.driver))
    if target != NO_DRIVER:
        found.append(Step(Verb.BIND, device.name, target))
    return tuple(found)


def _put_online(device: Device, rules: Rules) -> tuple[Step, ...]:
    """Bring memory online, and where this preparation has bound it, so that it can go offline again.

    The kernel's own default may put it into zone Normal the moment it is bound (auto_online_blocks).
    """
    offline = tuple(b.number for b in device.blocks if not b.is_online)
    found = [Step(Verb.ONLINE, device.name, KMEM, offline)] if offline else []
    change = rules.changed.get(device.name)
    stuck = tuple(b.number for b in device.blocks if b.is_online and not b.is_movable)
    if stuck and change is not None and change.after == KMEM:
        found += [Step(Verb.OFFLINE, device.name, KMEM, stuck), Step(Verb.ONLINE, device.name, KMEM, stuck)]
    return tuple(found)


def plan(demand: CxlDemand, seen: DaxState, rules: Rules) -> tuple[Goal, ...]:
    """What there is to do, by device; nothing for what is as it should be or may not be changed now."""
    needed = needs(demand, seen, rules)
    back = {} if not demand.is_complete else {d.name: _former(d, rules) for d in seen.devices if d.name not in needed}
    goals = []
    for device in seen.devices:
        target = needed.get(device.name, back.get(device.name))
        if target is not None and (found := steps(device, target, rules, is_complete=demand.is_complete)):
            goals.append(Goal(device, target, found, is_return=device.name not in needed))
    return tuple(goals)
