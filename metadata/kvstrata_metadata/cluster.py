"""What the metadata service asks of Kubernetes: agents' Leases, what is declared, and one Secret."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeVar

from kvstrata_api import names
from kvstrata_kube import secrets
from kvstrata_kube.api import KubeApi
from kvstrata_kube.leases import Lease, lease_path, parse_lease
from kvstrata_kube.watch import Source, list_objects
from kvstrata_metadata.declared import parse_capacity, parse_owner, parse_pool

T = TypeVar("T")

_OWNERS: Final = ("kvtenants", "kvtrustdomains", "kvprefixshares")
_LEASE_PREFIX: Final = names.agent_lease_name("", "").rstrip(".")


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
