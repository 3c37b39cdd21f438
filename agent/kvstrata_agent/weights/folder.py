"""Weights on disk: one folder for each revision, which has its name when all of it is there and verified.

    <tier>/kvstrata-models/<model>/<revision>/           files as in the source, mode 0444
    <tier>/kvstrata-models/<model>/.<revision>.listing   its listing, durable before the folder has its name
    <tier>/kvstrata-models/<model>/.<revision>.staging/  files that are on their way
    <tier>/kvstrata-models/<model>/.<revision>.draft     what of them is known
    <tier>/kvstrata-models/<model>/.removed-<number>/    a revision that is being removed

So a crash leaves a revision whole under its name, or not under it. The time of a revision's folder is that of its last
use, which an agent that starts again goes on from. Files that two revisions have alike are one file with two names.
Only `ModelFolder.use` and `reading` are for the event loop; everything else blocks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstrata_agent.weights.listing import Listing, ModelFile, decode
from kvstrata_api.decoding import UNDECODABLE
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.names import MODELS_FOLDER
from kvstrata_node import directories

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstrata_agent.weights.listing import Chunk

_FICLONERANGE: Final = 0x4020940D
"""_IOW(0x94, 13, struct file_clone_range); include/uapi/linux/fs.h."""
_SYNC_FILE_RANGE_WRITE: Final = 2
"""include/uapi/linux/fs.h."""
_sync_file_range: Final = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_BLOCK_BYTES: Final = 512
"""Unit of st_blocks; man 3type stat."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMOVED: Final = ".removed-"
_FILE_MODE: Final = 0o444
_FOLDER_MODE: Final = 0o755


@dataclass(frozen=True, slots=True)
class Revision:
    """One whole revision on this node."""

    model: str
    revision: str
    path: Path
    listing: Listing
    digest: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a chunk are."""

    path: Path
    offset: int
    size_bytes: int


class Known(msgspec.Struct, frozen=True):
    """What of the files on their way is known, across restarts."""

    listing: Listing | None = None
    """All of them, where the listing came first."""
    found: dict[str, tuple[str, ModelFile]] = {}
    """By path the source's mark and the file as it was brought, where it did not."""


