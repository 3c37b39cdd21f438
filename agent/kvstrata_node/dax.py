"""Keeps dax devices in the modes that tiers declare: observes, plans, carries out, remembers what was refused."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvstrata_api.tiers import CxlMode
from kvstrata_node import dax_plan as dax
from kvstrata_node import dax_verdict
from kvstrata_node.books import DaxBook
from kvstrata_node.dax_plan import CxlDemand, DaxState, Goal, Rules
from kvstrata_node.dax_sysfs import DaxMachine, read_devices
from kvstrata_node.dax_verdict import Verdict
from kvstrata_node.discovery import read_machine

AGAIN_S: Final = 300.0
"""Retry interval of what the kernel refused: each has it move pages away, and back."""
PASSES_MAX: Final = 4
"""Observations in one round: memory can be put online only when its driver is there, and shows its size only then."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DaxKeeper:
    """State between rounds. One process has it."""

    machine: DaxMachine
    book: DaxBook
    rules: Rules
    """Without `changed`, which the book holds."""
    return_s: float
    """For so long no tier must have needed a device before it gets its former driver."""
    clock: Callable[[], float] = time.monotonic
    _refused: dict[str, tuple[str, Verdict, float]] = field(default_factory=dict)
    """By device: the driver that it was to get, why it did not, and when it is tried again."""
    _unneeded_s: dict[str, float] = field(default_factory=dict)
    """By device: when nobody needed it first."""

    @property
    def due_s(self) -> tuple[float, ...]:
        """Seconds of the clock at which something is to be tried."""
        waiting = (since_s for name, since_s in self._unneeded_s.items() if name not in self._refused)
        returns = (since_s + self.return_s for since_s in waiting)
        return (*(at_s for _, _, at_s in self._refused.values()), *returns)

    def round(self, demand: CxlDemand) -> Mapping[CxlMode, Verdict]:
        """Bring the devices as near to the demand as they can be now, and judge them. Blocking; see `OFFLINE_S`."""
        for _ in range(PASSES_MAX):
            due = self._due(demand, self._observe())
            if not due:
                break
            for goal in due:
                self._carry_out(goal)
        seen = self._observe()
        self._strike_settled(demand, seen)
        refused = {name: verdict for name, (_, verdict, _) in self._refused.items()}
        return dax_verdict.of_modes(demand, seen, self._rules(), refused)

    def _strike_settled(self, demand: CxlDemand, seen: DaxState) -> None:
        """Forget devices that have their former driver and should have no other."""
        needed = dax.needs(demand, seen, self._rules())
        for device in seen.devices:
            change = self.book.changed.get(device.name)
            is_former = change is not None and device.driver == change.before == needed.get(device.name, change.before)
            if is_former and device.name not in self._unneeded_s and demand.is_complete:
                try:
                    self.book.strike(device.name)
                except OSError as e:
                    _log.warning("book of dax devices not written", extra={"device": device.name, "cause": str(e)})

    def _observe(self) -> DaxState:
        return read_devices(read_machine(self.machine.root), self.machine.root)

    def _rules(self) -> Rules:
        return replace(self.rules, changed=self.book.changed)

    def _due(self, demand: CxlDemand, seen: DaxState) -> list[Goal]:
        now_s = self.clock()
        goals = dax.plan(demand, seen, self._rules())
        targets = {goal.device.name: goal.target for goal in goals}
        self._refused = {name: r for name, r in self._refused.items() if targets.get(name) == r[0]}
        returned = {goal.device.name for goal in goals if goal.is_return}
        self._unneeded_s = {name: self._unneeded_s.get(name, now_s) for name in returned}
        return [goal for goal in goals if self._is_due(goal, now_s)]

    def _is_due(self, goal: Goal, now_s: float) -> bool:
        name = goal.device.name
        if goal.is_return and now_s < self._unneeded_s[name] + self.return_s:
            return False
        return name not in self._refused or now_s >= self._refused[name][2]

    def _carry_out(self, goal: Goal) -> None:
        verdict = self.machine.carry_out(goal, self.book)
        self._refused.pop(goal.device.name, None)
        if verdict is not None:
            self._refused[goal.device.name] = (goal.target, verdict, self.clock() + AGAIN_S)
