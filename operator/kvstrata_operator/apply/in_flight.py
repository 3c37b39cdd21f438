"""Writes that are under way while the next plan is made: a change need not wait for what was planned before it.

Laws: of one object there is never more than one write under way; a pool's finalizer waits for all that is made for the
pool, or something would be made for a pool that is gone; whatever ends badly for no reason that a retry could
mend ends the task group, and so the process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from kvstrata_operator.apply.executor import CONCURRENCY, Outcome
from kvstrata_operator.decide.plan.actions import Action, SetFinalizers

Landed = Callable[[Outcome], None]
"""Told how an action went, once its object may be written again."""

FEW: Final = CONCURRENCY
"""With fewer than this under way some requests are free, and the next plan has something to do."""


class Flights:
    """Runs each action in a task of its own."""

    def __init__(self, tasks: asyncio.TaskGroup, apply: Callable[[Iterable[Action]], Awaitable[list[Outcome]]]) -> None:
        """`tasks` must be entered; `apply` bounds how many requests there are at once."""
        self._tasks = tasks
        self._apply = apply
        self._paths: dict[str, str] = {}
        """Objects that are being written, and the pool of each."""
        self._few = asyncio.Event()
        self._few.set()

    def is_free(self, action: Action) -> bool:
        """True when nothing is being written that the action has to wait for."""
        waits = isinstance(action, SetFinalizers) and action.pool in self._paths.values()
        return action.ref.path not in self._paths and not waits

    def launch(self, actions: Iterable[Action], landed: Landed) -> None:
        """Carry out actions whose objects are free, of which there is one each."""
        for action in actions:
            assert self.is_free(action), action.ref
            self._paths[action.ref.path] = action.pool
            self._tasks.create_task(self._fly(action, landed))
        self._count()

    async def until_few(self) -> None:
        """Wait until another plan is worth it."""
        await self._few.wait()

    async def _fly(self, action: Action, landed: Landed) -> None:
        (outcome,) = await self._apply([action])
        del self._paths[action.ref.path]
        self._count()
        landed(outcome)

    def _count(self) -> None:
        if len(self._paths) < FEW:
            self._few.set()
        else:
            self._few.clear()
