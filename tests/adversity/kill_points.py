"""The operator is killed before and after each of its API calls, and has to end where nobody killed it.

A point is known by its step, its call and which of the calls of that name it is, counted from the start of the step or
from the last kill. Points are those of an undisturbed run, and those that come into being through a kill: writes that
only an operator makes that finds its work half done.

What comes at times only (an Event, a status in between, the second write after a conflict) is brought about in one of
the `Way`s.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from adversity.calls import PASS, Deed, Seen
from adversity.runs import Plan, Reference, Result, occurrences, run
from adversity.stage import Keeper, Stage
from controlplane.waiting import wait_until

KILLS: Final = 4
"""Kills in each step of a run: every restart reads and does anew what is left, and so meets the next of them."""
TRIES: Final = 3
"""Runs in each way for a point by itself: a call that the operator joins with another by chance comes in one."""
PAUSE_S: Final = 1.3
"""Between two events that are told slowly: more than between two writes of one status."""
SLOW_S: Final = 20.0
"""So long at most something is held back in a step."""
_COLLECTOR: Final = "kube-controller-manager"


class Way(StrEnum):
    """How it is brought about that a call comes once more."""

    AS_IT_COMES = "as it comes"
    SLOWLY = "slowly"
    """Events are told one by one, so that the operator sees what lies in between and writes that, too."""
    REFUSED = "refused"
    """Earlier calls of the name are refused, as after a conflict, so that the operator makes them again."""
    UNCOLLECTED = "uncollected"
    """The garbage collector stands still, so that the operator finds what nobody owns any more before it does."""


Aim = tuple["KillPoint", ...]
"""Points of one run."""


@dataclass(frozen=True, slots=True, order=True)
class KillPoint:
    """One place at which the operator dies."""

    step: int
    signature: str
    occurrence: int
    is_after: bool
    """Whether the API server has carried the call out."""

    @property
    def call(self) -> tuple[int, str, int]:
        """The call that it is about."""
        return (self.step, self.signature, self.occurrence)

    def __str__(self) -> str:
        return f"{'after' if self.is_after else 'before'} {self.signature} #{self.occurrence} in step {self.step + 1}"


@dataclass(slots=True)
class Book:
    """What is known of points over all runs."""

    points: set[KillPoint]
    met: set[KillPoint] = field(default_factory=set)
    born: dict[KillPoint, KillPoint] = field(default_factory=dict)
    """Points that were first seen after a kill, and that kill."""
    most: Counter[tuple[int, str]] = field(default_factory=Counter)
    """How often a call came at most between two kills, by step and signature."""
    ways: Counter[Way] = field(default_factory=Counter)
    """How points were met that were not met before."""
    kills: int = 0

    def meet(self, point: KillPoint, way: Way) -> None:
        """Count a kill."""
        self.ways[way] += point not in self.met
        self.met.add(point)
        self.kills += 1

    def unmet(self) -> list[KillPoint]:
        """Points of the undisturbed run that are left."""
        return sorted(self.points - self.met)

    def unmet_born(self) -> list[tuple[KillPoint, KillPoint]]:
        """Points that kills brought about and that are left, each behind the kill that did."""
        return [(before, point) for point, before in sorted(self.born.items()) if point not in self.met]

    def why(self, point: KillPoint) -> str:
        """Say why a point was not met."""
        came = self.most[point.step, point.signature]
        return f"{point}: the call came {came} times at most"


class Killer:
    """Kills at one kill point after the other."""

    def __init__(self, stage: Stage, keeper: Keeper, book: Book, aim: Iterable[KillPoint], way: Way) -> None:
        """Kill once at each of `aim`, in whichever order they come; what is met and seen is noted in `book`."""
        self._plane = stage.plane
        self._sight = stage.proxy.sight
        self._keeper = keeper
        self._book = book
        self._way = way
        self._lock = threading.Lock()
        self._left = set(aim)
        self._seen: Counter[str] = Counter()
        self._last: KillPoint | None = None
        self._step = 0
        self._last_s = 0.0
        self.hit: list[KillPoint] = []

    def begin(self, step: int) -> None:
        """Count calls from here."""
        with self._lock:
            self._step, self._last = step, None
            self._seen.clear()
        if self._is_done():
            return
        if self._way is Way.SLOWLY:
            self._sight.pause_s = PAUSE_S
        elif self._way is Way.UNCOLLECTED:
            self._plane.pause(_COLLECTOR, SLOW_S)

    def calm(self) -> None:
        """Hold events or the collector back until all points of the step are met, or for long enough."""
        if self._way in (Way.SLOWLY, Way.UNCOLLECTED):
            wait_until(self._is_done, SLOW_S)
            self._sight.pause_s = 0.0
            self._plane.resume(_COLLECTOR)

    def _is_done(self) -> bool:
        return not any(point.step == self._step for point in self._left.copy())

    def last_s(self) -> float:
        """Monotonic second of the last kill; 0 before the first."""
        return self._last_s

    def judge(self, seen: Seen) -> Deed:
        """Decide on one request."""
        with self._lock:
            self._seen[seen.signature] += 1
            count = self._seen[seen.signature]
            self._note(seen, count)
            call = (self._step, seen.signature, count)
            point = next((p for p in sorted(self._left) if p.call == call), None)
            if point is None:
                return self._refuse(seen, count) if self._way is Way.REFUSED else PASS
            self._left.remove(point)
            self._seen.clear()
            self._last, self._last_s = point, time.monotonic()
            self.hit.append(point)
            self._book.meet(point, self._way)
            return Deed(forwards=point.is_after, loses=True, then=self._keeper.kill)

    def _refuse(self, seen: Seen, count: int) -> Deed:
        """Refuse a call of which a later one is aimed at. What is to be made is told 503: 409 would mean it exists."""
        aims = (p for p in self._left if (p.step, p.signature) == (self._step, seen.signature))
        if not seen.is_write or not any(count < p.occurrence for p in aims):
            return PASS
        return Deed(forwards=False, status=409 if seen.method in ("PATCH", "PUT") else 503)

    def _note(self, seen: Seen, count: int) -> None:
        """Write down a call, and the points that it makes where nobody has seen it so before."""
        book, key = self._book, (self._step, seen.signature)
        book.most[key] = max(book.most[key], count)
        # Reads are those of any start, and a kill at one lies between two writes.
        if self._last is None or not seen.is_write or seen.is_periodic:
            return
        for is_after in (False, True):
            point = KillPoint(self._step, seen.signature, count, is_after)
            if point not in book.points and point != self._last:
                book.born.setdefault(point, self._last)


def points_of(reference: Reference) -> set[KillPoint]:
    """Every kill point of every step of an undisturbed run."""
    return {
        KillPoint(step, signature, number, is_after)
        for step, calls in enumerate(reference.calls)
        for signature, count in occurrences(calls).items()
        for number in range(1, count + 1)
        for is_after in (False, True)
    }


def sweep(
    stage: Stage, keeper: Keeper, reference: Reference, book: Book, aims: Sequence[Aim], way: Way = Way.AS_IT_COMES
) -> Iterator[Result]:
    """Run the scenario once for each of `aims`, as far as the last step that it is about."""
    for number, aim in enumerate(aims, 1):
        killer = Killer(stage, keeper, book, aim, way)
        stage.proxy.judge = killer.judge
        began_s = time.monotonic()
        steps = max(point.step for point in aim) + 1
        plan = Plan(killer.begin, killer.calm, disturbed_s=killer.last_s, steps=steps)
        result = run(stage, keeper, reference, plan)
        result.violations = [f"{'; '.join(map(str, killer.hit))}: {line}" for line in result.violations]
        missed = "".join(f", not met: {point}" for point in sorted(set(aim) - set(killer.hit))[:2])
        _tell(
            f"{way}: {number}/{len(aims)} runs, {len(killer.hit)} kills{missed}, {time.monotonic() - began_s:.1f} s",
            result,
        )
        yield result


def rounds_of(points: Iterable[KillPoint], kills: int) -> list[Aim]:
    """Divide kill points over runs with at most so many in each step."""
    by_step: dict[int, list[KillPoint]] = {}
    for point in sorted(points):
        by_step.setdefault(point.step, []).append(point)
    count = max(-(-len(step) // kills) for step in by_step.values())
    return [tuple(p for step in by_step.values() for p in step[number::count]) for number in range(count)]


def _tell(line: str, result: Result) -> None:
    sys.stderr.write(f"    {line}, slowest step {result.slowest_s:.1f} s\n")
    sys.stderr.writelines(f"    {violation}\n" for violation in result.violations)
    sys.stderr.flush()
