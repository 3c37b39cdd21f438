"""Names of segment files, and the index file of a record store: what a start reads instead of all headers. Pure.

Two map pages state which listed segments may differ from the list; the body lists segments and their records
(docs/format.md). Everything is under a MAC with the store's secret, so a torn, rotten or foreign index is none. In a
store that encrypts, the entries of each segment are sealed under the data key of its scope (`EntrySealing`).
"""

import hashlib
import hmac
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from kvstrata_agent.backends.base import CODEC_BYTES_MAX, Columns, KeyAwayError
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.record.encryption import SALT_BYTES, TAG_BYTES, Sealer
from kvstrata_agent.backends.record.layout import Form, SealedForm
from kvstrata_agent.backends.recovered import fields_of
from kvstrata_agent.backends.slot_table import round_up
from kvstrata_api.blocks import KEY_BYTES, LayoutId, ScopeId
from kvstrata_api.checksum import CHECKSUM_BYTES

_NAME: Final = re.compile(r"seg-([0-9a-f]{8,12})-([0-9a-f]+)-([0-9a-f]+)\.kv")

MAPS: Final = 2
"""Copies of the map, each in a page of its own: one torn or rotten page loses nothing."""
BODY_OFFSET: Final = MAPS * DIRECT_BYTES
VERSION: Final = 1
SEALED_VERSION: Final = 2
"""Scopes are listed by their tags, and the entries of each segment are sealed (`EntrySealing`)."""
_MAP_MAGIC: Final = b"KVSTRMAP"
_TAG_BYTES: Final = 16
_BODY_MAGIC: Final = b"KVSTRIDX"
KINDS_MAX: Final = 64
_SCOPE_BYTES_MAX: Final = 512
EXTRA_BYTES: Final = SALT_BYTES + TAG_BYTES
"""Before the ciphertext of a segment's entries: salt and tag."""
_MAGIC: Final = b"KVSTRENT"
_PART: Final = 3


@dataclass(frozen=True, slots=True)
class SegmentName:
    """What a segment's file name states: enough to find its records without any index."""

    id: int
    stride_bytes: int
    slots: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.stride_bytes * self.slots

    def __str__(self) -> str:
        return f"seg-{self.id:08x}-{self.stride_bytes:x}-{self.slots:x}.kv"


def parse_name(name: str) -> SegmentName | None:
    """Read a segment's file name; None for any other, also where it only looks like one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    found = SegmentName(*(int(g, 16) for g in match.groups()))
    has_slots = found.slots > 0 and found.stride_bytes > 0 and found.stride_bytes % DIRECT_BYTES == 0
    return found if has_slots and str(found) == name else None


_MAP: Final = struct.Struct("<8sQQ")
"""magic, generation, sequence; then one bit for each listed segment, and the tag at the end of the page."""

_BODY: Final = struct.Struct("<8sIIQQIIQ")
"""magic, version, zero, generation, next segment id, segments, kinds, bytes of the body with its tag."""

_SEGMENT: Final = struct.Struct("<QQQH")
"""id, stride, slots, length of the scope's name, which follows."""

_KIND: Final = struct.Struct("<16sB")
"""layout id, length of the codec's name, which follows."""

FIELDS: Final = np.dtype(
    [
        ("stamp", "<u8"), ("epoch", "<u8"), ("raw_bytes", "<u8"), ("stored_bytes", "<u8"), ("kind", "<u2"),
        ("parent_length", "u1"), ("zeros", "u1", 5), ("checksum", "u1", CHECKSUM_BYTES), ("digest", "u1", KEY_BYTES),
        ("parent", "u1", KEY_BYTES),
    ]
)  # fmt: skip
"""An entry. A stamp of 0 means a free slot, and an epoch of records is that of the agent's run that wrote them."""

ENTRY_BYTES: Final = FIELDS.itemsize
LISTED_MAX: Final = (DIRECT_BYTES - _MAP.size - _TAG_BYTES) * 8
"""Segments that a map has bits for (32,576); four times as many as a store opens."""

_FREE: Final = bytes(8)


@dataclass(slots=True)
class Kinds:
    """Layouts and codecs, which many records share, by number."""

    known: list[tuple[LayoutId, str]] = field(default_factory=list)
    _numbers: dict[tuple[LayoutId, str], int] = field(default_factory=dict)

    def extend(self, known: Sequence[tuple[LayoutId, str]]) -> None:
        """Go on with the numbers of an index; called before any number is given."""
        assert not self.known, "numbers were given"
        self.known.extend(known)
        self._numbers.update({kind: number for number, kind in enumerate(known)})

    def number(self, layout_id: LayoutId, codec: str) -> int | None:
        """Return the number of a kind, new ones included; None when there are too many."""
        kind = (layout_id, codec)
        found = self._numbers.get(kind)
        if found is None and len(self.known) < KINDS_MAX:
            found = self._numbers[kind] = len(self.known)
            self.known.append(kind)
        return found


