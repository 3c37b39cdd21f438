"""The declared state that one agent follows: its KVPool and its KVPoolNode."""

import logging
from typing import Any, Final

from kvstrata_agent.kube.declared import SeenNode, order_answers
from kvstrata_agent.policy.removal import Presence
from kvstrata_api import names
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import KVPoolNode, NodeTier, OrderAnswer
from kvstrata_kube.signal import Signal
from kvstrata_kube.typed_store import Known

REMINDER_S: Final = 30.0
"""Seconds between two lines that say what is still missing."""

_log: Final = logging.getLogger(__name__)


class KubeDesired:
    """The declared state that this agent follows, over two stores. Keeps the last seen objects when they vanish."""

    def __init__(self, pool: str, node: str, pools: Known[KVPool], nodes: Known[SeenNode], signal: Signal) -> None:
        self._pool_name = pool
        self._node_name = names.pool_node_name(pool, node)
        self._pools = pools
        self._nodes = nodes
        self._signal = signal
        self._last_pool: KVPool | None = None
        self._last_node: KVPoolNode | None = None
        self._was_withdrawn = False

    @property
    def pool(self) -> KVPool:
        """Last seen KVPool. `ready` must have returned before."""
        self._last_pool = self._pools.get(self._pool_name) or self._last_pool
        assert self._last_pool is not None, "ready() comes first"
        return self._last_pool

    @property
    def pool_node(self) -> KVPoolNode:
        """Last seen KVPoolNode. `ready` must have returned before."""
        seen = self._nodes.get(self._node_name)
        self._last_node = seen.declared if seen else self._last_node
        assert self._last_node is not None, "ready() comes first"
        return self._last_node

    @property
    def report(self) -> NodeReport | None:
        """What node preparation has told of this machine; None where it does not run."""
        seen = self._nodes.get(self._node_name)
        return seen.report if seen is not None else None

    @property
    def answers(self) -> tuple[OrderAnswer, ...]:
        """Answers to orders as the API server holds them, also those of an earlier run of this agent."""
        seen = self._nodes.get(self._node_name)
        return order_answers(seen.status) if seen else ()

    @property
    def refused(self) -> tuple[OrderAnswer, ...]:
        """Answers to orders that this version cannot read, as last seen."""
        seen = self._nodes.get(self._node_name)
        return seen.refused if seen else ()

    @property
    def is_withdrawn(self) -> bool:
        """True while the KVPoolNode or the KVPool does not exist: nobody wants this agent any more."""
        return bool(self._missing())

    @property
    def pool_presence(self) -> Presence:
        """Whether the KVPool exists, at any time."""
        pool = self._pools.get(self._pool_name)
        return _presence(self._pools, self._pool_name, pool.metadata if pool else None)

    @property
    def node_presence(self) -> Presence:
        """Whether the KVPoolNode exists, at any time."""
        seen = self._nodes.get(self._node_name)
        return _presence(self._nodes, self._node_name, seen.declared.metadata if seen else None)

    @property
    def deletion_policy(self) -> str:
        """What the pool wants at its end; empty while none was seen. At any time."""
        pool = self._pools.get(self._pool_name) or self._last_pool
        return pool.spec.deletion_policy if pool else ""

    @property
    def tiers(self) -> tuple[NodeTier, ...]:
        """Tiers that were declared last; none while none were seen. At any time."""
        seen = self._nodes.get(self._node_name)
        node = seen.declared if seen else self._last_node
        return node.spec.tiers if node else ()

    async def ready(self) -> None:
        """Return when both objects exist; say now and then which one does not."""
        while missing := self._missing():
            _log.info("waiting for the declared state", extra={"missing": missing})
            await self._signal.wait(REMINDER_S)

    async def changed(self) -> None:
        """Return when either object differs from what was last read, or when one of them vanished or came back.

        Changes nothing; may be cancelled at any time.
        """
        while not self._differs():
            await self._signal.wait()
        self._was_withdrawn = self.is_withdrawn

    def _differs(self) -> bool:
        """True when a reader would see something else than last time."""
        pool, seen = self._pools.get(self._pool_name), self._nodes.get(self._node_name)
        has_new_pool = pool is not None and pool != self._last_pool
        has_new_node = seen is not None and seen.declared != self._last_node
        return has_new_pool or has_new_node or self.is_withdrawn != self._was_withdrawn

    def _missing(self) -> list[str]:
        """Objects that do not exist, as a user would name them."""
        wanted = {
            f"KVPool/{self._pool_name}": self._pools.get(self._pool_name),
            f"KVPoolNode/{self._node_name}": self._nodes.get(self._node_name),
        }
        return [name for name, value in wanted.items() if value is None]


def _presence(known: Known[Any], name: str, meta: ObjectMeta | None) -> Presence:
    """Tell absence from an object that cannot be read, and from one that nobody has told of yet."""
    if meta is not None:
        return Presence.PRESENT if meta.deletion_timestamp is None else Presence.LEAVING
    return Presence.ABSENT if known.is_synced and name not in known.items else Presence.UNKNOWN
