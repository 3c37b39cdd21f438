"""KVPoolNode: one pool on one node. The operator writes the spec, that node's agent the status."""

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from kvstrata_api.models.base import COUNT_MAX, ApiModel, Count, Name, ObjectMeta, ObjectName, Text
from kvstrata_api.models.conditions import Conditions
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.models.model_cache import ListingDigest, ModelSource, Revision
from kvstrata_api.models.operation import PREFIXES_MAX, BlockDigest
from kvstrata_api.models.pool import (
    NVME_PATHS_MAX,
    CxlTier,
    Encryption,
    HbmTier,
    HostDramTier,
    NvmeTier,
    ObjectTier,
    RemoteFlashTier,
    with_block,
)
from kvstrata_api.tiers import MEDIA, TierType

NumaNode = Annotated[int, Field(ge=0, le=4095)]

ORDERS_MAX: Final = 8
"""KVOperations that one node works on at a time; others wait."""
MIGRATE_TARGETS_MAX: Final = 8
"""Nodes that an agent may bring its blocks to: one after the other, while the one before it is away or full."""
MODELS_MAX: Final = 16
"""KVModelCaches whose weights one node is to have; it reports as many again that it has not removed yet."""
MODEL_PEERS_MAX: Final = 8
"""Nodes that an agent asks for weights: those that have them, or that come first."""
SHARES_MAX: Final = 64
"""Prefix shares that one node reports hits of: those that were read last."""
TENANTS_MAX: Final = 128
"""Pairs of tenant and tier that one node reports, those with the most bytes first."""
ERASING_MAX: Final = 64
"""Erasures that one node confirms at a time."""


class NodeTier(ApiModel):
    """One tier of the pool, resolved for this node."""

    name: Name = Field(description="Tier name of the pool.")
    type: TierType = Field(description=MEDIA)
    capacity_bytes: int = Field(
        ge=1, le=COUNT_MAX, description="Bytes on this node; for shared tiers this node's share."
    )
    hbm: HbmTier | None = Field(None, description="Set when type is HBM.")
    host_dram: HostDramTier | None = Field(None, alias="hostDRAM", description="Set when type is HostDRAM.")
    cxl: CxlTier | None = Field(None, description="Set when type is CXL.")
    nvme: NvmeTier | None = Field(None, description="Set when type is NVMe.")
    remote_flash: RemoteFlashTier | None = Field(None, description="Set when type is RemoteFlash.")
    object: ObjectTier | None = Field(None, description="Set when type is Object.")
    encryption: Encryption = Field(Encryption(), description="Encryption at rest of this tier.")

    _block = model_validator(mode="before")(with_block)


class NodeDrain(ApiModel):
    """Request to empty this node's agent."""

    requested: bool = Field(False, description="Whether the agent should empty itself.")
    mode: Literal["Demote", "Drop"] = Field(
        "Demote",
        description="Demote: blocks are brought to a tier that survives the agent first. Drop: they go with the agent.",
    )
    deadline: Text = Field("", description="RFC 3339; empty when nothing is requested.")


class FlushOrder(ApiModel):
    """Take blocks away that nobody holds."""

    tier: Name | None = Field(None, description="Tier; absent: all.")
    mode: Literal["Drop", "Demote"] = Field(
        "Drop", description="Drop: they are removed. Demote: they are brought to the next slower tier that takes them."
    )


class TierDrainOrder(ApiModel):
    """Bring the blocks of a tier to others, and take no new ones there while the order stands."""

    tier: Name = Field(description="Tier.")


class WarmOrder(ApiModel):
    """Bring prefixes of a tenant here."""

    tenant: Name = Field(description="KVTenant by whose rights and quotas.")
    prefixes: tuple[BlockDigest, ...] = Field(
        (), max_length=PREFIXES_MAX, description="Last block of each prefix, in hex."
    )
    archived_sessions: bool = Field(False, description="Also the archived sessions that this node remembers.")
    max_bytes: Count = Field(0, description="Most to bring; 0: as much as the tier holds below the low watermark.")
    tier: Name | None = Field(None, description="Tier; absent: the one that engines read from.")


