"""What a block is worth, from the returns of requests like the one that used it last. Pure.

A request leaves up to four records (`policy.return_times`). *Own*: the middle of what no other chain shares; it
returns when a later request reuses more than half of that. *Head*: the deepest point at which its chain parts from
others; it returns with any of them. *Superseded*: the end of an own part of which a later request has left out the
rest, as a rewritten last block or an abandoned branch; most such never return, and it is learned how many do. *Tail*:
the last block alone, which is often cut short and then rewritten by the next turn.
A block counts as what its last use made of it.

Points are digests of blocks. Whoever knows that several blocks are always used together may give one for all of them.
"""

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import Any, Final, Generic, Protocol, TypeVar

from kvstrata_agent.policy.return_times import LEVELS, RECORDS_MAX, ReturnTimes

K = TypeVar("K", bound=Hashable)
K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)
W = TypeVar("W", bound="float | tuple[Any, ...]")

FORKS_MAX: Final = 15
"""Continuations of a point that are counted."""
NAMES_MAX: Final = LEVELS - 1
"""Kinds and stop reasons that are told apart; 0 stands for all others."""
NEVER: Final = -1
"""Record of what has none."""
UNMARKED: Final = 0
"""Mark of a block of whose uses nothing is known."""
_FORK_BITS: Final = 4


