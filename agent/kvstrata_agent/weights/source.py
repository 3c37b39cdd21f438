"""Where weights come from: a folder that is mounted here, or objects below one URL. Nothing is written there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urlsplit

from kvstrata_agent.backends.registry import open_client
from kvstrata_agent.backends.threads import in_thread
from kvstrata_agent.weights.listing import LISTING_FILE, check_paths
from kvstrata_api.errors import BackendFailedError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.backends.object.client import ObjectClient
    from kvstrata_agent.backends.registry import ReadSecret
    from kvstrata_api.models.model_cache import ModelSource

FILE_SCHEME: Final = "file"
CLOSED: Final = (Path("/proc"), Path("/sys"), Path("/dev"), Path("/run"), Path("/var/run"), Path("/etc"))
"""Where a pod has its tokens and Secrets, or its kernel: no file there is anybody's weights.

What is staged is readable to every engine of the node, so a source must not be a way to what only the agent may read.
"""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file as the source shows it."""

    path: str
    size_bytes: int
    mark: str
    """Another one when the bytes may be others: the store's entity tag, or inode and time of the last change."""


class Source(Protocol):
    """Files that can be listed and read. Every method raises `BackendFailedError` when the source does not answer."""

    async def files(self) -> list[SourceFile]:
        """All files below the source, by path. Raises `InvalidInputError` for names that no folder can have."""

    async def read(self, path: str, start: int, end: int) -> memoryview:
        """Bytes [start, end) of a file; all of them, or it fails."""

    async def close(self) -> None:
        """Release what was opened. Idempotent."""


async def open_source(source: ModelSource, read_secret: ReadSecret | None, closed: Sequence[Path] = ()) -> Source:
    """Open what an order names; folders `closed`, and those that are so for everybody, are no source.

    Raises `InvalidInputError`, `UnsupportedError` (no object client, no Secrets here) and `BackendFailedError`.
    """
    where = urlsplit(source.url)
    if where.scheme == FILE_SCHEME:
        if where.netloc:
            raise InvalidInputError(f"source.url {source.url}: host {where.netloc!r}, file:///PATH wanted")
        return FolderSource(Path(unquote(where.path)), (*CLOSED, *closed))
    return ObjectSource(await open_client(source.url, source.secret_ref, "source.secretRef", read_secret))


class FolderSource:
    """Files of a folder; links to files are followed, as caches of models have them, links to folders are not."""

    def __init__(self, root: Path, closed: Sequence[Path] = ()) -> None:
        """Read `root`, but nothing below the folders `closed`, whatever links lead there."""
        self._root = root
        self._closed = tuple(Path(os.path.realpath(path)) for path in closed)

    async def files(self) -> list[SourceFile]:
        """See `Source`."""
        try:
            found = await in_thread(None, partial(_walk, self._root, self._closed))
        except OSError as e:
            raise BackendFailedError(f"source {e.filename or self._root}: {e.strerror}") from e
        return _checked(found)

    async def read(self, path: str, start: int, end: int) -> memoryview:
        """See `Source`."""
        try:
            return await in_thread(None, partial(_read, self._root / path, self._closed, start, end))
        except OSError as e:
            raise BackendFailedError(f"source {self._root / path}: {e.strerror or e}") from e

    async def close(self) -> None:
        """See `Source`."""


def _check_open(path: Path, closed: Sequence[Path]) -> None:
    """Raise `InvalidInputError` for a path without links that is in a closed folder, or has one in it."""
    for folder in closed:
        if path == folder or folder in path.parents or path in folder.parents:
            raise InvalidInputError(f"source {path}: {folder} is no source of weights")


def _walk(root: Path, closed: Sequence[Path]) -> list[SourceFile]:
    _check_open(Path(os.path.realpath(root)), closed)
    if not root.is_dir():
        raise NotADirectoryError(0, "no such folder on this node", str(root))
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            _check_open(Path(os.path.realpath(path)), closed)
            status = path.stat()
            mark = f"{status.st_ino}-{status.st_mtime_ns}"
            found.append(SourceFile(path.relative_to(root).as_posix(), status.st_size, mark))
    return found


def _read(path: Path, closed: Sequence[Path], start: int, end: int) -> memoryview:
    piece = memoryview(bytearray(end - start))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check_open(Path(f"/proc/self/fd/{fd}").readlink(), closed)  # A link may have changed since it was listed.
        done = 0
        while done < len(piece):
            count = os.preadv(fd, [piece[done:]], start + done)
            if not count:
                raise OSError(0, f"ends at {start + done}, {end} wanted")
            done += count
    finally:
        os.close(fd)
    return piece


class ObjectSource:
    """Objects below one URL."""

    def __init__(self, client: ObjectClient) -> None:
        """Take over `client`."""
        self._client = client

    async def files(self) -> list[SourceFile]:
        """See `Source`."""
        found = [SourceFile(path, size, mark) async for path, size, mark in self._client.marked("")]
        return _checked([file for file in found if not file.path.endswith("/")])  # Marks of folders.

    async def read(self, path: str, start: int, end: int) -> memoryview:
        """See `Source`."""
        piece = await self._client.get(path, start, end) if end > start else memoryview(b"")
        if len(piece) != end - start:
            raise BackendFailedError(f"source {self._client.url}/{path}: {len(piece)} B of {end - start} B")
        return piece

    async def close(self) -> None:
        """See `Source`."""
        await self._client.close()


def _checked(found: list[SourceFile]) -> list[SourceFile]:
    check_paths([file.path for file in found if file.path != LISTING_FILE])
    return sorted(found, key=lambda file: file.path.encode())
