"""What is said of the files of a release: in-toto statements, among them SLSA's provenance. Pure.

No time of day and no name of a machine stands in them: two builds of one commit say the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from release.errors import ReleaseError

SOURCE: Final = "https://github.com/kvstrata/kvstrata"
_STATEMENT: Final = "https://in-toto.io/Statement/v1"
PROVENANCE: Final = "https://slsa.dev/provenance/v1"
BILL: Final = "https://cyclonedx.org/bom"
BUILD: Final = f"{SOURCE}/blob/main/RELEASING.md#what-make-release-does"
"""What `externalParameters` mean: the page that says it."""
BY_HAND: Final = f"{SOURCE}/blob/main/RELEASING.md#by-hand"
"""Who built, where the releaser names nobody else: a person with a machine, which is SLSA's level 1 and no more."""


@dataclass(frozen=True, slots=True)
class Build:
    """What a release is made from, and by what."""

    version: str
    commit: str
    epoch_s: int
    """Second of the commit: the time of every file."""
    parts: tuple[str, ...]
    materials: Mapping[str, str]
    """SHA-256 of each file of pins by its path in the tree."""
    builder: str = BY_HAND


def statement(subjects: Mapping[str, str], kind: str, predicate: Mapping[str, Any]) -> bytes:
    """Return what is said of files or images: `subjects` are their names with the SHA-256 of each."""
    if not subjects:
        raise ReleaseError("a statement about nothing")
    named = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(subjects.items())]
    said = {"_type": _STATEMENT, "subject": named, "predicateType": kind, "predicate": predicate}
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def provenance(build: Build) -> dict[str, Any]:
    """Where a release is from, as SLSA 1.0 has it."""
    pins = [
        {"uri": f"git+{SOURCE}@{build.commit}#{path}", "digest": {"sha256": digest}}
        for path, digest in sorted(build.materials.items())
    ]
    source = {"uri": f"git+{SOURCE}@{build.commit}", "digest": {"gitCommit": build.commit}}
    return {
        "buildDefinition": {
            "buildType": BUILD,
            "externalParameters": {"version": build.version, "commit": build.commit, "parts": list(build.parts)},
            "internalParameters": {"SOURCE_DATE_EPOCH": build.epoch_s},
            "resolvedDependencies": [source, *pins],
        },
        "runDetails": {"builder": {"id": build.builder}},
    }
