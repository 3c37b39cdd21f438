"""Object store as a tier: one object for each record, with the same header as on NVMe.

Objects lie under `<pool>/<node>/<scope hash>/<digest>.<stamp>`, sealed ones under `<pool>/<node>/<scope tag>/<stamp>`.
The stamp in the name keeps a late delete of an old copy from hitting a new one. Every agent owns its own prefix; nobody
else writes or deletes there. An object has no address: only bytes count, and a few blocks of one scope make an extent
(`ObjectSlots`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from kvstrata_agent.backends.base import (
    Capabilities,
    OptionalCapabilities,
    PacedBackend,
    Record,
    SealingBackend,
    SlotRef,
)
from kvstrata_agent.backends.file.claim import STAMPS_PER_RUN, STORE_FILE
from kvstrata_agent.backends.record.layout import (
    HEADER_BYTES,
    SEALED_VERSION,
    VERSION,
    SealedForm,
    Unread,
    form_of,
    open_into,
)
from kvstrata_agent.backends.threads import here_or_in_thread
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, InvalidInputError, TierFullError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstrata_agent.backends.object.client import ObjectClient
    from kvstrata_agent.backends.record.encryption import DataKeys
    from kvstrata_api.blocks import BlockKey, ScopeId


_SLOTS_PER_GROUP: Final = 32
"""Blocks of one extent: small, so that emptying one frees little more than is needed."""

_log = logging.getLogger(__name__)
_HEADERS_AT_A_TIME: Final = 32
"""Header reads under way while recovering; object stores answer in tens of milliseconds."""
_PLACE: Final = 0
"""Extent and offset in headers: an object has no place that a header could be bound to, only its name."""
_FORGET_DELAY_S: Final = 0.5
_RETRY_DELAY_S: Final = 10.0
_DELETIONS_MAX: Final = 100_000
"""Deletions that wait for a store that is away; beyond it objects stay until the next start finds them."""


@dataclass(slots=True)
class _SlotGroup:
    scope: ScopeId
    given: int
    """Slots ever given; a full group gets none again."""
    sizes: dict[int, int]
    """Bytes of each live stamp."""


class ObjectSlots:
    """Slots of a medium without addresses. The bytes in use never exceed the capacity. Pure."""

    def __init__(self, capacity_bytes: int, *, first_stamp: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._groups: dict[int, _SlotGroup] = {}
        self._open: dict[ScopeId, int] = {}
        """Group of each scope that still gives slots."""
        self._next_group = 0
        self._next_stamp = first_stamp

    @property
    def room_bytes(self) -> int:
        """Bytes that can still be taken; negative after a shrink."""
        return self.capacity_bytes - self.used_bytes

    def take(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take room. Raises `TierFullError` with need and room; nothing was changed then."""
        if size_bytes > self.room_bytes:
            raise TierFullError(
                f"{size_bytes} B wanted, {max(0, self.room_bytes)} B of {self.capacity_bytes} B free", delay_s=0.1
            )
        number, group = self._open_group(scope)
        stamp, self._next_stamp = self._next_stamp, self._next_stamp + 1
        slot = SlotRef(number, group.given, size_bytes, stamp)
        group.given += 1
        self._put(group, slot)
        return slot

    def _open_group(self, scope: ScopeId) -> tuple[int, _SlotGroup]:
        number = self._open.get(scope)
        group = None if number is None else self._groups.get(number)
        if number is None or group is None or group.given >= _SLOTS_PER_GROUP:
            number, self._next_group = self._next_group, self._next_group + 1
            group = self._groups[number] = _SlotGroup(scope, 0, {})
            self._open[scope] = number
        return number, group

    def _put(self, group: _SlotGroup, slot: SlotRef) -> None:
        group.sizes[slot.stamp] = slot.size_bytes
        self.used_bytes += slot.size_bytes

    def adopt(self, scope: ScopeId, size_bytes: int, stamp: int) -> SlotRef:
        """Enter a block of an earlier run under its old stamp."""
        number, group = self._open_group(scope)
        slot = SlotRef(number, group.given, size_bytes, stamp)
        group.given += 1
        self._put(group, slot)
        return slot

    def is_live(self, slot: SlotRef) -> bool:
        """True while the slot is in use."""
        group = self._groups.get(slot.extent)
        return group is not None and slot.stamp in group.sizes

    def give_back(self, slot: SlotRef) -> bool:
        """Free a slot; False when it was free already."""
        group = self._groups.get(slot.extent)
        size_bytes = None if group is None else group.sizes.pop(slot.stamp, None)
        if group is None or size_bytes is None:
            return False
        self.used_bytes -= size_bytes
        if not group.sizes:
            del self._groups[slot.extent]
        return True

    def extents_to_free(self, size_bytes: int) -> frozenset[int]:
        """Extents that, emptied, leave `size_bytes` free; smallest first. Empty when there is room."""
        need = size_bytes - self.room_bytes
        chosen: set[int] = set()
        for number, group in sorted(self._groups.items(), key=lambda item: sum(item[1].sizes.values())):
            if need <= 0:
                break
            chosen.add(number)
            need -= sum(group.sizes.values())
        return frozenset(chosen)


