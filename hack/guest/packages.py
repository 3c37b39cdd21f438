"""QEMU, a kernel and a few tools, from the Debian mirror that this machine uses, unpacked into the cache.

The programs come with every library they need, down to the C library, and nothing is installed. A set of packages is
made once and put in place by renaming.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.cache import default_root
from debian_archive import Archive, ArchiveError, check_machine, mirror, release_codename, run, source_line
from guest.errors import UnavailableError

_TOOLS: Final = ("qemu-system-x86", "busybox-static", "e2fsprogs")
_KERNEL: Final = "linux-image-cloud-amd64"
"""A metapackage. The cloud kernel has CXL, DAX, HMAT and NVMe, and half the size of the generic one."""
_EDITION: Final = "1"
"""Part of the folder's name; another one makes everything anew."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Packages that were unpacked below one folder."""

    root: Path

    @property
    def kernel(self) -> Path:
        """The kernel's image."""
        return next(iter(sorted((self.root / "boot").glob("vmlinuz-*"))))

    @property
    def modules(self) -> Path:
        """Folder of the kernel's modules, named after its release."""
        parents = (self.root / "lib/modules", self.root / "usr/lib/modules")
        return next(path for parent in parents if parent.is_dir() for path in parent.iterdir())

    @property
    def busybox(self) -> Path:
        """The static shell and its commands."""
        return next(p for p in (self.root / "bin/busybox", self.root / "usr/bin/busybox") if p.exists())

    def command(self, program: str) -> list[str]:
        """Arguments that run a program of the packages with their own loader and libraries, on any distribution."""
        libraries = [self.root / "usr/lib/x86_64-linux-gnu", self.root / "lib/x86_64-linux-gnu"]
        loader = next(p for p in (lib / "ld-linux-x86-64.so.2" for lib in libraries) if p.exists())
        return [str(loader), "--library-path", ":".join(map(str, libraries)), str(self.root / program)]


def guest_packages(cache: Path | None = None) -> Packages:
    """Return the unpacked packages, downloading them first when this is the first time (70 MB).

    Raises `UnavailableError`. Processes that want them at the same time wait for the one that came first.
    """
    parent = (cache or default_root(os.environ)) / "guest"
    root = parent / f"packages-{_EDITION}"
    if root.is_dir():
        return Packages(root)
    try:
        check_machine()
        with _locked(parent):
            if not root.is_dir():
                _make(parent / f"new-{os.getpid()}", root)
    except ArchiveError as e:
        raise UnavailableError(str(e)) from e
    return Packages(root)


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(work: Path, root: Path) -> None:
    try:
        unpacked = work / "root"
        for package in _download(work / "apt"):
            run(["dpkg", "-x", str(package), str(unpacked)], {})
        unpacked.replace(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(folder: Path) -> list[Path]:
    """Fetch the tools with all they need, and the kernel alone: its dependencies are for installing it."""
    codename = release_codename()
    backports = f"{codename}-backports"
    suites = (codename, f"{codename}-updates", backports)
    archive = Archive(folder, [source_line(mirror(codename), suite) for suite in suites])
    tools = archive.download_with_dependencies(_TOOLS, suite=backports)
    facts = archive.apt("apt-cache", "depends", "--important", f"{_KERNEL}/{backports}")
    image = next((word for word in facts.split() if word.startswith("linux-image-") and word[12].isdigit()), None)
    if image is None:
        raise UnavailableError(f"{_KERNEL} of {backports} names no kernel")
    return [*tools, *archive.download([image])]
