"""Scans the directory, a bounded part at a time: what each agent has in each tier, sessions, over-replicated blocks."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.directory.registry import Fleet
from kvstrata_metadata.duties.nominations import OverReplicated
from kvstrata_metadata.store.keys import Shard
from kvstrata_metadata.store.records import INCARNATION_BYTES, Incarnation, tier_name, unpack_copies
from kvstrata_metadata.store.scripts import Script
from kvstrata_metadata.store.store import Call, Store

CALLS_PER_ROUND: Final = 32
"""Transitions of one round: about 5 ms of the server each, 3 % of its time at one round in 5 s."""

SHARDS_AT_ONCE: Final = 8
"""Shards scanned in one round trip; other clients have their turn between two transitions."""

LOCATIONS_PER_CALL: Final = 4_000
SESSIONS_PER_CALL: Final = 1_000
BLOCKS_PER_CALL: Final = 256
"""Over-replicated blocks named by one transition; the next pass finds the others."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much there is of something."""

    locations: int = 0
    stored_bytes: int = 0


Holding = tuple[Incarnation, str]
"""An incarnation and the medium of a tier."""


@dataclass(slots=True)
class _Pass:
    """What one pass over a shard has found so far."""

    bucket: int = 0
    session: int = 0
    held: dict[Holding, Amount] = field(default_factory=dict)
    sessions: Counter[str] = field(default_factory=Counter)

    @property
    def is_done(self) -> bool:
        return self.bucket < 0 and self.session < 0


class Survey:
    """Last complete scan of each shard."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: deque[Shard] = deque()
        self._under_way: dict[Shard, _Pass] = {}
        self._done: dict[Shard, _Pass] = {}
        self.held: dict[Holding, Amount] = {}
        """How much each incarnation has in each tier, over all shards."""
        self.sessions: Counter[str] = Counter()
        """Sessions by state."""
        self.passes_total = 0
        """Shards scanned to their end, since start."""

    async def scan(self, fleet: Fleet, many: int) -> list[OverReplicated]:
        """Scan the next part of the shards of `fleet`; blocks found there with more than `many` copies.

        Raises `DirectoryAwayError`; what was found so far is kept.
        """
        self._follow({shard for member in fleet.members for shard in member.shards})
        over_replicated: list[OverReplicated] = []
        left = CALLS_PER_ROUND
        started = len(self._queue)
        while left > 0 and started > 0 and self._queue:
            part = [self._queue[i] for i in range(min(SHARDS_AT_ONCE, left, started, len(self._queue)))]
            over_replicated += await self._step(part, many)
            left -= len(part)
            finished = [shard for shard in part if self._under_way[shard].is_done]
            self._finish(finished)
            started -= len(finished)
        return over_replicated

    def _follow(self, shards: set[Shard]) -> None:
        """Forget shards that nobody uses any more and queue new ones; those that were never scanned come first."""
        for shard in self._done.keys() - shards:
            self._count(self._done.pop(shard), -1)
        for shard in self._under_way.keys() - shards:
            del self._under_way[shard]
        queued = set(self._queue)
        self._queue = deque(shard for shard in self._queue if shard in shards)
        self._queue.extendleft(sorted(shards - queued, reverse=True))

    async def _step(self, part: Sequence[Shard], many: int) -> list[OverReplicated]:
        """One transition on each shard."""
        passes = [self._under_way.setdefault(shard, _Pass()) for shard in part]
        calls = [_call(shard, p, many) for shard, p in zip(part, passes, strict=True)]
        over_replicated: list[OverReplicated] = []
        for shard, p, reply in zip(part, passes, await self._store.run_each(calls), strict=True):
            if isinstance(reply, DirectoryAwayError):
                if not reply.is_partial:
                    raise reply
                self._put_last(shard)
            elif p.bucket < 0:
                p.session, *counts = reply
                p.sessions.update({counts[i].decode(errors="replace"): counts[i + 1] for i in range(0, len(counts), 2)})
            else:
                p.bucket, totals, blocks = reply
                _add(p.held, _holdings(totals), 1)
                over_replicated += _over_replicated(shard.tag, blocks)
        return over_replicated

    def _put_last(self, shard: Shard) -> None:
        self._queue.remove(shard)
        self._queue.append(shard)

    def _finish(self, shards: Iterable[Shard]) -> None:
        """Put what was found in place of what was known, and the shards at the end of the queue."""
        for shard in shards:
            self._count(self._done.pop(shard, _Pass()), -1)
            self._done[shard] = self._under_way.pop(shard)
            self._count(self._done[shard], 1)
            self._put_last(shard)
            self.passes_total += 1

    def _count(self, p: _Pass, step: int) -> None:
        """Put a shard's share into the totals, or take it out."""
        _add(self.held, p.held, step)
        for state, count in p.sessions.items():
            self.sessions[state] += step * count


def _call(shard: Shard, p: _Pass, many: int) -> Call:
    if p.bucket < 0:
        return Call(Script.TALLY, shard.key, (p.session, SESSIONS_PER_CALL))
    return Call(Script.SURVEY, shard.key, (p.bucket, LOCATIONS_PER_CALL, many, BLOCKS_PER_CALL))


def _holdings(totals: Sequence[Any]) -> dict[Holding, Amount]:
    found = {}
    for i in range(0, len(totals), 3):
        incarnation, code = Incarnation(totals[i][:INCARNATION_BYTES]), totals[i][INCARNATION_BYTES]
        found[incarnation, tier_name(code)] = Amount(totals[i + 1], totals[i + 2])
    return found


def _over_replicated(tag: str, blocks: Sequence[bytes]) -> list[OverReplicated]:
    pairs = ((blocks[i], blocks[i + 1]) for i in range(0, len(blocks), 2))
    return [OverReplicated(tag, digest, tuple(unpack_copies(digest, value))) for digest, value in pairs]


def _add(total: dict[Holding, Amount], part: Mapping[Holding, Amount], step: int) -> None:
    """Add a part to a total, or take it out again; nothing stays of what has become nothing."""
    for holding, amount in part.items():
        before = total.pop(holding, Amount())
        now = Amount(before.locations + step * amount.locations, before.stored_bytes + step * amount.stored_bytes)
        if now != Amount():
            total[holding] = now
