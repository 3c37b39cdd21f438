r"""Which files a model has and what is in them: the listing, its digest, and the cut of files into chunks. Pure.

The digest of a listing is the SHA-256 of one line of UTF-8 text for each file, in the order of their paths' bytes:
`<SHA-256 in hex>  <bytes>  <path>\n`. Chunks have no part in it: two cuts of the same files have the same digest.

A chunk is named by the XXH3-128 of its bytes. That finds equal chunks and transfers that went wrong; what proves a
file is its SHA-256, which is compared before anybody sees the file.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Any, Final

import msgspec
import xxhash

from kvstrata_agent.movement.scheduler import PIECE_BYTES_MAX
from kvstrata_api.decoding import UNDECODABLE
from kvstrata_api.errors import InvalidInputError

LISTING_FILE: Final = "kvstrata-listing.json"
"""A source may have its listing under this name; it is not staged."""
LISTING_BYTES_MAX: Final = 64 << 20
"""Of an encoded listing: a million chunks take 40 MB."""
FILES_MAX: Final = 4_096
PATH_CHARS_MAX: Final = 512
HEADER_BYTES_MAX: Final = 100_000_000
"""Of a safetensors file; the limit of the format's own reader (github.com/huggingface/safetensors, tensor.rs)."""
LENGTH_BYTES: Final = 8
"""Of the little-endian length in front of that header."""
DIGEST_PREFIX: Final = "sha256:"

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_CHUNK_NAME: Final = re.compile(r"[0-9a-f]{32}")
_FORMAT: Final = 1


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One piece of a file: a tensor, a part of one, or where a file is no safetensors a piece of fixed size."""

    size_bytes: int
    name: str
    """XXH3-128 of its bytes in hex."""


class ModelFile(msgspec.Struct, frozen=True):
    """One file, whole."""

    path: str
    """Relative to the source, with `/`."""
    size_bytes: int
    sha256: str
    chunks: tuple[Chunk, ...]
    """In order, without gaps."""


class Listing(msgspec.Struct, frozen=True):
    """All files of a model, by path."""

    files: tuple[ModelFile, ...]
    format: int = _FORMAT

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """`sha256:<hex>`; see the head of this file."""
        lines = (f"{file.sha256}  {file.size_bytes}  {file.path}\n" for file in _sorted(self.files))
        return DIGEST_PREFIX + hashlib.sha256("".join(lines).encode()).hexdigest()

    def encode(self) -> bytes:
        """Write it down as JSON."""
        return msgspec.json.encode(self)


_decoder: Final = msgspec.json.Decoder(Listing)


def _sorted(files: tuple[ModelFile, ...]) -> list[ModelFile]:
    return sorted(files, key=lambda file: file.path.encode())


def listing_of(files: tuple[ModelFile, ...]) -> Listing:
    """Put files into order."""
    return Listing(tuple(_sorted(files)))


def decode(document: bytes) -> Listing:
    """Read a listing. Raises `InvalidInputError` that names the file, the value and the limit."""
    if len(document) > LISTING_BYTES_MAX:
        raise InvalidInputError(f"listing of {len(document)} B, limit {LISTING_BYTES_MAX} B")
    try:
        listing = _decoder.decode(document)
    except UNDECODABLE as e:
        raise InvalidInputError(f"listing: {e}") from e
    if listing.format != _FORMAT:
        raise InvalidInputError(f"listing: format {listing.format}, this version reads {_FORMAT}")
    check_paths([file.path for file in listing.files])
    for file in listing.files:
        _check_file(file)
    return listing_of(listing.files)


def _check_file(file: ModelFile) -> None:
    if not _SHA256.fullmatch(file.sha256):
        raise InvalidInputError(f"{file.path}: sha256 {file.sha256[:80]!r}: 64 hexadecimal digits wanted")
    for chunk in file.chunks:
        if not 0 < chunk.size_bytes <= PIECE_BYTES_MAX or not _CHUNK_NAME.fullmatch(chunk.name):
            raise InvalidInputError(
                f"{file.path}: chunk of {chunk.size_bytes} B named {chunk.name[:40]!r}: 1 to {PIECE_BYTES_MAX} B "
                "and 32 hexadecimal digits wanted"
            )
    total = sum(chunk.size_bytes for chunk in file.chunks)
    if total != file.size_bytes:
        raise InvalidInputError(f"{file.path}: chunks of {total} B in a file of {file.size_bytes} B")


def check_paths(paths: list[str]) -> None:
    """Raise `InvalidInputError` for paths that cannot be files of one folder, side by side."""
    if not 0 < len(paths) <= FILES_MAX:
        raise InvalidInputError(f"{len(paths)} files: 1 to {FILES_MAX} wanted")
    for path in paths:
        parts = path.split("/")
        is_named = all(part and part not in (".", "..") and not part.startswith(".kvstrata") for part in parts)
        if not is_named or not path.isprintable() or "\\" in path or len(path) > PATH_CHARS_MAX:
            raise InvalidInputError(
                f"file {path[:PATH_CHARS_MAX]!r}: a relative path of printable characters, without `..`, of "
                f"{PATH_CHARS_MAX} at most wanted"
            )
    known = set(paths)
    if len(known) != len(paths):
        raise InvalidInputError(f"file {next(p for p in paths if paths.count(p) > 1)!r} is listed twice")
    for path in paths:
        parts = path.split("/")
        above = next((a for a in itertools.accumulate(parts[:-1], "{}/{}".format) if a in known), None)
        if above is not None:
            raise InvalidInputError(f"file {path!r}: {above!r} is a file and a folder")


def header_bytes(path: str, size_bytes: int, prefix: bytes) -> int:
    """Bytes of a safetensors header, from the file's first 8. Raises `InvalidInputError`."""
    if size_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise InvalidInputError(f"{path}: {size_bytes} B, a safetensors file has {LENGTH_BYTES} at least")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    limit = min(HEADER_BYTES_MAX, size_bytes - LENGTH_BYTES)
    if not 0 < length <= limit:
        raise InvalidInputError(f"{path}: header of {length} B, limit {limit} B")
    return length


