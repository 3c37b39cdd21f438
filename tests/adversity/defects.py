"""Seeded defects of the operator, each of a class that one of the proofs must see."""

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata_kube.watch import Watch
from kvstrata_operator.apply.executor import Executor, Outcome
from kvstrata_operator.decide.pools import lifecycle
from kvstrata_operator.decide.pools.reconcile import Difference
from support.nursery import Channel, become


def inject(name: str) -> None:
    """Break the operator in this process; nothing for the empty name."""
    if name:
        DEFECTS[name]()


def operate(channel: Channel, *, argv: Sequence[str], log: str, defect: str) -> None:
    """Be an operator with a defect, or without, in a child of a nursery."""
    inject(defect)
    become(channel, module="kvstrata_operator.app.main", argv=argv, files=[log], environment=dict(os.environ))


def _remembers_placements() -> None:
    """Withdraw only what this process has seen placed: what leaves while it is down stays for ever."""
    put, placed = Difference.put, set[str]()

    def edge_triggered(self: Difference, node: str, *, is_wanted: bool, is_there: bool, is_plain: bool) -> None:
        if is_wanted:
            placed.add(node)
        put(self, node, is_wanted=is_wanted, is_there=is_there and node in placed, is_plain=is_plain)

    Difference.put = edge_triggered  # type: ignore[method-assign]


def _tries_once() -> None:
    """Take every action for done that was tried."""
    guarded, tried = Executor._guarded, set[str]()

    async def once(self: Executor, action: Any, until_s: float) -> Outcome:
        if repr(action) in tried:
            return Outcome(action)
        tried.add(repr(action))
        return await guarded(self, action, until_s)

    Executor._guarded = once  # type: ignore[method-assign]


def _lists_once() -> None:
    """Go on after 410 without a list, as if nothing had happened meanwhile."""
    listed = Watch._list

    async def only_first(self: Any) -> None:
        if self._store.is_synced:
            take, self._store.take = self._store.take, lambda _records, _version: []
            try:
                await listed(self)
            finally:
                self._store.take = take
        else:
            await listed(self)

    Watch._list = only_first  # type: ignore[method-assign]


def _remembers_lists() -> None:
    """Believe the first list for ever: the feed of events counts for nothing."""

    async def deaf(_self: Any) -> None:
        await asyncio.sleep(3600.0)

    Watch._watch = deaf  # type: ignore[method-assign, assignment]


def _needs_a_lease() -> None:
    """Take agents for gone whose Leases nobody has looked at yet, as after a start."""
    known = lifecycle.answering
    lifecycle.answering = lambda nodes, alive, silent: known(nodes, alive, silent) & set(alive)


DEFECTS: dict[str, Callable[[], None]] = {
    "remembers-placements": _remembers_placements,
    "tries-once": _tries_once,
    "lists-once": _lists_once,
    "remembers-lists": _remembers_lists,
    "needs-a-lease": _needs_a_lease,
}
