"""An API server that refuses, loses, delays, hides and lies for a while: random, and the same for the same seed."""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from adversity.calls import PASS, Deed, Seen, Sight
from adversity.runs import Plan, Reference, Result, run
from adversity.stage import Keeper, Stage
from controlplane.waiting import wait_until

STORM_S: Final = (1.0, 4.0)
"""How long it lasts in each step."""
STORM_S_MAX: Final = 30.0
"""Longer where the operator has not made `MET_CALLS` calls meanwhile; an operator at rest makes some by the clock."""
MET_CALLS: Final = 8
_STATUSES: Final = (409, 429, 500, 503, 504)
_TIMEOUT_S: Final = 11.0
"""Longer than the operator waits for an answer."""


@dataclass(slots=True)
class Storm:
    """What is wrong in one run."""

    stage: Stage
    keeper: Keeper
    chance: random.Random
    begin: "Callable[[Storm], None]"
    """Called at the start of each step."""
    end: "Callable[[Storm], None]"
    """Called when the time of the storm is over."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def disturb(self, _step: int) -> None:
        """Begin."""
        self.begin(self)

    def calm(self) -> None:
        """Let it go on for a while, and end it. It lasts until the operator has met it, however long that starts."""
        until_s = time.monotonic() + self.chance.uniform(*STORM_S)
        before = len(self.stage.proxy.log)
        wait_until(lambda: self._has_passed(until_s, before), STORM_S_MAX)
        self.end(self)

    def _has_passed(self, until_s: float, before: int) -> bool:
        return time.monotonic() >= until_s and len(self.stage.proxy.log) >= before + MET_CALLS

    def refuse_and_lose(self, seen: Seen) -> Deed:
        """Fail one request of four, in any way."""
        with self.lock:
            if seen.is_watch or self.chance.random() > 0.25:
                return PASS
            return self.chance.choice(
                [
                    *(Deed(forwards=False, status=status) for status in _STATUSES),
                    Deed(loses=True),
                    Deed(loses=True),
                    Deed(forwards=False, loses=True),
                    Deed(delay_s=self.chance.uniform(0.1, 1.0)),
                    Deed(delay_s=_TIMEOUT_S) if self.chance.random() < 0.2 else Deed(delay_s=0.3),
                ]
            )


def _fail(storm: Storm) -> None:
    storm.stage.proxy.judge = storm.refuse_and_lose


def _work_again(storm: Storm) -> None:
    storm.stage.proxy.judge = lambda _seen: PASS


def _fall_behind(storm: Storm) -> None:
    """Freeze all watches; half of the time the operator is started again and shown lists as they were."""
    sight = storm.stage.proxy.sight
    sight.is_frozen = True
    if storm.chance.random() < 0.5:
        sight.shows_old_lists = True
        storm.keeper.kill()


def _catch_up(storm: Storm) -> None:
    storm.stage.proxy.sight.is_frozen = False
    storm.stage.proxy.sight.shows_old_lists = False


def _withhold(storm: Storm) -> None:
    """Withhold events, tear them, and refuse to go on with pages."""
    sight = storm.stage.proxy.sight
    sight.coalesces = True
    sight.page_objects = 1
    sight.expires_pages = storm.chance.randrange(4)
    sight.tears = storm.chance.randrange(6)
    sight.is_frozen = storm.chance.random() < 0.8


def _reveal(storm: Storm) -> None:
    storm.stage.proxy.sight.is_frozen = False


KINDS: Final[dict[str, tuple[Callable[[Storm], None], Callable[[Storm], None]]]] = {
    "faults": (_fail, _work_again),
    "stale": (_fall_behind, _catch_up),
    "unobserved": (_withhold, _reveal),
}


def weather(
    stage: Stage, keeper: Keeper, reference: Reference, kind: str, seeds: range
) -> Iterator[tuple[int, Result, Counter[str]]]:
    """Run the scenario once for each seed."""
    begin, end = KINDS[kind]
    for seed in seeds:
        stage.proxy.sight, stage.proxy.injected = Sight(), Counter()
        storm = Storm(stage, keeper, random.Random(f"{kind} {seed}"), begin, end)
        began_s = time.monotonic()
        result = run(stage, keeper, reference, Plan(storm.disturb, storm.calm))
        told = f"{kind} {seed}: {stage.proxy.injected.total()} lies, {time.monotonic() - began_s:.1f} s"
        sys.stderr.write(f"    {told}, slowest step {result.slowest_s:.1f} s\n")
        sys.stderr.writelines(f"    {violation}\n" for violation in result.violations)
        sys.stderr.flush()
        yield seed, result, stage.proxy.injected
