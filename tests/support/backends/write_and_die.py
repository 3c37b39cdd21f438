"""A process that stores blocks and says which are stored, until somebody kills it: `PATH IO plain|sealed [striped]`."""

import asyncio
import sys

from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_api.models.pool import NvmeTier
from support.agent.scope_keys import NamedKeys
from support.backends.contract import ANNA, CAPACITY_BYTES, put


async def main(path: str, io: str, form: str, spread: str = "") -> None:
    """Write, keep the last 20 blocks, print each number only after `write` returned."""
    keys = NamedKeys(ANNA) if form == "sealed" else None
    tier = NvmeTier(paths=(f"{path}/a", f"{path}/b"), io=io) if spread else NvmeTier(path=path, io=io)
    capacity_bytes = 2 * CAPACITY_BYTES if spread else CAPACITY_BYTES
    backend = await open_nvme(tier, "pool-a", "node-a", capacity_bytes, keys=keys)
    kept = []
    for number in range(1_000_000):
        slot, _ = await put(backend, number)
        kept.append(slot)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        if len(kept) > 20:
            backend.drop(kept.pop(0))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
