"""Archives that the kernel unpacks as its first root file system. Pure but for reading files.

Format: "newc", Documentation/driver-api/early-userspace/buffer-format.rst of the kernel.
"""

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MAGIC = b"070701"
_END = "TRAILER!!!"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or link of the archive."""

    mode: int
    content: bytes | Path = b""
    """Bytes of a file or target of a link; a path stands for the file's bytes."""
    device: tuple[int, int] = (0, 0)

    @property
    def bytes(self) -> bytes:
        """What the entry holds."""
        return self.content.read_bytes() if isinstance(self.content, Path) else self.content

    @property
    def changed_s(self) -> int:
        """Second of the last change. Python trusts its bytecode only beside a source of the same second."""
        return int(self.content.stat().st_mtime) if isinstance(self.content, Path) else 0


def file(content: bytes | Path, permissions: int = 0o755) -> Entry:
    """A plain file."""
    return Entry(stat.S_IFREG | permissions, content)


def link(target: str) -> Entry:
    """A symbolic link."""
    return Entry(stat.S_IFLNK | 0o777, target.encode())


FOLDER = Entry(stat.S_IFDIR | 0o755)
CONSOLE = Entry(stat.S_IFCHR | 0o600, device=(5, 1))
"""/dev/console: without it the first program has no output (Documentation/filesystems/ramfs-rootfs-initramfs.rst)."""


def archive(entries: Mapping[str, Entry]) -> Iterator[bytes]:
    """Yield the archive of `entries` by absolute path; folders above them are added."""
    folders = {str(above): FOLDER for path in entries for above in PurePosixPath(path).parents if str(above) != "/"}
    for number, (path, entry) in enumerate(sorted((folders | dict(entries)).items()), start=1):
        yield from _member(path.lstrip("/"), entry, number)
    yield from _member(_END, Entry(0), 0)


def _member(name: str, entry: Entry, number: int) -> Iterator[bytes]:
    content, named = entry.bytes, name.encode() + b"\0"
    links = 1
    numbers = (number, entry.mode, 0, 0, links, entry.changed_s, len(content), 0, 0, *entry.device, len(named), 0)
    head = _MAGIC + b"".join(b"%08x" % n for n in numbers) + named
    yield head + bytes(-len(head) % 4)
    yield content
    yield bytes(-len(content) % 4)
