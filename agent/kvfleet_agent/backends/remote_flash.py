"""Opening record stores: on local NVMe, and on flash that several nodes mount, in a sub-directory of this node.

Each agent writes and reads its own records only. Several nodes reading one copy need leases across agents and are
not built: until then the same block may lie there once for each node that demoted it.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import TYPE_CHECKING, Literal

from kvfleet_agent.backends.claim import claim_pool
from kvfleet_agent.backends.io_choice import open_volume
from kvfleet_agent.backends.nvme import RecordStore, open_store
from kvfleet_agent.backends.striped import StripedStore, open_striped
from kvfleet_api.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfleet_agent.backends.sealing import DataKeys
    from kvfleet_agent.backends.volume import Volume
    from kvfleet_api.models.pool import NvmeTier, RemoteFlashTier


async def open_nvme(
    tier: NvmeTier, pool: str, node: str, capacity_bytes: int, *, keys: DataKeys | None = None
) -> RecordStore | StripedStore:
    """Record store in the tier's directory, or one in each of several, with blocks spread over them.

    Raises `InvalidInputError` that names path and owner when no directory can be ours.
    """
    check_directories(tier.directories)

    async def opened(path: str, part_bytes: int) -> RecordStore:
        return await _open(await _claimed(path, tier.io, pool, node), part_bytes, keys=keys)

    if len(tier.directories) == 1:
        return await opened(tier.directories[0], capacity_bytes)
    return await open_striped({path: partial(opened, path) for path in tier.directories}, capacity_bytes)


def check_directories(paths: Sequence[str]) -> None:
    """Raise `InvalidInputError` unless there is a directory, and none of several is or holds another one."""
    if not paths:
        raise InvalidInputError("nvme.path or nvme.paths must be set")
    whole = [PurePosixPath(normpath(path)) for path in paths]
    for (i, one), (k, other) in combinations(enumerate(whole), 2):
        if one == other or one in other.parents or other in one.parents:
            raise InvalidInputError(
                f"nvme.paths[{k}]: {paths[k]} and nvme.paths[{i}]: {paths[i]} are one directory or lie in each other"
            )


async def _claimed(path: str, io: Literal["Uring", "Posix"], pool: str, node: str) -> Volume:
    """Claim a directory for the pool, and the node's part of it with the I/O engine that trying has chosen."""
    root = Path(path)
    await _claim(root, pool)
    return await open_volume(root / node, io)


async def _open(volume: Volume, capacity_bytes: int, *, medium: str = "", keys: DataKeys | None) -> RecordStore:
    """Open the record store of a volume that we take over, sealed when there are `keys`."""
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
    volume = await _claimed(tier.path, "Posix", pool, node)
    return await _open(volume, capacity_bytes, medium="shared", keys=keys)
