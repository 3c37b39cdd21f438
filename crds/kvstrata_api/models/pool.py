"""KVPool: what an administrator declares about one model's KV cache on a set of nodes."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from kvstrata_api.models.base import SET, ApiModel, Count, LabelValue, Name, ObjectMeta, ObjectName, Quantity, Text
from kvstrata_api.models.conditions import Conditions
from kvstrata_api.tiers import MEDIA, CxlMode, Persistence, TierType

BLOCK_TOKENS: Final = 16
DTYPE: Final = "bf16"
ANY: Final = "*"
"""Model or revision of a pool that serves each engine its own: both are in the layout id, so no block is taken for
another's."""
HIGH_WATERMARK_PERCENT: Final = 92
LOW_WATERMARK_PERCENT: Final = 85
PAGE_SIZE: Final = "2Mi"
CALIBRATED_LAYOUTS_MAX: Final = 16
CALIBRATED_PLANES_MAX: Final = 8192
"""Of one layout: 128 layers of 32 KV heads."""

Path = Annotated[str, Field(min_length=2, max_length=1024, pattern=r"^/.*$")]
"""Absolute path on the node."""

_PERSISTENCE: Final = (
    "Auto: blocks outlive a restart of the agent where it has a memory file system; AgentRestart: the same, and the "
    "status reports when it cannot be; None: memory ends with the agent."
)

NVME_PATHS_MAX: Final = 16
"""Devices of one tier: what large servers have, few enough to be label values, and rules over all pairs stay cheap."""


class Compatibility(ApiModel):
    """What makes KV blocks of equal tokens equal bytes; enters the layout id together with the engine's geometry."""

    model: str = Field(ANY, min_length=1, max_length=253, description="Model name, as the engine knows it; * for any.")
    revision: str = Field(ANY, min_length=1, max_length=128, description="Revision of the weights; * for any.")
    dtype: Literal["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int8"] = Field(
        DTYPE,
        description="Element type of the KV cache; engines with another one are refused. bf16 and fp16: floats of two "
        "bytes. fp32: floats of four. fp8_e4m3 and fp8_e5m2: floats of one byte. int8: integers of one byte, as the "
        "engine scales them.",
    )
    block_tokens: int = Field(BLOCK_TOKENS, ge=1, le=1024, description="Tokens in one block.")


class HbmTier(ApiModel):
    """GPU memory: all GPUs of the node take part."""

    reading: Literal["Copied", "InPlace"] = Field(
        "Copied",
        description="Copied: a block is copied to host memory for its readers. InPlace: engines that can open the "
        "GPU's memory copy a tenant's own blocks on the GPU; those of domains and shares are copied as before, because "
        "whoever opens such memory can write it.",
    )


class HostDramTier(ApiModel):
    """Host memory."""

    page_size: Literal["4Ki", "2Mi", "1Gi"] = Field(
        PAGE_SIZE,
        description="2Mi and 1Gi: huge pages of the node; where it has too few, 4Ki with a condition. 4Ki: ordinary "
        "pages, which every node has.",
    )
    numa: Literal["Spread", "Local"] = Field(
        "Spread",
        description="Spread: interleaved over all NUMA nodes with processors. Local: on the first of them, whose "
        "memory has to hold all of it.",
    )
    persistence: Persistence = Field("Auto", description=_PERSISTENCE)


class CxlEmulation(ApiModel):
    """A file in place of CXL silicon; status, logs and metrics show `emulated`."""

    path: Path = Field(description="Directory for the backing file.")
    latency_ns: int = Field(350, ge=0, le=1_000_000, description="Extra latency of one access, in nanoseconds.")


class CxlPooled(ApiModel):
    """A memory device that several nodes reach, as a switch or a multi-headed device offers."""

    path: Path = Field(
        description="The dax device, equal on all nodes (a link that udev makes). A regular file plays one for agents "
        "of one machine, and status, logs and metrics show `emulated`."
    )


class CxlTier(ApiModel):
    """CXL memory."""

    mode: CxlMode = Field(
        CxlMode.NUMA_NODE,
        description="NumaNode: memory of NUMA nodes without processors. DevDax: a dax device that is mapped. Pooled: "
        "one that several nodes reach; each claims room in it, and reads in place what the others have there. "
        "Emulated: memory of the host plays it.",
    )
    pooled: CxlPooled | None = Field(None, description="Set exactly when mode is Pooled.")
    emulated: CxlEmulation | None = Field(None, description="Set exactly when mode is Emulated.")
    persistence: Persistence = Field("Auto", description=_PERSISTENCE)


