"""From a tier of a KVPoolNode to the backend that holds its bytes, and the removal of what it has left (`wipe`).

A new backend is one more line in `_MAKERS`. Of media that outlive the agent only what the pool has claimed is removed.
Freed blocks of a file system or a flash device may still be read by whoever has the raw device; where that matters
tiers are encrypted, and without its key nothing of a scope can be opened.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kvstrata_agent.backends.device.devdax import open_devdax
from kvstrata_agent.backends.device.pooled import open_pooled
from kvstrata_agent.backends.file.claim import NEW_SUFFIX, POOL_FILE
from kvstrata_agent.backends.file.open_store import open_nvme, open_remote_flash
from kvstrata_agent.backends.memory.cxl import open_cxl
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.backends.memory.persistence import NO_PERSISTENCE, PersistenceRoot
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.directories import directories_of
from kvstrata_api.errors import BackendFailedError, InvalidInputError, UnsupportedError
from kvstrata_api.names import MODELS_FOLDER
from kvstrata_api.tiers import CxlMode, TierType
from kvstrata_node import directories as folders

if TYPE_CHECKING:
    from kvstrata_agent.backends.base import TierBackend
    from kvstrata_agent.backends.object.client import ObjectClient
    from kvstrata_agent.backends.record.encryption import DataKeys
    from kvstrata_api.models.pool import ObjectTier, SecretRef
    from kvstrata_api.models.poolnode import NodeTier
    from kvstrata_node.discovery import NodeFacts


Settings = TypeVar("Settings")

ReadSecret = Callable[[str], Awaitable[Mapping[str, bytes] | None]]
"""Reads a Secret of the system namespace by name; None where it is not there. Raises a `KvStrataError`."""

_DELETE_BATCH: Final = 1000
"""Objects that are listed before they are deleted."""


@dataclass(frozen=True, slots=True)
class Place:
    """For whom and where a backend is made."""

    pool: str
    node: str
    facts: NodeFacts
    """What discovery found on this machine."""
    read_secret: ReadSecret | None = field(default=None, repr=False)
    """Reads Secrets that object stores name; None where there are none."""
    persistence: PersistenceRoot = NO_PERSISTENCE
    """Where memory tiers can outlive the agent."""
    keys: DataKeys | None = field(default=None, repr=False)
    """Data keys of scopes, for tiers that are declared encrypted."""
    hbm_device: str = "cuda"
    """torch device of HBM tiers; `cpu` is a double for tests."""


async def make_backend(tier: NodeTier, place: Place) -> TierBackend:
    """Open the backend of a tier.

    Raises `InvalidInputError` (path or settings; names the owner of a foreign directory), `UnsupportedError`
    (names what to install or change) or `BackendFailedError`.
    """
    if tier.encryption.type != "None":
        _check_encryption(tier, place)
    raise_descriptor_limit()
    return await _MAKERS[tier.type](tier, place)


def _check_encryption(tier: NodeTier, place: Place) -> None:
    """Refuse what cannot be kept: in the clear, what was declared encrypted would be worse than not stored."""
    if tier.type not in _AT_REST:
        at_rest = ", ".join(sorted(_AT_REST))
        raise InvalidInputError(
            f"tier {tier.name}: encryption {tier.encryption.type} is for bytes at rest ({at_rest}), "
            f"not for {tier.type}: engines map memory as it is; set encryption.type None"
        )
    if place.keys is None:
        raise UnsupportedError(f"tier {tier.name}: encryption {tier.encryption.type}: this process has no data keys")


def _keys(tier: NodeTier, place: Place) -> DataKeys | None:
    return None if tier.encryption.type == "None" else place.keys


def raise_descriptor_limit() -> None:
    """Let this process open as many files as it may: every extent takes one or two descriptors.

    The usual soft limit of 1,024 is there for programs that call select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _settings(tier: NodeTier, value: Settings | None) -> Settings:
    if value is None:
        raise InvalidInputError(f"tier {tier.name}: the settings block of type {tier.type} is missing")
    return value


async def _host_dram(tier: NodeTier, place: Place) -> TierBackend:
    settings = _settings(tier, tier.host_dram)
    return open_host_dram(
        settings, tier.capacity_bytes, place.facts.cpu_nodes, replace(place.persistence, tier=tier.name)
    )


async def _cxl(tier: NodeTier, place: Place) -> TierBackend:
    settings = _settings(tier, tier.cxl)
    if settings.mode is CxlMode.DEV_DAX:
        return await in_thread(None, partial(open_devdax, tier.capacity_bytes, place.facts.dax))
    if settings.pooled is not None:
        return await in_thread(None, partial(open_pooled, settings.pooled, place.pool, place.node, tier.capacity_bytes))
    return open_cxl(settings, tier.capacity_bytes, place.facts.cpuless, replace(place.persistence, tier=tier.name))


