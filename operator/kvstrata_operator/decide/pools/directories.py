"""Which directories of nodes two pools cannot both have. Pure.

NVMe and RemoteFlash tiers claim their directory for one pool: its agents refuse one that another pool has claimed.
Emulated CXL and file:// stores keep a directory of each pool's own in theirs, so pools share one; but none of that may
lie in what another pool has claimed. That several pools share one mount is fine where each names a directory in it.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath
from posixpath import normpath

from kvstrata_api.directories import Directory, directories_of
from kvstrata_api.models.pool import KVPoolSpec


def normal(path: str) -> PurePosixPath:
    """Without `..`, `.` and double slashes; two at the start mean one (POSIX leaves them to the system)."""
    return PurePosixPath(normpath(f"/{path.lstrip('/')}"))


def collision(older: KVPoolSpec, younger: KVPoolSpec) -> tuple[str, str] | None:
    """Field and path of the first directory of `younger` that `older` does not leave to it, and the same of `older`.

    None where both can be on one node.
    """
    theirs = list(_fields(older))
    for mine, mine_said in _fields(younger):
        for other, other_said in theirs:
            if _collide(mine, other):
                return mine_said, other_said
    return None


def _fields(spec: KVPoolSpec) -> Iterable[tuple[Directory, str]]:
    for number, tier in enumerate(spec.tiers):
        for found in directories_of(tier):
            yield found, f"spec.tiers[{number}].{found.field} {normal(found.path)}"


def _collide(one: Directory, other: Directory) -> bool:
    """True when one is or lies in the other, and the outer one, or either of equal ones, is claimed."""
    mine, theirs = normal(one.path), normal(other.path)
    if mine == theirs:
        return one.is_claimed or other.is_claimed
    return (other.is_claimed and theirs in mine.parents) or (one.is_claimed and mine in theirs.parents)
