"""The header of a stored record, format version 1: one 4 KiB page of fixed layout (docs/format.md). Pure."""

import hashlib
import hmac
import struct
from typing import Final

from kvstrata_agent.backends.base import Record, SlotRef
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, BlockKey, LayoutId, ScopeId
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import InvalidInputError

HEADER_BYTES: Final = 4096
"""One page of its own: O_DIRECT writes payload and header from where they lie, and a torn header tears alone."""

MAGIC: Final = b"KVSTRREC"
VERSION: Final = 1

SCOPE_BYTES_MAX: Final = 512
CODEC_BYTES_MAX: Final = 32
_TAG_BYTES: Final = 16

_FIELDS: Final = struct.Struct("<8sHHIQQQQQQ16s16s20s20sBBH32s512s")
"""magic, version, zero, zero, extent, offset, stamp, epoch, raw bytes, stored bytes, checksum, layout id, digest,
parent, parent length, codec length, scope length, codec, scope. All little-endian, no padding."""

_ZEROS: Final = bytes(HEADER_BYTES - _FIELDS.size - _TAG_BYTES)


def pack_header(record: Record, slot: SlotRef, secret: bytes) -> bytes:
    """Header page of `record` at its place. Raises `InvalidInputError` for names that are over the format's limits.

    The tag is a MAC under the store's secret: block bytes come from tenants, and bytes that look like a header
    must not become one when a crash leaves them where the scan expects a header.
    """
    check_names(record)
    scope = record.key.scope.encode()
    codec = record.codec.encode()
    fields = _FIELDS.pack(
        MAGIC, VERSION, 0, 0, slot.extent, slot.offset, slot.stamp, record.epoch, record.raw_bytes,
        record.stored_bytes, record.checksum, record.layout_id, record.key.digest, record.parent, len(record.parent),
        len(codec), len(scope), codec, scope,
    )  # fmt: skip
    return fields + _tag(fields, secret) + _ZEROS


def check_names(record: Record) -> None:
    """Raise `InvalidInputError` for names that are over the format's limits."""
    check_length("scope", record.key.scope.encode(), SCOPE_BYTES_MAX)
    check_length("codec", record.codec.encode(), CODEC_BYTES_MAX)
    check_length("parent", record.parent, KEY_BYTES)


def check_length(what: str, value: bytes, most: int) -> None:
    """Raise `InvalidInputError` for a name that is longer than its field."""
    if len(value) > most:
        raise InvalidInputError(f"{what} of {len(value)} B, at most {most} B fit a record header")


def _tag(fields: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(fields, key=secret, digest_size=_TAG_BYTES, person=b"kvstrata.record").digest()


def unpack_header(page: bytes | memoryview, extent: int, offset: int, secret: bytes) -> tuple[int, Record] | None:
    """Stamp and record of a header page found at a place; None when there is no valid header of this place.

    A header that was written for another place (a misdirected write, a copied file) does not count.
    """
    fields = bytes(page[: _FIELDS.size])
    tag = bytes(page[_FIELDS.size : _FIELDS.size + _TAG_BYTES])
    if not fields.startswith(MAGIC) or not hmac.compare_digest(tag, _tag(fields, secret)):
        return None
    (
        _, version, _, _, at_extent, at_offset, stamp, epoch, raw_bytes, stored_bytes, checksum, layout_id, digest,
        parent, parent_length, codec_length, scope_length, codec, scope,
    ) = _FIELDS.unpack(fields)  # fmt: skip
    if version != VERSION or at_extent != extent or at_offset != offset:
        return None
    return stamp, Record(
        key=BlockKey(ScopeId(scope[:scope_length].decode()), digest),
        parent=parent[:parent_length],
        layout_id=LayoutId(layout_id),
        codec=codec[:codec_length].decode(),
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        checksum=checksum,
        epoch=epoch,
    )


assert struct.calcsize("<16s16s20s") == CHECKSUM_BYTES + LAYOUT_ID_BYTES + KEY_BYTES, "the format fixes these sizes"