class Return(IntEnum):
    """What an engine knows of a request's next turn."""

    UNKNOWN = 0
    COMPLETE = 1
    """Session or branch is over."""
    SOON = 2
    """Within a minute."""
    LATER = 3


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is said of a request; all of it may be unknown."""

    kind: str = ""
    stop: str = ""
    """Why its generation ended."""
    session: Hashable = None
    next_turn: Return = Return.UNKNOWN


class Point(IntEnum):
    """Which part of a chain a record is of."""

    OWN = 0
    HEAD = 1
    SUPERSEDED = 2
    TAIL = 3


class _Feature(IntEnum):
    """Columns of a record."""

    POINT = 0
    TURN = 1
    SIZE = 2
    NEW = 3
    GAP = 4
    MATCHED = 5
    FORKS = 6
    KIND = 7
    STOP = 8
    NEXT_TURN = 9


@dataclass(slots=True)
class _Own:
    """What is kept of an own record besides its features."""

    end: Hashable
    turn: int
    started_s: float


class Marks(Protocol[K_contra]):
    """Where the marks of blocks are kept: the record of the last use, and how many continuations a block had."""

    def read(self, chain: Sequence[K_contra]) -> list[int]:
        """Mark of each, `UNMARKED` where there is none."""

    def write(self, chain: Sequence[K_contra], marks: Sequence[int]) -> None:
        """Set the mark of each."""


class MarkTable(Generic[K]):
    """Marks by point, of all that are not forgotten."""

    def __init__(self) -> None:
        self.marks: dict[K, int] = {}

    def read(self, chain: Sequence[K]) -> list[int]:
        """Mark of each, `UNMARKED` where there is none."""
        get = self.marks.get
        return [get(point, UNMARKED) for point in chain]

    def write(self, chain: Sequence[K], marks: Sequence[int]) -> None:
        """Set the mark of each."""
        self.marks.update(zip(chain, marks, strict=True))


class ExpectedReuse(Generic[K]):
    """Learns and judges. Memory: a mark for each block, and the records."""

    def __init__(self, marks: Marks[K], records_max: int = RECORDS_MAX) -> None:
        self.times = ReturnTimes(len(_Feature), records_max)
        self._records_max = records_max
        self._marks = marks
        self._tails: dict[K, int] = {}
        """Tail records, that are remembered, of chains' last blocks that nothing has continued."""
        self._awaited: dict[K, int] = {}
        """Points that records wait for."""
        self._point_of: list[K | None] = [None] * records_max
        self._own: list[_Own | None] = [None] * records_max
        self._judged_by = [NEVER] * records_max
        """Record that stands for each one: itself, or what was superseded."""
        self._sessions: dict[Hashable, tuple[int, float]] = {}
        self._names: dict[str, int] = {}

    def begin(self, chain: Sequence[K], sizes: Sequence[int] | None, facts: RequestFacts, now_s: float) -> None:
        """A request uses a chain, all of which counts as here afterwards.

        `sizes` are the blocks of each of its points; None: one each.
        """
        marks = self._marks.read(chain)
        known, fork, returned = self._find(chain, marks)
        size, matched = _blocks(sizes, len(chain)), _blocks(sizes, known + 1)
        previous = self._close(returned, chain, now_s)
        turn, gap_s = self._lineage(previous, marks[known] if known >= 0 else UNMARKED, facts, now_s)
        if 0 <= known < len(chain) - 1 and previous is None and marks[known]:
            forks = min(FORKS_MAX, (marks[known] & FORKS_MAX) + 1)
            marks[known] = marks[known] & ~FORKS_MAX | forks
            fork = known if forks >= 2 else fork
        common = (
            _log_level(size), _log_level(size - matched), self._name(facts.kind), self._name(facts.stop),
            int(facts.next_turn),
        )  # fmt: skip
        middle = _middle(sizes, fork, len(chain))
        own_facts = _Own(chain[-1], turn, now_s)
        own = self._note((Point.OWN, turn, gap_s, matched, 0, *common), chain[middle], own_facts, now_s)
        head = own
        if fork >= 0 and fork != middle:
            head_gap_s, forks = self._idle_s(marks[fork], now_s), marks[fork] & FORKS_MAX
            head_blocks = _blocks(sizes, fork + 1)
            head = self._note((Point.HEAD, turn, head_gap_s, head_blocks, forks, *common), chain[fork], None, now_s)
        self._mark(chain, marks, fork, head, own)
        if fork < len(chain) - 1 != middle:
            tail = (Point.TAIL, turn, gap_s, matched, 0, *common)
            self._tails[chain[-1]] = self._note(tail, chain[-1], None, now_s)
        if self.times.is_due():
            self.times.fit(now_s)

    def worth(self, point: K, mark: int, now_s: float, idle_s: float = inf) -> float:
        """Uses that holding a block brings for each second, by its last use or the `idle_s` for which there was none.

        0.0 where nothing that is remembered tells.
        """
        number = self._judged(point, mark)
        return self.times.worth(number, now_s, idle_s) if number != NEVER else 0.0

    def chance(self, point: K, mark: int, idle_s: float, now_s: float, within_s: float) -> float:
        """Probability of a use within so many seconds of a block that was not used for `idle_s`."""
        number = self._judged(point, mark)
        if number == NEVER:
            return self.times.overall_chance(idle_s, within_s)
        return self.times.chance(number, now_s, within_s, idle_s)

    def return_chance(self, point: K, mark: int, now_s: float, idle_s: float = inf) -> float | None:
        """Probability that a block is ever used again; None where records do not go back far enough to tell."""
        number = self._judged(point, mark)
        age_s = idle_s if number == NEVER else min(idle_s, self.times.age_s(number, now_s))
        if not self.times.tells(age_s, now_s):
            return None
        return self.chance(point, mark, idle_s, now_s, inf)

    def expect(self, point: K, mark: int, next_turn: Return) -> None:
        """The engine tells when a chain that ends at this point is continued."""
        own = _record(mark)
        numbers = [self._tails.get(point, NEVER)]
        if self.times.is_known(own) and self._own[own % self._records_max] is not None:
            numbers.append(own)
        for number in numbers:
            if self.times.is_known(number):
                self.times.amend(number, _Feature.NEXT_TURN, int(next_turn))

    def explain(self, point: K, mark: int) -> dict[str, int | str]:
        """What a block is judged by: part of its chain, features and class of the record."""
        number = self._judged(point, mark)
        if number == NEVER:
            return {"reason": "no request that is remembered used it; as the average of all"}
        names, levels = (f.name.lower() for f in _Feature), self.times.features_of(number)
        known: dict[str, int | str] = dict(zip(names, levels, strict=True))
        return known | {"point": Point(levels[0]).name.lower(), "class": self.times.class_of(levels)}

    def _judged(self, point: K, mark: int) -> int:
        """Number of the record that a block is judged by; `NEVER` where none is remembered."""
        # For each leaf of a sample: no call that can be left out.
        number, ring = (mark >> _FORK_BITS) - 1, self._records_max
        oldest = self.times.noted - ring
        if number < 0 or number < oldest:
            return NEVER
        judged_by = self._judged_by[number % ring]
        if judged_by == number:
            judged_by = self._tails.get(point, number)
        return judged_by if judged_by >= oldest else NEVER

    def is_tail(self, point: K) -> bool:
        """True for the last block of a chain, which is judged apart from what comes before it."""
        return point in self._tails

    def end_of(self, point: K, mark: int) -> K:
        """Last block of the chain that used `point` last, if that is remembered; else the point itself."""
        number = _record(mark)
        own = self._own[number % self._records_max] if self.times.is_known(number) else None
        return point if own is None else own.end  # type: ignore[return-value]

    @staticmethod
    def is_shared(mark: int) -> bool:
        """True for a block that several chains continue."""
        return mark & FORKS_MAX > 1

    def cut(self, point: K) -> None:
        """It is the last block of a chain no more: that was continued, or has left a point that stands for several."""
        self._tails.pop(point, None)

    def is_fresh(self, mark: int, within_s: float, now_s: float) -> bool:
        """True when the last use that a mark tells of is no longer ago."""
        return 0.0 <= self._idle_s(mark, now_s) <= within_s

    def remembered(self) -> int:
        """Entries of all tables: at most four for each record."""
        return len(self._tails) + len(self._awaited) + len(self._sessions) + len(self._names)

    def _find(self, chain: Sequence[K], marks: Sequence[int]) -> tuple[int, int, list[int]]:
        """Deepest point that is known, deepest one that chains part at (-1: none), and records that wait for any."""
        awaited, last = self._awaited, len(chain) - 1
        points = awaited.keys() & chain
        at = {point: i for i, point in enumerate(chain) if point in points} if points else {}
        known = next((i for i in range(last, -1, -1) if marks[i]), -1)
        fork = next((i for i in range(known, -1, -1) if marks[i] & FORKS_MAX > 1), -1)
        known = max(known, *at.values()) if at else known
        return known, fork, [awaited[point] for point in at]

    def _mark(self, chain: Sequence[K], marks: Sequence[int], fork: int, head: int, own: int) -> None:
        """Note for each block what its last use was."""
        by_head, by_own = (head + 1) << _FORK_BITS, (own + 1) << _FORK_BITS
        new = [by_head | (mark & FORKS_MAX or 1) for mark in marks[: fork + 1]]
        new += [by_own | (mark & FORKS_MAX or 1) for mark in marks[fork + 1 :]]
        if not marks[-1] & FORKS_MAX:
            new[-1] &= ~FORKS_MAX  # Nothing continues it yet.
        self._marks.write(chain, new)
        if self._tails:
            for point in self._tails.keys() & chain:
                del self._tails[point]

    def _close(self, returned: Iterable[int], chain: Sequence[K], now_s: float) -> _Own | None:
        """End the records whose points are used again; returns the latest of a request's own."""
        found: _Own | None = None
        points: set[K] | None = None
        for number in returned:
            at = number % self._records_max
            point, own = self._point_of[at], self._own[at]
            if point is not None:
                self._awaited.pop(point, None)
                self._point_of[at] = None
            self.times.returned(number, now_s)
            if own is None:
                continue
            found = own
            points = set(chain) if points is None else points
            if own.end not in points:
                features = (int(Point.SUPERSEDED), *self.times.features_of(number)[1:])
                self._judged_by[at] = self._start(features, own.end, None, now_s)  # type: ignore[arg-type]
        return found

    def _lineage(self, previous: _Own | None, mark: int, facts: RequestFacts, now_s: float) -> tuple[int, float]:
        """Turn of a request, 0 for a first one, and seconds since what it continues; -1 where that is unknown."""
        if facts.session is not None:
            turn, at_s = self._sessions.pop(facts.session, (-1, now_s + 1.0))
            self._sessions[facts.session] = (turn + 1, now_s)
            if len(self._sessions) > self._records_max:
                del self._sessions[next(iter(self._sessions))]
            return turn + 1, now_s - at_s
        if previous is not None:
            return previous.turn + 1, now_s - previous.started_s
        return 0, self._idle_s(mark, now_s)

    def _idle_s(self, mark: int, now_s: float) -> float:
        """Seconds since the last use of what has this mark; -1 where that is unknown."""
        number = _record(mark)
        return self.times.age_s(number, now_s) if self.times.is_known(number) else -1.0

    def _note(
        self, seen: tuple[int, int, float, int, int, int, int, int, int, int], point: K, own: _Own | None, now_s: float
    ) -> int:
        part, turn, gap_s, matched, forks, size, new, kind, stop, next_turn = seen
        features = (
            int(part), _turn_level(turn), size, new, _gap_level(gap_s), _log_level(matched), forks, kind, stop,
            next_turn,
        )  # fmt: skip
        return self._start(features, point, own, now_s)

    def _start(self, features: tuple[int, ...], point: K, own: _Own | None, now_s: float) -> int:
        """Start a record that waits for a point; what had its place in the ring waits no more."""
        number = self.times.note(features, now_s)
        at = number % self._records_max
        old, before = self._point_of[at], number - self._records_max
        if old is not None:
            for table in (self._awaited, self._tails):
                if table.get(old) == before:
                    del table[old]
        self._awaited[point] = number
        self._point_of[at] = point
        self._own[at] = own
        self._judged_by[at] = number
        return number

    def _name(self, name: str) -> int:
        """Number of a kind or stop reason, in the order of their first use."""
        if not name:
            return 0
        if name not in self._names and len(self._names) < NAMES_MAX:
            self._names[name] = len(self._names) + 1
        return self._names.get(name, 0)


