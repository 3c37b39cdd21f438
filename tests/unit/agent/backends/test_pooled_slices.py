"""Laws of what a host does with its slices of pooled memory where these, or the device, fail."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata_agent.backends.device import pooled
from kvstrata_agent.backends.device.devdax import MAP_BYTES, Region
from kvstrata_agent.backends.device.pooled import HEAD_BYTES, Line, PooledMemory, Superblock, open_pooled
from kvstrata_agent.backends.memory import sigbus
from kvstrata_api.errors import BackendFailedError, InvalidInputError, TierFullError
from kvstrata_api.models.pool import CxlPooled
from kvstrata_api.units import KIB, MIB
from kvstrata_native import flush

pytestmark = pytest.mark.unit

DEVICE_BYTES = 6 * MIB
SLICE_BYTES = 64 * KIB
HEAD = Superblock("pool", DEVICE_BYTES)
THIEF = Line(b"t" * 16, b"t" * 16, 1).packed()


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts but the test, and nobody waits."""
    monkeypatch.setattr(pooled, "BEAT_S", 3600.0)
    monkeypatch.setattr(pooled, "SETTLE_S", 0.0)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "device"
    path.touch()
    os.truncate(path, DEVICE_BYTES)
    return path


@pytest.fixture
def memory(device: Path) -> Iterator[PooledMemory]:
    made = holding(device, 8)
    yield made
    made.close()


def holding(device: Path, slices: int, node: str = "a") -> PooledMemory:
    memory = PooledMemory(device, node, HEAD)
    memory.claim(slices * SLICE_BYTES, 0.0)
    return memory


def made(memory: PooledMemory, extent: int, slices: int = 1) -> range:
    """Slices that an extent is given."""
    memory.make(extent, slices * SLICE_BYTES)
    return memory._units(memory._regions[extent])


def stolen(memory: PooledMemory, index: int) -> None:
    """Another host takes a slice, as from one that stood still."""
    memory.claims.table.write(index, THIEF)
    memory._renew()


def cut(device: Path, memory: PooledMemory, index: int) -> None:
    """From this slice on there is a memory error, as poison is: a load there is a SIGBUS."""
    os.truncate(device, memory._slice(index).offset)


def mend(device: Path) -> None:
    os.truncate(device, DEVICE_BYTES)


def given_out(memory: PooledMemory) -> set[int]:
    """All slices that extents can be given now."""
    found: set[int] = set()
    extent = 100
    while True:
        try:
            found |= {*made(memory, extent)}
        except TierFullError:
            return found
        extent += 1


def left(device: Path, memory: PooledMemory, index: int) -> bytes:
    at = memory._slice(index).offset
    return device.read_bytes()[at : at + SLICE_BYTES]


@contextmanager
def let_go(device: Path) -> Iterator[None]:
    """In the end nothing of the device is open, mapped or guarded."""
    before = {*sigbus._guarded.values()}
    yield
    open_files = [str(fd.resolve()) for fd in Path("/proc/self/fd").iterdir()]
    assert str(device) not in open_files
    assert str(device) not in Path("/proc/self/maps").read_text()
    assert {*sigbus._guarded.values()} <= before


def test_a_release_keeps_the_mark_of_what_another_extent_lost(memory: PooledMemory) -> None:
    slices = made(memory, 1)
    memory.free(1)
    assert made(memory, 2) == slices
    stolen(memory, slices[0])

    memory.release(1)
    assert memory.broken() == {2}
    with pytest.raises(BackendFailedError, match="have another owner"):
        memory.copy_in(2, 0, memoryview(b"block"))

    memory.free(2)
    memory.release(2)
    assert memory.broken() == frozenset()
    assert given_out(memory) == memory.claims.held


def test_a_slice_with_a_memory_error_is_not_given_out_again(memory: PooledMemory, device: Path) -> None:
    slices = made(memory, 1)
    cut(device, memory, slices[0])
    with pytest.raises(BackendFailedError, match="memory error in extent"):
        memory.copy_in(1, 0, memoryview(b"block"))
    mend(device)
    memory.free(1)
    memory.release(1)

    memory.claim(9 * SLICE_BYTES, 0.0)

    assert memory.claims.barred == {*slices}
    assert given_out(memory) == memory.claims.held - {*slices}


class Watching(PooledMemory):
    """Takes slices up whenever an extent has gone, as the thread that counts may."""

    seen: set[int]

    def _forget(self, extent: int) -> tuple[Region, bool]:
        found = super()._forget(extent)
        self._take_up()
        self.seen = {index for index, is_free in enumerate(self._is_free) if is_free}
        return found


@pytest.mark.parametrize("is_stolen", [False, True])
def test_a_slice_with_a_memory_error_is_free_at_no_moment(device: Path, *, is_stolen: bool) -> None:
    memory = Watching(device, "a", HEAD)
    memory.claim(8 * SLICE_BYTES, 0.0)
    slices = made(memory, 1, 2)
    cut(device, memory, slices[1])
    with pytest.raises(BackendFailedError, match="memory error in extent"):
        memory.copy_in(1, SLICE_BYTES, memoryview(b"block"))
    mend(device)
    if is_stolen:
        stolen(memory, slices[0])

    memory.free(1)
    memory.release(1)

    assert memory.seen.isdisjoint(slices)
    assert given_out(memory).isdisjoint(slices)
    memory.close()


