"""Damage to blocks in memory and in an object store: flipped bits, lost ends, another block's bytes."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from kvstrata_agent.backends.base import Record, SlotRef, TierBackend
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.backends.object.client import ObjectClient
from kvstrata_agent.backends.object.object_tier import ObjectStoreTier, open_object_tier
from kvstrata_agent.backends.record.layout import HEADER_BYTES
from kvstrata_api.errors import BackendFailedError, BlockCorruptError
from kvstrata_api.models.pool import HostDramTier
from support.backends.contract import content, put

BLOCK_BYTES = 8192
_BLOCKS = 16
_CAPACITY_BYTES = 4 << 20

Held = tuple[SlotRef, Record]


def rot_elsewhere(rng: random.Random, memory_faults: int, object_faults: int) -> tuple[int, list[str]]:
    """Damage so many blocks of each kind of tier; number of faults and what was served wrongly."""
    return asyncio.run(_both(rng, memory_faults, object_faults))


async def _both(rng: random.Random, memory_faults: int, object_faults: int) -> tuple[int, list[str]]:
    wrong = await _memory(rng, memory_faults)
    wrong += await _objects(rng, object_faults)
    return memory_faults + object_faults, wrong


async def _memory(rng: random.Random, faults: int) -> list[str]:
    arena = open_host_dram(HostDramTier(page_size="4Ki"), _CAPACITY_BYTES, (0,))
    held = [await put(arena, n, size_bytes=BLOCK_BYTES) for n in range(_BLOCKS)]

    async def damage(slot: SlotRef, damaged: Callable[[bytes], bytes]) -> Callable[[], Awaitable[None]]:
        view = arena.view(slot)[:BLOCK_BYTES]
        before = bytes(view)
        view[:] = damaged(before)

        async def mend() -> None:
            view[:] = before

        return mend

    wrong = [w for _ in range(faults) for w in await _one(arena, held, damage, rng)]
    await arena.close()
    return wrong


async def _objects(rng: random.Random, faults: int) -> list[str]:
    client = ObjectClient("memory://")
    tier = await open_object_tier(client, "pool-a", "node-a", _CAPACITY_BYTES)
    held = [await put(tier, n, size_bytes=BLOCK_BYTES) for n in range(_BLOCKS)]

    async def damage(slot: SlotRef, damaged: Callable[[bytes], bytes]) -> Callable[[], Awaitable[None]]:
        path = _path(tier, slot)
        before = bytes(await client.get(path, 0, HEADER_BYTES + BLOCK_BYTES))
        await client.put(path, [before[:HEADER_BYTES], damaged(before[HEADER_BYTES:])])

        async def mend() -> None:
            await client.put(path, [before])

        return mend

    wrong = [w for _ in range(faults) for w in await _one(tier, held, damage, rng)]
    await tier.close()
    return wrong


def _path(tier: ObjectStoreTier, slot: SlotRef) -> str:
    return tier._paths[slot.stamp]


async def _one(
    tier: TierBackend,
    held: list[Held],
    damage: Callable[[SlotRef, Callable[[bytes], bytes]], Awaitable[Callable[[], Awaitable[None]]]],
    rng: random.Random,
) -> list[str]:
    """Damage one block, read it, mend it."""
    number = rng.randrange(_BLOCKS)
    slot, made = held[number]
    mend = await damage(slot, rng.choice((_flipped, _replaced, _cut))(rng, number))
    into = bytearray(BLOCK_BYTES)
    try:
        await tier.read(slot, made, memoryview(into))
    except (BlockCorruptError, BackendFailedError):
        return []
    finally:
        await mend()
    return [f"{tier.capabilities.medium}: block {number} was served damaged"]


def _flipped(rng: random.Random, number: int) -> Callable[[bytes], bytes]:
    bit = rng.randrange(8 * BLOCK_BYTES)
    return lambda was: (int.from_bytes(was, "little") ^ 1 << bit).to_bytes(BLOCK_BYTES, "little")


def _replaced(rng: random.Random, number: int) -> Callable[[bytes], bytes]:
    """Another block's bytes."""
    return lambda _: bytes(content(number + rng.randrange(1, _BLOCKS), BLOCK_BYTES))


def _cut(rng: random.Random, number: int) -> Callable[[bytes], bytes]:
    """The end of it never arrived."""
    cut = rng.randrange(1, BLOCK_BYTES)
    return lambda was: was[:cut] + bytes(byte ^ 0xFF for byte in was[cut:])
