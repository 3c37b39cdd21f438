"""What is decided about weights: where chunks come from, and which models leave for KV or for other models. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvstrata_agent.movement.path import KV_WEIGHT
from kvstrata_agent.movement.scheduler import PIECE_BYTES_MAX
from kvstrata_agent.provision.provisioner import KV_BYTES_MIN, KV_PARTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvstrata_agent.weights.listing import Chunk, ModelFile


class Fault(StrEnum):
    """Why a model is not staged; each value is a reason of condition ModelsStaged."""

    SOURCE_AWAY = "SourceAway"
    SOURCE_CHANGED = "SourceChanged"
    SOURCE_INVALID = "SourceInvalid"
    DIGEST_MISMATCH = "DigestMismatch"
    TOO_LARGE = "TooLarge"
    NO_ROOM = "NoRoom"
    DISK_FULL = "DiskFull"
    DISK_FAILED = "DiskFailed"
    TIER_ABSENT = "TierAbsent"
    UNSUPPORTED = "Unsupported"
    INTERNAL = "Internal"
    UNKNOWN_ORDER = "UnknownOrder"


class Cause(StrEnum):
    """Why a revision went."""

    ROOM_FOR_KV = "RoomForKv"
    ROOM_FOR_MODEL = "RoomForModel"
    UNWANTED = "Unwanted"


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring chunks of a file that are brought with one read: 16 MiB at most."""

    offset: int
    chunks: tuple[Chunk, ...]
    is_here: bool = False
    """Every chunk is in another revision on this node: no byte of them needs to travel."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.size_bytes for chunk in self.chunks)


def runs_of(file: ModelFile, here: Collection[str] = ()) -> list[Run]:
    """Cut a file into runs, in order; `here` names the chunks that this node has already."""
    runs: list[Run] = []
    at = start = size_bytes = 0
    group: list[Chunk] = []
    is_here = False
    for chunk in file.chunks:
        has_chunk = chunk.name in here
        if group and (has_chunk is not is_here or size_bytes + chunk.size_bytes > PIECE_BYTES_MAX):
            runs.append(Run(start, tuple(group), is_here))
            group, start, size_bytes = [], at, 0
        is_here = has_chunk
        group.append(chunk)
        size_bytes += chunk.size_bytes
        at += chunk.size_bytes
    if group:
        runs.append(Run(start, tuple(group), is_here))
    return runs


@dataclass(frozen=True, slots=True)
class Resident:
    """One revision of a model on this node, as the rule of room sees it."""

    name: str
    revision: str
    size_bytes: int
    """That go with it: files that another revision has as well stay."""
    weight: int
    """Of the KVModelCache, beside KV's 100."""
    idle_seconds: float
    """So long after its last use it may go."""
    idle_s: float | None
    """Since its last use; None while a file of it is open."""
    is_wanted: bool = True
    """False for a revision that no order names any more."""

    @property
    def may_go(self) -> bool:
        """True when KV may have its room: never while a file of it is open."""
        return self.idle_s is not None and self.idle_s >= self.idle_seconds

    @property
    def strength(self) -> float:
        """Its claim on room. It falls with its idle time: twice as long as it may be idle leaves half of its weight."""
        if not self.may_go:
            return float(self.weight)
        return self.weight * self.idle_seconds / self.idle_s if self.idle_s else 0.0


def kv_share_bytes(contested_bytes: int, others: Iterable[Resident]) -> int:
    """What KV may have of the room that is not bound: by its weight against the strength of models that may go."""
    return int(contested_bytes * KV_WEIGHT / (KV_WEIGHT + sum(model.strength for model in others)))


def plan_for_kv(capacity_bytes: int, models: Sequence[Resident], *, kv_wants_room: bool) -> tuple[Resident, ...]:
    """Models that leave so that KV has its share of a tier, the weakest ones first.

    What may not go is bound and has its bytes whole. KV and the others share the rest by KV's 100 and their strength;
    while KV wants room, models leave until they have no more than their share, one by one, and each that leaves takes
    its strength with it. A revision that nobody wants goes as soon as it may, whether KV wants room or not.
    """
    stays = [m for m in models if m.may_go and m.is_wanted]
    leaves = [m for m in models if m.may_go and not m.is_wanted]
    contested_bytes = max(0, capacity_bytes - sum(m.size_bytes for m in models if not m.may_go))
    stays.sort(key=_weakest_last)
    while stays and kv_wants_room:
        room_bytes = contested_bytes - kv_share_bytes(contested_bytes, stays)
        if sum(m.size_bytes for m in stays) <= room_bytes:
            break
        leaves.append(stays.pop())
    return tuple(leaves)


def _weakest_last(model: Resident) -> tuple[float, float, str, str]:
    return (-model.strength, model.idle_s or 0.0, model.name, model.revision)


@dataclass(frozen=True, slots=True)
class Room:
    """What has to be done before a model may be staged."""

    leaves: tuple[Resident, ...] = ()
    short_bytes: int = 0
    """Missing even then; 0 when it has room."""
    is_too_large: bool = False
    """It would have no room in a tier of its own either."""


def models_bytes_max(capacity_bytes: int) -> int:
    """What all models of a tier may take."""
    return max(0, capacity_bytes - max(KV_BYTES_MIN, capacity_bytes // KV_PARTS))


def plan_room(capacity_bytes: int, models: Sequence[Resident], need_bytes: int) -> Room:
    """Make room for `need_bytes` beside other models: those that may go leave, the weakest ones first.

    Nobody leaves for what has no room all the same.
    """
    limit_bytes = models_bytes_max(capacity_bytes)
    if need_bytes > limit_bytes:
        return Room((), need_bytes - limit_bytes, is_too_large=True)
    left_bytes = limit_bytes - sum(m.size_bytes for m in models)
    leaves: list[Resident] = []
    ranked = sorted((m for m in models if m.may_go), key=_weakest_last)
    ranked.sort(key=lambda m: m.is_wanted, reverse=True)
    while left_bytes < need_bytes and ranked:
        leaves.append(ranked.pop())
        left_bytes += leaves[-1].size_bytes
    short_bytes = max(0, need_bytes - left_bytes)
    return Room((), short_bytes) if short_bytes else Room(tuple(leaves))
