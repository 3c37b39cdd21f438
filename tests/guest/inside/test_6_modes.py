"""Node preparation brings a dax device into the mode that tiers declare, and leaves every other one as it is.

Before: the volatile device is online as memory, the persistent one can be mapped (the tests before this one). No file
system was mounted since: the kernel makes caches then with a part on each node, which from zone Normal never goes away.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import regions
from recorded import Record

from kvstrata_agent.backends.device.devdax import open_devdax
from kvstrata_agent.backends.memory.cxl import open_cxl
from kvstrata_agent.backends.memory.host_dram import make_bound
from kvstrata_agent.backends.memory.mapping import Placement
from kvstrata_api.models.pool import CxlTier
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import MIB
from kvstrata_node.books import read_dax_book
from kvstrata_node.dax import DaxKeeper
from kvstrata_node.dax_plan import DEVDAX, KMEM, CxlDemand, Rules
from kvstrata_node.dax_sysfs import DaxMachine, Sysfs
from kvstrata_node.dax_verdict import Reason
from kvstrata_node.discovery import read_dax, read_machine
from support.backends.contract import CAPACITY_BYTES, content, get, put

DEVICE = "dax0.0"
BOOT = Path("/proc/sys/kernel/random/boot_id")
STATE = Path("/tmp/state")
MAPPED = CxlDemand(devices_bytes=(8 * MIB, 8 * MIB))
"""Two devices: the persistent one and one more."""
ONLINE = CxlDemand(numa_bytes=300 * MIB)
"""More than the node of firmware has."""


def keeper(*patterns: str, gives_back: bool = False) -> DaxKeeper:
    STATE.mkdir(exist_ok=True)
    book = read_dax_book(STATE, BOOT.read_text().strip())
    return DaxKeeper(DaxMachine(), book, Rules(patterns or (DEVICE,), gives_back=gives_back), return_s=0.0)


def drivers() -> dict[str, str]:
    return {device.name: device.driver for device in read_dax(Path("/"))}


def others() -> dict[str, str]:
    return {name: driver for name, driver in drivers().items() if name != DEVICE}


def far_bytes(node: int) -> int:
    return sum(n.memory_bytes for n in read_machine().cpuless if n.id == node)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = others()
    assert list(before.values()) == [DEVDAX]
    yield
    assert others() == before


def test_a_device_that_is_not_declared_is_left_and_told_of() -> None:
    told = keeper("dax9.*").round(MAPPED)

    assert drivers()[DEVICE] == KMEM
    assert told[CxlMode.DEV_DAX][0] is Reason.WRONG_MODE
    assert f"{DEVICE} has driver kmem" in told[CxlMode.DEV_DAX][1]


async def test_memory_becomes_a_device_that_a_tier_maps(record_property: Record) -> None:
    told = keeper().round(MAPPED)

    assert told == {CxlMode.DEV_DAX: (Reason.PRESENT, "")}
    (device,) = [d for d in read_dax(Path("/")) if d.name == DEVICE]
    assert device.driver == DEVDAX
    assert far_bytes(device.node) == 0
    assert keeper().round(MAPPED) == told
    backend = open_devdax(CAPACITY_BYTES, [device])
    slot, record = await put(backend, 7)
    assert await get(backend, slot, record) == content(7)
    await backend.close()
    record_property("book", (STATE / "dax.json").read_text())


@pytest.mark.parametrize("is_mapped_only", [False, True])
def test_a_device_that_a_process_has_open_keeps_its_driver(record_property: Record, *, is_mapped_only: bool) -> None:
    fd = os.open(f"/dev/{DEVICE}", os.O_RDWR)
    mapped = mmap.mmap(fd, 2 * MIB)
    mapped[:4] = b"mine"
    if is_mapped_only:
        del mapped
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = libc.mmap(None, 2 * MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        os.close(fd)

    told = keeper().round(ONLINE)

    assert drivers()[DEVICE] == DEVDAX
    reason, why = told[CxlMode.NUMA_NODE]
    assert reason is Reason.BUSY
    assert f"{os.getpid()}" in why
    record_property("busy", why)
    if is_mapped_only:
        assert ctypes.string_at(address, 4) == b"mine"
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.munmap(address, 2 * MIB)
    else:
        assert mapped[:4] == b"mine"
        mapped.close()
        os.close(fd)


async def test_a_device_that_nobody_has_open_any_more_becomes_memory_that_can_go_offline_again(
    record_property: Record,
) -> None:
    told = keeper().round(ONLINE)

    assert told == {CxlMode.NUMA_NODE: (Reason.PRESENT, "")}
    assert drivers()[DEVICE] == KMEM
    seen = DaxMachine().device(DEVICE)
    assert seen is not None
    record_property("blocks", len(seen.blocks))
    assert [(b.is_online, b.is_movable) for b in seen.blocks] == [(True, True)] * len(seen.blocks)
    assert seen.blocks
    (device,) = [d for d in read_dax(Path("/")) if d.name == DEVICE]
    backend = open_cxl(CxlTier(), CAPACITY_BYTES, [n for n in read_machine().cpuless if n.id == device.node])
    slot, record = await put(backend, 3)
    assert await get(backend, slot, record) == content(3)
    await backend.close()


@contextmanager
def held(node: int) -> Iterator[None]:
    """A page of a node that the kernel cannot move: a pipe refers to it (man 2 vmsplice)."""
    memory = make_bound(2 * MIB, 4096, Placement((node,)))
    memory.populate()
    read, write = os.pipe()
    vector = (ctypes.c_size_t * 2)(memory.address, 4096)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.vmsplice(write, ctypes.byref(vector), ctypes.c_ulong(1), 0) == 4096, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        os.close(read)
        os.close(write)
        memory.release()


def test_memory_that_cannot_be_moved_stays_online_whole(
    record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata_node.dax_sysfs.OFFLINE_S", 5.0)
    (device,) = [d for d in read_dax(Path("/")) if d.name == DEVICE]
    before = far_bytes(device.node)

    with held(device.node):
        reason, why = keeper().round(MAPPED)[CxlMode.DEV_DAX]

    record_property("busy", why)
    assert reason is Reason.BUSY
    assert "do not go offline" in why
    assert drivers()[DEVICE] == KMEM
    assert far_bytes(device.node) == before > 0


class DyingSysfs(Sysfs):
    """Is killed before one of its writes; a block that goes offline is one."""

    def __init__(self, die_at: int) -> None:
        self._left = die_at

    def _moment(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def write(self, path: Path, text: str) -> None:
        self._moment()
        super().write(path, text)

    def offline(self, states: Sequence[Path]) -> None:
        for state in states:
            self._moment()
            super().offline([state])


def dies(demand: CxlDemand, die_at: int) -> bool:
    """A process that is killed before one of its writes, counted from 0; false when it ends first."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            dying = keeper()
            dying.machine = DaxMachine(sysfs=DyingSysfs(die_at))
            dying.round(demand)
            os._exit(0)
        os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) in {0, -signal.SIGKILL}
    return os.WIFSIGNALED(status)