def tensor_ends(path: str, size_bytes: int, header: bytes) -> list[int]:
    """Where each tensor of a safetensors file ends, in bytes of the file, in their order.

    Raises `InvalidInputError` unless the tensors fill the rest of the file without a gap or an overlap, as the format
    wants (github.com/huggingface/safetensors, README, "Format").
    """
    data_bytes = size_bytes - LENGTH_BYTES - len(header)
    try:
        entries: Any = msgspec.json.decode(header)
    except UNDECODABLE as e:
        raise InvalidInputError(f"{path}: header is no JSON: {e}") from e
    if not isinstance(entries, dict):
        raise InvalidInputError(f"{path}: header is {type(entries).__name__}, a JSON object wanted")
    spans = sorted(_span(path, name, entry, data_bytes) for name, entry in entries.items() if name != "__metadata__")
    at = 0
    for begin, end, name in spans:
        if begin != at:
            found = "overlap" if begin < at else "gap"
            raise InvalidInputError(f"{path}: tensor {name[:80]!r} begins at {begin}, {at} wanted: {found}")
        at = end
    if at != data_bytes:
        raise InvalidInputError(f"{path}: tensors of {at} B in {data_bytes} B of data")
    return [LENGTH_BYTES + len(header) + end for begin, end, _ in spans if end > begin]


def _span(path: str, name: str, entry: Any, data_bytes: int) -> tuple[int, int, str]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(at) is int for at in offsets)):
        raise InvalidInputError(f"{path}: tensor {name[:80]!r}: data_offsets {offsets!r:.80}: two integers wanted")
    begin, end = offsets
    if not 0 <= begin <= end <= data_bytes:
        raise InvalidInputError(
            f"{path}: tensor {name[:80]!r}: data_offsets {offsets}: 0 to {data_bytes} in order wanted"
        )
    return begin, end, name


def cut(size_bytes: int, ends: list[int] | None = None) -> list[int]:
    """Sizes of a file's chunks: `PIECE_BYTES_MAX` at most, and none goes over one of `ends`."""
    sizes: list[int] = []
    at = 0
    for end in [*(ends or []), size_bytes]:
        while at < end:
            sizes.append(min(PIECE_BYTES_MAX, end - at))
            at += sizes[-1]
    return sizes


def chunk_name(piece: memoryview | bytes) -> str:
    """Name of a chunk by its bytes."""
    return xxhash.xxh3_128_hexdigest(piece)
