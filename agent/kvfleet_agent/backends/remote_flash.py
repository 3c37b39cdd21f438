"""Opening record stores: on local NVMe, and on flash that several nodes mount, in a sub-directory of this node.

Each agent writes and reads its own records only. Several nodes reading one copy need leases across agents and are
not built: until then the same block may lie there once for each node that demoted it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvfleet_agent.backends.claim import claim_pool
from kvfleet_agent.backends.io_choice import open_volume
from kvfleet_agent.backends.nvme import RecordStore, open_store
from kvfleet_api.errors import InvalidInputError

if TYPE_CHECKING:
    from kvfleet_agent.backends.sealing import DataKeys
    from kvfleet_api.models.pool import NvmeTier, RemoteFlashTier


async def open_nvme(
    tier: NvmeTier,
    pool: str,
    node: str,
    capacity_bytes: int,
    *,
    medium: str = "",
    keys: DataKeys | None = None,
) -> RecordStore:
    """Claim the directory, choose the I/O engine by trying, and open the record store, sealed when there are `keys`.

    Raises `InvalidInputError` that names path and owner when the directory cannot be ours.
    """
    root = Path(tier.path)
    await _claim(root, pool)
    volume = await open_volume(root / node, tier.io)
    try:
        return await open_store(volume, capacity_bytes, medium=medium and f"{medium}-{volume.medium}", keys=keys)
    except InvalidInputError:
        await volume.close()
        raise
    except OSError as e:
        await volume.close()
        raise InvalidInputError(f"{volume.where}: {e.strerror}; the agent must be able to write there") from e


async def _claim(root: Path, pool: str) -> None:
    """Take the root for the pool; the agents of several nodes may do it at a time."""
    volume = await open_volume(root, "Buffered", is_waiting=True)
    try:
        await claim_pool(volume, pool)
    except OSError as e:
        raise InvalidInputError(f"{root}: {e.strerror}; the agent must be able to write there") from e
    finally:
        await volume.close()


async def open_remote_flash(
    tier: RemoteFlashTier, pool: str, node: str, capacity_bytes: int, *, keys: DataKeys | None = None
) -> RecordStore:
    """Record store on a shared mount; network file systems are not asked for io_uring."""
    from kvfleet_api.models.pool import NvmeTier  # Backends alone need none of the API's models.

    local = NvmeTier(path=tier.path, io="Posix")
    return await open_nvme(local, pool, node, capacity_bytes, medium="shared", keys=keys)
