"""What the operator remembers of each object: small frozen values, parsed once where they come in. Pure.

Only what a decision reads is kept, because a fleet has many KVPoolNodes; whoever needs more asks the API server.
Versions take no part in comparisons: a heartbeat that changes nothing else is no news.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstrata_api.models.base import ApiModel, ObjectMeta
from kvstrata_api.models.conditions import Condition
from kvstrata_kube.store import version_of
from kvstrata_operator.observe.kinds import Kind, Ref

M = TypeVar("M", bound=ApiModel)


@dataclass(frozen=True, slots=True)
class Declared(Generic[M]):
    """An administrator's object: its metadata always, its model when it can be read."""

    kind: Kind
    meta: ObjectMeta
    model: M | None
    status: Mapping[str, object]
    """As stored, for comparison with what should be stored."""
    conditions: tuple[Condition, ...] = ()
    error: str = ""
    """Why it is refused; empty when it is fine."""

    @property
    def key(self) -> str:
        """Name, with the namespace where there is one."""
        return f"{self.meta.namespace}/{self.meta.name}" if self.meta.namespace else self.meta.name

    @property
    def uid(self) -> str:
        """Identity over delete and create."""
        return self.meta.uid

    @property
    def version(self) -> int:
        """Order of writes, as `version_of` gives it."""
        return version_of(self.meta.resource_version)

    @property
    def ref(self) -> Ref:
        """Address of the object."""
        return Ref(self.kind, self.meta.name, self.meta.namespace or "")

    @property
    def is_deleting(self) -> bool:
        """True once somebody asked for its deletion."""
        return self.meta.deletion_timestamp is not None


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A Node or a Namespace: what matters is which labels it has, and of a Node its huge pages."""

    key: str
    uid: str
    version: int = field(compare=False)
    labels: Mapping[str, str]
    pages_bytes: Mapping[str, int] | None = None
    """Huge pages that its kubelet offers to pods, by resource name; None before it has reported."""


@dataclass(frozen=True, slots=True)
class DrainSeen:
    """`spec.drain` of a KVPoolNode."""

    requested: bool = False
    mode: str = "Demote"
    deadline: str = ""
    """RFC 3339, or empty."""


@dataclass(frozen=True, slots=True)
class DemandSeen:
    """Of a thousand blocks asked for: how many more with a step up, how many fewer with one down."""

    gain_permille: int
    loss_permille: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class TierSeen:
    """One tier as the agent reports it."""

    name: str
    type: str
    phase: str
    capacity_bytes: int
    used_bytes: int
    last_error: str
    demand: DemandSeen | None = None
    """What reuse implies for its size; None of a tier that does not scale, or is not used yet."""
    blocks: int = 0
    """Blocks that it holds, rounded down by an eighth at most."""


@dataclass(frozen=True, slots=True)
class TenantSeen:
    """What one tenant holds of one tier of a node."""

    tenant: str
    tier: str
    used_bytes: int
    over_hard: bool


@dataclass(frozen=True, slots=True)
class TenantAsked:
    """Blocks that one tenant asked a node for, found there, and was denied."""

    tenant: str
    queried: int
    hit: int
    denied: int


@dataclass(frozen=True, slots=True)
class AnswerSeen:
    """What an agent reports of its part of a KVOperation."""

    phase: str
    reason: str
    message: str
    blocks_done: int
    blocks_total: int
    bytes_done: int
    bytes_total: int
    blocks_missing: int = 0


@dataclass(frozen=True, slots=True)
class ModelSeen:
    """What an agent reports of one revision of a KVModelCache."""

    uid: str
    generation: int
    revision: str
    digest: str
    state: str
    size_bytes: int
    staged_bytes: int
    in_use: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ConditionSeen:
    """One condition of a KVPoolNode, without its times."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolNodeSeen:
    """One KVPoolNode."""

    key: str
    uid: str
    version: int = field(compare=False)
    pool: str
    node: str
    is_marked: bool
    """True while it has our labels and an owner, by which it is found and goes."""
    revision: str
    tiers_digest: str
    """Digest of `spec.tiers`, compared with the wanted one."""
    memory_tier_bytes: int
    """Sum of the memory tiers of the spec."""
    drain: DrainSeen
    is_deleting: bool
    observed_revision: str
    conditions: Mapping[str, ConditionSeen]
    tiers: tuple[TierSeen, ...]
    queried_blocks: int
    hit_blocks: int
    memory_bytes: int
    """Physical memory of the node; 0 until the agent has reported it."""
    share_hits: tuple[tuple[str, int], ...] = ()
    """Blocks that readers of prefix shares were given, by the share's uid."""
    tenants: tuple[TenantSeen, ...] = ()
    tenant_lookups: tuple[TenantAsked, ...] = ()
    evicted_per_minute: int = 0
    directory_backlog: int = 0
    """Changes that the agent has not told the directory yet."""
    orders: tuple[str, ...] = ()
    """Uids of the KVOperations that the spec orders a part of."""
    answers: Mapping[str, AnswerSeen] = field(default_factory=dict)
    """What the agent reports of them, by uid."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Digests of the orders for weights in the spec, by uid of the KVModelCache."""
    weights: tuple[ModelSeen, ...] = ()
    """What the agent reports of weights: a KVModelCache may have several revisions here."""
    is_heard: bool = False
    """True when the status speaks of the spec as it is now."""
    erased: Mapping[str, int] = field(default_factory=dict)
    """Key version, by uid of the tenant, before which the node holds nothing any more; only of erasures under way."""
    created: str = ""
    """RFC 3339, or empty."""

    def is_true(self, type_: str) -> bool:
        """True when the condition exists and is True."""
        found = self.conditions.get(type_)
        return found is not None and found.status == "True"

    def is_false(self, type_: str) -> bool:
        """True when the condition exists and is False."""
        found = self.conditions.get(type_)
        return found is not None and found.status == "False"

    @property
    def staged(self) -> frozenset[tuple[str, str, str]]:
        """Uid, revision and digest of the weights that are here."""
        return frozenset((w.uid, w.revision, w.digest) for w in self.weights if w.state == "Staged")

    @property
    def has_reported(self) -> bool:
        """True once an agent has written its conditions; node preparation may have written one before."""
        return "AgentConnected" in self.conditions


