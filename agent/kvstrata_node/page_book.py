"""What node preparation has added on this machine since it booted, in a file.

Law: the book never says more than was added. Pages are added before they are entered and struck before they are
taken back, so what a crash leaves in doubt counts as somebody else's and stays.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstrata_node import directories as folders
from kvstrata_node.pages_plan import Pages, Place

FORMAT: Final = 1
_FILE: Final = "pages.json"


@dataclass(slots=True)
class Book:
    """Added pages by place. It survives the process; what does not survive the machine is not true any more either."""

    path: Path
    boot: str
    """Id of this boot: pages that were added at run time are gone after the next."""
    lock_fd: int
    added: dict[Place, int] = field(default_factory=dict)

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self.lock_fd)

    def enter(self, place: Place, pages: int) -> None:
        """Add to what was added in one place; negative to strike. Raises `OSError`, and nothing has changed then."""
        after = dict(self.added)
        after[place] = max(0, after.get(place, 0) + pages)
        _write(self.path, self.boot, after)
        self.added = after


def open_book(directory: Path, boot: str) -> Book:
    """Read the book of this boot; an empty one after a reboot, and where it cannot be read.

    The directory stays this process's own until it ends. Raises `InvalidInputError` when another one has it, `OSError`.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock_fd = folders.lock(directory, "another process prepares this node")
    path = directory / _FILE
    try:
        return Book(path, boot, lock_fd, _read(json.loads(path.read_text()), boot))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return Book(path, boot, lock_fd)


def _read(content: Mapping[str, Any], boot: str) -> dict[Place, int]:
    if content["format"] != FORMAT or content["boot"] != boot:
        return {}
    return {Place(int(e["node"]), int(e["pageBytes"])): max(0, int(e["added"])) for e in content["pages"]}


def _write(path: Path, boot: str, added: Pages) -> None:
    entries = [{"node": p.node, "pageBytes": p.page_bytes, "added": n} for p, n in sorted(added.items()) if n]
    new = path.with_suffix(".new")
    with new.open("w") as file:
        json.dump({"format": FORMAT, "boot": boot, "pages": entries}, file)
    new.replace(path)