class ModelFolder:
    """The weights of one tier; one process at a time has it."""

    def __init__(self, root: Path) -> None:
        """Make and lock the folder below a tier's.

        Raises `InvalidInputError` when another agent has it, `OSError`.
        """
        self.root = root / MODELS_FOLDER
        self.root.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        self._lock = directories.lock(self.root, "another agent process holds it; give each node its own")
        self.revisions: dict[tuple[str, str], Revision] = {}
        self._readers: Counter[tuple[str, str]] = Counter()
        self._misnamed: set[tuple[str, str]] = set()
        """Files on their way that have a revision's name, because they could not be renamed back."""
        self._removed = 0

    @staticmethod
    def is_at(root: Path) -> bool:
        """Whether there is a folder of weights below a tier's."""
        return (root / MODELS_FOLDER).is_dir()

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def scan(self) -> None:
        """Read which revisions are whole, and remove what a crash has left of others that went."""
        self.revisions.clear()
        for folder in (entry for entry in self.root.iterdir() if entry.is_dir()):
            for entry in list(folder.iterdir()):
                if entry.name.startswith(_REMOVED):
                    shutil.rmtree(entry)
                elif not entry.name.startswith(".") and entry.is_dir():
                    self._take(folder.name, entry)

    def _take(self, model: str, path: Path) -> None:
        """Enter a revision; one whose listing or files are not as they were left is none, and goes."""
        try:
            listing = decode(self._listing_path(model, path.name).read_bytes())
            is_whole = all((path / f.path).stat().st_size == f.size_bytes for f in listing.files)
        except (OSError, InvalidInputError):
            is_whole = False
        if not is_whole:
            self._clear(path)
            return
        self.revisions[model, path.name] = Revision(model, path.name, path, listing, listing.digest)

    def staging(self, model: str, revision: str) -> Path:
        """Folder for files on their way; made when it is not there."""
        self._rename_back(model, revision)
        path = self._staging_path(model, revision)
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        return path

    def stagings(self) -> list[tuple[str, str]]:
        """Model and revision of all that have files on their way, or had when an agent ended."""
        found = self.root.glob("*/.*.staging")
        named = [(p.parent.name, p.name.removeprefix(".").removesuffix(".staging")) for p in found]
        return [*named, *self._misnamed]

    def known(self, model: str, revision: str) -> Known:
        """What is known of files on their way; nothing where that cannot be read."""
        try:
            return msgspec.json.decode(self._draft_path(model, revision).read_bytes(), type=Known)
        except (OSError, *UNDECODABLE):
            return Known()

    def note(self, model: str, revision: str, document: bytes) -> None:
        """Keep what is known, an encoded `Known`, durably."""
        directories.write_durably(self._draft_path(model, revision), document)

    def finish(self, model: str, revision: str, listing: Listing) -> Revision:
        """Give files that are all there, and durable, the revision's name; durable on return.

        The listing comes first: a folder that has its name and no listing is one that is being removed.
        """
        staging, path = self.staging(model, revision), self.root / model / revision
        directories.write_durably(self._listing_path(model, revision), listing.encode())
        for folder, _, _ in os.walk(staging, topdown=False):
            Path(folder).chmod(_FOLDER_MODE)  # Whatever the umask: engines have other users.
            directories.sync(Path(folder))
        staging.rename(path)
        try:
            os.utime(path)
            directories.sync(path.parent)
            directories.sync(self.root)
            self._draft_path(model, revision).unlink(missing_ok=True)
        except OSError:
            self._misnamed.add((model, revision))
            with suppress(OSError):  # The next try does it then.
                self._rename_back(model, revision)
            raise
        made = self.revisions[model, revision] = Revision(model, revision, path, listing, listing.digest)
        return made

    def _rename_back(self, model: str, revision: str) -> None:
        """Take the name from what is no revision: the next try goes on with what is there, and needs the name."""
        if (model, revision) in self._misnamed:
            (self.root / model / revision).rename(self._staging_path(model, revision))
            self._misnamed.discard((model, revision))

    def drop_staging(self, model: str, revision: str) -> None:
        """Remove files on their way, and what is known of them."""
        self._rename_back(model, revision)
        self._draft_path(model, revision).unlink(missing_ok=True)
        self._clear(self._staging_path(model, revision))
        self._drop_empty(model)

    def is_in_use(self, model: str, revision: str) -> bool | None:
        """Whether anybody has a file of a revision open or mapped; None while we read it for others.

        The kernel grants a write lease to whoever has the only open description of a file, whatever container the
        others are in. What cannot be asked is in use. Notes the time of a use.
        """
        if self._readers[model, revision]:
            return None
        held = self.revisions[model, revision]
        is_used = not all(_is_alone(held.path / file.path) for file in held.listing.files)
        if is_used:
            os.utime(held.path)
        return is_used

    def used_at_s(self, model: str, revision: str) -> float:
        """Unix time at which a revision was last in use, or was staged."""
        return self.revisions[model, revision].path.stat().st_mtime

    def remove(self, model: str, revision: str) -> bool:
        """Remove a revision that nobody uses; False for one that is in use, which stays.

        All files are leased before the folder loses its name, so nobody has one of them then; who opens one at that
        moment waits until it has, and either finds none or has a file that is whole for as long as it is open.
        """
        held = self.revisions.get((model, revision))
        if held is None:
            return True
        if self._readers[model, revision]:
            return False
        with ExitStack() as leases:
            for path in _different([held.path / file.path for file in held.listing.files]):
                if not leases.enter_context(_leased(path)):
                    return False
            del self.revisions[model, revision]
            try:
                self._listing_path(model, revision).unlink(missing_ok=True)
                gone = self._set_aside(held.path)
            except OSError:
                with suppress(OSError):  # Where it has its name yet, a later try removes it.
                    held.path.lstat()
                    self.revisions[model, revision] = held
                raise
        shutil.rmtree(gone)
        self._drop_empty(model)
        return True

    @contextmanager
    def reading(self, model: str, revision: str) -> Iterator[Revision | None]:
        """A revision that stays for as long as it is read for others; None when it is not here."""
        self._readers[model, revision] += 1
        try:
            yield self.revisions.get((model, revision))
        finally:
            self._readers[model, revision] -= 1

    def chunks(self, but: tuple[str, str]) -> dict[str, Place]:
        """Where chunks of all revisions but one are. The same chunk in several is at one of them."""
        found: dict[str, Place] = {}
        for key, held in tuple(self.revisions.items()):  # Threads change it.
            for file in held.listing.files if key != but else ():
                at = 0
                for chunk in file.chunks:
                    found.setdefault(chunk.name, Place(held.path / file.path, at, chunk.size_bytes))
                    at += chunk.size_bytes
        return found

    def files(self, but: tuple[str, str]) -> dict[str, Path]:
        """Files of all revisions but one, by SHA-256."""
        return {
            file.sha256: held.path / file.path
            for key, held in tuple(self.revisions.items())
            for file in (held.listing.files if key != but else ())
        }

    def staging_bytes(self, model: str, revision: str) -> int:
        """Bytes that files on their way take; those that another revision has too are counted there."""
        taken = 0
        for folder, _, names in os.walk(self._staging_path(model, revision)):
            for name in names:
                with suppress(FileNotFoundError):  # It has gone meanwhile.
                    status = os.lstat(Path(folder, name))
                    taken += status.st_blocks * _BLOCK_BYTES if status.st_nlink == 1 else 0
        return taken

    def check_room(self, model: str, revision: str, size_bytes: int) -> None:
        """Raise `OSError`, of a full disk, when the file system has no room for what is missing of `size_bytes`."""
        missing_bytes = size_bytes - self.staging_bytes(model, revision)
        free_bytes = self.free_bytes
        if missing_bytes > free_bytes:
            raise _full(self.root, missing_bytes, free_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that the file system has left for this process."""
        return _free_bytes(os.statvfs(self.root))

    def sizes(self) -> dict[tuple[str, str], int]:
        """Bytes that would go with each revision; a file of several counts for the first of them.

        What goes meanwhile, by another thread, is left out.
        """
        sizes: dict[tuple[str, str], int] = {}
        seen: set[int] = set()
        for key, held in sorted(self.revisions.items()):
            sizes[key] = 0
            for file in held.listing.files:
                with suppress(FileNotFoundError):
                    inode = (held.path / file.path).stat().st_ino
                    sizes[key] += file.size_bytes if inode not in seen else 0
                    seen.add(inode)
        return {key: size_bytes for key, size_bytes in sizes.items() if key in self.revisions}

    def _listing_path(self, model: str, revision: str) -> Path:
        return self.root / model / f".{revision}.listing"

    def _staging_path(self, model: str, revision: str) -> Path:
        return self.root / model / f".{revision}.staging"

    def _draft_path(self, model: str, revision: str) -> Path:
        return self.root / model / f".{revision}.draft"

    def _set_aside(self, path: Path) -> Path:
        self._removed += 1
        gone = path.with_name(f"{_REMOVED}{os.getpid()}-{self._removed}")
        path.rename(gone)
        directories.sync(path.parent)
        return gone

    def _clear(self, path: Path) -> None:
        if path.exists():
            shutil.rmtree(self._set_aside(path))

    def _drop_empty(self, model: str) -> None:
        with suppress(OSError):
            (self.root / model).rmdir()


def _different(paths: Sequence[Path]) -> list[Path]:
    """One path for each file: who opens a file a second time breaks the own lease, and waits for itself."""
    found: dict[object, Path] = {}
    for path in paths:
        file: object = path  # One that cannot be looked at counts for itself.
        with suppress(OSError):
            status = os.lstat(path)
            file = status.st_dev, status.st_ino
        found.setdefault(file, path)
    return list(found.values())


@contextmanager
def _leased(path: Path) -> Iterator[bool]:
    """Whether nobody else has a file open; as long as the block runs, who opens it waits."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        with directories.write_lease(file):
            yield directories.has_write_lease(file)
    finally:
        os.close(file)


def _is_alone(path: Path) -> bool:
    with _leased(path) as is_alone:
        return is_alone


def write_at(fd: int, offset: int, piece: memoryview) -> None:
    """Write all of a piece, and let the disk begin with it: the sync at the file's end then has little left to do."""
    done = 0
    while done < len(piece):
        done += os.pwrite(fd, piece[done:], offset + done)
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, len(piece), _SYNC_FILE_RANGE_WRITE)  # A hint: what fails shows at the sync.


