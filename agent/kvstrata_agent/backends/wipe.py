"""Removes what a tier of one node has left on media that outlive the agent. Only what the pool has claimed is touched.

Freed blocks of a file system or a flash device may still be read by whoever has the raw device; where that matters
tiers are encrypted, and without its key nothing of a scope can be opened.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.file.claim import NEW_SUFFIX, POOL_FILE
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.directories import directories_of
from kvstrata_api.errors import BackendFailedError, UnsupportedError
from kvstrata_node import directories as folders

if TYPE_CHECKING:
    from kvstrata_agent.backends.registry import Place
    from kvstrata_api.models.poolnode import NodeTier

_KEPT: Final = frozenset({"lost+found"})
_DELETE_BATCH: Final = 1000
"""Objects that are listed before they are deleted."""


async def wipe(tier: NodeTier, place: Place) -> None:
    """Remove this node's files or objects of a tier that is closed. Idempotent.

    Raises `BackendFailedError` with the place and the cause; what could be removed is gone then.
    """
    for directory in directories_of(tier):
        if directory.is_claimed:
            await in_thread(None, partial(wipe_directory, Path(directory.path), place.pool, place.node))
    if tier.object is not None:
        await _wipe_objects(tier.object.url, place)


def wipe_directory(root: Path, pool: str, node: str) -> None:
    """Remove the part of a node, and the pool's claim with the last one. A directory of others is left alone."""
    try:
        if not _is_claimed_by(root, pool):
            return
        own = root / node
        if own.is_dir():
            for file in own.iterdir():
                file.unlink()
            own.rmdir()
        if not {p.name for p in root.iterdir()} - _KEPT - {POOL_FILE, POOL_FILE + NEW_SUFFIX}:
            (root / POOL_FILE).unlink(missing_ok=True)
        folders.sync(root)
    except OSError as e:
        raise BackendFailedError(f"{e.filename or root}: {e.strerror or e}") from e


def _is_claimed_by(root: Path, pool: str) -> bool:
    try:
        return bool(json.loads((root / POOL_FILE).read_bytes()).get("pool") == pool)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (ValueError, AttributeError):
        return False  # Nobody can tell whose it is.


async def _wipe_objects(url: str, place: Place) -> None:
    try:
        from kvstrata_agent.backends.object.client import ObjectClient
    except ImportError as e:
        raise UnsupportedError(f"{url}: {e}; install the `agent` extra, which has obstore") from e
    client, prefix = ObjectClient(url, place.object_credentials), f"{place.pool}/{place.node}/"
    try:
        await client.abort_uploads(prefix)
        batch: list[str] = []
        async for path, _ in client.list(prefix):
            batch.append(path)
            if len(batch) == _DELETE_BATCH:
                await client.delete(batch)
                batch = []
        if batch:
            await client.delete(batch)
    finally:
        await client.close()
