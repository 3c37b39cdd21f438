"""Opening record stores: on local NVMe, one or several devices, and on flash that several nodes mount."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from itertools import combinations
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import TYPE_CHECKING, Literal

from kvstrata_agent.backends.file.claim import claim_pool, start_run
from kvstrata_agent.backends.file.engine import open_volume
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.shared_flash import SharedFlash
from kvstrata_agent.backends.file.striped import StripedStore, open_striped
from kvstrata_api.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvstrata_agent.backends.file.volume import Volume
    from kvstrata_agent.backends.record.encryption import DataKeys
    from kvstrata_api.models.pool import NvmeTier, RemoteFlashTier


async def open_nvme(
    tier: NvmeTier, pool: str, node: str, capacity_bytes: int, *, keys: DataKeys | None = None
) -> RecordStore | StripedStore:
    """Record store in the tier's directory, or one in each of several, with blocks spread over them.

    Raises `InvalidInputError` that names path and owner when no directory can be ours.
    """
    check_directories(tier.directories)

    async def opened(path: str, part_bytes: int) -> RecordStore:
        volume = await _claimed(path, tier.io, pool, node)
        async with _ours(volume):
            return await open_store(volume, part_bytes, keys=keys)

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


async def _claimed(path: str, io: Literal["Auto", "Uring", "Posix"], pool: str, node: str) -> Volume:
    """Claim a directory for the pool, and the node's part of it with the I/O engine that trying has chosen."""
    root = Path(path)
    await _claim(root, pool)
    return await open_volume(root / node, io)


@asynccontextmanager
async def _ours(volume: Volume) -> AsyncIterator[None]:
    """Close the volume when it cannot be our store, which is an `InvalidInputError` then."""
    try:
        yield
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
) -> SharedFlash:
    """Record store on a shared mount; network file systems are not asked for io_uring."""
    volume = await _claimed(tier.path, "Posix", pool, node)
    async with _ours(volume):
        claim = await start_run(volume, is_sealed=keys is not None)
        medium = f"shared-{volume.medium}"
        return SharedFlash(claim, volume, capacity_bytes, Path(tier.path), medium=medium, keys=keys)