DevicePath = Annotated[str, Field(min_length=2, max_length=256, pattern=r"^/.*$")]
"""Absolute path of one of several devices; shorter than `Path`, for every pair of them is compared."""


class NvmeTier(ApiModel):
    """Local NVMe, as files in a directory of its own, or in one on each of several devices."""

    path: Path | None = Field(None, description="Directory on the node; one pool owns it. Either this or paths.")
    paths: tuple[DevicePath, ...] | None = Field(
        None,
        min_length=1,
        max_length=NVME_PATHS_MAX,
        json_schema_extra=SET,
        description="Directories on devices of their own: blocks are spread over them, and a device that fails costs "
        "its own blocks. Either this or path.",
    )
    io: Literal["Auto", "Uring", "Posix"] = Field(
        "Auto",
        description="Auto: measures both at start and takes the faster. Uring: io_uring through NIXL, or Posix with a "
        "condition where that does not work. Posix: threads that read and write.",
    )

    @property
    def directories(self) -> tuple[str, ...]:
        """All directories, in the declared order; empty when neither field is set."""
        return self.paths or ((self.path,) if self.path is not None else ())


class RemoteFlashTier(ApiModel):
    """Flash that several nodes mount."""

    path: Path = Field(description="Mount point, equal on all nodes.")


class SecretRef(ApiModel):
    """A Secret in the system namespace."""

    name: ObjectName = Field(description="Name of the Secret.")


class ObjectTier(ApiModel):
    """Object store."""

    url: str = Field(
        min_length=4,
        max_length=1024,
        pattern=r"^(s3|gs|az|file)://.+$",
        description="s3://, gs://, az:// or file:// URL.",
    )
    secret_ref: SecretRef | None = Field(
        None,
        description="Settings of the store's client by their names, such as aws_access_key_id, aws_secret_access_key, "
        "aws_region and aws_endpoint; read when the tier is opened. Absent for file:// and ambient identity.",
    )


class Encryption(ApiModel):
    """Encryption of bytes at rest."""

    type: Literal["None", "AESGCM"] = Field(
        "None",
        description="None: bytes lie as they are. AESGCM: sealed by AES-256-GCM under a key of their trust scope; for "
        "NVMe, RemoteFlash and Object.",
    )


class TierAutoscale(ApiModel):
    """Size of a tier by what it brings: hits of the blocks that are asked for again."""

    min_per_node: Quantity = Field(description="Never fewer bytes on a node.")
    max_per_node: Quantity = Field(description="Never more bytes on a node.")
    min_gain_permille: int = Field(
        10,
        ge=1,
        le=1000,
        description="Grow by a quarter while so many more of a thousand blocks asked for would be found; shrink as far "
        "while that costs at most half as many.",
    )
    cooldown_seconds: int = Field(300, ge=10, le=86_400, description="Between two steps of a tier.")


TIER_NAMES: Final = {
    TierType.HBM: "hbm",
    TierType.HOST_DRAM: "dram",
    TierType.CXL: "cxl",
    TierType.NVME: "nvme",
    TierType.REMOTE_FLASH: "flash",
    TierType.OBJECT: "object",
}
"""What a tier is called that has no name."""


def with_name(tier: Any) -> Any:
    """A tier's JSON with its name, where a manifest leaves that out."""
    of = tier.get("type") if isinstance(tier, dict) and tier.get("name") is None else None
    return {**tier, "name": TIER_NAMES[TierType(of)]} if isinstance(of, str) and of in {*TIER_NAMES} else tier


_OPTIONAL_BLOCKS: Final = {TierType.HBM: ("hbm", "hbm"), TierType.HOST_DRAM: ("host_dram", "hostDRAM")}


def with_block(tier: Any) -> Any:
    """A tier's JSON with the block of its type, where a manifest may leave that out: all its fields have defaults."""
    for of, names in _OPTIONAL_BLOCKS.items():
        if isinstance(tier, dict) and tier.get("type") == of and all(tier.get(name) is None for name in names):
            return {**tier, names[1]: {}}
    return tier


