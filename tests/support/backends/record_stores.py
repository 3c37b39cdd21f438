"""Record stores in directories for tests, below what `open_nvme` does."""

from pathlib import Path

from kvstrata_agent.backends.file.claim import Claim, claim_pool, start_run
from kvstrata_agent.backends.file.engine import open_volume
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.volume import Volume


async def claimed(root: Path, pool: str, node: str) -> tuple[Claim, Volume]:
    """Claim `root` for a pool and begin a run of a node's store."""
    whole = await open_volume(root, "Buffered", is_waiting=True)
    try:
        await claim_pool(whole, pool)
    finally:
        await whole.close()
    volume = await open_volume(root / node, "Buffered")
    return await start_run(volume), volume


async def buffered_store(directory: Path, capacity_bytes: int) -> RecordStore:
    """Open a store on the page cache."""
    return await open_store(await open_volume(directory, "Buffered"), capacity_bytes)