async def _nvme(tier: NodeTier, place: Place) -> TierBackend:
    settings = _settings(tier, tier.nvme)
    return await open_nvme(settings, place.pool, place.node, tier.capacity_bytes, keys=_keys(tier, place))


async def _remote_flash(tier: NodeTier, place: Place) -> TierBackend:
    settings = _settings(tier, tier.remote_flash)
    return await open_remote_flash(settings, place.pool, place.node, tier.capacity_bytes, keys=_keys(tier, place))


async def _object(tier: NodeTier, place: Place) -> TierBackend:
    try:
        from kvstrata_agent.backends.object.object_tier import open_object_tier
    except ImportError as e:
        raise UnsupportedError(f"tier {tier.name}: {e}; install the `agent` extra, which has obstore") from e
    settings = _settings(tier, tier.object)
    client = await open_client(settings.url, settings.secret_ref, "object.secretRef", place.read_secret)
    return await open_object_tier(client, place.pool, place.node, tier.capacity_bytes, keys=_keys(tier, place))


async def open_client(
    url: str, secret_ref: SecretRef | None, field_name: str, read_secret: ReadSecret | None
) -> ObjectClient:
    """Open an object store with the settings that its Secret has, such as aws_access_key_id; none: ambient identity.

    Raises `UnsupportedError` without obstore or where there are no Secrets, `BackendFailedError` without that one, and
    `InvalidInputError` for what is no text in it, and for a malformed URL.
    """
    try:
        from kvstrata_agent.backends.object.client import ObjectClient
    except ImportError as e:
        raise UnsupportedError(f"{url}: {e}; install the `agent` extra, which has obstore") from e
    return ObjectClient(url, await _client_settings(secret_ref, field_name, read_secret))


async def _client_settings(
    secret_ref: SecretRef | None, field_name: str, read_secret: ReadSecret | None
) -> dict[str, str]:
    if secret_ref is None:
        return {}
    where = f"{field_name} {secret_ref.name}"
    if read_secret is None:
        raise UnsupportedError(f"{where}: there are no Secrets here; set the store's credentials in the environment")
    found = await read_secret(secret_ref.name)
    if found is None:
        raise BackendFailedError(f"{where}: the agents' namespace has no such Secret")
    try:
        return {key: value.decode().strip() for key, value in found.items()}
    except UnicodeDecodeError as e:
        raise InvalidInputError(f"{where}: not UTF-8 at byte {e.start}") from e


async def _hbm(tier: NodeTier, place: Place) -> TierBackend:
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(f"tier {tier.name}: HBM needs torch; install the `cuda` extra")
    from kvstrata_agent.backends.device.hbm import open_hbm

    lends = tier.hbm is not None and tier.hbm.reading == "InPlace"
    return await in_thread(None, partial(open_hbm, place.hbm_device, tier.capacity_bytes, lends=lends))


_AT_REST: Final = frozenset({TierType.NVME, TierType.REMOTE_FLASH, TierType.OBJECT})

_Maker = Callable[["NodeTier", Place], Awaitable["TierBackend"]]

_MAKERS: Final[dict[TierType, _Maker]] = {
    TierType.HBM: _hbm,
    TierType.HOST_DRAM: _host_dram,
    TierType.CXL: _cxl,
    TierType.NVME: _nvme,
    TierType.REMOTE_FLASH: _remote_flash,
    TierType.OBJECT: _object,
}


_KEPT: Final = frozenset({"lost+found"})


async def wipe(tier: NodeTier, place: Place) -> None:
    """Remove this node's files or objects of a tier that is closed. Idempotent.

    Raises `BackendFailedError` with the place and the cause; what could be removed is gone then.
    """
    for directory in directories_of(tier):
        if directory.is_claimed:
            await in_thread(None, partial(wipe_directory, Path(directory.path), place.pool, place.node))
    if tier.object is not None:
        await _wipe_objects(tier.object, place)


def wipe_directory(root: Path, pool: str, node: str) -> None:
    """Remove the part of a node and the weights of models, and the pool's claim with the last one.

    A directory of others is left alone.
    """
    try:
        if not _is_claimed_by(root, pool):
            return
        own = root / node
        if own.is_dir():
            for file in own.iterdir():
                file.unlink()
            own.rmdir()
        if (root / MODELS_FOLDER).is_dir():
            shutil.rmtree(root / MODELS_FOLDER)
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
    except (ValueError, AttributeError, RecursionError):
        return False  # Nobody knows whose it is.


async def _wipe_objects(store: ObjectTier, place: Place) -> None:
    client = await open_client(store.url, store.secret_ref, "object.secretRef", place.read_secret)
    prefix = f"{place.pool}/{place.node}/"
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