class PoolTier(ApiModel):
    """One tier of a pool; no block but the one that matches `type` is set."""

    name: Name = Field(
        "",
        description="Unique in the pool; label value in metrics, and what quotas and operations name. Absent: hbm, "
        "dram, cxl, nvme, flash or object, by type.",
    )
    type: TierType = Field(description=f"Medium; immutable. {MEDIA}")
    capacity_per_node: Quantity | None = Field(None, description="Bytes on each node (not RemoteFlash, Object).")
    capacity: Quantity | None = Field(None, description="Bytes in all (only RemoteFlash and Object).")
    autoscale: TierAutoscale | None = Field(
        None,
        description="Let the tier grow and shrink; it begins at capacityPerNode, or at the nearer bound where that is "
        "outside. HostDRAM, CXL and NVMe.",
    )
    hbm: HbmTier | None = Field(None, description="Only for type HBM; may be left out.")
    host_dram: HostDramTier | None = Field(
        None, alias="hostDRAM", description="Only for type HostDRAM; may be left out."
    )
    cxl: CxlTier | None = Field(None, description="Set exactly when type is CXL.")
    nvme: NvmeTier | None = Field(None, description="Set exactly when type is NVMe.")
    remote_flash: RemoteFlashTier | None = Field(None, description="Set exactly when type is RemoteFlash.")
    object: ObjectTier | None = Field(None, description="Set exactly when type is Object.")
    encryption: Encryption = Field(Encryption(), description="Encryption at rest of this tier.")

    _block = model_validator(mode="before")(with_block)
    _name = model_validator(mode="before")(with_name)


class EvictionPolicy(ApiModel):
    """When and what to demote."""

    type: Literal["ReuseAware", "LeafLRU"] = Field(
        "ReuseAware",
        description="ReuseAware: the block leaves first that is least likely to be used again soon, as learned from "
        "requests and hints. LeafLRU: the least recently used. With either children leave before their parents.",
    )
    high_watermark_percent: int = Field(
        HIGH_WATERMARK_PERCENT, ge=2, le=100, description="Fill at which demotion starts."
    )
    low_watermark_percent: int = Field(LOW_WATERMARK_PERCENT, ge=1, le=99, description="Fill at which it stops.")


class AdmissionPolicy(ApiModel):
    """Which new blocks enter the fast tiers."""

    type: Literal["Always", "Auto", "Never"] = Field(
        "Auto",
        description="Always: new blocks stay in memory until it is full, and all that leaves it goes to slower tiers. "
        "Auto: what first turns have above the high watermark goes down at once; what is unlikely to return is not "
        "written to flash or an object store, as long as that costs less than a point of the hit ratio. Never: all "
        "goes down at once.",
    )


class PlacementPolicy(ApiModel):
    """Where a block goes when it leaves a tier."""

    type: Literal["ReuseInterval", "Cascade"] = Field(
        "ReuseInterval",
        description="ReuseInterval: a block that leaves a tier goes to the fastest slower one that has room, or where "
        "it is expected back sooner than what leaves that. Cascade: to the next slower one.",
    )


class PrefetchPolicy(ApiModel):
    """What is brought up before it is asked for."""

    type: Literal["Urgency", "None"] = Field(
        "Urgency", description="Urgency: blocks of sessions that will soon go on are brought up. None: nothing is."
    )
    max_inflight_bytes: Quantity = Field(2 << 30, description="Bound on bytes in flight.")


class RecomputePolicy(ApiModel):
    """When recomputing is cheaper than fetching."""

    type: Literal["CostModel", "AlwaysFetch"] = Field(
        "CostModel",
        description="CostModel: what is slower to fetch than to compute is computed. AlwaysFetch: all is fetched.",
    )
    prefill_tokens_per_second: int | None = Field(
        None,
        ge=1,
        le=100_000_000,
        description="Tokens of prompts that an engine computes in a second, until it reports its own rate. Absent: as "
        "agents see it from outside; until they have seen some prompts, everything is fetched.",
    )


class RetentionPolicy(ApiModel):
    """How long sessions keep their blocks, and how many copies of one the fleet keeps."""

    tool_gap_seconds: int = Field(300, ge=0, le=86_400, description="Expected return within a tool call.")
    idle_seconds: int = Field(3_600, ge=0, le=31_536_000, description="After this a session counts as finished.")
    archive: bool = Field(True, description="Finished sessions with a reusable prefix go to slow tiers, not away.")
    copies: int = Field(
        2, ge=1, le=16, description="Copies of a block on different nodes that are wanted; more go where they are idle."
    )


