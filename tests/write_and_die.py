"""A process that stores blocks and says which ones are stored, until somebody kills it: `PATH IO [sealed]`."""

import asyncio
import sys

from backend_contract import ANNA, CAPACITY_BYTES, put
from scope_keys_double import NamedKeys

from kvfleet_agent.backends.remote_flash import open_nvme
from kvfleet_api.models.pool import NvmeTier


async def main(path: str, io: str, form: str = "") -> None:
    """Write, keep the last 20 blocks, print each number only after `write` returned."""
    keys = NamedKeys(ANNA) if form == "sealed" else None
    backend = await open_nvme(NvmeTier(path=path, io=io), "pool-a", "node-a", CAPACITY_BYTES, keys=keys)
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