class MigrateOrder(ApiModel):
    """Bring blocks of this node to agents of another pool."""

    to: Name = Field(description="KVPool.")
    nodes: tuple[ObjectName, ...] = Field(max_length=MIGRATE_TARGETS_MAX, description="Its nodes, in this order.")
    tenant: Name | None = Field(None, description="KVTenant; absent: all.")
    tier: Name | None = Field(None, description="Tier there; absent: the fastest that survives a restart.")
    keep_source: bool = Field(False, description="Keep the blocks here as well.")


class NodeOrder(ApiModel):
    """One KVOperation's part on this node; carried out once, and answered in the status by its uid."""

    uid: Text = Field(description="Uid of the KVOperation.")
    type: Literal["Drain", "Flush", "Warm", "Migrate"] = Field(
        description="Exactly the block of this name is set. Drain: a tier is emptied and kept so. Flush: blocks that "
        "nobody holds are removed or demoted. Warm: prefixes are brought here. Migrate: blocks are brought to another "
        "pool."
    )
    drain: TierDrainOrder | None = Field(None, description="Set when type is Drain.")
    flush: FlushOrder | None = Field(None, description="Set when type is Flush.")
    warm: WarmOrder | None = Field(None, description="Set when type is Warm.")
    migrate: MigrateOrder | None = Field(None, description="Set when type is Migrate.")


class ModelOrder(ApiModel):
    """The weights of one KVModelCache that this node is to have, for as long as this stands here.

    The digest may be absent at first and be set later, while the generation stays: what has that digest is left alone.
    """

    name: Name = Field(description="Name of the KVModelCache: the folder above the revision's.")
    uid: Text = Field(description="Uid of the KVModelCache.")
    generation: Count = Field(description="metadata.generation of the KVModelCache that this was made from.")
    tier: Name = Field(description="Tier of this node that holds the files, and whose bytes they are.")
    source: ModelSource = Field(description="Where the files come from.")
    revision: Revision = Field(description="Name of the folder.")
    digest: ListingDigest | None = Field(None, description="Digest that the files have to have; absent: any.")
    peers: tuple[ObjectName, ...] = Field(
        (),
        max_length=MODEL_PEERS_MAX,
        description="Nodes of the pool whose agents have the files, or get them before this one, in the order in which "
        "they are asked; the source is read without them.",
    )
    weight: int = Field(ge=1, le=10_000, description="Share of contended bandwidth, beside KV, which weighs 100.")
    idle_seconds: int = Field(
        ge=0, le=31_536_000, description="So long after its last use it may be removed to make room for KV."
    )


class KVPoolNodeSpec(ApiModel):
    """What the operator wants of the agent."""

    pool_ref: Name = Field(description="Name of the KVPool.")
    node_name: ObjectName = Field(description="Name of the Node.")
    tiers: tuple[NodeTier, ...] = Field(max_length=8, description="Fast to slow.")
    revision: Text = Field(description="Digest of the pool's spec that this was made from.")
    drain: NodeDrain = Field(NodeDrain(), description="Request to empty the agent.")
    orders: tuple[NodeOrder, ...] = Field(
        (), max_length=ORDERS_MAX, description="What KVOperations under way want of the agent."
    )
    models: tuple[ModelOrder, ...] = Field(
        (), max_length=MODELS_MAX, description="Weights that KVModelCaches want on this node."
    )


class TierProbe(ApiModel):
    """What the agent measured at start, at the pool's block size, for the choice to fetch or to recompute."""

    read_bytes_per_second: Count = Field(0, description="Sequential reads of whole blocks.")
    write_bytes_per_second: Count = Field(0, description="Sequential writes of whole blocks.")
    read_latency_microseconds: Count = Field(0, description="Median of one block read alone.")
    write_latency_microseconds: Count = Field(0, description="Median of one block written alone; for the reader.")
    block_bytes: Count = Field(0, description="Block size of the probe.")


class TierDevice(ApiModel):
    """One of several devices of a tier."""

    name: str = Field(max_length=1024, description="Its directory.")
    capacity_bytes: Count = Field(0, description="Bytes of the tier's capacity that it is to hold.")
    used_bytes: Count = Field(0, description="To within an eighth.")
    error: str = Field("", max_length=1024, description="Why it takes no blocks; empty when it does.")


class TierDemand(ApiModel):
    """What the blocks that engines ask for again show about the size of a tier; of tiers that scale by themselves."""

    gain_permille: int = Field(
        0, ge=0, le=1000, description="Of a thousand blocks asked for, more found with a step up."
    )
    loss_permille: int = Field(0, ge=0, le=1000, description="Of a thousand blocks asked for, fewer with a step down.")
    held_bytes: Count = Field(0, description="Bytes under leases, rounded up to within an eighth.")


