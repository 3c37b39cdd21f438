"""The pooled tier on a file in place of a device that several hosts reach: two tiers on it are two hosts."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvstrata_agent.backends.base import SlotRef, TierBackend
from kvstrata_agent.backends.device import pooled
from kvstrata_agent.backends.device.pooled import HEAD_BYTES, PooledTier, open_pooled
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, TierFullError
from kvstrata_api.models.pool import CxlPooled
from kvstrata_api.units import KIB, MIB
from support.backends.contract import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    BackendContract,
    content,
    get,
    put,
    put_until_refused,
    record,
)

pytestmark = pytest.mark.contract

DEVICE_BYTES = 6 * MIB
SLICE_BYTES = 64 * KIB


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device of foreign bytes, as memory has them after power came."""
    path = tmp_path / "device"
    path.write_bytes(b"\xa5" * HEAD_BYTES + bytes(DEVICE_BYTES - HEAD_BYTES))
    return path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same protocol, with shorter times."""
    for name, seconds in (("BEAT_S", 0.05), ("LAPSE_S", 0.5), ("SETTLE_S", 0.02)):
        monkeypatch.setattr(pooled, name, seconds)


def opened(device: Path, node: str, capacity_bytes: int = CAPACITY_BYTES, pool: str = "pool") -> PooledTier:
    return open_pooled(CxlPooled(path=str(device)), pool, node, capacity_bytes)


class TestPooled(BackendContract):
    @pytest.fixture
    async def backend(self, device: Path) -> AsyncIterator[TierBackend]:
        backend = opened(device, "a")
        assert backend.capabilities.medium == "emulated-cxl-pooled"
        assert backend.capabilities.is_emulated
        yield backend
        await backend.close()


async def read_by(reader: PooledTier, owner: PooledTier, number: int) -> memoryview:
    """Store a block with one host and read it by the other one."""
    slot, made = await put(owner, number)
    into = memoryview(bytearray(made.stored_bytes))
    await reader.read_other("a", owner.file_of(slot), slot, made, into)
    return into


async def test_one_copy_is_read_by_both(device: Path) -> None:
    a, b = opened(device, "a"), opened(device, "b")

    for number in range(1, 60):
        assert await read_by(b, a, number) == content(number)
        assert await read_by(a, b, 100 + number) == content(100 + number)

    await a.close()
    await b.close()


async def test_a_slot_that_was_used_again_and_a_slice_that_was_given_back_are_found_out(device: Path) -> None:
    a, b = opened(device, "a"), opened(device, "b")
    slot, made = await put(a, 1)
    place, into = a.file_of(slot), memoryview(bytearray(made.stored_bytes))

    a.drop(slot)
    again, _ = await put(a, 2)
    assert (again.extent, again.offset) == (slot.extent, slot.offset)
    with pytest.raises(BlockCorruptError, match="checksum differs"):
        await b.read_other("a", place, slot, made, into)

    await a.close()
    with pytest.raises(BlockCorruptError, match="another owner"):
        await b.read_other("a", place, slot, made, into)
    await b.close()


async def test_hosts_that_open_at_the_same_time_share_no_slice(device: Path) -> None:
    opening = [asyncio.to_thread(opened, device, name, CAPACITY_BYTES // 2) for name in "abcd"]
    hosts = await asyncio.gather(*opening)

    held = [set(host.memory.claims.held) for host in hosts]
    assert sum(map(len, held)) == len(set.union(*held))
    assert all(len(one) * SLICE_BYTES == CAPACITY_BYTES // 2 for one in held)
    for host in hosts:
        await host.close()


async def test_what_is_left_is_named_when_there_is_too_little(device: Path) -> None:
    a = opened(device, "a", 4 * MIB)

    with pytest.raises(InvalidInputError, match=r"2097152 B asked for, 1572864 B could be had .* have 4194304 B"):
        opened(device, "b", 2 * MIB)
    assert all(line == bytes(64) for line in _lines_of_others(a))
    with pytest.raises(InvalidInputError, match="slices of 65536 B"):
        opened(device, "b", 8 * MIB)
    await a.close()


def _lines_of_others(host: PooledTier) -> list[bytes]:
    lines = host.memory.claims.table.read()
    return [line for index, line in enumerate(lines) if index not in host.memory.claims.held]


async def test_a_tier_that_shrinks_leaves_room_to_others_and_one_that_grows_takes_it(device: Path) -> None:
    a = opened(device, "a", 4 * MIB)

    assert await a.resize(2 * MIB) == frozenset()
    b = opened(device, "b", 3 * MIB)
    with pytest.raises(InvalidInputError, match="5242880 B asked for"):
        await a.resize(5 * MIB)
    assert a.capacity_bytes == 2 * MIB
    await b.close()
    await a.resize(5 * MIB)

    assert a.capacity_bytes == 5 * MIB
    numbers = [await put(a, number) for number in range(5 * MIB // (16 * KIB))]
    assert await get(a, *numbers[-1]) == content(len(numbers) - 1)
    await a.close()


async def test_a_growth_that_is_refused_leaves_the_tier_what_it_had_and_others_the_rest(device: Path) -> None:
    a, b = opened(device, "a", MIB), opened(device, "b", 3 * MIB)
    memory, before = a.memory, set(a.memory.claims.held)
    kept = await put(a, 0)
    others = set(range(memory.superblock.slices)) - before - b.memory.claims.held
    with memory._whole[memory._first_at + min(others) * SLICE_BYTES :] as left:
        left[:5] = b"block"  # Of a host that has died.

    with pytest.raises(InvalidInputError, match="5242880 B asked for"):
        await a.resize(5 * MIB)
    lines = memory.claims.table.read()
    assert all(lines[index] == bytes(64) for index in others)
    with memory._whole[memory._first_at + min(others) * SLICE_BYTES :] as left:
        assert left[:5] == bytes(5)
    await asyncio.sleep(4 * pooled.BEAT_S)

    assert memory.claims.held == before
    stored, _ = await put_until_refused(a)
    assert len(stored) == len(before) * (SLICE_BYTES // kept[0].size_bytes) - 1
    assert await get(a, *kept) == content(0)
    await b.resize(3 * MIB + len(others) * SLICE_BYTES)
    await a.close()
    await b.close()


async def test_another_pool_another_format_and_another_process_of_the_node_are_refused(device: Path) -> None:
    a = opened(device, "a")
    with pytest.raises(InvalidInputError, match="it belongs to pool pool, not other; clear its first"):
        opened(device, "b", pool="other")
    with pytest.raises(InvalidInputError, match="Resource temporarily unavailable"):
        opened(device, "a")
    await a.close()
    with pytest.raises(InvalidInputError, match="No such file"):
        opened(device.with_name("absent"), "a")


@pytest.mark.parametrize("place", ["", "x-1", f"{'00' * 16}-9999", f"{'00' * 16}--1", f"{'00' * 15}-0", "../a"])
async def test_a_place_that_cannot_be_is_refused(device: Path, place: str) -> None:
    a = opened(device, "a")
    slot, made = await put(a, 1)

    with pytest.raises(InvalidInputError):
        await a.read_other("b", place, slot, made, memoryview(bytearray(made.stored_bytes)))
    await a.close()


async def test_slices_that_somebody_took_are_given_up_and_replaced(device: Path) -> None:
    a = opened(device, "a")
    stored = [await put(a, number) for number in range(40)]
    claims = a.memory.claims
    first = a.memory._units(a.memory._regions[stored[0][0].extent])[0]
    thief = pooled.Line(b"t" * 16, b"t" * 16, 1).packed()
    claims.table.write(first, thief)  # As by a host that saw this one stand still.

    await _until(lambda: stored[0][0].extent in a.compact())
    with pytest.raises(BackendFailedError, match="have another owner"):
        await get(a, *stored[0])
    lost = {slot.extent for slot, _ in stored if slot.extent in a.compact()}
    for slot, made in stored:
        if slot.extent in lost:
            a.drop(slot)
        else:
            assert await get(a, slot, made) == content(int.from_bytes(made.key.digest, "big"))
    await _until(lambda: len(claims.held) * SLICE_BYTES == CAPACITY_BYTES)
    assert first not in claims.held
    await _until(
        lambda: sum(a.memory._is_free) + sum(len(a.memory._units(r)) for r in a.memory._regions.values()) == 32
    )
    assert await get(a, *(await put(a, 77))) == content(77)

    await a.close()
    assert _raw(device, first) == thief


def _whole(device: Path) -> bytes:
    return device.read_bytes()


def _raw(device: Path, index: int) -> bytes:
    at = 4 * KIB + 64 * index
    return device.read_bytes()[at : at + 64]


async def _until(is_true: Callable[[], bool]) -> None:
    for _ in range(200):
        if is_true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not within 4 s")


async def test_a_full_device_is_a_full_tier(device: Path) -> None:
    a = opened(device, "a")

    stored, refused = await put_until_refused(a)
    assert isinstance(refused, TierFullError)
    assert len(stored) == CAPACITY_BYTES // SLICE_BYTES * (SLICE_BYTES // BLOCK_BYTES)
    await a.close()


_OWNER = """
import asyncio, json, sys
from kvstrata_agent.backends.device import pooled
from support.backends.contract import put
from kvstrata_api.models.pool import CxlPooled
pooled.BEAT_S, pooled.LAPSE_S, pooled.SETTLE_S = 0.05, 0.5, 0.02