@dataclass(frozen=True, slots=True)
class ScopeSecretSeen:
    """A Secret with key material of a scope; the material itself is not kept."""

    key: str
    uid: str
    version: int = field(compare=False)
    resource_version: str = field(compare=False)
    owner_uid: str
    """Uid of the object that the keys were made for; empty on a foreign Secret."""
    versions: frozenset[str]
    """Names of its entries, such as `v1`."""
    wrapped: Mapping[str, str] = field(default_factory=dict)
    """Wrapped data keys by entry, such as `v1.data`: of no use without the KEK that each names."""


@dataclass(frozen=True, slots=True)
class KeksSeen:
    """Which key-encryption keys there are; the keys themselves are not here."""

    numbers: frozenset[int] = frozenset()
    is_absent: bool = False
    """True when the cluster should have a KEK Secret and has none."""

    @property
    def newest(self) -> int:
        """Number of the one that wraps; 0 when there is none."""
        return max(self.numbers, default=0)


@dataclass(frozen=True, slots=True)
class ConfigMapSeen:
    """A ConfigMap of ours."""

    key: str
    uid: str
    version: int = field(compare=False)
    content_digest: str
    entries: frozenset[str] = frozenset()
    """Names of its entries, those that somebody else added included."""
    template: str = ""
    """What agents or Redis are made from, as JSON; empty on ConfigMaps that hold neither."""


Selector = tuple[tuple[str, str], ...]
"""Labels that a node must have, sorted; none for every node."""


@dataclass(frozen=True, slots=True)
class MadeSeen:
    """A DaemonSet or a PodDisruptionBudget of ours."""

    key: str
    uid: str
    version: int = field(compare=False)
    content_digest: str
    """As it was made, see `kinds.sealed`."""
    selectors: frozenset[Selector] = frozenset()
    """Of nodes that a DaemonSet picks by their labels; any one is enough."""


@dataclass(frozen=True, slots=True)
class StatefulSetSeen:
    """The StatefulSet of Redis, whoever made it."""

    key: str
    uid: str
    version: int = field(compare=False)
    body: Mapping[str, object]
    """Labels, annotations and owners under `metadata`, and `spec`, as stored."""
    memory_bytes: int
    """`maxmemory` that it was made with; 0 when it declares none."""
    is_deleting: bool
    is_observed: bool
    """True when the status speaks of the spec as it is now."""
    ready: int
    """Pods that are ready."""
    updated: int
    """Pods of the template as it is now."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a pod of agents has for tiers."""

    paths: frozenset[str] = frozenset()
    """Directories of the host."""
    limits_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory and huge pages by resource name; memory is without limit where none is given."""

    def covers(self, other: "Room") -> bool:
        """True when tiers that were made for `other` fit in here."""
        held = {"memory": float("inf"), **self.limits_bytes}
        is_enough = all(held.get(name, 0) >= wanted for name, wanted in other.limits_bytes.items())
        return is_enough and other.paths <= self.paths


@dataclass(frozen=True, slots=True)
class AgentPodSeen:
    """One pod of a pool's DaemonSet."""

    key: str
    uid: str
    version: int = field(compare=False)
    pool: str
    node: str
    """Name of the Node that it runs on or is meant for."""
    revision: str
    """Of the template that it was made from."""
    created: str
    """RFC 3339."""
    is_deleting: bool
    is_ready: bool
    ready_since: str
    """When `is_ready` last changed, RFC 3339; empty before the kubelet has reported."""
    trouble: str
    """Why it does not run, in the words of scheduler or kubelet; empty when nothing is wrong."""
    room: Room
    has_small_pages: bool = False
    """True when it was made for a node that lacks its pool's huge pages."""
    unstarted_since: str = ""
    """Since when it has a node and no sandbox there, for want of a volume or of network, RFC 3339; empty otherwise."""
    awaited: tuple[str, ...] = ()
    """Folders of the host that have to be there before it gets one, sorted."""