class NodeTierStatus(ApiModel):
    """One tier as it is."""

    name: Name = Field(description="Tier name.")
    type: TierType = Field(description=f"Medium that was asked for. {MEDIA}")
    phase: Literal["Pending", "Ready", "Degraded", "Failed", "Draining"] = Field(
        "Pending",
        description="Pending: it is being set up. Ready: it serves. Degraded: it serves, with fewer devices or after "
        "errors. Failed: it takes no blocks; lastError says why. Draining: it is being closed.",
    )
    medium: Text = Field("", description="What really holds the bytes, such as memfd-2Mi, file-uring or emulated-cxl.")
    emulated: bool = Field(False, description="True when the medium is played by another one.")
    encrypted: bool = Field(False, description="True when every byte at rest is sealed under its scope's data key.")
    capacity_bytes: Count = Field(0, description="Bytes that could be set up.")
    used_bytes: Count = Field(0, description="Rounded to 1 % of the capacity.")
    used_of_capacity: Text = Field("", description="Such as 12Gi/64Gi, for the printer column.")
    blocks: Count = Field(0, description="Blocks held when the status was written.")
    recovered_blocks: Count = Field(0, description="Blocks of an earlier run that were found when the tier came up.")
    numa_nodes: tuple[NumaNode, ...] = Field((), max_length=64, description="NUMA nodes that the bytes lie on.")
    devices: tuple[TierDevice, ...] = Field(
        (), max_length=NVME_PATHS_MAX, description="Devices that blocks are spread over, where they are several."
    )
    probe: TierProbe | None = Field(None, description="Measured at start.")
    demand: TierDemand | None = Field(None, description="Worth of its size; absent before blocks are asked for again.")
    last_error: str = Field("", max_length=1024, description="Last failure of the medium; empty when there was none.")


class LookupCounts(ApiModel):
    """Blocks asked for and found since the agent started; feeds the pool's HIT% column."""

    queried: Count = Field(0, description="Blocks asked for.")
    hit: Count = Field(0, description="Blocks found.")


class ShareHits(ApiModel):
    """Use of one prefix share on this node."""

    uid: Text = Field(description="Uid of the KVPrefixShare.")
    hits: Count = Field(
        0, description="Blocks that its readers were given since the agent started, to within an eighth."
    )


class TenantBytes(ApiModel):
    """Bytes of one tenant in one tier of this node."""

    tenant: str = Field(
        max_length=330, description="Tenant; `domain/...` or `share/...` for blocks whose writer is not known any more."
    )
    tier: Name = Field(description="Tier name.")
    used_bytes: Count = Field(0, description="Bytes of its slots, to within an eighth.")
    over_hard: bool = Field(False, description="True while it holds more than its hard quota, which was lowered.")


class TenantLookups(ApiModel):
    """Blocks that one tenant asked this node for since the agent started, to within an eighth."""

    tenant: str = Field(max_length=330, description="Tenant.")
    queried: Count = Field(0, description="Blocks asked for.")
    hit: Count = Field(0, description="Blocks found.")
    denied: Count = Field(
        0, description="Blocks of scopes that it may not read or write, and those that its hard quota refused."
    )


class TenantErased(ApiModel):
    """Confirmation that a node holds nothing of a tenant from before a key version."""

    uid: Text = Field(description="Uid of the KVTenant.")
    key_version: Count = Field(0, description="Key version in use here; nothing of earlier ones is left.")


class OrderAnswer(ApiModel):
    """How far the agent has come with one order; gone when the order is."""

    uid: Text = Field(description="Uid of the KVOperation.")
    phase: Literal["Running", "Done", "Failed"] = Field(
        description="Running: under way. Done: all of it is done. Failed: it has ended without, for the reason."
    )
    reason: Text = Field("", description="CamelCase cause of Failed.")
    message: str = Field("", max_length=256, description="The same for people, with numbers.")
    blocks_done: Count = Field(0, description="Blocks that were dealt with, to within an eighth.")
    blocks_total: Count = Field(0, description="Blocks that there were, or are to be, to within an eighth.")
    bytes_done: Count = Field(0, description="Bytes of the former, to within an eighth.")
    bytes_total: Count = Field(0, description="Bytes of the latter, to within an eighth.")
    blocks_missing: Count = Field(0, description="Of blocksTotal, those that no agent has, to within an eighth.")


