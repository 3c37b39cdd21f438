"""containerd, runc, the CNI programs and nft: pinned Debian packages, unpacked into the cache, never installed."""

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.cache import default_root, sha256_of
from debian_archive import ArchiveError, run
from images.debian import Pin, fetch
from images.errors import ImageError
from nodes.errors import UnavailableError

PINS: Final = Path(__file__).with_name("packages.json")
_DIGEST_HEX: Final = 16


@dataclass(frozen=True, slots=True)
class Packages:
    """Unpacked packages below one folder."""

    root: Path

    @property
    def plugins(self) -> Path:
        """Folder of the CNI programs."""
        return self.root / "usr/lib/cni"

    def environment(self) -> dict[str, str]:
        """Variables under which the packages' programs find each other and their libraries."""
        folders = [self.root / "usr/sbin", self.root / "usr/bin"]
        path = ":".join([*map(str, folders), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
        return {"PATH": path, "LD_LIBRARY_PATH": str(self.root / "usr/lib/x86_64-linux-gnu")}


def node_packages(cache: Path | None = None) -> Packages:
    """Return the unpacked packages, downloading them first when this is the first time (37 MB).

    Raises `UnavailableError`. Processes that want them at the same time wait for the one that came first.
    """
    parent = (cache or default_root(os.environ)) / "nodes"
    root = parent / f"packages-{sha256_of(PINS)[:_DIGEST_HEX]}"
    if root.is_dir():
        return Packages(root)
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            _make(parent / f"new-{os.getpid()}", root)
    return Packages(root)


def _make(work: Path, root: Path) -> None:
    """Fetch and unpack; the folder is put in place whole."""
    unpacked = work / "root"
    pins = [Pin(**pin) for pin in json.loads(PINS.read_text())]
    unpacked.mkdir(parents=True)
    try:
        for archive in fetch(pins).values():
            run(["dpkg", "-x", str(archive), str(unpacked)], {})
        unpacked.replace(root)
    except (ArchiveError, ImageError) as e:
        raise UnavailableError(str(e)) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
