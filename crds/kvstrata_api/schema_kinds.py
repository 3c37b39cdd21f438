"""The kinds of the API group with everything that their CRDs hold beyond the models. Pure."""

from dataclasses import dataclass
from typing import Any, Final

from kvstrata_api.models.base import ApiModel
from kvstrata_api.models.model_cache import KVModelCache
from kvstrata_api.models.operation import KVOperation
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import KVPoolNode
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.rules import model_cache, operation, pool, trust
from kvstrata_api.rules.rule import AnyRule


@dataclass(frozen=True, slots=True)
class Column:
    """One column of `kubectl get`."""

    name: str
    path: str
    """JSONPath; of several matches the first is shown."""
    type: str = "string"
    is_wide: bool = False
    """Shown with `-o wide` only."""

    @property
    def definition(self) -> dict[str, Any]:
        """Entry of `additionalPrinterColumns`."""
        wide = {"priority": 1} if self.is_wide else {}
        return {"name": self.name, "type": self.type, "jsonPath": self.path} | wide


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind."""

    name: str
    plural: str
    short: str
    model: type[ApiModel]
    rules: tuple[AnyRule, ...]
    columns: tuple[Column, ...]
    is_namespaced: bool = False
    name_chars_max: int = 63
    """Names become metric labels and parts of other names; 63 means an RFC 1123 label, 253 a subdomain."""


def _condition(name: str, type_: str, field: str = "status", *, is_wide: bool = False) -> Column:
    """Make a column of one field of one condition."""
    return Column(name, f'.status.conditions[?(@.type=="{type_}")].{field}', is_wide=is_wide)


def _tier(name: str, type_: str) -> Column:
    """Make a column of the first tier of a type."""
    return Column(name, f'.status.tiers[?(@.type=="{type_}")].usedOfCapacity')


_READY: Final = _condition("Ready", "Ready")
_MESSAGE: Final = _condition("Message", "Ready", "message", is_wide=True)
_AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")

KINDS: Final = (
    Kind(
        "KVPool",
        "kvpools",
        "kvp",
        KVPool,
        tuple(pool.POOL),
        (
            _READY,
            Column("Nodes", ".status.nodesReady"),
            Column("Used/Cap", ".status.usedOfCapacity"),
            Column("Hit%", ".status.hitPercent", "integer"),
            Column("Tenants", ".status.tenants", "integer"),
            Column("Policy", ".spec.policy.eviction.type", is_wide=True),
            Column("Evict/s", ".status.evictionsPerSecond", is_wide=True),
            Column("GC-Backlog", ".status.gcBacklog", "integer", is_wide=True),
            _MESSAGE,
            _AGE,
        ),
    ),
    Kind(
        "KVPoolNode",
        "kvpoolnodes",
        "kvpn",
        KVPoolNode,
        tuple(pool.POOL_NODE),
        (
            Column("Node", ".spec.nodeName"),
            _READY,
            _tier("HBM", "HBM"),
            _tier("DRAM", "HostDRAM"),
            _tier("CXL", "CXL"),
            _tier("NVMe", "NVMe"),
            _condition("Heartbeat", "AgentConnected"),
            Column("Epoch", ".status.epoch", "integer", is_wide=True),
            Column("Version", ".status.agentVersion", is_wide=True),
            _MESSAGE,
            _AGE,
        ),
        name_chars_max=253,
    ),
    Kind(
        "KVTenant",
        "kvtenants",
        "kvt",
        KVTenant,
        tuple(trust.TENANT),
        (
            _READY,
            Column("Domain", ".status.effectiveDomain"),
            Column("Quota", ".status.quota"),
            Column("Used", ".status.used"),
            Column("Hit%", ".status.hitPercent", "integer"),
            Column("Denied", ".status.denied", "integer"),
            Column("Over-Quota", ".spec.overQuota", is_wide=True),
            Column("Key", ".status.keyVersion", "integer", is_wide=True),
            _MESSAGE,
            _AGE,
        ),
    ),
    Kind(
        "KVTrustDomain",
        "kvtrustdomains",
        "kvtd",
        KVTrustDomain,
        tuple(trust.TRUST_DOMAIN),
        (
            _READY,
            Column("Sharing", ".spec.sharing"),
            Column("Key", ".status.keyVersion", "integer"),
            Column("Members", ".status.members", is_wide=True),
            _MESSAGE,
            _AGE,
        ),
    ),
    Kind(
        "KVPrefixShare",
        "kvprefixshares",
        "kvps",
        KVPrefixShare,
        tuple(trust.PREFIX_SHARE),
        (
            Column("Pool", ".spec.poolRef"),
            _condition("Active", "Active"),
            Column("Expires", ".spec.expiresAt"),
            Column("Consumers", ".status.consumers", "integer"),
            Column("Hits", ".status.hits", "integer"),
            _condition("Message", "Active", "message", is_wide=True),
            _AGE,
        ),
        is_namespaced=True,
    ),
    Kind(
        "KVOperation",
        "kvoperations",
        "kvop",
        KVOperation,
        tuple(operation.OPERATION),
        (
            Column("Type", ".spec.type"),
            Column("Pool", ".spec.poolRef"),
            Column("Progress", ".status.summary"),
            Column("State", ".status.state"),
            _condition("Message", "Progressing", "message", is_wide=True),
            _AGE,
        ),
    ),
    Kind(
        "KVModelCache",
        "kvmodelcaches",
        "kvmc",
        KVModelCache,
        tuple(model_cache.MODEL_CACHE),
        (
            Column("Pool", ".spec.poolRef"),
            Column("Revision", ".spec.revision"),
            Column("Nodes", ".status.summary"),
            _condition("Staged", "Staged"),
            Column("In-Use", ".status.nodesInUse", "integer", is_wide=True),
            Column("Size", ".status.sizeBytes", "integer", is_wide=True),
            _condition("Message", "Staged", "message", is_wide=True),
            _AGE,
        ),
    ),
)

BY_NAME: Final = {kind.name: kind for kind in KINDS}