async def main():
    tier = pooled.open_pooled(CxlPooled(path=sys.argv[1]), "pool", "dead", 4 << 20)
    for number in range(1, 9):
        slot, made = await put(tier, number)
        print(tier.file_of(slot), slot.extent, slot.offset, slot.size_bytes, slot.stamp, flush=True)
    print("stored", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def _owner(device: Path) -> Iterator[tuple[subprocess.Popen[str], list[list[str]]]]:
    command = [sys.executable, "-c", _OWNER, str(device)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert owner.stdout is not None
    lines = []
    while (line := owner.stdout.readline().split()) != ["stored"]:
        assert line, "the owner ended"
        lines.append(line)
    try:
        yield owner, lines
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


async def test_what_a_killed_host_leaves_is_readable_until_its_slices_are_taken_and_never_wrong(device: Path) -> None:
    b = opened(device, "b", MIB)
    with _owner(device) as (owner, lines):
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        for number, line in enumerate(lines, 1):
            assert await _read(b, line, number) == content(number)

        await b.resize(3 * MIB // 2)  # What was free.
        with pytest.raises(InvalidInputError):
            await b.resize(5 * MIB)  # Not known yet as dead.
        await _until_grown(b, 5 * MIB)
        taken = {place for place, *_ in lines if int(place.partition("-")[2]) in b.memory.claims.held}
        assert taken
        for number, line in enumerate(lines, 1):
            if line[0] in taken:
                with pytest.raises(BlockCorruptError, match="another owner"):
                    await _read(b, line, number)
            else:
                assert await _read(b, line, number) == content(number)

    left = _whole(device)
    for number, line in enumerate(lines, 1):
        assert (bytes(content(number)[:64]) in left) != (line[0] in taken), "cleared when somebody takes it"
    stored = [await put(b, number) for number in range(100, 160)]
    for number, (slot, made) in enumerate(stored, 100):
        assert await get(b, slot, made) == content(number)
    await b.close()


async def test_a_host_that_stood_still_loses_what_was_taken_and_serves_no_wrong_byte(device: Path) -> None:
    b = opened(device, "b", MIB)
    with _owner(device) as (owner, lines):
        owner.send_signal(signal.SIGSTOP)
        await _until_grown(b, 5 * MIB)
        stored = [await put(b, number) for number in range(100, 300)]
        owner.send_signal(signal.SIGCONT)
        for _ in range(20):
            await asyncio.sleep(0.05)
            for number, (slot, made) in enumerate(stored, 100):
                assert await get(b, slot, made) == content(number)
        for number, line in enumerate(lines, 1):
            with suppress(BlockCorruptError):  # Where its slice was taken.
                assert await _read(b, line, number) == content(number)
    assert len(b.memory.claims.held) * SLICE_BYTES == 5 * MIB, "nothing was taken from the one that is alive"
    await b.close()


async def _until_grown(tier: PooledTier, size_bytes: int) -> None:
    for _ in range(200):
        try:
            await tier.resize(size_bytes)
        except InvalidInputError:
            await asyncio.sleep(0.02)
        else:
            return
    raise AssertionError("slices of the dead were not to be had")


async def _read(reader: PooledTier, line: list[str], number: int) -> memoryview:
    place, extent, offset, size_bytes, stamp = line
    slot = SlotRef(int(extent), int(offset), int(size_bytes), int(stamp))
    made = record(number, content(number), slot)
    into = memoryview(bytearray(made.stored_bytes))
    await reader.read_other("dead", place, slot, made, into)
    return into


async def test_a_memory_error_in_what_another_host_has_costs_that_read_and_bars_those_slices(device: Path) -> None:
    a, b = opened(device, "a", MIB), opened(device, "b", MIB)
    slot, made = await put(a, 1)
    mine = await put(b, 2)
    os.truncate(device, HEAD_BYTES)  # As poison does: a load there is a SIGBUS.

    with pytest.raises(BackendFailedError, match="memory error between bytes"):
        await b.read_other("a", a.file_of(slot), slot, made, memoryview(bytearray(made.stored_bytes)))
    os.truncate(device, DEVICE_BYTES)

    assert b.memory.claims.barred
    assert "memory error" in b.last_error
    with pytest.raises((BackendFailedError, BlockCorruptError)):  # Truncation took these bytes as well.
        await get(b, *mine)
    again = await put(b, 3)
    assert b.memory._units(b.memory._regions[again[0].extent])[0] not in b.memory.claims.barred or b.compact()
    await b.close()
    await a.close()


async def test_a_memory_error_in_the_head_loses_the_tier_and_not_the_process(device: Path) -> None:
    a = opened(device, "a", MIB)
    stored = await put(a, 1)
    os.truncate(device, 4 * KIB)

    await _until(lambda: stored[0].extent in a.compact())
    with pytest.raises(BackendFailedError):
        await get(a, *stored)
    os.truncate(device, DEVICE_BYTES)
    a.drop(stored[0])
    a.compact()
    assert not a.memory.claims.held
    with pytest.raises((TierFullError, BackendFailedError)):  # A slice that nobody counts on for is not filled again.
        await put(a, 2)
    await a.close()