class Victims(Generic[K, W]):
    """Takes the leaves of least worth out of samples; what is among the least of one sample is kept for the next."""

    SAMPLE: Final = 16
    KEPT: Final = 32
    """Leaves of all samples so far that are worth least, and what was offered."""
    TAKEN: Final = 2
    """Before the next sample."""

    def __init__(self, sample: Callable[[int], Sequence[K]], is_leaf: Callable[[K], bool]) -> None:
        self._sample = sample
        self._is_leaf = is_leaf
        self._pool: list[tuple[W, int, K]] = []
        """Ascending; the number keeps points from being compared."""
        self._entries: dict[K, int] = {}
        """Number of the one entry of each leaf in the pool that counts."""
        self._left = 0
        self._serial = self._fresh = 0

    def renew(self) -> None:
        """Worths have changed: what is next is judged again before it is taken, beside a new sample."""
        self._fresh = self._serial
        self._left = 0

    def offer(self, leaf: K, worth: W) -> None:
        """A leaf to be considered."""
        self._serial = self._entries[leaf] = self._serial + 1
        insort(self._pool, (worth, self._serial, leaf))

    def next(self, worth: Callable[[K], W]) -> K:
        """The leaf of least worth; there must be one. It is returned again while it is a leaf."""
        pool, entries, is_leaf = self._pool, self._entries, self._is_leaf
        while True:
            if not self._left:
                self._draw(worth)
            while pool:
                _, serial, leaf = pool[0]
                if entries.get(leaf) != serial:
                    del pool[0]
                elif not is_leaf(leaf):
                    del pool[0], entries[leaf]
                elif serial > self._fresh:
                    return leaf
                else:
                    del pool[0]
                    self.offer(leaf, worth(leaf))
            self._left = 0

    @property
    def next_worth(self) -> W:
        """Worth of the one that was returned last."""
        return self._pool[0][0]

    def least(self, is_meant: Callable[[K], bool]) -> tuple[K, W] | None:
        """The leaf of least worth of those that were looked at and are meant; None without one. Draws no sample."""
        entries = self._entries
        for worth, serial, leaf in self._pool:
            if entries.get(leaf) == serial and is_meant(leaf):
                return leaf, worth
        return None

    def taken(self, *, is_same_run: bool = False) -> None:
        """The one that was returned last has gone; with the one before it where they are always used together."""
        self._left -= not is_same_run
        del self._entries[self._pool[0][2]]
        del self._pool[0]

    def _draw(self, worth: Callable[[K], W]) -> None:
        self._left = self.TAKEN
        pool, entries, serial = self._pool, self._entries, self._serial
        for leaf in self._sample(self.SAMPLE):
            if entries.get(leaf, NEVER) <= self._fresh:
                serial += 1
                entries[leaf] = serial
                pool.append((worth(leaf), serial, leaf))
        self._serial = serial
        pool.sort()
        for _, old, leaf in pool[self.KEPT :]:
            if entries.get(leaf) == old:
                del entries[leaf]
        del pool[self.KEPT :]


def _blocks(sizes: Sequence[int] | None, points: int) -> int:
    """Blocks of so many leading points."""
    return points if sizes is None else sum(sizes[:points])


def _middle(sizes: Sequence[int] | None, fork: int, points: int) -> int:
    """Index of the point that lies just past half of the part behind `fork`; the last one where that is empty."""
    if sizes is None:
        return min(points - 1, fork + 1 + (points - fork - 1) // 2)
    left = sum(sizes[fork + 1 :]) // 2
    for i in range(fork + 1, points):
        left -= sizes[i]
        if left < 0:
            return i
    return points - 1


def _record(mark: int) -> int:
    """Number of the record that a mark names."""
    return (mark >> _FORK_BITS) - 1


def _log_level(count: int) -> int:
    """Doublings of a count of blocks."""
    return min(LEVELS - 1, count.bit_length())


def _gap_level(gap_s: float) -> int:
    """Doublings of seconds, from a quarter; 0 for an unknown gap."""
    return 0 if gap_s < 0 else min(LEVELS - 1, 1 + int(4 * gap_s).bit_length())


def _turn_level(turn: int) -> int:
    """Turns up to eight each by itself, then doublings."""
    return turn if turn <= 8 else min(LEVELS - 1, 5 + turn.bit_length())
