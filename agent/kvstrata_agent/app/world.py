"""What one agent needs of the world outside its node.

A cluster provides it (`peering.FleetWorld`), or manifests on one machine (`standalone.world.StandaloneWorld`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, Self

from kvstrata_agent.app.config import Config

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from types import TracebackType

    from kvstrata_agent.app.wiring import AgentParts
    from kvstrata_agent.backends.record.encryption import DataKeys
    from kvstrata_agent.backends.registry import ReadSecret
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tenants import ScopeMemory
    from kvstrata_agent.cache.ports import Directory, DirectoryState, Peers, Tenants
    from kvstrata_agent.kube.declared import KubeDesired
    from kvstrata_agent.serve.authorization import Authenticator, Users
    from kvstrata_api.models.poolnode import KVPoolNodeStatus
    from kvstrata_telemetry.metrics import Instruments


class StatusSink(Protocol):
    """Where the status goes."""

    def report(self, status: KVPoolNodeStatus) -> None:
        """Take the newest status; returns at once. What differs in nothing that readers see may be left out."""


class Network(Protocol):
    """Directory and other agents; an agent that is alone has neither."""

    @property
    def directory(self) -> Directory | None:
        """Index of what other agents hold."""

    @property
    def peers(self) -> Peers | None:
        """Other agents."""

    @property
    def state(self) -> DirectoryState:
        """What the directory does for this node."""

    @property
    def backlog(self) -> int:
        """Changes that the directory was not told yet."""

    @property
    def address(self) -> str:
        """`host:port` where other agents reach this one; empty where there are none."""

    async def start(self, stack: AsyncExitStack, parts: AgentParts) -> None:
        """Begin to answer others and to ask them; `stack` ends it."""

    async def run(self, node: Node, scopes: ScopeMemory) -> None:
        """Do what is due every so often; until cancelled, or nothing is ever due."""


class World(Protocol):
    """Declared state in, status out, callers authenticated. Leaving it stops everything that it started."""

    @property
    def desired(self) -> KubeDesired:
        """Pool and pool node, as declared."""

    @property
    def authenticator(self) -> Authenticator:
        """Callers by their tokens."""

    @property
    def users(self) -> Users | None:
        """Callers by their unix user; None where nobody is let in without a token."""

    @property
    def tenants(self) -> Tenants:
        """What is declared of tenants."""

    @property
    def status(self) -> StatusSink:
        """Where observations go."""

    @property
    def keyring(self) -> DataKeys:
        """Data keys of scopes, for tiers that encrypt."""

    @property
    def read_secret(self) -> ReadSecret | None:
        """Reads Secrets that object stores name; None where there are none."""

    async def ready(self) -> None:
        """Return when everything that is declared was read once."""

    async def reread(self) -> None:
        """Read what is declared once more, before the process decides what it leaves behind. Best effort."""

    def start_heartbeat(self, epoch: int) -> None:
        """Begin to show others that this incarnation lives; once, after `ready`."""

    def network(self, config: Config, epoch: int, instruments: Instruments) -> Network:
        """Make the network of this incarnation; once, after `ready`. Raises `OSError` without its address."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


Connect = Callable[[Config], Awaitable[World]]
"""Opens the world of an agent. Raises `UnsupportedError` where there is none."""
