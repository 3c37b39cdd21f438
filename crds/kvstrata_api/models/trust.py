"""KVTenant, KVTrustDomain and KVPrefixShare: who may use and share what."""

from typing import Literal

from pydantic import Field

from kvstrata_api.models.base import (
    SET,
    ApiModel,
    Count,
    LabelValue,
    Name,
    ObjectMeta,
    ObjectName,
    Quantity,
    Text,
    Timestamp,
    unique_by,
)
from kvstrata_api.models.conditions import Conditions
from kvstrata_api.names import KEY_VERSION


class LabelSelector(ApiModel):
    """Equality-based selector."""

    match_labels: dict[str, LabelValue] = Field({}, max_length=32, description="All must match.")


class ServiceAccountRef(ApiModel):
    """One ServiceAccount; its tokens are the tenant's identity."""

    namespace: Name = Field(description="Namespace.")
    name: ObjectName = Field(description="Name.")


class TenantQuota(ApiModel):
    """Bounds of a tenant in one tier of one pool, on each node."""

    pool_ref: Name = Field(description="Pool.")
    tier: Name = Field(description="Tier name of the pool.")
    hard: Quantity | None = Field(None, description="Never more than this.")
    guaranteed: Quantity | None = Field(None, description="Other tenants cannot push it below this.")


class TenantRetention(ApiModel):
    """How long a tenant's blocks may live."""

    idle_seconds: int | None = Field(None, ge=0, le=31_536_000, description="Unused for this long: dropped.")
    max_seconds: int | None = Field(None, ge=0, le=31_536_000, description="Older than this: dropped.")
    zeroize: bool = Field(False, description="Overwrite slots with zeros when they are freed.")


class KVTenantSpec(ApiModel):
    """Identity and limits."""

    namespace_selector: LabelSelector | None = Field(None, description="All ServiceAccounts of these namespaces.")
    service_accounts: tuple[ServiceAccountRef, ...] = Field(
        (), max_length=256, description="Or exactly these.", json_schema_extra=unique_by("namespace", "name")
    )
    trust_domain: Name | None = Field(None, description="Domain to join; the domain must admit the tenant as well.")
    accept_shares_from: tuple[Name, ...] = Field(
        (),
        max_length=64,
        description="Tenants whose prefix shares it reads; those of publishers of its own domain it reads anyway.",
        json_schema_extra=SET,
    )
    quotas: tuple[TenantQuota, ...] = Field((), max_length=64, description="By pool and tier.")
    over_quota: Literal["Evict", "Reject", "Demote"] = Field(
        "Evict",
        description="At the hard quota. Evict: the tenant's oldest blocks give way. Demote: they go to the next slower "
        "tier. Reject: new blocks are refused.",
    )
    weight: int = Field(100, ge=1, le=10_000, description="Share of contended bandwidth and space.")
    priority_classes: tuple[Name, ...] = Field(
        (),
        max_length=16,
        description="Priorities that its sessions may name; empty: any. Blocks of urgent, interactive, standard, batch "
        "and background sessions stay 4, 2, 1, 1/2 and 1/4 times as long as standard ones that are used alike, and "
        "their moves go by the same factors, within the tenant's own share. Other names count as standard.",
        json_schema_extra=SET,
    )
    retention: TenantRetention = Field(TenantRetention(), description="Retention.")
    erase_requested: str | None = Field(
        None,
        max_length=64,
        description="Written by KVOperations of type Erase, which are the way to erase a tenant; by hand only in files "
        "of kvstrata up, where any new value erases all its blocks. status.lastErase has the last value that is done.",
    )


class TenantUsage(ApiModel):
    """Bytes of a tenant in one tier of one pool."""

    pool_ref: Name = Field(description="Pool.")
    tier: Name = Field(description="Tier name of the pool.")
    used: Text = Field("0", description="Bytes that hold blocks of the tenant.")


