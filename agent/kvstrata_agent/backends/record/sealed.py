"""A sealed record, format version 2: header page and payload under the data key of their scope (docs/format.md). Pure.

What a thief of the medium reads: place, stamp and size of each record, and a tag that stands for its scope. What ties
the bytes to their use is authenticated: place, stamp, epoch, key digest, parent, layout, codec, sizes, scope and store.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvstrata_agent.backends.base import KeyAwayError, Record, SlotRef
from kvstrata_agent.backends.record.encryption import SALT_BYTES, SCOPE_TAG_BYTES, TAG_BYTES, Sealer
from kvstrata_agent.backends.record.header import CODEC_BYTES_MAX, HEADER_BYTES, MAGIC, check_length
from kvstrata_api.blocks import KEY_BYTES, BlockKey, LayoutId, ScopeId

SEALED_VERSION: Final = 2

_OPEN: Final = struct.Struct(f"<8sHHIQQQ{SCOPE_TAG_BYTES}s{SALT_BYTES}s{TAG_BYTES}s")
"""magic, version, zero, zero, extent, offset, stamp, tag of the scope, salt, tag of the payload."""

_CLOSED: Final = struct.Struct("<QQQ16s16s20s20sBB32s")
"""epoch, raw bytes, stored bytes, checksum, layout id, digest, parent, parent length, codec length, codec."""

_BOUND: Final = struct.Struct("<8sQQQQQQ16s16s20s20sBB32sH")
"""magic, extent, offset, stamp, epoch, raw bytes, stored bytes, checksum, layout id, digest, parent, parent length,
codec length, codec, scope length; then the scope and the store's secret."""

_CLOSED_END: Final = _OPEN.size + _CLOSED.size + TAG_BYTES
_ZEROS: Final = bytes(HEADER_BYTES - _CLOSED_END)
_HEADER_PART: Final = 1
_PAYLOAD_PART: Final = 2


@dataclass(frozen=True, slots=True)
class Unread:
    """A header that cannot be opened now."""

    scope_tag: bytes


@dataclass(frozen=True, slots=True)
class SealedForm:
    """How one store writes and reads sealed records."""

    sealer: Sealer
    secret: bytes = field(repr=False)
    """The store's: records of another store do not count."""

    def lay_out(
        self, whole: memoryview, record: Record, slot: SlotRef, payload: memoryview
    ) -> Callable[[Record], None]:
        """See `Form`. Keys are looked up here, in the loop's thread, and the rest needs none of them."""
        check_length("codec", record.codec.encode(), CODEC_BYTES_MAX)
        check_length("parent", record.parent, KEY_BYTES)
        scope, end = record.key.scope, HEADER_BYTES + len(payload)
        scope_tag, (salt, key) = self.sealer.tag(scope), self.sealer.new_key(scope)

        def work(made: Record) -> None:
            tag = key.seal(_PAYLOAD_PART, payload, whole[HEADER_BYTES:end], self._bound(made, slot))
            place = (slot.extent, slot.offset, slot.stamp)
            said = _OPEN.pack(MAGIC, SEALED_VERSION, 0, 0, *place, scope_tag, salt, tag)
            closed = key.seal_small(_HEADER_PART, _pack(made), self._header_bound(said, scope))
            whole[:HEADER_BYTES] = said + closed + _ZEROS
            whole[end:] = bytes(len(whole) - end)

        return work

    @property
    def head_bytes(self) -> int:
        """All: salt and tag stand there."""
        return HEADER_BYTES

    @property
    def is_sealed(self) -> bool:
        """Yes."""
        return True

    def opener(self, record: Record, slot: SlotRef) -> Callable[[memoryview, memoryview], memoryview | None]:
        """See `Form`. A payload that is not this very record's leaves zeros.

        Of the page only salt and tag are believed: they open nothing but what was sealed for `record` and `slot`.
        """
        key_of = self.sealer.keys_of(record.key.scope)

        def work(whole: memoryview, room: memoryview) -> memoryview | None:
            *_, salt, tag = _OPEN.unpack_from(whole)
            sealed = whole[HEADER_BYTES : HEADER_BYTES + len(room)]
            is_open = key_of(salt).open(_PAYLOAD_PART, sealed, room, self._bound(record, slot), tag)
            return room if is_open else None

        return work

    def header(self, page: bytes | memoryview, extent: int, offset: int) -> tuple[int, Record] | Unread | None:
        """Stamp and record of a header page found at a place; None when there is no header of this place and store."""
        said = bytes(page[: _OPEN.size])
        if len(said) < _OPEN.size:
            return None
        magic, version, _, _, at_extent, at_offset, stamp, scope_tag, salt, _ = _OPEN.unpack(said)
        if magic != MAGIC or version != SEALED_VERSION or (at_extent, at_offset) != (extent, offset):
            return None
        scope = self.sealer.keys.scope(scope_tag)
        if scope is None:
            return Unread(scope_tag)
        try:
            key = self.sealer.key(scope, salt)
        except KeyAwayError:
            return Unread(scope_tag)
        closed = bytes(page[_OPEN.size : _CLOSED_END])
        fields = key.open_small(_HEADER_PART, closed, self._header_bound(said, scope))
        return None if fields is None else (stamp, _unpack(fields, scope))

    def _header_bound(self, said: bytes, scope: ScopeId) -> bytes:
        return said + scope.encode() + self.secret

    def _bound(self, record: Record, slot: SlotRef) -> bytes:
        """What the payload's tag is bound to."""
        codec, scope = record.codec.encode(), record.key.scope.encode()
        fields = _BOUND.pack(
            MAGIC, slot.extent, slot.offset, slot.stamp, record.epoch, record.raw_bytes, record.stored_bytes,
            record.checksum, record.layout_id, record.key.digest, record.parent, len(record.parent), len(codec), codec,
            len(scope),
        )  # fmt: skip
        return fields + scope + self.secret


def _pack(record: Record) -> bytes:
    codec = record.codec.encode()
    return _CLOSED.pack(
        record.epoch, record.raw_bytes, record.stored_bytes, record.checksum, record.layout_id, record.key.digest,
        record.parent, len(record.parent), len(codec), codec,
    )  # fmt: skip


def _unpack(fields: bytes, scope: ScopeId) -> Record:
    (
        epoch, raw_bytes, stored_bytes, checksum, layout_id, digest, parent, parent_length, codec_length, codec,
    ) = _CLOSED.unpack(fields)  # fmt: skip
    return Record(
        key=BlockKey(scope, digest),
        parent=parent[:parent_length],
        layout_id=LayoutId(layout_id),
        codec=codec[:codec_length].decode(),
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        checksum=checksum,
        epoch=epoch,
    )
