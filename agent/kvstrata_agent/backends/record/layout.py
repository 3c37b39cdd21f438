"""How one record lies on a medium: a header page and the payload, in the clear or sealed (docs/format.md). Pure.

In the clear (format version 1) the header is one page of 4 KiB with fields at fixed places under a MAC. A sealed record
(version 2) has header and payload under the data key of its scope: a thief of the medium reads place, stamp and size of
each record, and a tag that stands for its scope. What ties the bytes to their use is authenticated: place, stamp,
epoch, key digest, parent, layout, codec, sizes, scope and store.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstrata_agent.backends.base import CODEC_BYTES_MAX, KeyAwayError, Record, SlotRef, matches
from kvstrata_agent.backends.record.encryption import SALT_BYTES, SCOPE_TAG_BYTES, TAG_BYTES, DataKeys, Sealer
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, BlockKey, LayoutId, ScopeId
from kvstrata_api.checksum import CHECKSUM_BYTES
from kvstrata_api.errors import InvalidInputError
from kvstrata_native import copy

HEADER_BYTES: Final = 4096
"""One page of its own: O_DIRECT writes payload and header from where they lie, and a torn header tears alone."""

MAGIC: Final = b"KVSTRREC"
VERSION: Final = 1

SCOPE_BYTES_MAX: Final = 512
_TAG_BYTES: Final = 16

_FIELDS: Final = struct.Struct(f"<8sHHIQQQQQQ16s16s20s20sBBH{CODEC_BYTES_MAX}s{SCOPE_BYTES_MAX}s")
"""magic, version, zero, zero, extent, offset, stamp, epoch, raw bytes, stored bytes, checksum, layout id, digest,
parent, parent length, codec length, scope length, codec, scope. All little-endian, no padding."""

_ZEROS: Final = bytes(HEADER_BYTES - _FIELDS.size - _TAG_BYTES)

SEALED_VERSION: Final = 2
_HEADER_PART: Final = 1
_PAYLOAD_PART: Final = 2


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
    try:
        names = scope[:scope_length].decode(), codec[:codec_length].decode()
    except UnicodeDecodeError:
        return None
    return stamp, Record(
        key=BlockKey(ScopeId(names[0]), digest),
        parent=parent[:parent_length],
        layout_id=LayoutId(layout_id),
        codec=names[1],
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        checksum=checksum,
        epoch=epoch,
    )


assert struct.calcsize("<16s16s20s") == CHECKSUM_BYTES + LAYOUT_ID_BYTES + KEY_BYTES, "the format fixes these sizes"


_OPEN: Final = struct.Struct(f"<8sHHIQQQ{SCOPE_TAG_BYTES}s{SALT_BYTES}s{TAG_BYTES}s")
"""magic, version, zero, zero, extent, offset, stamp, tag of the scope, salt, tag of the payload."""

_CLOSED: Final = struct.Struct("<QQQ16s16s20s20sBB32s")
"""epoch, raw bytes, stored bytes, checksum, layout id, digest, parent, parent length, codec length, codec."""

_BOUND: Final = struct.Struct("<8sQQQQQQ16s16s20s20sBB32sH")
"""magic, extent, offset, stamp, epoch, raw bytes, stored bytes, checksum, layout id, digest, parent, parent length,
codec length, codec, scope length; then the scope and the store's secret."""

_CLOSED_END: Final = _OPEN.size + _CLOSED.size + TAG_BYTES
_SEALED_ZEROS: Final = bytes(HEADER_BYTES - _CLOSED_END)


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
            opening = _OPEN.pack(MAGIC, SEALED_VERSION, 0, 0, *place, scope_tag, salt, tag)
            closed = key.seal_small(_HEADER_PART, _pack(made), self._header_bound(opening, scope))
            whole[:HEADER_BYTES] = opening + closed + _SEALED_ZEROS
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
        opening = bytes(page[: _OPEN.size])
        if len(opening) < _OPEN.size:
            return None
        magic, version, _, _, at_extent, at_offset, stamp, scope_tag, salt, _ = _OPEN.unpack(opening)
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
        fields = key.open_small(_HEADER_PART, closed, self._header_bound(opening, scope))
        record = None if fields is None else _unpack(fields, scope)
        return None if record is None else (stamp, record)

    def _header_bound(self, opening: bytes, scope: ScopeId) -> bytes:
        return opening + scope.encode() + self.secret

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