_READABLE: Final = (VERSION, SEALED_VERSION)  # No set: what JSON holds need not be hashable.


class ObjectStoreTier(OptionalCapabilities):
    """A tier of objects (`TierBackend`)."""

    def __init__(
        self,
        client: ObjectClient,
        prefix: str,
        capacity_bytes: int,
        secret: bytes,
        run: int,
        keys: DataKeys | None = None,
    ) -> None:
        """Use `open_object_tier`, which reads the store's secret and run number first."""
        self._client = client
        self._prefix = prefix
        self._form = form_of(secret, keys)
        self._waiting: dict[bytes, dict[str, int]] = {}
        """Size of objects by path whose headers could not be opened, by the tag of their scope."""
        self._slots = ObjectSlots(capacity_bytes, first_stamp=run * STAMPS_PER_RUN)
        self._paths: dict[int, str] = {}
        """Path of the object of each stamp that was written."""
        self._pending_deletions: list[str] = []
        self._deleting: asyncio.Task[None] | None = None
        self._last_error = ""
        self._is_closed = False

    @property
    def paced(self) -> PacedBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def sealing(self) -> SealingBackend:
        """Itself. See `OptionalCapabilities`."""
        return self

    @property
    def capabilities(self) -> Capabilities:
        """State what the medium can do."""
        return Capabilities(
            medium=f"object-{self._client.scheme}",
            is_memory=False,
            survives_restart=True,
            is_emulated=False,
            alignment_bytes=1,
            is_encrypted=isinstance(self._form, SealedForm),
            is_archive=True,
        )

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be reserved in all."""
        return self._slots.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now, headers included."""
        return self._slots.used_bytes

    @property
    def last_error(self) -> str:
        """The last failure of the store; empty when there was none."""
        return self._last_error

    @property
    def requests_max(self) -> int:
        """Requests that the store gets at once now. See `PacedBackend`."""
        return int(self._client.pace.limit)

    @property
    def refused_requests(self) -> int:
        """Requests that the store has refused. See `PacedBackend`."""
        return self._client.pace.refused

    @property
    def refusing_s(self) -> float:
        """Since when the store refuses requests. See `PacedBackend`."""
        return self._client.pace.refusing_s(time.monotonic())

    def slot_bytes(self, size_bytes: int) -> int:
        """Bytes of such an object. See `TierBackend`."""
        return HEADER_BYTES + size_bytes

    def reserve(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take room for an object. See `TierBackend`."""
        return self._slots.take(scope, self.slot_bytes(size_bytes))

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        """Put one object; it is there whole or not at all. See `TierBackend`."""
        whole = memoryview(bytearray(HEADER_BYTES + record.stored_bytes))
        payload = stored[: record.stored_bytes]
        lay_out = self._form.lay_out(whole, record, _placeless(slot), payload)
        await here_or_in_thread(None, len(payload), partial(lay_out, record))
        path = self._paths[slot.stamp] = self._path(record.key, slot.stamp)
        try:
            await self._client.put(path, [whole])
        except BackendFailedError as e:
            self._last_error = str(e)
            raise

    def _path(self, key: BlockKey, stamp: int) -> str:
        """Path of an object; a sealed one's name reveals nothing of its block. Raises `KeyAwayError`."""
        if isinstance(self._form, SealedForm):
            return f"{self._prefix}/{self._form.sealer.tag(key.scope).hex()}/{stamp:x}"
        return f"{self._prefix}/{scope_hash(key.scope)}/{key.digest.hex()}.{stamp:x}"

    async def read(self, slot: SlotRef, record: Record, into: memoryview) -> None:
        """Get one object's payload and verify it. See `TierBackend`."""
        path = self._paths.get(slot.stamp)
        if path is None or not self._slots.is_live(slot):
            raise BackendFailedError(f"block {record.key}: no object of stamp {slot.stamp}")
        first = HEADER_BYTES - self._form.head_bytes
        try:
            whole = await self._client.get(path, first, HEADER_BYTES + record.stored_bytes)
        except BackendFailedError as e:
            self._last_error = str(e)
            raise
        if len(whole) != HEADER_BYTES - first + record.stored_bytes:
            raise BlockCorruptError(f"block {record.key}: {len(whole)} B of {record.stored_bytes} B in {path}")
        target = into[: record.stored_bytes]
        opened = open_into(self._form, target, whole, record, _placeless(slot))
        if not await here_or_in_thread(None, len(target), opened):
            raise BlockCorruptError(f"block {record.key}: checksum differs in {path}")

    def drop(self, slot: SlotRef) -> None:
        """Give the room back; the object is deleted within a second. See `TierBackend`."""
        if not self._slots.give_back(slot):
            return
        path = self._paths.pop(slot.stamp, None)
        if path is not None and len(self._pending_deletions) < _DELETIONS_MAX:
            self._delete_soon(path)

    def _delete_soon(self, path: str) -> None:
        self._pending_deletions.append(path)
        if self._deleting is None:
            self._deleting = asyncio.ensure_future(self._delete_until_done())

    async def _delete_until_done(self) -> None:
        delay_s = _FORGET_DELAY_S
        while self._pending_deletions:
            await asyncio.sleep(delay_s)
            delay_s = _FORGET_DELAY_S if await self._delete_pending() else _RETRY_DELAY_S
        self._deleting = None

    async def _delete_pending(self) -> bool:
        pending, self._pending_deletions = self._pending_deletions, []
        is_done = False
        try:
            await self._client.delete(pending)
            is_done = True
        except BackendFailedError as e:
            self._last_error = str(e)
        finally:
            if not is_done:  # Also where `close` ends it in the middle.
                self._pending_deletions += pending
        return is_done

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        """Change the capacity; nothing closes, because objects share nothing: what is over has to be dropped."""
        self._slots.capacity_bytes = capacity_bytes
        return frozenset()

    def extents_to_free(self, scope: ScopeId, size_bytes: int) -> frozenset[int]:  # noqa: ARG002 - room is for any scope.
        """Groups whose emptying makes room. See `TierBackend`."""
        return self._slots.extents_to_free(self.slot_bytes(size_bytes))

    def compact(self) -> frozenset[int]:
        """Nothing: every object takes its own bytes only."""
        return frozenset()

    async def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks of earlier runs, as far as the capacity goes; objects that are no records are deleted."""
        batch: list[tuple[str, int]] = []
        async for path, size_bytes in self._client.list(f"{self._prefix}/"):
            if not path.endswith(STORE_FILE):
                batch.append((path, size_bytes))
            if len(batch) < _HEADERS_AT_A_TIME:
                continue
            for found in await self._adopt_all(batch):
                yield found
            batch = []
        for found in await self._adopt_all(batch):
            yield found

    @property
    def waiting(self) -> frozenset[bytes]:
        """Tags of scopes whose key is missing. See `SealingBackend`."""
        return frozenset(self._waiting)

    async def recover_waiting(self, tag: bytes) -> AsyncIterator[tuple[SlotRef, Record]]:
        """Blocks that waited for a key. See `SealingBackend`."""
        left = list(self._waiting.get(tag, {}).items())
        for first in range(0, len(left), _HEADERS_AT_A_TIME):
            for found in await self._adopt_all(left[first : first + _HEADERS_AT_A_TIME], tag):
                yield found

    async def forget_waiting(self, tag: bytes) -> None:
        """Delete what waits for a key. See `SealingBackend`."""
        for path in tuple(self._waiting.get(tag, ())):
            self._end_waiting(tag, path)
            self._delete_soon(path)

    def _end_waiting(self, tag: bytes, path: str) -> None:
        waiting = self._waiting[tag]
        self._slots.used_bytes -= waiting.pop(path)
        if not waiting:
            del self._waiting[tag]

    async def _adopt_all(self, batch: list[tuple[str, int]], tag: bytes | None = None) -> list[tuple[SlotRef, Record]]:
        """Enter the records of objects; with `tag` they have waited for its key, and wait on where that fails."""
        found = await asyncio.gather(*(self._adopt(path, size_bytes, tag) for path, size_bytes in batch))
        return [f for f in found if f is not None]

    async def _adopt(self, path: str, size_bytes: int, tag: bytes | None) -> tuple[SlotRef, Record] | None:
        try:
            page = await self._client.get(path, 0, HEADER_BYTES) if size_bytes >= HEADER_BYTES else b""
        except BackendFailedError as e:
            self._last_error = str(e)
            return None
        if tag is not None:
            self._end_waiting(tag, path)
        header = self._form.header(page, _PLACE, _PLACE)
        if isinstance(header, Unread):
            self._waiting.setdefault(header.scope_tag, {})[path] = size_bytes
            self._slots.used_bytes += size_bytes
            return None
        if header is None or not self._is_kept(path, size_bytes, *header):
            self._delete_soon(path)
            return None
        stamp, record = header
        self._paths[stamp] = path
        return self._slots.adopt(record.key.scope, size_bytes, stamp), record

    def _is_kept(self, path: str, size_bytes: int, stamp: int, record: Record) -> bool:
        """False for a truncated or renamed object, and for one that no longer fits the capacity."""
        is_whole = size_bytes == HEADER_BYTES + record.stored_bytes
        return is_whole and path == self._path(record.key, stamp) and size_bytes <= self._slots.room_bytes

    async def close(self) -> None:
        """Delete what was dropped and let go. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._deleting is not None:
            self._deleting.cancel()
            await asyncio.wait([self._deleting])
        if self._pending_deletions:
            await self._delete_pending()
        await self._client.close()


def _placeless(slot: SlotRef) -> SlotRef:
    return replace(slot, extent=_PLACE, offset=_PLACE)


def scope_hash(scope: ScopeId) -> str:
    """16 hex digits for a path; scope names would reveal the tenants to the bucket's readers."""
    return hashlib.blake2b(scope.encode(), digest_size=8, person=b"kvstrata.object").hexdigest()


def _fresh_marker() -> dict[str, Any]:
    return {"format": VERSION, "secret": secrets.token_hex(32), "run": 0}


async def open_object_tier(
    client: ObjectClient, pool: str, node: str, capacity_bytes: int, *, keys: DataKeys | None = None
) -> ObjectStoreTier:
    """Open the objects of `node` in `pool`, and count this run. With `keys` every object is sealed.

    Raises `BackendFailedError` when the store does not answer, `InvalidInputError` when its marker is not ours.
    """
    prefix = f"{pool}/{node}"
    path = f"{prefix}/{STORE_FILE}"
    before = await client.get_small(path)
    try:
        content: dict[str, Any] = json.loads(before) if before else _fresh_marker()
        secret, run = bytes.fromhex(content["secret"]), int(content["run"]) + 1
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as e:
        raise InvalidInputError(f"{client.url}/{path}: not a claim of kvstrata: {e}") from e
    if content.get("format") not in _READABLE:
        raise InvalidInputError(
            f"{client.url}/{path}: format {content.get('format')!r}, this build reads {sorted(_READABLE)}"
        )
    marker = {"format": VERSION if keys is None else SEALED_VERSION, "secret": secret.hex(), "run": run}
    await client.put(path, [json.dumps(marker).encode()])
    try:
        if count := await client.abort_uploads(f"{prefix}/"):
            _log.info("uploads of an earlier run aborted", extra={"prefix": prefix, "uploads": count})
    except BackendFailedError as e:  # They cost money and harm nobody: the next start tries again.
        _log.warning("uploads of an earlier run cannot be aborted", extra={"prefix": prefix, "cause": str(e)})
    return ObjectStoreTier(client, prefix, capacity_bytes, secret, run, keys)
