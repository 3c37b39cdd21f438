"""What stores and hosts write on media: whatever lies there is a record of ours, or none; never another exception.

Checksums and MACs are made right after most mutations, under secrets that a thief of the medium would not have: what
is behind them has to stand what an earlier version, or a bug of this one, may have written.
"""

import binascii
import hashlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fuzz.target import TEXT_BYTES, Form, Target, expect
from kvstrata_agent.backends.base import CODEC_BYTES_MAX, Record, SlotRef
from kvstrata_agent.backends.device import pooled
from kvstrata_agent.backends.file import claim, index_format
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from kvstrata_agent.backends.memory import ledger
from kvstrata_agent.backends.object.object_tier import open_object_tier
from kvstrata_agent.backends.record import layout
from kvstrata_agent.backends.record.encryption import Sealer
from kvstrata_agent.cache import session_journal
from kvstrata_agent.codec.base import Planes, Shape, room_bytes
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_agent.weights import listing
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId
from kvstrata_api.errors import BlockCorruptError, InvalidInputError
from kvstrata_api.models.pool import CompressionPolicy
from kvstrata_native import xxh3_128

_SECRET: Final = bytes(range(32))
_SCOPE: Final = ScopeId("tenant/a/uid-a/v1")
_TAG: Final = b"scopetag"
_EXTENT, _OFFSET, _STAMP = 3, 8192, 5
_SLOT: Final = SlotRef(_EXTENT, _OFFSET, 8192, _STAMP)


def _record(codec: str = "packed", parent: bytes = b"") -> Record:
    return Record(
        key=BlockKey(_SCOPE, b"d" * 20), parent=parent, layout_id=LayoutId(b"L" * 16), codec=codec, raw_bytes=4096,
        stored_bytes=3000, checksum=b"c" * 16, epoch=7,
    )  # fmt: skip


class _Keys:
    """One scope and its data key."""

    def data_key(self, scope: ScopeId) -> bytes | None:
        return _SECRET if scope == _SCOPE else None

    def tag(self, scope: ScopeId) -> bytes | None:
        return _TAG if scope == _SCOPE else None

    def scope(self, tag: bytes) -> ScopeId | None:
        return _SCOPE if tag == _TAG else None


_SEALED: Final = layout.SealedForm(Sealer(_Keys()), _SECRET)
_PLAIN: Final = layout.PlainForm(_SECRET)


def _tagged(content: bytes, person: bytes) -> bytes:
    return content + hashlib.blake2b(content, key=_SECRET, digest_size=16, person=person).digest()


# Headers of records.


def _headers() -> list[bytes]:
    return [layout.pack_header(_record(c, p), _SLOT, _SECRET)[:720] for c, p in (("packed", b""), ("raw", b"p" * 20))]


_FIELDS_BYTES: Final = struct.calcsize("<8sHHIQQQQQQ16s16s20s20sBBH32s512s")


def _header_repaired(page: bytes) -> bytes:
    """The MAC, and mostly the place: a header of another place is none."""
    fields = bytearray(page[:_FIELDS_BYTES].ljust(_FIELDS_BYTES, b"\0"))
    fields[:16] = struct.pack("<8sHHI", layout.MAGIC, layout.VERSION, 0, 0)
    fields[16:32] = struct.pack("<QQ", _EXTENT, _OFFSET)
    return _tagged(bytes(fields), b"kvstrata.record")


def _check_header(page: bytes) -> bool:
    found = _PLAIN.header(page.ljust(layout.HEADER_BYTES, b"\0"), _EXTENT, _OFFSET)
    if found is None:
        return False
    expect(not isinstance(found, layout.Unread), "a header in the clear is read")
    assert not isinstance(found, layout.Unread)
    stamp, record = found
    written = layout.pack_header(record, SlotRef(_EXTENT, _OFFSET, 8192, stamp), _SECRET)
    expect(_PLAIN.header(written, _EXTENT, _OFFSET) == found, "a header is written and read again alike", record)
    return True


_OPEN_BYTES: Final = struct.calcsize("<8sHHIQQQ8s32s16s")
_CLOSED_BYTES: Final = struct.calcsize("<QQQ16s16s20s20sBB32s")


