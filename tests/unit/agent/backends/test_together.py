"""Laws of groups over several segments and devices: whoever is told of a group's end has all of its memory back."""

import asyncio
import mmap
from collections.abc import Sequence

import pytest
from sim.volume import MemoryVolume

from kvstrata_agent.backends.base import Reading, Writing
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.threads import together
from support.backends.contract import ANNA, BLOCK_BYTES, BOB, CAPACITY_BYTES, content, put, record
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit


def slow(volume: MemoryVolume, site: str, delays_s: Sequence[float]) -> None:
    """Let the next transfers of blocks at a site take so long, each its own time."""
    left = iter(delays_s)
    volume.latency_s = lambda at, size_bytes: next(left, 0.0) if at == site and size_bytes >= BLOCK_BYTES else 0.0


async def cancelled_at(delay_s: float, group: "asyncio.Task[object]") -> float:
    """Cancel a group after so long; how long it went on."""
    await asyncio.sleep(delay_s)
    group.cancel()
    began_s = asyncio.get_running_loop().time()
    await asyncio.wait([group])
    assert group.cancelled()
    return asyncio.get_running_loop().time() - began_s


def written_as_it_lies(store: RecordStore, number: int) -> Writing:
    scope = (ANNA, BOB)[number % 2]
    slot = store.reserve(scope, BLOCK_BYTES)
    view = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    view[:] = content(number)
    return Writing(slot, view, record(number, view, slot, scope))


def test_a_cancelled_write_into_two_segments_waits_for_both() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        group = [written_as_it_lies(store, i) for i in range(2)]
        assert group[0].slot.extent != group[1].slot.extent
        slow(volume, "write", (5.0, 20.0))

        assert await cancelled_at(1.0, asyncio.create_task(store.write_group(group))) == pytest.approx(19.0)

    run_virtually(scenario())


def test_nothing_is_read_into_memory_behind_the_end_of_a_cancelled_group() -> None:
    async def scenario() -> None:
        volume = MemoryVolume()
        store = await open_store(volume, CAPACITY_BYTES)
        held = [await put(store, number, scope) for number, scope in ((1, ANNA), (2, BOB))]
        assert held[0][0].extent != held[1][0].extent
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in held]
        slow(volume, "read", (1.1, 1.5))
        group = [Reading(slot, made, view) for (slot, made), view in zip(held, into, strict=True)]
        await cancelled_at(1.0, asyncio.create_task(store.read_group(group)))
        seen = [bytes(view) for view in into]
        await asyncio.sleep(5.0)

        assert [bytes(view) for view in into] == seen

    run_virtually(scenario())


async def test_work_that_is_done_together_ends_together() -> None:
    goes_on, ended = asyncio.Event(), list[str]()

    async def fails() -> None:
        raise ValueError("at once")

    async def lasts() -> None:
        await goes_on.wait()
        ended.append("last")

    group = asyncio.create_task(together([fails(), lasts()]))
    await asyncio.sleep(0.01)
    assert not group.done()
    goes_on.set()

    with pytest.raises(ValueError, match="at once"):
        await group
    assert ended == ["last"]
