"""Transitions as agents of releases call them: Redis knows them by a digest of the whole text."""

import json
from pathlib import Path
from typing import Final

from kvstrata_metadata.store.scripts import Script

_FILE: Final = Path(__file__).parents[2] / "recorded" / "transitions.json"

DIGESTS: Final[dict[str, dict[Script, str]]] = {
    version: {Script(name): digest for name, digest in recorded.items()}
    for version, recorded in json.loads(_FILE.read_text()).items()
}
"""SHA-1 of each transition that agents call, by version: the releases that may be side by side with this one."""