def _sealed_seeds() -> list[bytes]:
    """What is sealed, in the clear: opening and fields."""
    seeds = []
    for record in (_record(), _record("raw", b"p" * 20)):
        codec = record.codec.encode()
        closed = struct.pack(
            "<QQQ16s16s20s20sBB32s", record.epoch, record.raw_bytes, record.stored_bytes, record.checksum,
            record.layout_id, record.key.digest, record.parent, len(record.parent), len(codec), codec,
        )  # fmt: skip
        opening = struct.pack(
            "<8sHHIQQQ8s32s16s", layout.MAGIC, 2, 0, 0, _EXTENT, _OFFSET, _STAMP, _TAG, b"s" * 32, b"t" * 16
        )
        seeds.append(opening + closed)
    return seeds


def _check_sealed(data: bytes) -> bool:
    """The fields are sealed here, so that the check of the seal lets them through, and once as they are."""
    opening, closed = data[:_OPEN_BYTES].ljust(_OPEN_BYTES, b"\0"), data[_OPEN_BYTES:][:_CLOSED_BYTES]
    key = _SEALED.sealer.key(_SCOPE, opening[48:80])
    bound = opening + _SCOPE.encode() + _SECRET
    page = (opening + key.seal_small(1, closed.ljust(_CLOSED_BYTES, b"\0"), bound)).ljust(layout.HEADER_BYTES, b"\0")
    found = _SEALED.header(page, _EXTENT, _OFFSET)
    _SEALED.header(data, _EXTENT, _OFFSET)
    if found is None or isinstance(found, layout.Unread):
        return False
    _, record = found
    room = bytearray(layout.HEADER_BYTES + 4096)
    layout.check_length("codec", record.codec.encode(), CODEC_BYTES_MAX)
    payload = memoryview(bytes(64))
    _SEALED.lay_out(memoryview(room), record, _SLOT, payload)(record)
    again = _SEALED.header(bytes(room), _EXTENT, _OFFSET)
    expect(again == (_STAMP, record), "a sealed header is written and read again alike", record, again)
    opened = _SEALED.opener(record, _SLOT)(memoryview(room), memoryview(bytearray(64)))
    expect(opened == payload, "a sealed payload opens", record)
    return True


# The index of a store.

_HEAD: Final = struct.Struct("<8sIIQQIIQ")


def _indexes() -> list[bytes]:
    entries = np.zeros(3, index_format.FIELDS)
    entries["stamp"], entries["raw_bytes"], entries["stored_bytes"] = (1, 0, 2), 4096, 3000
    name = index_format.SegmentName(1, 8192, 3)
    listed = index_format.Listed(name, _SCOPE, memoryview(entries.tobytes()))
    kinds = ((LayoutId(b"L" * 16), "packed"), (LayoutId(b"M" * 16), "raw"))
    seeds = []
    for body in (index_format.Body(9, 2, kinds, (listed,)), index_format.Body(9, 1, (), ())):
        head = index_format.body_head(body)
        whole = bytearray(index_format.sealed_bytes(head))
        whole[: len(head)] = head
        whole[len(head) : len(whole) - 16] = b"".join(bytes(one.entries) for one in body.listed)
        index_format.seal(memoryview(whole), _SECRET)
        seeds.append(bytes(whole))
    return seeds


def _index_repaired(whole: bytes) -> bytes:
    content = bytearray(whole[:-16].ljust(_HEAD.size, b"\0"))
    content[:12] = struct.pack("<8sI", b"KVSTRIDX", index_format.VERSION)
    content[_HEAD.size - 8 : _HEAD.size] = (len(content) + 16).to_bytes(8, "little")
    return _tagged(bytes(content), b"kvstrata.index")


def _check_index(whole: bytes) -> bool:
    body = index_format.unpack_body(memoryview(whole), _SECRET)
    if body is None:
        return False
    for one in body.listed:
        expect(
            len(one.entries) == one.name.slots * index_format.ENTRY_BYTES, "entries are there, all of them", one.name
        )
        columns = index_format.unpack_entries(one, body.kinds)
        expect(len(columns.records) <= one.name.slots, "no more records than slots", one.name)
    return True


def _maps() -> list[bytes]:
    return [index_format.pack_map(9, 4, b"\x05", 0, _SECRET)]


def _map_repaired(page: bytes) -> bytes:
    content = bytearray(page[: DIRECT_BYTES - 16].ljust(DIRECT_BYTES - 16, b"\0"))
    content[:8] = b"KVSTRMAP"
    return _tagged(bytes(content), b"kvstrata.map0")