def read_at(fd: int, offset: int, size_bytes: int) -> memoryview:
    """Read a range; shorter at the end of the file."""
    piece = memoryview(bytearray(size_bytes))
    done = 0
    while done < size_bytes and (count := os.preadv(fd, [piece[done:]], offset + done)):
        done += count
    return piece[:done]


def allocate(fd: int, size_bytes: int, path: Path) -> None:
    """Give a file its size and its blocks, so that a full disk is noticed before bytes travel.

    Raises `OSError`; of a full disk it names `path` and what is missing.
    """
    if not size_bytes:
        return
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as e:
        if is_full(e):
            raise _full(path, size_bytes, _free_bytes(os.fstatvfs(fd))) from e
        if e.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    os.ftruncate(fd, size_bytes)


def is_full(error: OSError) -> bool:
    """Whether an error says that a file system or a quota has no room."""
    return error.errno in _FULL


def _free_bytes(status: os.statvfs_result) -> int:
    return status.f_bavail * status.f_frsize


def _full(path: Path, size_bytes: int, free_bytes: int) -> OSError:
    return OSError(errno.ENOSPC, f"{size_bytes} B wanted, its file system has {free_bytes} B free", str(path))


def copy_chunks(fd: int, offset: int, chunks: tuple[Chunk, ...], here: dict[str, Place]) -> bool:
    """Copy chunks that other files here have into a file; False when one of them is not there any more.

    File systems that can let both files have the same blocks; others copy inside of the kernel. Nothing is verified.
    """
    for chunk in chunks:
        place = here[chunk.name]
        try:
            source = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if not _clone(source, place.offset, fd, offset, chunk.size_bytes):
                _copy(source, place.offset, fd, offset, chunk.size_bytes)
        except OSError:
            return False
        finally:
            os.close(source)
        offset += chunk.size_bytes
    return True


def _clone(source: int, source_offset: int, fd: int, offset: int, size_bytes: int) -> bool:
    """Share blocks; only whole ones can be, and only some file systems do (man 2 ioctl_ficlonerange)."""
    if source_offset % 4096 or offset % 4096 or size_bytes % 4096:
        return False
    fields = b"".join(n.to_bytes(8, "little") for n in (source, source_offset, size_bytes, offset))
    try:
        fcntl.ioctl(fd, _FICLONERANGE, fields)
    except OSError:
        return False
    return True


def _copy(source: int, source_offset: int, fd: int, offset: int, size_bytes: int) -> None:
    done = 0
    while done < size_bytes:
        count = os.copy_file_range(source, fd, size_bytes - done, source_offset + done, offset + done)
        if not count:
            raise OSError(errno.EIO, f"file ends at {source_offset + done}")
        done += count


def seal(fd: int) -> None:
    """Make a file durable and read-only."""
    os.fchmod(fd, _FILE_MODE)
    os.fsync(fd)