class ModelReport(ApiModel):
    """One revision of a KVModelCache on this node; gone when its files are."""

    name: Name = Field(description="Name of the KVModelCache.")
    uid: Text = Field(description="Uid of the KVModelCache.")
    generation: Count = Field(0, description="Generation of the last order for it that the agent took up.")
    revision: Revision = Field(description="Name of the folder.")
    digest: str = Field("", max_length=71, description="Digest of the files; empty until all of them were listed.")
    state: Literal["Staging", "Staged", "Failed", "Evicted"] = Field(
        description="Staging: files are missing and on their way. Staged: all files are here. Failed: files are "
        "missing, for the reason, and it is tried again. Evicted: they were removed to make room for KV."
    )
    size_bytes: Count = Field(0, description="Bytes of all files; 0 until they were listed.")
    staged_bytes: Count = Field(0, description="Of sizeBytes, those that are here, to within an eighth.")
    source_bytes: Count = Field(0, description="Of stagedBytes, those that came from the source.")
    peer_bytes: Count = Field(0, description="Of stagedBytes, those that came from other agents.")
    shared_bytes: Count = Field(0, description="Of stagedBytes, those that another revision on this node had.")
    in_use: bool = Field(False, description="True while an engine has a file of it open.")
    path: str = Field("", max_length=1024, description="Folder on the node; empty when it has none.")
    reason: Text = Field("", description="CamelCase cause of Failed or Evicted.")
    message: str = Field("", max_length=256, description="The same for people, with numbers.")


class KVPoolNodeStatus(ApiModel):
    """What the agent observed."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of.")
    observed_revision: Text = Field("", description="spec.revision that the agent runs.")
    conditions: Conditions = Field((), description="Observations by type; operator and agent both write here.")
    epoch: Count = Field(0, description="Number of this incarnation of the agent.")
    agent_version: Text = Field("", description="Version of the agent.")
    offload_engine: Text = Field(
        "",
        description="What codes, copies and digests blocks: none (the kernels), reference (by the offload interface), "
        "or name and version of an offload library, with (emulated) for one that plays a device and (lost) for one "
        "that was given up.",
    )
    peer_address: str = Field("", max_length=256, description="host:port where other agents reach this one.")
    tiers: tuple[NodeTierStatus, ...] = Field((), max_length=8, description="Tiers as they are, fast to slow.")
    lookups: LookupCounts = Field(LookupCounts(), description="Lookups since the agent started.")
    shares: tuple[ShareHits, ...] = Field(
        (), max_length=SHARES_MAX, description="Prefix shares that were read here, by uid."
    )
    tenants: tuple[TenantBytes, ...] = Field(
        (), max_length=TENANTS_MAX, description="Bytes by tenant and tier, the most first."
    )
    tenant_lookups: tuple[TenantLookups, ...] = Field(
        (), max_length=TENANTS_MAX, description="Blocks asked for by tenant: those that asked last."
    )
    evicted_per_minute: Count = Field(
        0, description="Blocks that left the last tier that held them within the last minute, to within an eighth."
    )
    directory_backlog: Count = Field(
        0, description="Changes that the directory was not told yet, withdrawals of what is gone among them."
    )
    erased: tuple[TenantErased, ...] = Field(
        (), max_length=ERASING_MAX, description="Erasures under way that are done on this node."
    )
    orders: tuple[OrderAnswer, ...] = Field(
        (), max_length=ORDERS_MAX, description="Answers to spec.orders, by uid of the KVOperation."
    )
    models: tuple[ModelReport, ...] = Field(
        (), max_length=2 * MODELS_MAX, description="Weights that this node has, or is to have."
    )
    memory_bytes: Count = Field(0, description="Physical memory of the node.")
    node: NodeReport | None = Field(None, description="What the machine has; written by node preparation.")


class KVPoolNode(ApiModel):
    """One pool on one node. The operator writes the spec, that node's agent the status."""

    metadata: ObjectMeta
    spec: KVPoolNodeSpec = Field(description="What the operator wants of the agent.")
    status: KVPoolNodeStatus = Field(KVPoolNodeStatus(), description="What the agent observed.")
