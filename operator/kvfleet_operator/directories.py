"""Directories of nodes that tiers name, and which two pools cannot both have. Pure.

NVMe and RemoteFlash tiers claim their directory for one pool: its agents refuse one that another pool has claimed.
Emulated CXL and file:// stores keep a directory of each pool's own in theirs, so pools share one; but none of that may
lie in what another pool has claimed. That several pools share one mount is fine where each names a directory in it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Final

from kvfleet_api.models.pool import KVPoolSpec, PoolTier
from kvfleet_api.models.poolnode import NodeTier

_FILE: Final = "file://"


@dataclass(frozen=True, slots=True)
class Directory:
    """One directory that a tier names."""

    path: PurePosixPath
    field: str
    """Path of the field within the tier."""
    is_claimed: bool
    """Whether one pool has it alone."""

    def collides(self, other: "Directory") -> bool:
        """True when one is or lies in the other, and the outer one, or either of equal ones, is claimed."""
        if self.path == other.path:
            return self.is_claimed or other.is_claimed
        lies_in = other.is_claimed and other.path in self.path.parents
        return lies_in or (self.is_claimed and self.path in other.path.parents)


def directories_of(tier: PoolTier | NodeTier) -> Iterator[Directory]:
    """Every directory that a tier names, normalised."""
    if tier.nvme is not None:
        for number, path in enumerate(tier.nvme.directories):
            field = "nvme.path" if tier.nvme.paths is None else f"nvme.paths[{number}]"
            yield Directory(_normal(path), field, is_claimed=True)
    if tier.remote_flash is not None:
        yield Directory(_normal(tier.remote_flash.path), "remoteFlash.path", is_claimed=True)
    if tier.cxl is not None and tier.cxl.emulated is not None:
        yield Directory(_normal(tier.cxl.emulated.path), "cxl.emulated.path", is_claimed=False)
    if tier.object is not None and tier.object.url.startswith(_FILE):
        yield Directory(_normal(tier.object.url.removeprefix(_FILE)), "object.url", is_claimed=False)


def collision(older: KVPoolSpec, younger: KVPoolSpec) -> tuple[str, str] | None:
    """Field and path of the first directory of `younger` that `older` does not leave to it, and the same of `older`.

    None where both can be on one node.
    """
    theirs = list(_fields(older))
    for mine, mine_said in _fields(younger):
        for other, other_said in theirs:
            if mine.collides(other):
                return mine_said, other_said
    return None


def _fields(spec: KVPoolSpec) -> Iterable[tuple[Directory, str]]:
    for number, tier in enumerate(spec.tiers):
        for found in directories_of(tier):
            yield found, f"spec.tiers[{number}].{found.field} {found.path}"


def _normal(path: str) -> PurePosixPath:
    """Without `..`, `.` and double slashes; two at the start mean one (POSIX leaves them to the system)."""
    return PurePosixPath(normpath(f"/{path.lstrip('/')}"))
