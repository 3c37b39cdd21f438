"""KVModelCache: the weights of one model on nodes of a pool, before an engine is started there."""

from typing import Annotated, Final

from pydantic import Field

from kvstrata_api.models.base import ApiModel, Count, Name, ObjectMeta, Text
from kvstrata_api.models.conditions import Conditions
from kvstrata_api.models.operation import FAILURES_MAX, OperationFailure, OperationNodes
from kvstrata_api.models.pool import SecretRef

DEADLINE_S: Final = 3_600
"""Default of `spec.deadlineSeconds`."""
MODEL_WEIGHT: Final = 100
"""Default of `spec.weight`, which is the weight of KV (docs/decisions/067)."""
IDLE_S: Final = 86_400
"""Default of `spec.idleSeconds`."""

Revision = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")]
"""A folder's name, and the value of a label: 1 to 63 characters."""

ListingDigest = Annotated[str, Field(min_length=71, max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
"""SHA-256 of a listing of files: the path, size and SHA-256 of each."""


class ModelSource(ApiModel):
    """Where the files of a model are copied from; nothing is written there."""

    url: str = Field(
        min_length=6,
        max_length=1024,
        pattern=r"^(s3|gs|az|file)://.+$",
        description="s3://, gs:// or az:// URL of a bucket and a prefix, or file:// URL of a folder that every node "
        "mounts. All files below it are copied.",
    )
    secret_ref: SecretRef | None = Field(
        None,
        description="Settings of the store's client by their names, as for a tier of type Object. Absent for file:// "
        "and ambient identity.",
    )


class KVModelCacheSpec(ApiModel):
    """Which weights are wanted, and where."""

    pool_ref: Name = Field(description="KVPool whose nodes, agents and tier hold them.")
    tier: Name | None = Field(
        None,
        description="Tier of the pool, of type NVMe, or HostDRAM with pageSize 4Ki: weights count as bytes of it. "
        "Absent: its first of type NVMe.",
    )
    source: ModelSource = Field(description="Where the files come from.")
    revision: Revision = Field(
        description="Revision of the weights, such as the commit of their repository: name of the folder on nodes and "
        "value of their label. A new one is staged in a folder beside the old one."
    )
    digest: ListingDigest | None = Field(
        None,
        description="SHA-256 of the listing of all files; another one is refused. Absent: the first that a node finds "
        "is in status.digest, and holds for all nodes until spec changes.",
    )
    nodes: OperationNodes | None = Field(None, description="Nodes that are to have them; absent: all of the pool.")
    copies: int | None = Field(
        None,
        ge=1,
        le=5_000,
        description="At most so many of these nodes: those that have them first, then spread over zones. Absent: all.",
    )
    deadline_seconds: int = Field(
        DEADLINE_S,
        ge=1,
        le=604_800,
        description="From the time that a copy is missing: later Staged has the reason DeadlineExceeded, and staging "
        "goes on.",
    )
    weight: int = Field(
        MODEL_WEIGHT,
        ge=1,
        le=10_000,
        description="Share of the bandwidth of each path while it is contended, beside KV, which weighs 100.",
    )
    idle_seconds: int = Field(
        IDLE_S,
        ge=0,
        le=31_536_000,
        description="So long after an engine last had files open, a node may remove them to make room for KV; 0: at "
        "once. Never while they are open.",
    )


class KVModelCacheStatus(ApiModel):
    """What the operator observed."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of.")
    conditions: Conditions = Field((), description="Accepted, Staged and Progressing.")
    tier: str = Field("", max_length=63, description="Tier that holds the files.")
    digest: str = Field("", max_length=71, description="Digest of the listing that nodes are to have.")
    size_bytes: Count = Field(0, description="Bytes of all files.")
    nodes_wanted: Count = Field(0, description="Nodes that are to have them.")
    nodes_staged: Count = Field(0, description="Nodes of these that have all files.")
    nodes_in_use: Count = Field(0, description="Nodes where an engine has files open.")
    summary: Text = Field("", description="The same for the printer column, such as 2/3 nodes, 45%.")
    staging_since: Text = Field(
        "", description="Since when copies are missing, RFC 3339; the deadline runs from here. Empty when none is."
    )
    failures: tuple[OperationFailure, ...] = Field(
        (), max_length=FAILURES_MAX, description="What keeps nodes from having them, by reason."
    )


class KVModelCache(ApiModel):
    """The weights of one model, staged on nodes of a pool before engines start there."""

    metadata: ObjectMeta
    spec: KVModelCacheSpec = Field(description="Which weights are wanted, and where.")
    status: KVModelCacheStatus = Field(KVModelCacheStatus(), description="What the operator observed.")