def test_killed_before_any_of_its_writes_it_ends_where_it_would_have(record_property: Record) -> None:
    kills, is_going = {DEVDAX: 0, KMEM: 0}, True
    while is_going:
        is_going = False
        for target, demand in ((DEVDAX, MAPPED), (KMEM, ONLINE)):
            if dies(demand, kills[target]):
                kills[target] += 1
                is_going = True
            assert [reason for reason, _ in keeper().round(demand).values()] == [Reason.PRESENT]
            assert drivers()[DEVICE] == target
    record_property("kills", kills)
    assert min(kills.values()) >= 4


def test_a_device_gets_its_former_driver_back_where_that_is_declared() -> None:
    assert drivers()[DEVICE] == KMEM
    (STATE / "dax.json").unlink()
    assert keeper(gives_back=True).round(MAPPED)[CxlMode.DEV_DAX][0] is Reason.PRESENT
    assert keeper().round(CxlDemand()) == {}
    assert drivers()[DEVICE] == DEVDAX

    keeper(gives_back=True).round(CxlDemand())

    seen = DaxMachine().device(DEVICE)
    assert seen is not None
    assert seen.mode is CxlMode.NUMA_NODE
    assert json.loads((STATE / "dax.json").read_text())["devices"] == []
    regions.until(lambda: far_bytes(read_dax(Path("/"))[0].node) > 0)
