"""Flash that several nodes mount: a record store of our own, and reading what other agents' stores hold beside it.

Each agent writes below its own sub-directory alone. Everybody reads everywhere: a record states itself what it is, so a
slot that its owner has used again, or a file of another mount, is found out by its header and its checksum.
"""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvstrata_agent.backends.base import KeyAwayError, Record, SharedBackend, SlotRef
from kvstrata_agent.backends.file.claim import FORMAT, SEALED_FORMAT, STORE_FILE
from kvstrata_agent.backends.file.index_format import SegmentName, parse_name
from kvstrata_agent.backends.file.posix import read_fully
from kvstrata_agent.backends.file.record_store import RecordStore
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.record.layout import HEADER_BYTES, Form, Unread, form_of, open_into
from kvstrata_agent.backends.scratch import BoundedBuffers
from kvstrata_agent.backends.slot_table import round_up
from kvstrata_agent.backends.threads import in_thread
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata_agent.backends.file.claim import Claim
    from kvstrata_agent.backends.file.volume import Volume
    from kvstrata_agent.backends.record.encryption import DataKeys

_THREADS: Final = 8
"""As for a store of our own (`posix`)."""
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class SharedFlash(RecordStore):
    """Our store on a shared mount (`TierBackend`, `SharedBackend`)."""

    def __init__(
        self, claim: Claim, volume: Volume, capacity_bytes: int, root: Path, *, medium: str, keys: DataKeys | None
    ) -> None:
        """Use `open_remote_flash`."""
        super().__init__(claim, volume, capacity_bytes, medium=medium, keys=keys)
        self._others = OtherStores(root, keys)

    @property
    def shared(self) -> SharedBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    def file_of(self, slot: SlotRef) -> str:
        """Name of the file that holds a slot, in our sub-directory."""
        return str(self._state.segments[slot.extent].name)

    async def read_other(self, node: str, file: str, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Read a record of another node's store. See `SharedBackend`."""
        await self._others.read(node, file, slot, record, into)

    async def close(self) -> None:
        """Close our store and stop reading others. Idempotent."""
        try:
            await super().close()
        finally:
            await self._others.close()


class OtherStores:
    """Reads single records below `root`, in the directories of other nodes. Writes nothing there."""

    def __init__(self, root: Path, keys: DataKeys | None) -> None:
        self._root = root
        self._keys = keys
        self._buffers = BoundedBuffers()
        self._threads = ThreadPoolExecutor(_THREADS, "kvstrata-shared")

    async def read(self, node: str, file: str, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Fill the first `record.stored_bytes` of `into` from the one place where this very record is.

        Raises `BlockCorruptError` when another record is there, `BackendFailedError` when nothing can be read,
        `KeyAwayError` without its scope's key, and `InvalidInputError` for a place that no store can have.
        """
        name = _checked(node, file, slot, record)
        size_bytes = HEADER_BYTES + round_up(record.stored_bytes, DIRECT_BYTES)
        async with self._buffers.lend(size_bytes) as loan:
            fill = partial(self._load, self._root / node, file, slot.offset, loan.view)
            form = await in_thread(self._threads, fill)
            found = form.header(loan.view[:HEADER_BYTES], name.id, slot.offset)
            if isinstance(found, Unread):
                raise KeyAwayError(f"block {record.key}: node {node} has sealed it under a key that is not here")
            where = f"block {record.key} in {node}/{file} at {slot.offset}"
            if found != (slot.stamp, record):
                raise BlockCorruptError(f"{where}: its owner has used the slot again")
            whole = loan.view[HEADER_BYTES - form.head_bytes :]
            opened = open_into(form, into[: record.stored_bytes], whole, record, slot)
            if not await in_thread(self._threads, opened):
                raise BlockCorruptError(f"{where}: checksum differs")

    def _load(self, directory: Path, file: str, offset: int, into: memoryview) -> Form:
        """Read header and payload, and what the store's marker states of its form. Blocking.

        Files are opened for each record: that is when network file systems check whether they have changed.
        """
        try:
            form = self._form(directory / STORE_FILE)
            fd = _open(directory / file)
            try:
                read_fully(fd, offset, into)
            finally:
                os.close(fd)
        except OSError as e:
            raise BackendFailedError(f"{directory / file}: {e.strerror or e}") from e
        return form

    def _form(self, marker: Path) -> Form:
        fd = os.open(marker, _READ_FLAGS)
        with os.fdopen(fd, "rb") as opened:
            marker_bytes: Any = opened.read(DIRECT_BYTES)
        try:
            claim = json.loads(marker_bytes)
            secret, version = bytes.fromhex(claim["secret"]), claim["format"]
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise BackendFailedError(f"{marker}: not a claim file of kvstrata: {e}") from e
        if version != (FORMAT if self._keys is None else SEALED_FORMAT):
            raise BackendFailedError(f"{marker}: format {version}, ours is sealed: {self._keys is not None}")
        return form_of(secret, self._keys)

    async def close(self) -> None:
        """Stop the threads. Idempotent."""
        await in_thread(None, self._threads.shutdown)


def _open(path: Path) -> int:
    """Past the page cache where that is possible: it may hold what was there before."""
    try:
        return os.open(path, _READ_FLAGS | os.O_DIRECT)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
    fd = os.open(path, _READ_FLAGS)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


def _checked(node: str, file: str, slot: SlotRef, record: Record) -> SegmentName:
    """Parse the place that another agent has named. Raises `InvalidInputError` that names value and limit."""
    name = parse_name(file)
    if name is None or not node or "/" in node or node.startswith("."):
        raise InvalidInputError(f"{node!r}/{file!r} is no segment of a node")
    if slot.offset % name.stride_bytes or not 0 <= slot.offset < name.size_bytes:
        raise InvalidInputError(f"offset {slot.offset} in {file}: slots of {name.stride_bytes} B")
    if not 0 <= record.stored_bytes <= name.stride_bytes - HEADER_BYTES:
        raise InvalidInputError(f"record of {record.stored_bytes} B in slots of {name.stride_bytes} B of {file}")
    return name
