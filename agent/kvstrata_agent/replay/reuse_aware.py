"""The product's policy in the replay, with no hints, those that a trace carries, or those that engines can give."""

from __future__ import annotations

import random
import sys
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvstrata_agent.policy.expected_reuse import ExpectedReuse, MarkTable, RequestFacts, Return, Victims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.replay.cache import Cache
    from kvstrata_agent.replay.chains import Trace

SOON_S: Final = 60.0


class Hints(Enum):
    """What the policy knows of requests."""

    NONE = "none"
    TRACE = "trace"
    """Kind, stop reason and session, where the trace has them."""
    ENGINE = "engine"
    """Besides: whether the session or branch is complete, or its next turn comes within a minute."""


class ReuseAware:
    """`ExpectedReuse` over the leaves of a replay."""

    def __init__(self, trace: Trace, cache: Cache, hints: Hints = Hints.NONE) -> None:
        self._cache = cache
        self._trace = trace
        self._now_s = 0.0
        self._facts = facts(trace, hints)
        self._lengths = trace.lengths
        self._table: MarkTable[int] = MarkTable()
        self._reuse: ExpectedReuse[int] = ExpectedReuse(self._table)
        draw = random.Random(1)
        self._used_s = [0.0] * len(trace.lengths)
        """When each run was used last."""
        self._victims: Victims[int, tuple[float, float]] = Victims(
            lambda n: cache.leaves if len(cache.leaves) <= n else draw.choices(cache.leaves, k=n), cache.is_leaf
        )

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """Learn from it."""
        self._now_s = self._trace.at_s[number]
        lengths = self._lengths
        self._reuse.begin(path, [lengths[run] for run in path], self._facts[number], self._now_s)
        for run in path:
            self._used_s[run] = self._now_s

    def stored(self, number: int, path: Sequence[int]) -> None:
        """Its own tail competes with the rest."""
        self._victims.renew()
        self._offer(path[-1])

    def victim(self) -> int:
        """By the least worth."""
        return self._victims.next(self._worth)

    def blocks_of(self, run: int) -> int:
        """The last block of a chain alone; then the rest of its run, judged again."""
        if not self._reuse.is_tail(run) or self._cache.held[run] == 1:
            return sys.maxsize
        self._reuse.cut(run)
        self._victims.taken()
        self._offer(run)
        return 1

    def became_leaf(self, run: int) -> None:
        """It competes."""
        self._offer(run)

    def gone(self, run: int) -> None:
        """Nothing is kept of it."""
        self._reuse.cut(run)
        self._table.marks.pop(run, None)
        self._victims.taken()

    def _offer(self, run: int) -> None:
        if self._cache.is_leaf(run):
            self._victims.offer(run, self._worth(run))

    def _worth(self, run: int) -> tuple[float, float]:
        """Of equals the least recently used goes first, as in an agent."""
        return self._reuse.worth(run, self._table.marks[run], self._now_s), self._used_s[run]


def facts(trace: Trace, hints: Hints) -> list[RequestFacts]:
    """What is said of each request."""
    if hints is Hints.NONE:
        return [RequestFacts()] * len(trace.paths)
    coming = returns(trace) if hints is Hints.ENGINE else [Return.UNKNOWN] * len(trace.paths)
    return [
        RequestFacts(kind, stop, session, later)
        for kind, stop, session, later in zip(trace.kinds, trace.stops, trace.sessions, coming, strict=True)
    ]


def returns(trace: Trace) -> list[Return]:
    """What an engine that knows its sessions would say: whether most of what is new comes again, and when."""
    seen = bytearray(len(trace.lengths))
    middles: list[int] = []
    for path in trace.paths:
        new = [run for run in path if not seen[run]] or [path[-1]]
        left = sum(trace.lengths[run] for run in new) // 2
        middle = new[-1]
        for run in new:
            left -= trace.lengths[run]
            if left < 0:
                middle = run
                break
        middles.append(middle)
        for run in path:
            seen[run] = 1
    upcoming: dict[int, float] = {}
    found: list[Return] = []
    for number in range(len(trace.paths) - 1, -1, -1):
        at_s, next_s = trace.at_s[number], upcoming.get(middles[number])
        if next_s is None:
            found.append(Return.COMPLETE)
        else:
            found.append(Return.SOON if next_s - at_s <= SOON_S else Return.LATER)
        for run in trace.paths[number]:
            upcoming[run] = at_s
    found.reverse()
    return found