def _check_map(page: bytes) -> bool:
    found = index_format.unpack_map(memoryview(page), 9, 0, _SECRET)
    if found is None:
        return False
    written = index_format.pack_map(9, *found, 0, _SECRET)
    expect(index_format.unpack_map(memoryview(written), 9, 0, _SECRET) == found, "a map is written and read alike")
    return True


# Memory that survives, and memory of several hosts.


def _ledgers() -> list[bytes]:
    header = ledger.LedgerHeader(_EXTENT, 4096, 2, 8192, "b" * 36, _SCOPE, "a")
    record = ledger.pack_record(_record(), _EXTENT, 0, _STAMP)
    return [ledger.pack_header(header) + record + bytes(128), ledger.pack_header(header) + bytes(128) + record]


_LEDGER_HEADER: Final = struct.Struct("<8sIIQQQQ36sH512s")


def _ledger_repaired(data: bytes) -> bytes:
    """The header's check and those of both records."""
    page = bytearray(data.ljust(1280, b"\0")[:1280])
    page[:8] = ledger.MAGIC
    end = _LEDGER_HEADER.size + min(int.from_bytes(page[12:16], "little"), 253)
    page[end : end + 8] = _xxh3_64(bytes(page[:end]), 0)
    for index, at in enumerate((1024, 1152)):
        page[at : at + 8] = _xxh3_64(bytes(page[at + 8 : at + 128]), _EXTENT << 32 | index)
    return bytes(page)


def _xxh3_64(content: bytes, seed: int) -> bytes:
    import xxhash

    return bytes(xxhash.xxh3_64_digest(content, seed))


def _check_ledger(data: bytes) -> bool:
    header = ledger.unpack_header(data[:1024])
    if header is None:
        return False
    expect(ledger.unpack_header(ledger.pack_header(header)) == header, "a header is written and read alike", header)
    records = np.frombuffer(data[1024:1280].ljust(256, b"\0"), ledger.RECORD)
    whole = ledger.are_whole(records, _EXTENT, np.arange(2))
    expect(whole.shape == (2,), "each record is whole or not", whole)
    return True


_BLOCK: Final = pooled.Superblock("pool", 64 << 20)


def _pooled_heads() -> list[bytes]:
    line = pooled.Line(b"n" * 16, b"o" * 16, 3).packed()
    return [line + _BLOCK.packed().rstrip(b"\0")[:-16], line + pooled.Superblock("other", 1 << 30).packed()[:80]]


def _check_pooled(data: bytes) -> bool:
    """A line and the text of a superblock, each as it is and with the right checksum."""
    line = data[:64].ljust(64, b"\0")
    text = data[64:].rstrip(b"\0")[: 4096 - 16]
    taken = False
    for one in (line, line[:56] + xxh3_128(line[:56])[:8]):
        found = pooled.parse_line(one)
        if found is not None:
            taken = True
            expect(found.packed() == one or one[48:56] != bytes(8), "a line is written as it was read", found)
    page = text.ljust(4096 - 16, b"\0")
    for end in (xxh3_128(text), data[-16:].ljust(16, b"\0")):
        try:
            is_ours = pooled.check_superblock(page + end, _BLOCK, Path("device"))
        except InvalidInputError as e:
            expect("cxl.pooled.path" in str(e), "the field is named", str(e))
        else:
            taken |= is_ours
    return taken


# Files of JSON: claims of stores.


class _OneFile:
    """A volume with one file in it."""

    where = "volume"

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def load(self, _: str) -> bytes:
        return self._content


def _claims() -> list[bytes]:
    content = {"format": 2, "secret": _SECRET.hex(), "run": 3, "pool": "p", "node": "n"}
    return [msgspec.json.encode(content), msgspec.json.encode({"format": 1, "secret": _SECRET.hex()})]


def _check_claim(document: bytes) -> bool:
    try:
        content = _done(claim._load(_OneFile(document), "claim"))  # type: ignore[arg-type]  # Only `load` is asked.
        found = claim._next_run("volume/claim", content)
    except InvalidInputError as e:
        expect("claim" in str(e), "the file is named", str(e))
        return False
    expect(isinstance(found.secret, bytes), "a claim has a secret")
    return True


