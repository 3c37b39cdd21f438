"""Which dax devices node preparation has changed since the machine booted, in a file beside the book of pages.

Law: a device is entered before it is touched, so whatever a crash leaves can be given back. Whoever has the directory
of the book of pages has this one too.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstrata_node.dax_plan import Changed

FORMAT: Final = 1
_FILE: Final = "dax.json"


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
    path = directory / _FILE
    try:
        return DaxBook(path, boot, _read(json.loads(path.read_text()), boot))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return DaxBook(path, boot)


def _read(content: Mapping[str, Any], boot: str) -> dict[str, Changed]:
    if content["format"] != FORMAT or content["boot"] != boot:
        return {}
    return {str(e["device"]): Changed(str(e["before"]), str(e["after"])) for e in content["devices"]}
