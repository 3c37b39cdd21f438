"""Typed transitions on the scope shards: announce, locate, withdraw, drop, sweep, count, erase."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.store.keys import REVERSE_BUCKETS, SESSION_TTL_S, SHARDS, TOMBSTONE_S, Shard, by_shard
from kvstrata_metadata.store.records import (
    Announcement,
    Copy,
    Incarnation,
    Verdict,
    pack_changes,
    parse_verdict,
    unpack_copies,
)
from kvstrata_metadata.store.scripts import Script
from kvstrata_metadata.store.store import Call, Store

CHUNK: Final = 1_000
"""Changes, or removals, of one transition: about 5 ms of the server, which serves nobody else meanwhile."""

LOCATE_CHUNK: Final = 4_000
"""Digests of one transition: about 5 ms of the server."""

DROPPED_AT_ONCE: Final = 16
"""Shards of one round trip of removals: about 20 ms of the server where all are full, 1 ms where they are empty."""

ERASE_KEYS: Final = 1_024
"""Keys that one transition unlinks, the reverse indexes of four incarnations: about a millisecond of the server."""

ERASED_S: Final = 30 * 24 * 3_600
"""How long an erased scope takes no message. Its tag is never used again, and nobody can ask for its blocks."""


class Mode(StrEnum):
    """How a message continues its stream."""

    CONTINUE = "continue"
    RESET = "reset"
    """Starts again, in a shard that was never spoken to or right behind its withdrawal.

    Numbers still only grow, so that a late message of before cannot be taken for a new one.
    """
    CHECK = "check"
    """Changes nothing, compares the last number."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One message of an agent to one shard."""

    shard: Shard
    incarnation: Incarnation
    sequence: int
    mode: Mode
    changes: tuple[Announcement, ...] = ()
    """At most `CHUNK`; all of blocks of the shard."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The messages of one incarnation to one shard."""

    incarnation: Incarnation
    silence_s: float


async def announce(store: Store, batches: Sequence[Batch]) -> list[Verdict]:
    """Apply batches, each to its shard, in one round trip. Repeating a batch is harmless.

    Raises `DirectoryAwayError` when no part of the directory answers; a part that does not is `Verdict.AWAY`.
    """
    calls = [
        Call(Script.ANNOUNCE, b.shard.key, (b.incarnation, b.sequence, b.mode, pack_changes(b.incarnation, b.changes)))
        for b in batches
    ]
    return [_verdict_or_away(reply) for reply in await store.run_each(calls)]


async def locate(
    store: Store, tag: str, digests: Sequence[bytes], *, within_s: float | None = None
) -> list[list[Copy]]:
    """Find the copies of blocks of one scope, newest last, in one round trip.

    Raises `DirectoryAwayError` when no part of the directory answers; blocks of a part that does not, or not
    within `within_s`, have no copies.
    """
    calls, positions = [], []
    for index, places in by_shard(digests).items():
        for start in range(0, len(places), LOCATE_CHUNK):
            part = places[start : start + LOCATE_CHUNK]
            calls.append(Call(Script.LOCATE, Shard(tag, index).key, (b"".join(digests[i] for i in part),)))
            positions.append(part)
    found: list[list[Copy]] = [[] for _ in digests]
    for part, values in zip(positions, await store.run_each(calls, within_s=within_s), strict=True):
        if _is_away(values):
            continue
        for i, value in zip(part, values, strict=True):
            found[i] = unpack_copies(digests[i], value) if value else []
    return found


async def withdraw(store: Store, shard: Shard, incarnation: Incarnation, sequence: int) -> tuple[Verdict, int]:
    """Remove all of an incarnation's locations from a shard, as messages `sequence`, `sequence` + 1 and so on.

    Returns the last number used with its verdict; nothing is left of the incarnation only where that is `OK`.
    """
    start = 0
    while True:
        call = Call(Script.WITHDRAW, shard.key, (incarnation, sequence, start, CHUNK))
        reply, _, start = await store.run_one(call)
        verdict = parse_verdict(reply)
        if verdict is not Verdict.OK or start >= REVERSE_BUCKETS:
            return verdict, sequence
        sequence += 1


async def drop_agent(store: Store, shard: Shard, incarnation: Incarnation) -> int:
    """Refuse whatever a fenced incarnation still sends to a shard and remove its locations; how many there were."""
    start, removed = 0, 0
    while start < REVERSE_BUCKETS:
        count, start = await store.run_one(_drop(shard, incarnation, start, CHUNK))
        removed += count
    return removed


async def drop_everywhere(store: Store, shards: Sequence[Shard], incarnation: Incarnation) -> int:
    """`drop_agent` on many shards, some of them side by side; how many locations there were."""
    removed, left = 0, dict.fromkeys(shards, 0)
    while left:
        part = list(left)[:DROPPED_AT_ONCE]
        calls = [_drop(s, incarnation, left[s], CHUNK // 4) for s in part]
        for shard, (count, start) in zip(part, await store.run(calls), strict=True):
            removed += count
            left[shard] = start
            if start >= REVERSE_BUCKETS:
                del left[shard]
    return removed


def _drop(shard: Shard, incarnation: Incarnation, start: int, limit: int) -> Call:
    return Call(Script.DROP_AGENT, shard.key, (incarnation, start, limit, int(TOMBSTONE_S)))


async def sweep(store: Store, shards: Sequence[Shard], tombstone_s: float) -> list[list[Stream]]:
    """Forget tombstones older than `tombstone_s`; the living streams of each shard."""
    replies = await store.run([Call(Script.SWEEP, s.key, (int(tombstone_s), SESSION_TTL_S)) for s in shards])
    return [[Stream(Incarnation(r[i]), float(r[i + 1])) for i in range(0, len(r), 2)] for r in replies]


async def count(store: Store, shard: Shard, incarnations: Sequence[Incarnation]) -> list[int]:
    """Locations of each incarnation in a shard."""
    return list(await store.run_one(Call(Script.COUNT, shard.key, tuple(incarnations))))


async def erase_scope(store: Store, tag: str) -> int:
    """Remove every location, stream and session of a scope and refuse new ones; how many blocks had locations.

    Needs the role `metadata`. Runs in steps of milliseconds, all shards side by side, and may be repeated: a
    `DirectoryAwayError` or a cancellation in between leaves a part, which the next call removes.
    """
    parts = {Shard(tag, index): 0 for index in range(SHARDS)}
    removed = 0
    while parts:
        calls = [Call(Script.ERASE, s.key, (part, ERASE_KEYS, ERASED_S)) for s, part in parts.items()]
        replies = await store.run(calls)
        removed += sum(count for count, _ in replies)
        parts = {s: part for s, (_, part) in zip(parts, replies, strict=True) if part >= 0}
    return removed


def _is_away(reply: object) -> bool:
    """True when a part of the directory is away. Raises when all of it is, or when the part refuses us."""
    if not isinstance(reply, DirectoryAwayError):
        return False
    if not reply.is_partial:
        raise reply
    return True


def _verdict_or_away(reply: object) -> Verdict:
    return Verdict.AWAY if _is_away(reply) else parse_verdict(reply)