class _OneObject:
    """A bucket with one object in it."""

    url = "s3://bucket"

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def get_small(self, _: str) -> bytes:
        return self._content

    async def put(self, _: str, parts: Sequence[bytes]) -> None:
        self._content = b"".join(parts)

    async def abort_uploads(self, _: str) -> int:
        return 0


def _check_marker(document: bytes) -> bool:
    bucket = _OneObject(document)
    try:
        _done(open_object_tier(bucket, "pool", "node", 1 << 20))  # type: ignore[arg-type]  # These are asked.
    except InvalidInputError as e:
        expect("s3://bucket" in str(e), "the object is named", str(e))
        return False
    _done(open_object_tier(bucket, "pool", "node", 1 << 20))  # type: ignore[arg-type]
    return True


def _done(work: Any) -> Any:
    """Result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as e:
        return e.value
    raise AssertionError("it waits")


# The journal of sessions.


def _journals() -> list[bytes]:
    value = session_journal.Remembered(
        "idle", "standard", b"", 2, 0, 0.0, ((str(_SCOPE), b"d" * 20),), scope=str(_SCOPE)
    )
    return [
        session_journal.MAGIC
        + b"".join(
            _entry(msgspec.msgpack.encode((digest, one))) for digest, one in ((b"1" * 20, value), (b"2" * 20, None))
        )
    ]


def _entry(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + binascii.crc32(body).to_bytes(4, "big") + body


def _journal_repaired(content: bytes) -> bytes:
    """One entry of all that follows the first header: its length and checksum."""
    start = len(session_journal.MAGIC)
    size = int.from_bytes(content[start : start + 4], "big")
    body = content[start + 8 :]
    first, rest = (body[:size], body[size + 8 :]) if size < len(body) else (body, b"")
    return session_journal.MAGIC + _entry(first) + (_entry(rest) if rest else b"")


def _check_journal(content: bytes) -> bool:
    found = list(session_journal._frames(content))
    expect(sum(len(frame) for _, frame, _ in found) <= len(content), "frames are parts of the file", found)
    for _, _, remembered in found:
        if remembered is not None and (scope := remembered.erased_with):
            expect(scope.count("/") == 3 and scope.rsplit("/v")[-1].isdigit(), "it is a tenant's scope", scope)
    return bool(found)


# Weights.


def _listings() -> list[bytes]:
    file = listing.ModelFile("a/model.safetensors", 10, "0" * 64, (listing.Chunk(10, "1" * 32),))
    return [
        listing.listing_of((file,)).encode(),
        listing.listing_of((file, msgspec.structs.replace(file, path="b"))).encode(),
    ]


def _check_listing(document: bytes) -> bool:
    try:
        found = listing.decode(document)
    except InvalidInputError:
        return False
    expect(listing.decode(found.encode()) == found, "a listing is written and read alike", found)
    expect(found.digest.startswith(listing.DIGEST_PREFIX), "it has a digest", found)
    for file in found.files:
        expect(not file.path.startswith("/") and ".." not in file.path.split("/"), "paths stay below", file.path)
    return True


_TENSORS_BYTES: Final = 64


def _safetensors() -> list[bytes]:
    one = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    two = {"dtype": "F32", "shape": [12], "data_offsets": [16, 64]}
    headers = ({"a": one, "b": two}, {"__metadata__": {"format": "pt"}, "a": one | {"data_offsets": [0, 64]}})
    return [len(h).to_bytes(8, "little") + h for h in map(msgspec.json.encode, headers)]


def _safetensors_repaired(data: bytes) -> bytes:
    return (len(data) - 8).to_bytes(8, "little") + data[8:] if len(data) > 8 else data


def _check_safetensors(data: bytes) -> bool:
    size_bytes = len(data) + _TENSORS_BYTES
    try:
        length = listing.header_bytes("f", size_bytes, data[:8])
        ends = listing.tensor_ends("f", 8 + length + _TENSORS_BYTES, data[8 : 8 + length])
    except InvalidInputError as e:
        expect(str(e).startswith("f: "), "the file is named", str(e))
        return False
    sizes = listing.cut(8 + length + _TENSORS_BYTES, ends)
    expect(sum(sizes) == 8 + length + _TENSORS_BYTES and min(sizes) > 0, "chunks are the whole file", sizes)
    return True


# Compressed blocks.

_RAW_BYTES: Final = 2048
_CODECS: Final = CodecRegistry()


def _blocks(codec: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        rng = np.random.default_rng(1)
        raws = [
            (rng.normal(size=_RAW_BYTES // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes(),
            bytes(_RAW_BYTES),
            rng.bytes(_RAW_BYTES),
        ]
        policy = CompressionPolicy(mode="Auto", maxRelativeErrorPermille=100)
        made = []
        for raw in raws:
            for is_archive in (False, True):
                into = bytearray(room_bytes(len(raw)))
                coded = _CODECS.for_policy(policy, is_worn=False, is_archive=is_archive)
                planes = Planes(2, 8, 64) if codec == "mixed" else None
                encoded = coded.encode(memoryview(raw), Shape(2, planes, b"L" * 16), memoryview(into))
                if encoded.codec == codec:
                    made.append(bytes(into[: encoded.stored_bytes]))
        return made

    return seeds


def _decodes(codec: str) -> Callable[[bytes], bool]:
    decoder = _CODECS.named(codec)

    def check(stored: bytes) -> bool:
        """Twice, into memory with guards: the same bytes, none behind the end."""
        found: list[bytes | None] = []
        for fill in (b"\x00", b"\xff"):
            room = bytearray(fill * (_RAW_BYTES + 64))
            try:
                decoder.decode(memoryview(stored), memoryview(room)[32 : 32 + _RAW_BYTES])
            except BlockCorruptError:
                found.append(None)
            else:
                found.append(bytes(room[32:-32]))
            expect(
                room[:32] == fill * 32 and room[-32:] == fill * 32, "nothing is written outside of the block", stored
            )
        expect(found[0] == found[1], "what is decoded follows from the bytes alone", stored)
        return found[0] is not None

    return check


def _block_repaired(head: bytes) -> Callable[[bytes], bytes]:
    """The fixed part of the header, but for the width of codes, which is the byte at 2 or 1."""

    def repaired(stored: bytes) -> bytes:
        made = bytearray(stored.ljust(len(head), b"\0"))
        width_at = 2 if len(head) == 16 else 1
        width = made[width_at]
        made[: len(head)] = head
        made[width_at] = width if 3 <= width <= 7 else 3 + width % 5
        return bytes(made)

    return repaired


_PACKED_HEAD: Final = struct.pack("<BBB5sQ", 1, 2, 3, bytes(5), _RAW_BYTES)
_MIXED_HEAD: Final = struct.pack("<BBHIIIQ", 1, 3, 0, 2, 8, 64, _RAW_BYTES)

_JSON: Final[Sequence[bytes]] = (
    *TEXT_BYTES, b'"secret"', b'"format":1', b'"run":-5', b'"data_offsets"', b"[" * 1200, b"9" * 4400,
    b'"__metadata__"',
)  # fmt: skip

TARGETS: Final = (
    Target("record-headers", "headers of records on NVMe and shared flash", _headers, _check_header, _header_repaired),
    Target("sealed-headers", "the same of encrypted records", _sealed_seeds, _check_sealed),
    Target("index-bodies", "index files of record stores", _indexes, _check_index, _index_repaired),
    Target("index-maps", "map pages of index files", _maps, _check_map, _map_repaired),
    Target("ledgers", "ledgers of memory that survives a restart", _ledgers, _check_ledger, _ledger_repaired),
    Target(
        "pooled-heads", "superblock and lines of memory that hosts share", _pooled_heads, _check_pooled, tokens=_JSON
    ),
    Target("store-claims", "claim files of stores", _claims, _check_claim, tokens=_JSON, form=Form.JSON),
    Target("object-markers", "markers of object stores", _claims, _check_marker, tokens=_JSON, form=Form.JSON),
    Target("session-journals", "journals of sessions", _journals, _check_journal, _journal_repaired),
    Target("listings", "listings of weights", _listings, _check_listing, tokens=_JSON, form=Form.JSON),
    Target(
        "safetensors", "headers of safetensors files", _safetensors, _check_safetensors, _safetensors_repaired, _JSON
    ),
    Target(
        "blocks-packed",
        "exactly compressed blocks",
        _blocks("packed"),
        _decodes("packed"),
        _block_repaired(_PACKED_HEAD),
    ),
    Target(
        "blocks-mixed", "blocks compressed with loss", _blocks("mixed"), _decodes("mixed"), _block_repaired(_MIXED_HEAD)
    ),
)
