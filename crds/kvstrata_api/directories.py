"""Directories of a node that tiers name, and what each is used for. Pure, and free of pydantic: backends import it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from posixpath import normpath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstrata_api.models.pool import PoolTier
    from kvstrata_api.models.poolnode import NodeTier

_FILE: Final = "file://"
_DEVICES: Final = "/dev/"
"""A device is the pod template's to give, a folder of files is mounted."""


@dataclass(frozen=True, slots=True)
class Directory:
    """One directory that a tier names."""

    path: str
    """As it was declared."""
    field: str
    """Path of the field within the tier."""
    is_claimed: bool
    """Whether one pool has it alone: its agents refuse one that another pool has claimed, and leave a claim in it."""
    is_filled: bool
    """Whether the tier takes room of its file system up to the tier's capacity on this node."""


def directories_of(tier: PoolTier | NodeTier) -> Iterator[Directory]:
    """Every directory that a tier names."""
    if tier.nvme is not None:
        for number, path in enumerate(tier.nvme.directories):
            field = "nvme.path" if tier.nvme.paths is None else f"nvme.paths[{number}]"
            yield Directory(path, field, is_claimed=True, is_filled=True)
    if tier.remote_flash is not None:
        yield Directory(tier.remote_flash.path, "remoteFlash.path", is_claimed=True, is_filled=False)
    if tier.cxl is not None and tier.cxl.emulated is not None:
        yield Directory(tier.cxl.emulated.path, "cxl.emulated.path", is_claimed=False, is_filled=True)
    if tier.cxl is not None and tier.cxl.pooled is not None and not tier.cxl.pooled.path.startswith(_DEVICES):
        folder = tier.cxl.pooled.path.rpartition("/")[0]
        yield Directory(folder, "cxl.pooled.path", is_claimed=False, is_filled=False)
    if tier.object is not None and tier.object.url.startswith(_FILE):
        path = tier.object.url.removeprefix(_FILE)
        yield Directory(path, "object.url", is_claimed=False, is_filled=False)


def normal(path: str) -> PurePosixPath:
    """Without `..`, `.` and double slashes; two at the start mean one (POSIX leaves them to the system)."""
    return PurePosixPath(normpath(f"/{path.lstrip('/')}"))


def collide(one: Directory, other: Directory) -> bool:
    """True when one is or lies in the other, and the outer one, or either of equal ones, is claimed."""
    mine, theirs = normal(one.path), normal(other.path)
    if mine == theirs:
        return one.is_claimed or other.is_claimed
    return (other.is_claimed and theirs in mine.parents) or (one.is_claimed and mine in theirs.parents)


MODEL_TIERS_TEXT: Final = "weights lie in tiers of type NVMe, or HostDRAM with pageSize 4Ki"
"""Which tiers hold weights of models (`holds_models`), for those who named another one."""


def holds_models(tier: PoolTier | NodeTier) -> bool:
    """Whether a tier can hold weights, as files in a folder beside what else it has.

    Huge pages cannot: a file of a hugetlbfs is a multiple of its pages long, and a safetensors file has to end where
    its last tensor does.
    """
    return tier.nvme is not None or (tier.host_dram is not None and tier.host_dram.page_size == "4Ki")