@dataclass(frozen=True, slots=True)
class Listed:
    """One segment of the list."""

    name: SegmentName
    scope: ScopeId
    """As listed: in a sealed index the tag in hexadecimal digits, until the entries are opened."""
    entries: memoryview
    """`ENTRY_BYTES` for each slot; in a sealed index with what opens them, until they are opened."""


@dataclass(frozen=True, slots=True)
class Body:
    """What the index lists."""

    generation: int
    next_segment: int
    """No segment of this id or above had been made."""
    kinds: tuple[tuple[LayoutId, str], ...]
    listed: tuple[Listed, ...]


def body_bytes_max(segments: int, slots: int) -> int:
    """Upper bound of a body's size, rounded up to whole pages."""
    fixed = _BODY.size + KINDS_MAX * (_KIND.size + CODEC_BYTES_MAX) + _TAG_BYTES
    return round_up(fixed + segments * (_SEGMENT.size + _SCOPE_BYTES_MAX) + slots * ENTRY_BYTES, DIRECT_BYTES)


def unpack_entries(listed: Listed, kinds: Sequence[tuple[LayoutId, str]]) -> Columns:
    """Every slot that is in use. One of a kind that the index does not list has no record."""
    entries = np.frombuffer(listed.entries, FIELDS)
    indices = np.flatnonzero((entries["stamp"] != 0) & (entries["kind"] < len(kinds)))
    entries = entries.take(indices)
    records = np.zeros(len(entries), fields_of(CODEC_BYTES_MAX))
    for name in ("stamp", "epoch", "raw_bytes", "stored_bytes", "checksum", "digest", "parent", "parent_length"):
        records[name] = entries[name]
    known = np.zeros(len(kinds), records.dtype)
    for kind, (layout_id, codec) in zip(known, kinds, strict=True):
        kind["layout_id"] = np.frombuffer(layout_id, np.uint8)
        kind["codec"][: len(codec.encode())] = np.frombuffer(codec.encode(), np.uint8)
        kind["codec_length"] = len(codec.encode())
    for name in ("layout_id", "codec", "codec_length"):
        records[name] = known[name].take(entries["kind"], axis=0)
    return Columns(listed.scope, listed.name.id, listed.name.stride_bytes, indices, records)


def body_head(body: Body, tags: Sequence[bytes] = (), extra_bytes: int = 0) -> bytes:
    """Everything of a body before its entries.

    A sealed one has a tag instead of each segment's scope, and `extra_bytes` more of entries for each segment.
    """
    scopes = tags or [s.scope.encode() for s in body.listed]
    names = b"".join(_packed_segment(s.name, scope) for s, scope in zip(body.listed, scopes, strict=True))
    kinds = b"".join(_KIND.pack(layout, len(codec.encode())) + codec.encode() for layout, codec in body.kinds)
    entries_bytes = sum(s.name.slots * ENTRY_BYTES + extra_bytes for s in body.listed)
    size_bytes = _BODY.size + len(names) + len(kinds) + entries_bytes + _TAG_BYTES
    version = SEALED_VERSION if extra_bytes else VERSION
    counts = (len(body.listed), len(body.kinds))
    return _BODY.pack(_BODY_MAGIC, version, 0, body.generation, body.next_segment, *counts, size_bytes) + names + kinds


def _packed_segment(name: SegmentName, scope: bytes) -> bytes:
    return _SEGMENT.pack(name.id, name.stride_bytes, name.slots, len(scope)) + scope


def sealed_bytes(head: bytes) -> int:
    """Bytes of a whole body with its tag, before rounding."""
    return int(_BODY.unpack_from(head)[-1])


def seal(whole: memoryview, secret: bytes) -> None:
    """Write the tag at the end of a body. Takes about 1 s for each GB; releases the GIL."""
    whole[-_TAG_BYTES:] = _tag(whole[:-_TAG_BYTES], secret, b"kvstrata.index")


def unpack_body(whole: memoryview, secret: bytes, extra_bytes: int = 0) -> Body | None:
    """Read a body; None when it is not a whole body of this store in the version that `extra_bytes` stands for."""
    if len(whole) < _BODY.size + _TAG_BYTES or bytes(whole[:8]) != _BODY_MAGIC:
        return None
    _, version, _, generation, next_segment, segments, kinds, size_bytes = _BODY.unpack_from(whole)
    wanted = SEALED_VERSION if extra_bytes else VERSION
    if version != wanted or not _BODY.size + _TAG_BYTES <= size_bytes <= len(whole):
        return None
    sealed = whole[: size_bytes - _TAG_BYTES]
    tag = bytes(whole[size_bytes - _TAG_BYTES : size_bytes])
    if not hmac.compare_digest(tag, _tag(sealed, secret, b"kvstrata.index")):
        return None
    try:
        names, at = _unpack_segments(sealed, segments, is_sealed=extra_bytes > 0)
        known, at = _unpack_kinds(sealed, at, kinds)
    except (struct.error, UnicodeDecodeError):
        return None
    if any(len(codec) > CODEC_BYTES_MAX for _, codec in known):
        return None
    listed = []
    for name, scope in names:
        end = at + name.slots * ENTRY_BYTES + extra_bytes
        listed.append(Listed(name, scope, sealed[at:end]))
        at = end
    return Body(generation, next_segment, known, tuple(listed)) if at == len(sealed) else None


