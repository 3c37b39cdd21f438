"""Runs the scenario and compares each step's end with that of an undisturbed run."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from adversity.calls import PASS, Seen, Sight
from adversity.portrait import KeyName, Portrait, take
from adversity.scenario import STEPS, Admin
from adversity.stage import Keeper, Stage

CONVERGED_S: Final = 60.0
"""The same final state within this, after the last disturbance."""
_QUIET_S: Final = 4.0
"""Without a write for so long, and with the same portrait: at rest."""
REST_S: Final = 600.0
"""Bound of waiting for rest; a large batch on a busy machine needs minutes, and is no measure of the operator."""
_LOOKS: Final = 4
"""At least so many looks are needed to call that rest, however slow the machine."""
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Reference:
    """An undisturbed run: how each step ends, and which calls it takes."""

    portraits: tuple[Portrait, ...]
    calls: tuple[tuple[Seen, ...], ...]


@dataclass(slots=True)
class Result:
    """One disturbed run."""

    violations: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to the operator in one run, and for how long its end is waited for."""

    disturb: Callable[[int], None]
    """Told of the number of each step before it is taken."""
    calm: Callable[[], None] = lambda: None
    """Ends what goes on, after each step was taken."""
    disturbed_s: Callable[[], float] = lambda: 0.0
    """Monotonic second of the last disturbance, where it comes after the step was taken: time counts from it."""
    steps: int = len(STEPS)
    """Only so many of the first steps are taken."""


def record(stage: Stage, keeper: Keeper) -> Reference:
    """Run the scenario undisturbed."""
    admin = Admin(stage.plane)
    keeper.stop()
    admin.clear()
    portraits, calls = [], []
    for number, step in enumerate(STEPS):
        mark = len(stage.proxy.log)
        step(admin)
        keeper.run() if number == 0 else None
        portraits.append(at_rest(stage))
        calls.append(tuple(stage.proxy.log[mark:]))
    keeper.stop()
    return Reference(tuple(portraits), tuple(calls))


def run(stage: Stage, keeper: Keeper, reference: Reference, plan: Plan) -> Result:
    """Run the scenario once more, up to the first step that does not end as it did undisturbed."""
    admin, result = Admin(stage.plane), Result()
    keeper.stop()
    admin.clear()
    keys: dict[KeyName, str] = {}
    for number, step in enumerate(STEPS[: plan.steps]):
        plan.disturb(number)
        step(admin)
        keeper.run() if number == 0 else None
        plan.calm()
        result.violations += _reach(stage, reference.portraits[number], keys, result, step.__name__, plan.disturbed_s)
        if result.violations:
            break
    keeper.stop()
    stage.proxy.judge = lambda _seen: PASS
    stage.proxy.sight = Sight()
    return result


def _reach(
    stage: Stage,
    wanted: Portrait,
    keys: dict[KeyName, str],
    result: Result,
    what: str,
    disturbed_s: Callable[[], float],
) -> list[str]:
    """Wait until the cluster is as wanted; say what is not when time is up, and which keys did not last."""
    began_s = time.monotonic()
    while True:
        since_s = max(began_s, disturbed_s())
        seen = take(stage.plane)
        differences, changed = seen.differences(wanted), seen.changed_keys(keys)
        keys.update(seen.keys)
        took_s = time.monotonic() - since_s
        if changed:
            return [f"{what}: {line}" for line in changed]
        if not differences:
            result.slowest_s = max(result.slowest_s, took_s)
            return []
        if took_s > CONVERGED_S:
            return [f"{what}, after {took_s:.0f} s: {line}" for line in differences[:4]]
        time.sleep(_POLL_S)


def at_rest(stage: Stage) -> Portrait:
    """Wait until nobody writes any more and nothing is left to be told."""
    began_s, looked_s = time.monotonic(), 0.0
    before, mark, since_s, looks = take(stage.plane), _writes(stage.proxy.log), time.monotonic(), 0
    while time.monotonic() - since_s < _QUIET_S or looks < _LOOKS:
        assert time.monotonic() - began_s < REST_S, before.behind
        time.sleep(max(_POLL_S, looked_s))  # Looking at many objects costs the time that they need to come to rest.
        looked_s = time.monotonic()
        now, writes = take(stage.plane), _writes(stage.proxy.log)
        looked_s = time.monotonic() - looked_s
        looks += 1
        if now.objects != before.objects or now.behind or before.behind or writes != mark:
            before, mark, since_s, looks = now, writes, time.monotonic(), 0
    return before


def _writes(log: Sequence[Seen]) -> int:
    return sum(1 for seen in log if seen.is_write and not seen.is_periodic)


def occurrences(calls: Sequence[Seen]) -> Mapping[str, int]:
    """Calls of a step by signature: every write, and of what is read again and again the first."""
    counts = Counter(seen.signature for seen in calls if seen.is_write and not seen.is_periodic)
    counts.update({seen.signature for seen in calls if not seen.is_write or seen.is_periodic})
    return counts
