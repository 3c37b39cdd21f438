"""The prefixes of tenants, asked of agents on this machine with the tenants' own tokens.

An agent shows a tenant what is its own and nothing else, so the page shows the tenants whose tokens it was given.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import KvStrataError
from kvstrata_client.client import Client
from kvstrata_client.target import NO_TOKEN, Target

Json = dict[str, Any]

WAIT_S: Final = 5.0
_AT_ONCE: Final = 4
"""Connections to agents; each is a thread."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose prefixes are shown."""

    name: str
    """As the page calls it; the agent decides by the token."""
    token: Path | str
    """File, as an engine has it; `NO_TOKEN` where the unix user counts, at an agent of `kvstrata up`."""


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents of one pool, and who is to be asked for."""

    sockets: tuple[Path, ...]
    pool: str
    layout: Layout
    """Fits the pool's `compatibility`, which is enough to be let in."""
    tenants: tuple[Tenant, ...]


class Prefixes:
    """Asks the agents. Blocking; called in threads."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._free = threading.BoundedSemaphore(_AT_ONCE)

    @property
    def pairs(self) -> Sequence[tuple[Path, Tenant]]:
        """Every agent with every tenant."""
        return [(socket, tenant) for tenant in self._agents.tenants for socket in self._agents.sockets]

    def tree(self, socket: Path, tenant: Tenant) -> Json:
        """One tenant's prefixes at one agent, by scope; `error` where it does not answer."""
        found: Json = {
            "tenant": tenant.name,
            "pool": self._agents.pool,
            "agent": socket.name,
            "block_tokens": self._agents.layout.block_tokens,
            "scopes": [],
            "error": "",
        }
        try:
            with self._attached(socket, tenant) as client:
                found["agent"] = json.loads(client.stats())["agent"]
                for scope in client.grants.scopes if client.grants is not None else ():
                    told = json.loads(client.explain(granted=scope))
                    found["scopes"].append({"kind": scope.kind, "name": scope.name, **told})
        except KvStrataError as e:
            found["error"] = str(e)
        return found

    def session(self, socket: Path, tenant: Tenant, name: str) -> Json:
        """The life of one session at one agent, without names of blocks. Raises `KvStrataError`."""
        with self._attached(socket, tenant) as client:
            told: Json = json.loads(client.explain(session=name))
        return {field: value for field, value in told.items() if field not in {"heads", "absent_heads"}}

    @contextmanager
    def _attached(self, socket: Path, tenant: Tenant) -> Iterator[Client]:
        target = Target(
            socket, self._agents.pool, tenant.token, self._agents.layout, timeout_s=WAIT_S, silence_s=WAIT_S
        )
        with self._free, Client(target, strict=True) as client:
            if not client.wait_settled(WAIT_S):
                raise client.reason
            yield client


def tenant_of(text: str) -> Tenant:
    """Parse `NAME=TOKEN_FILE`; a name alone is the user of this machine."""
    name, _, file = text.partition("=")
    return Tenant(name, Path(file) if file else NO_TOKEN)