def _unpack(fields: bytes, scope: ScopeId) -> Record | None:
    """Record of opened fields; None where a name is no text."""
    (
        epoch, raw_bytes, stored_bytes, checksum, layout_id, digest, parent, parent_length, codec_length, codec,
    ) = _CLOSED.unpack(fields)  # fmt: skip
    try:
        codec_name = codec[:codec_length].decode()
    except UnicodeDecodeError:
        return None
    return Record(
        key=BlockKey(scope, digest),
        parent=parent[:parent_length],
        layout_id=LayoutId(layout_id),
        codec=codec_name,
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        checksum=checksum,
        epoch=epoch,
    )


class Form(Protocol):
    """How a store lays records out. What takes as long as a copy of the payload is handed out, for a thread."""

    def lay_out(
        self, whole: memoryview, record: Record, slot: SlotRef, payload: memoryview
    ) -> Callable[[Record], None]:
        """What fills `whole` with header, payload and zeros: the buffer's last user may have been another scope.

        It takes the record once more, with the checksum that may not have been known before. Raises
        `InvalidInputError` for names that are over the format's limits, `KeyAwayError` without a key.
        """

    @property
    def head_bytes(self) -> int:
        """Of the header page, which stands before the payload, so much is needed to open a record."""

    @property
    def is_sealed(self) -> bool:
        """True when what opens is this very record; else its checksum has to prove it."""

    def opener(self, record: Record, slot: SlotRef) -> Callable[[memoryview, memoryview], memoryview | None]:
        """What finds a record's payload in `head_bytes` and payload as they were read; None when it does not open.

        Its second memory, as long as the payload, is where a sealed one is opened to; that may be where it lies.
        Raises `KeyAwayError` without a key.
        """

    def header(self, page: bytes | memoryview, extent: int, offset: int) -> tuple[int, Record] | Unread | None:
        """Stamp and record of a header page found at a place, as far as it can be read."""


@dataclass(frozen=True, slots=True)
class PlainForm:
    """Records in the clear, format version 1."""

    secret: bytes = field(repr=False)

    def lay_out(
        self, whole: memoryview, record: Record, slot: SlotRef, payload: memoryview
    ) -> Callable[[Record], None]:
        """See `Form`."""
        check_names(record)
        return lambda made: lay_out(whole, pack_header(made, slot, self.secret), payload)

    @property
    def head_bytes(self) -> int:
        """None: a record is opened by what is known of it."""
        return 0

    @property
    def is_sealed(self) -> bool:
        """No."""
        return False

    def opener(self, record: Record, slot: SlotRef) -> Callable[[memoryview, memoryview], memoryview | None]:  # noqa: ARG002
        """See `Form`. The payload stays where it lies."""
        return lambda whole, room: whole[: len(room)]

    def header(self, page: bytes | memoryview, extent: int, offset: int) -> tuple[int, Record] | Unread | None:
        """See `Form`."""
        return unpack_header(page, extent, offset, self.secret)


def form_of(secret: bytes, keys: DataKeys | None) -> Form:
    """Form of a store's records: sealed when there are keys for it."""
    return PlainForm(secret) if keys is None else SealedForm(Sealer(keys), secret)


def lay_out(whole: memoryview, header: bytes, payload: memoryview) -> None:
    """Header, payload, zeros."""
    end = HEADER_BYTES + len(payload)
    whole[:HEADER_BYTES] = header
    copy(whole[HEADER_BYTES:end], payload)
    whole[end:] = bytes(len(whole) - end)


def open_into(form: Form, target: memoryview, whole: memoryview, record: Record, slot: SlotRef) -> Callable[[], bool]:
    """What fills `target` from `head_bytes` and the payload; False when they are not this very record.

    Raises `KeyAwayError` without a key.
    """
    opener = form.opener(record, slot)

    def work() -> bool:
        payload = opener(whole, target)
        if payload is None or not (form.is_sealed or matches(payload, record, slot.stamp)):
            return False
        if payload is not target:
            copy(target, payload)
        return True

    return work
