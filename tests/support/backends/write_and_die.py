"""Work of a child that stores blocks and says which are stored, until somebody kills it (support.nursery)."""

import asyncio

from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_api.models.pool import NvmeTier
from support.agent.scope_keys import NamedKeys
from support.backends.contract import ANNA, CAPACITY_BYTES, put
from support.nursery import Channel


def write(channel: Channel, path: str, io: str, form: str, spread: str = "") -> None:
    """Write, keep the last 20 blocks, say each number only after `write` returned."""
    asyncio.run(_write(channel, path, io, form, spread))


async def _write(channel: Channel, path: str, io: str, form: str, spread: str) -> None:
    keys = NamedKeys(ANNA) if form == "sealed" else None
    tier = NvmeTier(paths=(f"{path}/a", f"{path}/b"), io=io) if spread else NvmeTier(path=path, io=io)
    capacity_bytes = 2 * CAPACITY_BYTES if spread else CAPACITY_BYTES
    backend = await open_nvme(tier, "pool-a", "node-a", capacity_bytes, keys=keys)
    kept = []
    for number in range(1_000_000):
        slot, _ = await put(backend, number)
        kept.append(slot)
        channel.say(number)
        if len(kept) > 20:
            backend.drop(kept.pop(0))