def test_what_another_extent_has_in_a_slice_with_a_memory_error_is_lost(memory: PooledMemory, device: Path) -> None:
    slices = made(memory, 1, 2)
    memory.free(1)
    assert made(memory, 2) == slices[:1]
    cut(device, memory, slices[1])

    memory.release(1)
    mend(device)

    assert memory.broken() == {2}
    memory.free(2)
    memory.release(2)
    assert memory.broken() == frozenset()
    assert given_out(memory) == memory.claims.held - {*slices}


def test_of_an_extent_that_lost_a_slice_the_others_are_cleared(memory: PooledMemory, device: Path) -> None:
    block = b"b" * SLICE_BYTES
    first, second = made(memory, 1, 2)
    memory.copy_in(1, 0, memoryview(block + block))
    stolen(memory, first)

    memory.free(1)
    memory.release(1)

    assert left(device, memory, first) == block, "it is the other host's"
    assert left(device, memory, second) == bytes(SLICE_BYTES)


def test_a_slice_is_given_back_once_it_is_clear(memory: PooledMemory) -> None:
    slices = made(memory, 1)
    memory.free(1)
    memory.shrink(0)

    memory._count()
    assert memory.claims.held == {*slices}
    memory.release(1)
    memory._count()
    assert memory.claims.held == set()


def test_a_memory_error_in_a_slice_that_is_cleared_bars_it(device: Path) -> None:
    memory = holding(device, 8)
    for index in range(HEAD.slices):
        if index not in memory.claims.held:  # Of an earlier process of this node: it has to be cleared.
            memory.claims.table.write(index, Line(memory.claims.node, b"earlier process!", 1).packed())
    cut(device, memory, HEAD.slices - 1)

    memory.claim(HEAD.slices * SLICE_BYTES, 0.0)
    mend(device)

    assert HEAD.slices - 1 in memory.claims.barred
    assert given_out(memory) == memory.claims.held - memory.claims.barred
    memory.close()
    lines = device.read_bytes()[4 * KIB :]
    kept = {n for n in range(HEAD.slices) if lines[n * 64 : n * 64 + 64] != bytes(64)}
    assert kept == memory.claims.barred, "whoever takes them later clears them"


def test_a_memory_error_beside_the_head_leaves_the_head(device: Path) -> None:
    a, b = holding(device, HEAD.slices - 4, "a"), holding(device, 4, "b")
    made(a, 1)
    os.truncate(device, HEAD_BYTES)

    with pytest.raises(BackendFailedError, match="memory error between"):
        b.copy_other(a.place(1), 0, memoryview(bytearray(5)))
    mend(device)

    assert b.claims.others_held(b.claims.table.read()) == HEAD.slices - 4
    for memory in (a, b):
        memory.close()


def test_a_memory_error_in_the_head_is_survived_from_the_first_look_on(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(part: memoryview) -> None:
        os.truncate(device, 0)
        flush(part)

    monkeypatch.setattr(pooled, "flush", failing)
    with let_go(device), pytest.raises(BackendFailedError, match="memory error in the head"):
        PooledMemory(device, "a", HEAD)


def test_a_device_whose_head_fails_while_slices_are_claimed_is_let_go(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(part: memoryview) -> None:
        if len(part) == HEAD.slices * 64:
            os.truncate(device, 0)
        flush(part)

    monkeypatch.setattr(pooled, "flush", failing)
    with let_go(device), pytest.raises(BackendFailedError, match="memory error in the head"):
        open_pooled(CxlPooled(path=str(device)), "pool", "a", 8 * SLICE_BYTES)


def test_the_guard_of_a_head_ends_with_a_page_of_the_device(device: Path) -> None:
    """A device in pages of 2 MiB does not let zeros take the place of a part of one."""
    os.truncate(device, 64 * MIB)
    memory = PooledMemory(device, "a", Superblock("pool", 64 * MIB))

    assert memory._table._guarded.size_bytes == MAP_BYTES
    memory.close()


class Slow(PooledMemory):
    """Another host takes the next slices while this one clears the first."""

    def _clear(self, region: Region) -> None:
        if self.claims.dirty == {*range(self.superblock.slices)}:
            for index in THEIRS:
                self.claims.table.write(index, THIEF)
        super()._clear(region)


THEIRS = (3, 4)


@pytest.mark.parametrize("wanted", ["all", "more"])
def test_what_another_host_takes_while_slices_are_cleared_is_left_to_it(device: Path, wanted: str) -> None:
    slices = HEAD.slices
    before = holding(device, slices)
    for index in range(slices):  # Its process is killed.
        before.claims.table.write(index, Line(before.claims.node, b"k" * 16, 1).packed())
    with before._whole[HEAD.first_at :] as blocks:
        blocks[:] = b"b" * len(blocks)
        flush(blocks)
    before.close()
    memory = Slow(device, "a", HEAD)
    if wanted == "all":
        memory.claim(slices * SLICE_BYTES, 0.0)
    else:
        with pytest.raises(InvalidInputError):
            memory.claim((slices + 1) * SLICE_BYTES, 0.0)

    for index in range(slices):
        assert (left(device, memory, index) == b"b" * SLICE_BYTES) == (index in THEIRS)
    assert given_out(memory).isdisjoint(THEIRS)
    memory.close()