def _unpack_segments(
    whole: memoryview, count: int, *, is_sealed: bool
) -> tuple[list[tuple[SegmentName, ScopeId]], int]:
    at = _BODY.size
    found = []
    for _ in range(count):
        segment_id, stride_bytes, slots, length = _SEGMENT.unpack_from(whole, at)
        at += _SEGMENT.size
        name = bytes(whole[at : at + length])
        scope = ScopeId(name.hex() if is_sealed else name.decode())
        found.append((SegmentName(segment_id, stride_bytes, slots), scope))
        at += length
    return found, at


def _unpack_kinds(whole: memoryview, at: int, count: int) -> tuple[tuple[tuple[LayoutId, str], ...], int]:
    found = []
    for _ in range(count):
        layout_id, length = _KIND.unpack_from(whole, at)
        at += _KIND.size
        found.append((LayoutId(layout_id), str(whole[at : at + length], "ascii")))
        at += length
    return tuple(found), at


def pack_map(generation: int, sequence: int, bits: bytes, copy: int, secret: bytes) -> bytes:
    """Page of one copy of the map."""
    page = (_MAP.pack(_MAP_MAGIC, generation, sequence) + bits).ljust(DIRECT_BYTES - _TAG_BYTES, b"\0")
    return page + _tag(page, secret, b"kvstrata.map%d" % copy)


def unpack_map(page: memoryview, generation: int, copy: int, secret: bytes) -> tuple[int, bytes] | None:
    """Sequence and bits of one copy of the map; None when it is none of this index."""
    content = bytes(page[:-_TAG_BYTES])
    if not hmac.compare_digest(bytes(page[-_TAG_BYTES:]), _tag(content, secret, b"kvstrata.map%d" % copy)):
        return None
    magic, of_generation, sequence = _MAP.unpack_from(content)
    if magic != _MAP_MAGIC or of_generation != generation:
        return None
    return sequence, content[_MAP.size :]


def _tag(content: bytes | memoryview, secret: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(content, key=secret, digest_size=_TAG_BYTES, person=person).digest()


_BOUND: Final = struct.Struct("<8sQQQQ")
"""magic, generation of the index, id, stride and slots of the segment; then the scope and the store's secret."""


@dataclass(frozen=True, slots=True)
class EntrySealing:
    """Seals and opens the entries of one store's index."""

    sealer: Sealer
    secret: bytes = field(repr=False)

    def has_key(self, scope: ScopeId) -> bool:
        """True while the entries of a scope can be sealed."""
        with suppress(KeyAwayError):
            self.sealer.key(scope, self.sealer.tag(scope))
            return True
        return False

    def tags(self, body: Body) -> list[bytes]:
        """What stands for the scope of each segment. Raises `KeyAwayError`."""
        return [self.sealer.tag(s.scope) for s in body.listed]

    def seal(self, generation: int, listed: Listed, into: memoryview) -> None:
        """Fill `into`, which has `EXTRA_BYTES` more than the entries. Raises `KeyAwayError`."""
        salt, key = self.sealer.new_key(listed.scope)
        tag = key.seal(_PART, listed.entries, into[EXTRA_BYTES:], self._bound(generation, listed))
        into[:EXTRA_BYTES] = salt + tag

    def opened(self, body: Body) -> Body:
        """Return the body with entries in the clear, without the segments that cannot be opened now."""
        return replace(body, listed=tuple(self._opened(body)))

    def _opened(self, body: Body) -> Iterator[Listed]:
        for sealed in body.listed:
            scope = self.sealer.keys.scope(bytes.fromhex(sealed.scope))
            if scope is None or not self.has_key(scope):
                continue
            entries = memoryview(bytearray(len(sealed.entries) - EXTRA_BYTES))
            found = Listed(sealed.name, scope, entries)
            salt, tag = bytes(sealed.entries[:SALT_BYTES]), bytes(sealed.entries[SALT_BYTES:EXTRA_BYTES])
            bound = self._bound(body.generation, found)
            if self.sealer.key(scope, salt).open(_PART, sealed.entries[EXTRA_BYTES:], entries, bound, tag):
                yield found

    def _bound(self, generation: int, listed: Listed) -> bytes:
        name = listed.name
        fields = _BOUND.pack(_MAGIC, generation, name.id, name.stride_bytes, name.slots)
        return fields + listed.scope.encode() + self.secret


def entry_sealing(form: Form) -> EntrySealing | None:
    """Return what seals the index of a store with records of this form; None for records in the clear."""
    return EntrySealing(form.sealer, form.secret) if isinstance(form, SealedForm) else None
