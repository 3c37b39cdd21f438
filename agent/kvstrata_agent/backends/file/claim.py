"""Claim of a directory by one pool and, below it, of a sub-directory by one node's agent.

`<path>/kvstrata-pool.json` names the pool; `<path>/<node>/kvstrata-store.json` belongs to one agent, which holds the
volume's lock while it runs. A directory with foreign data, or with another pool's claim, is refused and left alone.
"""

import hashlib
import json
import mmap
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kvstrata_agent.backends.file.volume import DIRECT_BYTES, Volume
from kvstrata_api.errors import InvalidInputError

POOL_FILE: Final = "kvstrata-pool.json"
STORE_FILE: Final = "kvstrata-store.json"
NEW_SUFFIX: Final = ".new"
"""A file that is about to take another one's place; left over by a crash, it means nothing."""

FORMAT: Final = 2
"""Format of the directory. 1 had no index; its records are the same, so it is taken over by reading them all."""

SEALED_FORMAT: Final = 3
"""The same with sealed records and a sealed index. Either kind of store finds nothing of the other and removes it."""

_READABLE: Final = (1, FORMAT, SEALED_FORMAT)  # No set: what JSON holds need not be hashable.
_POOL_FORMAT: Final = 1
_TOLERATED: Final = frozenset({"lost+found", POOL_FILE + NEW_SUFFIX})
"""A fresh ext4 has lost+found; a crash in the middle of the first claim leaves the other."""

_SECRET_BYTES: Final = 32
STAMPS_PER_RUN: Final = 1 << 36
"""2^36 slot uses a run, 2^17 runs before stamps leave the 53 bits that every JSON and Lua reader keeps exactly."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a store needs to know of itself before it reads any record."""

    secret: bytes = field(repr=False)
    """Key of all tags; never leaves the node's directory."""
    run: int
    """Number of this run of the store, from 1: stamps start at `run * STAMPS_PER_RUN`."""

    @property
    def first_stamp(self) -> int:
        """Above every stamp of earlier runs, without asking the records."""
        return self.run * STAMPS_PER_RUN


async def claim_pool(root: Volume, pool: str) -> None:
    """Make `root` the directory of `pool`, durable on return.

    Raises `InvalidInputError` that names the owner when it holds foreign files or is another pool's, and `OSError`.
    """
    names = await root.names()
    if POOL_FILE not in names:
        foreign = sorted(names.keys() - _TOLERATED)
        if foreign:
            raise InvalidInputError(
                f"{root.where}: holds {foreign[0]!r}, which is not ours; give the pool an empty directory"
            )
        await replace(root, POOL_FILE, {"format": _POOL_FORMAT, "pool": pool})
    owner = (await _load(root, POOL_FILE)).get("pool")
    if owner != pool:
        raise InvalidInputError(
            f"{root.where}: belongs to pool {owner!r}, not {pool!r}; give each pool its own directory"
        )


async def start_run(volume: Volume, *, is_sealed: bool = False) -> Claim:
    """Count one more run of the store in `volume`, which is durable on return.

    Raises `InvalidInputError` when its marker is rotten, foreign or of another format, and `OSError`.
    """
    names = await volume.names()
    before = await _load(volume, STORE_FILE) if STORE_FILE in names else None
    claim = _next_run(f"{volume.where}/{STORE_FILE}", before)
    content = {"format": SEALED_FORMAT if is_sealed else FORMAT, "secret": claim.secret.hex(), "run": claim.run}
    await replace(volume, STORE_FILE, content | {"sum": _sum(content)})
    return claim


def _next_run(where: str, before: Mapping[str, Any] | None) -> Claim:
    if before is None:
        return Claim(secrets.token_bytes(_SECRET_BYTES), 1)
    if before.get("format") not in _READABLE:
        raise InvalidInputError(
            f"{where}: format {before.get('format')!r}, this build reads {sorted(_READABLE)}; "
            "empty the directory, its blocks can be computed again"
        )
    if before["format"] != 1 and before.get("sum") != _sum(before):
        # A store whose secret has rotted would find no record of its own and delete them all.
        raise InvalidInputError(f"{where}: does not match its own checksum; empty the directory to go on")
    try:
        return Claim(bytes.fromhex(before["secret"]), int(before.get("run", 0)) + 1)
    except (KeyError, TypeError, ValueError) as e:
        raise InvalidInputError(f"{where}: not a claim file of kvstrata: {e}") from e


def _sum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps({key: value for key, value in content.items() if key != "sum"}, sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16, person=b"kvstrata.claim").hexdigest()


async def _load(volume: Volume, name: str) -> dict[str, Any]:
    """Read one of the claim files. Raises `InvalidInputError` when it is not JSON of an object."""
    where = f"{volume.where}/{name}"
    try:
        content = json.loads(await volume.load(name))
    except (ValueError, RecursionError) as e:
        raise InvalidInputError(f"{where}: not a claim file of kvstrata: {e}") from e
    if not isinstance(content, dict):
        raise InvalidInputError(f"{where}: not a claim file of kvstrata")
    return content


async def replace(volume: Volume, name: str, content: Mapping[str, Any]) -> None:
    """Replace a small JSON file so that a crash leaves the old or the new one; durable on return."""
    encoded = json.dumps(content).encode()
    assert len(encoded) <= DIRECT_BYTES, f"{name} of {len(encoded)} B is no small file"
    await volume.unlink(name + NEW_SUFFIX)
    file = await volume.create(name + NEW_SUFFIX, DIRECT_BYTES)
    try:
        with mmap.mmap(-1, DIRECT_BYTES) as page, memoryview(page) as view:
            view[:] = encoded.ljust(DIRECT_BYTES)  # O_DIRECT writes whole pages; JSON ignores the blanks.
            await file.write(0, partial(list, [view]))
    finally:
        await file.close()
    await volume.rename(name + NEW_SUFFIX, name)
    await volume.sync()
