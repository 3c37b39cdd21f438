"""KVOperation: one piece of work that an administrator wants done once, with progress, an end and a way to stop it."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from kvstrata_api.models.base import ApiModel, Count, LabelValue, Name, ObjectMeta, ObjectName, Quantity, Text
from kvstrata_api.models.conditions import Conditions

TIMEOUT_S: Final = 3600
"""Default of `spec.timeoutSeconds`."""
FAILURES_MAX: Final = 16
"""Reasons that a status lists; there are fewer kinds of them."""


PREFIXES_MAX: Final = 64
"""Prefixes that one warming names."""

BlockDigest = Annotated[str, Field(min_length=40, max_length=40, pattern=r"^[0-9a-f]{40}$")]
"""Key of a block within its scope, in hex."""


class OperationNodes(ApiModel):
    """Which of the pool's nodes. A node is meant that is named or that has all labels."""

    names: tuple[ObjectName, ...] = Field((), max_length=256, description="Names of Nodes of the pool.")
    match_labels: dict[str, LabelValue] = Field({}, max_length=32, description="Labels of Nodes; all must match.")


class DrainOperation(ApiModel):
    """Let nodes, or one tier of them, take no new blocks and bring theirs elsewhere while the KVOperation exists."""

    nodes: OperationNodes = Field(description="Nodes to drain.")
    tier: Name | None = Field(
        None, description="Tier of the pool that is emptied into the others; absent: all, into tiers that survive."
    )


class FlushOperation(ApiModel):
    """Take blocks away that nobody holds: those that are leased, pinned or decoded from stay."""

    nodes: OperationNodes | None = Field(None, description="Nodes to flush; absent: all of the pool.")
    tier: Name | None = Field(None, description="Tier of the pool to flush; absent: all.")
    mode: Literal["Drop", "Demote"] = Field(
        "Drop", description="Drop: they are removed. Demote: they are brought to the next slower tier that takes them."
    )


class EraseOperation(ApiModel):
    """Erase all blocks of a tenant: keys are shredded, agents confirm."""

    tenant: Name = Field(description="KVTenant. What its engines store from then on has another key.")


class WarmOperation(ApiModel):
    """Bring prefixes of a tenant to nodes before its engines ask for them there. Who may read them stays as it is."""

    nodes: OperationNodes | None = Field(None, description="Nodes to warm; absent: all of the pool.")
    tenant: Name = Field(
        description="KVTenant: the scopes that its engines may read are searched, and its quotas hold."
    )
    prefixes: tuple[BlockDigest, ...] = Field(
        (),
        max_length=PREFIXES_MAX,
        description="Last block of each prefix, as `explain` lists the heads of a session; all before it come along.",
    )
    archived_sessions: bool = Field(
        False, description="Also the archived sessions that each node remembers, the last archived first."
    )
    max_bytes: Quantity | None = Field(
        None, description="Most that each node brings; absent: as much as its tier holds below the low watermark."
    )
    tier: Name | None = Field(
        None, description="Tier of the pool to bring them to; absent: the one that engines read from."
    )


class MigrateOperation(ApiModel):
    """Bring blocks of a pool to another one of the same model and layout; who may read them stays as it is."""

    to: Name = Field(description="KVPool that the blocks go to: equal compatibility, another name.")
    nodes: OperationNodes | None = Field(None, description="Nodes whose blocks go; absent: all of the pool.")
    tenant: Name | None = Field(None, description="KVTenant whose blocks go; absent: those of all tenants.")
    tier: Name | None = Field(
        None, description="Tier of the other pool; absent: the fastest that survives a restart, or else of all."
    )
    keep_source: bool = Field(
        False, description="Keep the blocks here as well; absent: each is dropped once the other pool has it."
    )


class KVOperationSpec(ApiModel):
    """What is to be done. Only `cancel` may change."""

    type: Literal["Drain", "Flush", "Erase", "Warm", "Migrate"] = Field(
        description="The block of this name is set, and no other. Drain: nodes or a tier are emptied and kept so. "
        "Flush: blocks that nobody holds are removed or demoted. Erase: all that a tenant has is made unreadable and "
        "removed. Warm: prefixes are brought to nodes. Migrate: blocks are brought to another pool."
    )
    pool_ref: Name | None = Field(None, description="Pool; not with Erase, which is for all pools.")
    drain: DrainOperation | None = Field(None, description="Set when type is Drain.")
    flush: FlushOperation | None = Field(None, description="Only for type Flush; absent: all blocks are dropped.")
    erase: EraseOperation | None = Field(None, description="Set when type is Erase.")
    warm: WarmOperation | None = Field(None, description="Set when type is Warm.")
    migrate: MigrateOperation | None = Field(None, description="Set when type is Migrate.")
    timeout_seconds: int = Field(
        TIMEOUT_S, ge=1, le=604_800, description="From the start; what is not done by then has failed."
    )
    ttl_seconds_after_finished: int | None = Field(
        None, ge=0, le=31_536_000, description="The object is deleted so long after its end; absent: never."
    )
    cancel: bool = Field(False, description="Stop; what was done stays done, and a drain is undone.")

    @model_validator(mode="before")
    @classmethod
    def _with_flush(cls, spec: Any) -> Any:
        """A Flush has a block, which a manifest may leave out: all its fields have defaults."""
        if isinstance(spec, dict) and spec.get("type") == "Flush" and spec.get("flush") is None:
            return {**spec, "flush": {}}
        return spec


class OperationProgress(ApiModel):
    """How far it has come. Blocks and bytes are rounded down by an eighth at most."""

    nodes_done: Count = Field(0, description="Nodes that are done.")
    nodes_total: Count = Field(0, description="Nodes that are meant.")
    blocks_done: Count = Field(0, description="Blocks that were dealt with.")
    blocks_total: Count = Field(0, description="Blocks that the nodes found, or are to have, when they began.")
    bytes_done: Count = Field(0, description="Bytes of the former.")
    bytes_total: Count = Field(0, description="Bytes of the latter.")
    blocks_missing: Count = Field(0, description="Of blocksTotal, those that no agent has; of Warm.")


class OperationFailure(ApiModel):
    """What keeps, or kept, nodes from being done, for one reason."""

    reason: Text = Field(description="CamelCase, for programs.")
    nodes: Count = Field(0, description="Nodes that it happened on.")
    node: str = Field("", max_length=253, description="The first of them by name.")
    message: str = Field("", max_length=512, description="What that node reports.")


class KVOperationStatus(ApiModel):
    """What the operator observed."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of.")
    conditions: Conditions = Field(
        (), description="Accepted, Progressing, and at the end one of Complete, Failed and Cancelled."
    )
    state: Text = Field("", description="Pending, Progressing, Complete, Failed or Cancelled.")
    started_at: Text = Field("", description="When it was first accepted, RFC 3339; its time runs from here.")
    finished_at: Text = Field("", description="When it ended, RFC 3339.")
    progress: OperationProgress = Field(OperationProgress(), description="How far it has come.")
    summary: Text = Field("", description="The same for the printer column, such as 2/3 nodes, 45%.")
    failures: tuple[OperationFailure, ...] = Field(
        (), max_length=FAILURES_MAX, description="What keeps nodes from being done, by reason."
    )


class KVOperation(ApiModel):
    """One piece of work on a pool: carried out once, watched, cancelled."""

    metadata: ObjectMeta
    spec: KVOperationSpec = Field(description="What is to be done. Only `cancel` may change.")
    status: KVOperationStatus = Field(KVOperationStatus(), description="What the operator observed.")