class CalibratedLayout(ApiModel):
    """What `kvstrata calibrate` found in captured KV of one layout: where to begin, never what may be lost."""

    layout_id: str = Field(min_length=32, max_length=32, pattern=r"^[0-9a-f]{32}$", description="Id of the layout.")
    max_relative_error_permille: int = Field(ge=1, le=500, description="Permitted error that it was made for.")
    forms: str = Field(
        min_length=2,
        max_length=CALIBRATED_PLANES_MAX,
        pattern=r"^[0-5]+$",
        description="Form of each plane, by layer, K before V, head: 0 int4 and 2 e4m3 and 3 int8 by token, 1 int4 and "
        "4 int8 by channel, 5 exact.",
    )


class CompressionPolicy(ApiModel):
    """How blocks are stored below memory."""

    mode: Literal["None", "Lossless", "Auto"] = Field(
        "Lossless",
        description="None: blocks are stored as they are. Lossless: packed, and read back bit for bit. Auto: the same "
        "until maxRelativeErrorPermille is above 0; then in the smallest form that keeps within that error.",
    )
    max_relative_error_permille: int = Field(
        0, ge=0, le=500, description="Permitted error of lossy codecs; only mode Auto has any."
    )
    calibration: Annotated[tuple[CalibratedLayout, ...], Field(max_length=CALIBRATED_LAYOUTS_MAX)] = Field(
        (), description="Forms that mode Auto tries first; those for another permitted error are left alone."
    )


class PoolPolicy(ApiModel):
    """What to keep, where, and when to give up."""

    eviction: EvictionPolicy = Field(EvictionPolicy(), description="Eviction and demotion.")
    admission: AdmissionPolicy = Field(AdmissionPolicy(), description="Admission of new blocks.")
    placement: PlacementPolicy = Field(PlacementPolicy(), description="Choice of tier.")
    prefetch: PrefetchPolicy = Field(PrefetchPolicy(), description="Prefetch.")
    recompute: RecomputePolicy = Field(RecomputePolicy(), description="Recompute or fetch.")
    retention: RetentionPolicy = Field(RetentionPolicy(), description="Retention of sessions.")
    compression: CompressionPolicy = Field(CompressionPolicy(), description="Codecs.")


class RedisExternal(ApiModel):
    """A Redis that others run."""

    secret_ref: SecretRef = Field(description="Secret with url, username, password and optionally ca.crt.")


class RedisSpec(ApiModel):
    """Where the directory lives."""

    mode: Literal["Embedded", "External"] = Field(
        "Embedded",
        description="Embedded: kvstrata runs it. External: others run it, and the Secret of `external` says where. Has "
        "to be what the release was installed with.",
    )
    external: RedisExternal | None = Field(None, description="Set exactly when mode is External.")


class MetadataSpec(ApiModel):
    """The directory of the pool."""

    redis: RedisSpec = Field(RedisSpec(), description="Redis behind the directory.")


class DrainSpec(ApiModel):
    """What an agent does with its blocks before it stops."""

    mode: Literal["Demote", "Drop"] = Field(
        "Demote",
        description="Demote: blocks are brought to a tier that survives the agent first. Drop: they go with the agent.",
    )
    timeout_seconds: int = Field(300, ge=0, le=86_400, description="Bound on the drain.")


class UpdateStrategy(ApiModel):
    """How changes roll over the nodes."""

    type: Literal["RollingUpdate", "OnDelete"] = Field(
        "RollingUpdate",
        description="RollingUpdate: the operator replaces agents, maxUnavailable nodes at once. OnDelete: an agent is "
        "replaced when somebody deletes its pod.",
    )
    max_unavailable: int = Field(1, ge=1, le=5_000, description="Nodes that may be away at once.")
    drain: DrainSpec = Field(DrainSpec(), description="Drain before restart.")
    progress_deadline_seconds: int = Field(
        600,
        ge=1,
        le=86_400,
        description="A rollout stops when a pod of the new revision is not ready for so long.",
    )


class Toleration(ApiModel):
    """One taint that the agents tolerate; the fields mean what they mean in a pod."""

    key: str | None = Field(None, max_length=316, description="Taint key; absent with operator Exists: every key.")
    operator: Literal["Exists", "Equal"] = Field(
        "Equal",
        description="Equal: taints of this key and value are tolerated. Exists: those of this key with any value.",
    )
    value: LabelValue | None = Field(None, description="Taint value; only with operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None,
        description="Absent: every effect. NoSchedule: taints that keep new pods off. PreferNoSchedule: that keep them "
        "off where there is another node. NoExecute: that evict running pods too.",
    )
    toleration_seconds: int | None = Field(
        None, ge=0, le=31_536_000, description="For how long a NoExecute taint is tolerated; absent: for ever."
    )


