"""What node preparation has changed on this machine since it booted: a file of added pages, and one of dax devices.

Law: the book of pages never has more than was added. Pages are added before they are entered and struck before they
are taken back, so what a crash leaves in doubt counts as somebody else's and stays.
Law: a dax device is entered before it is touched, so whatever a crash leaves can be given back. The process that has
the directory of the book of pages has this one too.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstrata_node import directories
from kvstrata_node.dax_plan import Changed
from kvstrata_node.pages_plan import PagePool, Pages

FORMAT: Final = 1
"""Of both files."""
_PAGES_FILE: Final = "pages.json"
_DAX_FILE: Final = "dax.json"


@dataclass(slots=True)
class Book:
    """Added pages by pool. It survives the process; what does not survive the machine is not true any more either."""

    path: Path
    boot: str
    """Id of this boot: pages that were added at run time are gone after the next."""
    lock_fd: int
    added: dict[PagePool, int] = field(default_factory=dict)

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self.lock_fd)

    def enter(self, pool: PagePool, pages: int) -> None:
        """Add to what was added to one pool; negative to strike. Raises `OSError`, and nothing has changed then."""
        after = dict(self.added)
        after[pool] = max(0, after.get(pool, 0) + pages)
        _write_pages(self.path, self.boot, after)
        self.added = after


def open_book(directory: Path, boot: str) -> Book:
    """Read the book of this boot; an empty one after a reboot, and where it cannot be read.

    The directory stays this process's own until it ends. Raises `InvalidInputError` when another one has it, `OSError`.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock_fd = directories.lock(directory, "another process prepares this node")
    path = directory / _PAGES_FILE
    try:
        return Book(path, boot, lock_fd, _read_pages(json.loads(path.read_text()), boot))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return Book(path, boot, lock_fd)


def _read_pages(content: Mapping[str, Any], boot: str) -> dict[PagePool, int]:
    if content["format"] != FORMAT or content["boot"] != boot:
        return {}
    return {PagePool(int(e["node"]), int(e["pageBytes"])): max(0, int(e["added"])) for e in content["pages"]}


def _write_pages(path: Path, boot: str, added: Pages) -> None:
    entries = [{"node": p.node, "pageBytes": p.page_bytes, "added": n} for p, n in sorted(added.items()) if n]
    new = path.with_suffix(".new")
    with new.open("w") as file:
        json.dump({"format": FORMAT, "boot": boot, "pages": entries}, file)
    new.replace(path)


@dataclass(slots=True)
class DaxBook:
    """Changed devices by name. Modes do not survive a reboot, and names may not either."""

    path: Path
    boot: str
    changed: dict[str, Changed] = field(default_factory=dict)

    def enter(self, device: str, before: str, after: str) -> None:
        """Note what a device is to become; the first `before` stays. Raises `OSError`, and nothing has changed then."""
        known = self.changed.get(device)
        self._store({**self.changed, device: Changed(known.before if known else before, after)})

    def strike(self, device: str) -> None:
        """Forget a device that has its former driver again. Raises `OSError`, and nothing has changed then."""
        self._store({name: change for name, change in self.changed.items() if name != device})

    def _store(self, after: dict[str, Changed]) -> None:
        entries = [{"device": name, "before": c.before, "after": c.after} for name, c in sorted(after.items())]
        new = self.path.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"format": FORMAT, "boot": self.boot, "devices": entries}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)
        self.changed = after


def read_dax_book(directory: Path, boot: str) -> DaxBook:
    """Read the book of this boot; an empty one after a reboot, and where it cannot be read."""
    path = directory / _DAX_FILE
    try:
        return DaxBook(path, boot, _read_dax(json.loads(path.read_text()), boot))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return DaxBook(path, boot)


def _read_dax(content: Mapping[str, Any], boot: str) -> dict[str, Changed]:
    if content["format"] != FORMAT or content["boot"] != boot:
        return {}
    return {str(e["device"]): Changed(str(e["before"]), str(e["after"])) for e in content["devices"]}