class KVTenantStatus(ApiModel):
    """What the operator observed."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of.")
    conditions: Conditions = Field((), description="Observations by type.")
    usage: tuple[TenantUsage, ...] = Field((), max_length=64, description="Bytes by pool and tier.")
    quota: Text = Field("", description="Hard quotas over all nodes of their pools; empty without any.")
    used: Text = Field("", description="Bytes over all pools, tiers and nodes, such as 1.2Gi.")
    hit_percent: int | None = Field(
        None, ge=0, le=100, description="Hits per hundred looked-up blocks since agents started."
    )
    denied: Count = Field(
        0, description="Blocks that it may not read or write, or that its hard quota refused, since agents started."
    )
    key_version: Count = Field(0, description="Version of the tenant's key that is in use.")
    erase_started: Text = Field("", description="Value of spec.eraseRequested that the key version was moved on for.")
    last_erase: Text = Field("", description="Value of spec.eraseRequested that was carried out last.")
    effective_domain: str = Field("", max_length=63, description="The domain that both sides agree on, if any.")


class KVTenant(ApiModel):
    """A user of the fleet's KV cache, bound to Kubernetes identities."""

    metadata: ObjectMeta
    spec: KVTenantSpec = Field(description="Identity and limits.")
    status: KVTenantStatus = Field(KVTenantStatus(), description="What the operator observed.")


class KVTrustDomainSpec(ApiModel):
    """Tenants that share."""

    tenants: tuple[Name, ...] = Field(
        (), max_length=256, description="Admitted tenants; each must join as well.", json_schema_extra=SET
    )
    sharing: Literal["Private", "ListedPrefixes", "All"] = Field(
        "Private",
        description="What members read of each other. Private: nothing. ListedPrefixes: what a KVPrefixShare lists. "
        "All: every prefix.",
    )
    publishers: tuple[Name, ...] = Field(
        (),
        max_length=256,
        description="Members whose blocks and prefix shares the others read; empty: all.",
        json_schema_extra=SET,
    )
    key_version: int = Field(
        KEY_VERSION, ge=1, le=1_000_000, description="Raise it to cut old readers off; status.keyVersion may be ahead."
    )


class KVTrustDomainStatus(ApiModel):
    """What the operator observed."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of.")
    conditions: Conditions = Field((), description="Observations by type.")
    members: tuple[Name, ...] = Field(
        (),
        max_length=256,
        description="Tenants that both sides agree on: whoever is not named here is not handed the key.",
    )
    key_version: Count = Field(
        0, description="Version of the domain's key that is in use; moves on by itself when a member leaves."
    )


class KVTrustDomain(ApiModel):
    """A set of tenants whose prefixes may be shared."""

    metadata: ObjectMeta
    spec: KVTrustDomainSpec = Field(description="Tenants that share.")
    status: KVTrustDomainStatus = Field(KVTrustDomainStatus(), description="What the operator observed.")


class SharedPrefix(ApiModel):
    """One prefix by digest and length."""

    digest: str = Field(
        pattern=r"^[0-9a-f]{64}$",
        min_length=64,
        max_length=64,
        description="SHA-256 of the token ids, four bytes each, little-endian; `kvstrata digest` prints it.",
    )
    token_count: int = Field(
        ge=1, le=10_000_000, description="Tokens that the digest covers; whole blocks among them are shared."
    )
    description: str = Field("", max_length=256, description="For people.")


class ShareTarget(ApiModel):
    """A reader: exactly one of tenant and domain."""

    tenant: Name | None = Field(
        None, description="Reading tenant: in the granting tenant's domain, or it accepts that tenant's shares."
    )
    domain: Name | None = Field(None, description="Domain whose members read, unless its sharing is Private.")


class KVPrefixShareSpec(ApiModel):
    """Which prefixes who may read until when."""

    pool_ref: Name = Field(description="Pool.")
    prefixes: tuple[SharedPrefix, ...] = Field(
        min_length=1,
        max_length=256,
        description="Exactly these. They never change: other prefixes need another share, which has another key.",
        json_schema_extra=unique_by("digest"),
    )
    to: tuple[ShareTarget, ...] = Field(min_length=1, max_length=64, description="Readers.")
    expires_at: Timestamp | None = Field(None, description="End, RFC 3339; absent: until the share is deleted.")


class KVPrefixShareStatus(ApiModel):
    """What the operator observed."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of.")
    conditions: Conditions = Field((), description="Observations by type.")
    consumers: Count = Field(0, description="Tenants that may read now.")
    hits: Count = Field(0, description="Blocks that readers were given since the agents started, to within an eighth.")


class KVPrefixShare(ApiModel):
    """A grant by one tenant, in its own namespace, to read some of its prefixes."""

    metadata: ObjectMeta
    spec: KVPrefixShareSpec = Field(description="Which prefixes who may read until when.")
    status: KVPrefixShareStatus = Field(KVPrefixShareStatus(), description="What the operator observed.")
