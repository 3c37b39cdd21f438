"""Binaries that were built once, outside the tree, each beside its checksum.

Layout: `<root>/<module>-<digest>/<tool>` and `<tool>.sha256`. A binary is put in place by renaming and counts
only with a matching checksum, so neither a build cut short nor a damaged file is ever used.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from controlplane.pins import MODULES, Tool, cache_folder_name


def default_root(env: Mapping[str, str]) -> Path:
    """Return `$KVSTRATA_CACHE`, else `$XDG_CACHE_HOME/kvstrata`, else `~/.cache/kvstrata`; not created."""
    if named := env.get("KVSTRATA_CACHE"):
        return Path(named)
    base = env.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvstrata"


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BinaryCache:
    """Built tools below one folder; several processes may share it."""

    def __init__(self, root: Path, modules: Path = MODULES) -> None:
        """Use `root`, created on the first build, for tools pinned below `modules`."""
        self._root = root
        self._modules = modules

    def path(self, tool: Tool) -> Path:
        """Return where `tool` is or would be."""
        return self._root / cache_folder_name(tool.module, self._modules) / tool.name

    def verified(self, tool: Tool) -> Path | None:
        """Return the binary when it is there and matches its recorded checksum, else None."""
        binary = self.path(tool)
        try:
            recorded = _sum_file(binary).read_text().split()
            return binary if recorded[:1] == [sha256_of(binary)] else None
        except FileNotFoundError:
            return None

    @contextmanager
    def locked(self, tool: Tool, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the build of `tool` exclusively; `on_wait` is called once when another process holds it.

        The lock is the kernel's and ends with its holder, however that ends.
        """
        binary = self.path(tool)
        binary.parent.mkdir(parents=True, exist_ok=True)
        with binary.with_name(f".{tool.name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def staging(self, tool: Tool) -> Path:
        """Return the path to build `tool` at: on the same file system as its place."""
        return self.path(tool).with_name(f".{tool.name}.{os.getpid()}.new")

    def adopt(self, tool: Tool, staged: Path) -> Path:
        """Move a finished build into its place and record its checksum; call it under the lock.

        The checksum comes last: between the two renames the binary counts as damaged and is built again.
        """
        binary = self.path(tool)
        staged.chmod(0o755)
        sum_staged = staged.with_suffix(".sha256")
        sum_staged.write_text(f"{sha256_of(staged)}  {tool.name}\n")
        staged.replace(binary)
        sum_staged.replace(_sum_file(binary))
        return binary


def _sum_file(binary: Path) -> Path:
    """Return where the checksum of `binary` is kept, in the format of sha256sum(1)."""
    return binary.with_name(f"{binary.name}.sha256")
