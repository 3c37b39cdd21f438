"""What the metadata service reads of kvstrata's own kinds, as the API server's JSON tells it. Pure."""

from dataclasses import dataclass
from datetime import datetime

import msgspec

from kvstrata_api.scopes import KEY_VERSION

DEFAULT_COPIES = 2
"""Copies wanted by a pool that was stored before the field existed; the default of `policy.retention.copies`."""


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

    The key version is the higher one of what the administrator and what the operator says. One that cannot be read
    has the oldest: it must not look as if it were gone.
    """
    read = msgspec.json.decode(raw, type=_Owner)
    try:
        told = msgspec.json.decode(read.status, type=_OwnerStatus).key_version
        spec = msgspec.json.decode(read.spec, type=_OwnerSpec)
        key_version, ends_at = max(told, spec.key_version), spec.expires_at
    except msgspec.MsgspecError:
        key_version, ends_at = 0, None
    return Owner(read.metadata.uid, key_version, read.metadata.deletion_timestamp is not None, ends_at)
