"""One layer: a folder as a tar whose bytes depend on names, contents, links and modes alone."""

import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

import zstandard

_LEVEL: Final = 6
_STICKY: Final = {"tmp": 0o1777}
"""Modes of folders that are not 0755."""
MEDIA_TYPE: Final = "application/vnd.oci.image.layer.v1.tar+zstd"


@dataclass(frozen=True, slots=True)
class Layer:
    """A finished layer."""

    name: str
    root: Path
    """Folder that it was made from."""
    blob: Path
    """The compressed tar."""
    digest: str
    """Of the compressed tar."""
    diff_id: str
    """Of the tar itself."""
    size_bytes: int
    """Of the compressed tar."""
    unpacked_bytes: int
    """Of the files in it."""


class _Hashed:
    """A file that digests what is written to it, as far as tarfile and zstandard use files."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    def write(self, content: bytes) -> int:
        self._sha256.update(content)
        self.size_bytes += len(content)
        self._file.write(content)
        return len(content)

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"


def pack(name: str, root: Path, blob: Path) -> Layer:
    """Write the folder `root` as a layer to `blob`.

    Everything belongs to root and has the time 0. The compressor is a pinned wheel with one thread, so compressed bytes
    are the same everywhere too.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=0, write_checksum=True)
    unpacked_bytes = 0
    with blob.open("wb") as file:
        outer = _Hashed(file)
        with compressor.stream_writer(cast("IO[bytes]", outer), closefd=False) as stream:
            inner = _Hashed(stream)
            with tarfile.open(fileobj=cast("IO[bytes]", inner), mode="w|", format=tarfile.PAX_FORMAT) as tar:
                for path in _sorted(root):
                    unpacked_bytes += _add(tar, root, path)
    return Layer(name, root, blob, outer.digest, inner.digest, outer.size_bytes, unpacked_bytes)


def _sorted(folder: Path) -> Iterator[Path]:
    """Everything below `folder` by name, a folder before what is in it; links are not followed."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _sorted(Path(entry.path))


def _add(tar: tarfile.TarFile, root: Path, path: Path) -> int:
    name = str(path.relative_to(root))
    member = tarfile.TarInfo(name)
    if path.is_symlink():
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
    elif path.is_dir():
        member.type, member.mode = tarfile.DIRTYPE, _STICKY.get(name, 0o755)
    else:
        member.size, member.mode = path.stat().st_size, path.stat().st_mode & 0o777
        with path.open("rb") as file:
            tar.addfile(member, file)
        return member.size
    tar.addfile(member)
    return 0
