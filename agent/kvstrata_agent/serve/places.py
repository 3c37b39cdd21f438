"""Who has the places for connections: strangers apart from callers, callers in fair shares by tenant. No I/O."""

from typing import Final, Generic

from kvstrata_agent.policy.fair_share import FairOrder, K

CALLERS_MAX: Final = 1024
"""Engine processes of one pool on one node; a node has some tens of GPUs."""
STRANGERS_MAX: Final = 128
"""Connections that have not attached yet; an engine attaches at once, so the one that waits longest is no engine."""


class Places(Generic[K]):
    """Takes note of connections and says which one has to give way, if any."""

    def __init__(self, callers_max: int = CALLERS_MAX, strangers_max: int = STRANGERS_MAX) -> None:
        self._callers_max = callers_max
        self._strangers_max = strangers_max
        self._strangers: dict[K, None] = {}
        """In order of coming."""
        self._callers: FairOrder[K] = FairOrder()

    def __len__(self) -> int:
        return len(self._strangers) + len(self._callers)

    def come(self, stranger: K) -> K | None:
        """Give a place to a stranger; returns the one that loses its own."""
        self._strangers[stranger] = None
        return next(iter(self._strangers)) if len(self._strangers) > self._strangers_max else None

    def attach(self, connection: K, tenant: str) -> K | None:
        """Turn a stranger into a caller; returns the one that has to give way: the newest of whoever has most places.

        That may be this one.
        """
        if connection not in self._strangers:
            return None  # It renews its token.
        del self._strangers[connection]
        self._callers.use(tenant, connection)
        if len(self._callers) <= self._callers_max:
            return None
        payer = self._callers.payer()
        if self._callers.count(tenant) == self._callers.count(payer):
            return connection
        *_, newest = self._callers.of(payer)
        return newest

    def leave(self, connection: K) -> None:
        """Take a place back. Idempotent."""
        self._strangers.pop(connection, None)
        self._callers.drop(connection)
