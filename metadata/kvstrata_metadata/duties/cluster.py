"""What the metadata service reads and writes in Kubernetes: agents' Leases, kvstrata's own kinds, and one Secret.

The kinds are parsed as far as they are used. `ask` takes no answer for an answer: decisions know the state unknown.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec

from kvstrata_api import names
from kvstrata_api.errors import ForbiddenError, RetryableError, UnauthenticatedError
from kvstrata_api.names import KEY_VERSION
from kvstrata_kube import secrets
from kvstrata_kube.api import KubeApi
from kvstrata_kube.leases import Lease, lease_path, parse_lease
from kvstrata_kube.watch import Source, list_objects
from kvstrata_metadata.store.records import DEFAULT_COPIES

T = TypeVar("T")

ASK_TIMEOUT_S: Final = 4.0
"""Of one question: rounds must come around while the API server hangs. 5,000 Leases take about a second."""

_OWNERS: Final = ("kvtenants", "kvtrustdomains", "kvprefixshares")
_LEASE_PREFIX: Final = names.agent_lease_name("", "").rstrip(".")

_log = logging.getLogger(__name__)


async def ask(read: Callable[[], Awaitable[T]], what: str) -> T | None:
    """Return what `read` returns; None when the API server does not answer in time or refuses."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await read()
    except (RetryableError, UnauthenticatedError, ForbiddenError, TimeoutError) as e:
        _log.warning("api server gives no answer", extra={"what": what, "error": f"{type(e).__name__}: {e}"})
        return None


@dataclass(frozen=True, slots=True)
class Pool:
    """What a KVPool wants of the directory."""

    name: str
    copies: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one KVPoolNode gives to its agent."""

    agent: str
    """`<pool>.<node>`, the name of the object."""
    capacity_bytes: int
    """Of all tiers."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A KVTenant, KVTrustDomain or KVPrefixShare that has a scope."""

    uid: str
    key_version: int
    is_leaving: bool
    """True once it was deleted and only finalizers keep the object."""
    ends_at: datetime | None = None
    """When a share expires; its key goes then, though the object stays."""

    def is_there(self, now: datetime) -> bool:
        """True while its scope has a key."""
        return not self.is_leaving and (self.ends_at is None or now < self.ends_at)


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    deletion_timestamp: str | None = None


class _Retention(msgspec.Struct):
    copies: int = DEFAULT_COPIES


class _Policy(msgspec.Struct):
    retention: _Retention = msgspec.field(default_factory=_Retention)


class _PoolSpec(msgspec.Struct):
    policy: _Policy = msgspec.field(default_factory=_Policy)


class _Pool(msgspec.Struct):
    metadata: _Meta
    spec: _PoolSpec = msgspec.field(default_factory=_PoolSpec)


class _Tier(msgspec.Struct, rename="camel"):
    capacity_bytes: int = 0


class _NodeSpec(msgspec.Struct):
    tiers: list[_Tier] = []


class _Node(msgspec.Struct):
    metadata: _Meta
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)


class _OwnerSpec(msgspec.Struct, rename="camel"):
    key_version: int = KEY_VERSION
    expires_at: datetime | None = None


class _OwnerStatus(msgspec.Struct, rename="camel"):
    key_version: int = 0


class _Owner(msgspec.Struct):
    metadata: _Meta
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"{}")


def parse_pool(raw: bytes) -> Pool:
    """Read a KVPool. Raises `msgspec.MsgspecError` for anything else."""
    read = msgspec.json.decode(raw, type=_Pool)
    return Pool(read.metadata.name, read.spec.policy.retention.copies)


def parse_capacity(raw: bytes) -> Capacity:
    """Read a KVPoolNode. Raises `msgspec.MsgspecError` for anything else."""
    read = msgspec.json.decode(raw, type=_Node)
    return Capacity(read.metadata.name, sum(tier.capacity_bytes for tier in read.spec.tiers))


def parse_owner(raw: bytes) -> Owner:
    """Read a KVTenant, a KVTrustDomain or a KVPrefixShare. Raises `msgspec.MsgspecError` for anything else.

    The key version is the higher one of the administrator's spec and the operator's status. One that cannot be read
    has the oldest: it must not seem to be gone.
    """
    read = msgspec.json.decode(raw, type=_Owner)
    try:
        observed = msgspec.json.decode(read.status, type=_OwnerStatus).key_version
        spec = msgspec.json.decode(read.spec, type=_OwnerSpec)
        key_version, ends_at = max(observed, spec.key_version), spec.expires_at
    except msgspec.MsgspecError:
        key_version, ends_at = 0, None
    return Owner(read.metadata.uid, key_version, read.metadata.deletion_timestamp is not None, ends_at)


class Cluster:
    """One namespace of the API server under our identity.

    Methods raise `RetryableError`, as a rule `ApiServerAwayError`, and `ForbiddenError` for want of rights.
    """

    def __init__(self, api: KubeApi, namespace: str) -> None:
        self._api = api
        self._namespace = namespace

    async def agent_leases(self) -> dict[str, Lease]:
        """Read the Leases of all agents, by agent."""
        leases, _ = await list_objects(self._api, Source(lease_path(self._namespace), parse_lease))
        return {agent: lease for lease in leases if (agent := _agent(lease.name))}

    async def wanted_copies(self) -> dict[str, int]:
        """Read how many copies of a block each pool wants, by pool."""
        return {pool.name: pool.copies for pool in await self._declared("kvpools", parse_pool)}

    async def capacities(self) -> dict[str, int]:
        """Read the bytes that each agent was given, over all its tiers, by agent."""
        return {node.agent: node.capacity_bytes for node in await self._declared("kvpoolnodes", parse_capacity)}

    async def scope_owners(self) -> dict[str, int]:
        """Read the key version in use by uid of whatever owns a scope, without what is being deleted or has expired."""
        owners = [o for kind in _OWNERS for o in await self._declared(kind, parse_owner)]
        now = datetime.now(UTC)
        return {owner.uid: owner.key_version for owner in owners if owner.is_there(now)}

    async def _declared(self, kind: str, parse: Callable[[bytes], T]) -> list[T]:
        found, _ = await list_objects(self._api, Source(f"/apis/{names.API_VERSION}/{kind}", parse))
        return found

    async def read_secret(self, name: str) -> Mapping[str, bytes] | None:
        """Read the content of a Secret; None when there is none."""
        return await secrets.read_secret(self._api, self._namespace, name)

    async def write_secret(self, name: str, content: Mapping[str, str]) -> None:
        """Make a Secret hold exactly `content`. Idempotent."""
        await secrets.write_secret(self._api, self._namespace, name, content, names.FIELD_MANAGER_METADATA)


def _agent(lease: str) -> str:
    """Name the agent of a Lease; empty when it is nobody's."""
    prefix, _, agent = lease.partition(".")
    return agent if prefix == _LEASE_PREFIX else ""