class KVPoolSpec(ApiModel):
    """What the administrator wants."""

    node_selector: dict[str, LabelValue] = Field(
        {}, max_length=64, description="Labels of the nodes; empty selects all."
    )
    tolerations: tuple[Toleration, ...] = Field((), max_length=32, description="Tolerations of the agents.")
    compatibility: Compatibility = Field(
        Compatibility(), description="Model identity; immutable. Absent: any model, with KV in bf16."
    )
    tiers: tuple[PoolTier, ...] = Field(min_length=1, max_length=8, description="Fast to slow, unique names.")
    policy: PoolPolicy = Field(PoolPolicy(), description="What to keep and where.")
    metadata: MetadataSpec = Field(MetadataSpec(), description="Directory.")
    update_strategy: UpdateStrategy = Field(UpdateStrategy(), description="Rollout of changes.")
    deletion_policy: Literal["Retain", "Destroy"] = Field(
        "Retain", description="Retain: files and objects stay when the pool is deleted. Destroy: they are removed."
    )
    destroy_confirmation: str | None = Field(
        None, max_length=64, description="Must be destroy-all-kv-blocks when deletionPolicy is Destroy."
    )
    paused: bool = Field(False, description="Stop reconciling this pool; agents keep serving.")


class PoolNodeCounts(ApiModel):
    """How many nodes are in which state."""

    matched: Count = Field(0, description="Nodes that the selector picks.")
    ready: Count = Field(0, description="Nodes whose agent is ready.")
    updated: Count = Field(0, description="Nodes whose agent runs the update revision.")
    draining: Count = Field(0, description="Nodes whose agent is being emptied.")
    degraded: Count = Field(0, description="Nodes whose agent serves with less than was asked for.")


class PoolTierStatus(ApiModel):
    """One tier over all nodes."""

    name: Name = Field(description="Tier name.")
    capacity: Quantity | None = Field(None, description="Bytes that the pool asks for on all matched nodes.")
    allocatable: Text = Field("0", description="Bytes that the agents could set up.")
    used: Text = Field("0", description="Bytes that hold blocks.")


class TierScale(ApiModel):
    """Where autoscaling has brought a tier."""

    tier: Name = Field(description="Tier name.")
    capacity_per_node: Count = Field(description="Bytes on each node now.")
    stepped_at: Text = Field("", description="RFC 3339; time of the last step, empty before the first.")
    message: str = Field("", max_length=256, description="The last step and the figures that it was made by.")


class ConfigMapRef(ApiModel):
    """A ConfigMap."""

    namespace: str = Field(max_length=63, description="Namespace of the ConfigMap.")
    name: str = Field(max_length=253, description="Name of the ConfigMap.")


class PoolConnection(ApiModel):
    """How engine pods find the pool."""

    config_map_ref: ConfigMapRef = Field(description="Socket path, audience and layout facts of the pool.")


class KVPoolStatus(ApiModel):
    """What the operator observed."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of.")
    conditions: Conditions = Field((), description="Observations by type.")
    nodes: PoolNodeCounts = Field(PoolNodeCounts(), description="Nodes by state.")
    tiers: tuple[PoolTierStatus, ...] = Field((), max_length=8, description="Tiers over all nodes, fast to slow.")
    autoscaling: tuple[TierScale, ...] = Field((), max_length=8, description="Sizes of tiers that scale by themselves.")
    nodes_ready: Text = Field("", description="ready/matched, for the printer column.")
    used_of_capacity: Text = Field("", description="Such as 1.2Ti/3Ti, for the printer column.")
    hit_percent: int | None = Field(
        None, ge=0, le=100, description="Hits per hundred looked-up blocks since agents started."
    )
    evictions_per_second: Text = Field(
        "", description="Blocks that left the last tier that held them, over the last minute."
    )
    gc_backlog: Count = Field(
        0, description="Changes that agents have not told the directory yet, withdrawals of what is gone among them."
    )
    tenants: Count = Field(0, description="Tenants that may use the pool.")
    current_revision: Text = Field("", description="Revision that most agents run.")
    update_revision: Text = Field("", description="Revision that the spec asks for.")
    connection: PoolConnection | None = Field(None, description="What an engine pod needs to attach.")


class KVPool(ApiModel):
    """One model's KV cache over the nodes that the selector picks."""

    metadata: ObjectMeta
    spec: KVPoolSpec = Field(description="What the administrator wants.")
    status: KVPoolStatus = Field(KVPoolStatus(), description="What the operator observed.")
