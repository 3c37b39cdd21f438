"""The declared state: what is wanted of an object, without what others report of it, and how an agent follows it.

Parsing is pure; `KubeDesired` reads watched stores and waits for their changes.
"""

import base64
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from kvstrata_agent.policy.operations import MESSAGE_CHARS_MAX, UNKNOWN_ORDER
from kvstrata_agent.policy.removal import Presence
from kvstrata_api import __version__, names
from kvstrata_api.blocks import ScopeId
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import KVPoolNode, ModelOrder, ModelReport, NodeOrder, NodeTier, OrderAnswer
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.wrapping import DATA_SUFFIX, data_entry
from kvstrata_kube.answers import Json
from kvstrata_kube.signal import Signal
from kvstrata_kube.typed_store import Known
from kvstrata_node.pool_node import stored_report

REMINDER_S: Final = 30.0
"""Seconds between two log lines on what is still missing."""

_IDENTITY: Final = ("name", "namespace", "uid", "deletionTimestamp")
_FULL: Final = (*_IDENTITY, "generation", "labels", "annotations", "finalizers")

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A KVPoolNode as last seen: what is wanted of the agent, and which status the API server holds."""

    declared: KVPoolNode
    """Without status and resource version, so that status writes do not make it differ."""
    status: Mapping[str, Any]
    """As stored; empty when never written."""
    report: NodeReport | None = None
    """What node preparation has reported in it."""
    refused: tuple[OrderAnswer, ...] = ()
    """Answers to orders that this version cannot read."""
    refused_models: tuple[ModelReport, ...] = ()
    """The same of weights."""


@dataclass(frozen=True, slots=True)
class ScopeKeys:
    """Key material of one scope Secret."""

    owner_uid: str
    """Uid of the tenant, domain or share that it was made for; a successor of the same name gets another."""
    data: Mapping[str, str]
    """Base64 by `v<key version>`, and of the wrapped data key by `v<key version>.data`."""
    owner: str = ""
    """`<kind>/<name>` of what it was made for."""

    def scopes(self) -> Iterator[ScopeId]:
        """Scopes that the Secret has keys of, one for each version."""
        for entry in self.data:
            if not entry.endswith(DATA_SUFFIX):
                yield ScopeId(f"{self.owner}/{self.owner_uid}/{entry}")

    def wrapped(self, version: str) -> str:
        """Wrapped data key of a key version; empty when there is none."""
        try:
            return base64.b64decode(self.data.get(data_entry(version), ""), validate=True).decode()
        except ValueError:
            return ""


def _kept(obj: Json, fields: tuple[str, ...]) -> Json:
    """Return metadata cut to `fields`, and the spec."""
    metadata = {k: v for k, v in obj["metadata"].items() if k in fields}
    return {"metadata": metadata, "spec": obj.get("spec") or {}}


def pool(obj: Json) -> KVPool:
    """Parse a KVPool without its status."""
    return KVPool.model_validate(_kept(obj, _FULL))


def pool_node(obj: Json) -> SeenNode:
    """Parse a KVPoolNode; the status stays apart."""
    status, kept = obj.get("status") or {}, _kept(obj, _FULL)
    readable, refused = _orders(kept["spec"].get("orders") or ())
    models, refused_models = _models(kept["spec"].get("models") or ())
    spec = {**kept["spec"], "orders": readable, "models": models}
    declared = KVPoolNode.model_validate({**kept, "spec": spec})
    return SeenNode(declared, status, stored_report(status), refused, refused_models)


def _orders(wanted: Iterable[Any]) -> tuple[tuple[NodeOrder, ...], tuple[OrderAnswer, ...]]:
    """Separate orders that can be read from those of a newer operator, which are refused one by one."""
    readable, refused = [], []
    for order in wanted:
        try:
            readable.append(_order(order))
        except ValueError as e:
            uid = order.get("uid") if isinstance(order, Mapping) else None
            if uid and isinstance(uid, str):  # Nobody would know whom another answer is for.
                kept = f"{e} (agent {__version__})"[:MESSAGE_CHARS_MAX]
                refused.append(OrderAnswer(uid=uid[:64], phase="Failed", reason=UNKNOWN_ORDER, message=kept))
    return tuple(readable), tuple(refused)


def _order(order: Json) -> NodeOrder:
    """Parse one order. Raises `ValueError` that names the field, its value and what this version knows."""
    try:
        read = NodeOrder.model_validate(order)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        value = "" if isinstance(first["input"], Mapping) else f", not {str(first['input'])[:64]!r}"
        raise ValueError(f"order: {field}: {first['msg']}{value}") from e
    if getattr(read, read.type.lower()) is None:
        raise ValueError(f"order: {read.type.lower()} must be set when type is {read.type}")
    return read


def _models(wanted: Iterable[Any]) -> tuple[tuple[ModelOrder, ...], tuple[ModelReport, ...]]:
    """Separate models that can be read from those of a newer operator, which are refused one by one."""
    readable, refused = [], []
    for order in wanted:
        try:
            readable.append(ModelOrder.model_validate(order))
        except ValidationError as e:
            message = f"{e.errors(include_url=False)[0]['msg']} (agent {__version__})"[:MESSAGE_CHARS_MAX]
            known = {key: order.get(key) for key in ("name", "uid", "generation", "revision")}
            try:
                refused.append(ModelReport(state="Failed", reason=UNKNOWN_ORDER, message=message, **known))
            except ValidationError:
                _log.warning("model order cannot be read", extra={"cause": message})
    return tuple(readable), tuple(refused)


def model_reports(status: Mapping[str, Any]) -> tuple[ModelReport, ...]:
    """Reports on models that a KVPoolNode's status holds; what cannot be read counts as never written."""
    found = []
    for stored in status.get("models") or ():
        try:
            found.append(ModelReport.model_validate(stored))
        except ValidationError:
            continue
    return tuple(found)


def order_answers(status: Mapping[str, Any]) -> tuple[OrderAnswer, ...]:
    """Answers that a KVPoolNode's status holds; what cannot be read counts as never written."""
    found = []
    for stored in status.get("orders") or ():
        try:
            found.append(OrderAnswer.model_validate(stored))
        except ValueError:
            continue
    return tuple(found)


def tenant(obj: Json) -> KVTenant:
    """Parse what the agent needs of a KVTenant: the spec, its key version, and which erasure is over."""
    status = obj.get("status") or {}
    kept = {"keyVersion": max(status.get("keyVersion", 0), KEY_VERSION), "lastErase": status.get("lastErase", "")}
    return KVTenant.model_validate({**_kept(obj, _IDENTITY), "status": kept})


def trust_domain(obj: Json) -> KVTrustDomain:
    """Parse what trust needs of a KVTrustDomain: the spec, and who is named to hold which key."""
    status = obj.get("status") or {}
    kept = {k: status[k] for k in ("keyVersion", "members") if k in status}
    return KVTrustDomain.model_validate({**_kept(obj, _IDENTITY), "status": kept})


def prefix_share(obj: Json) -> KVPrefixShare:
    """Parse what trust needs of a KVPrefixShare."""
    return KVPrefixShare.model_validate(_kept(obj, _IDENTITY))


def namespace_labels(obj: Json) -> Mapping[str, str]:
    """Labels of a Namespace."""
    return dict(obj["metadata"].get("labels") or {})


def scope_keys(obj: Json) -> ScopeKeys:
    """Read a scope Secret."""
    metadata = obj["metadata"]
    uid = (metadata.get("annotations") or {}).get(names.ANNOTATION_OWNER_UID, "")
    _, kind, name = metadata["name"].split(".", 2)
    return ScopeKeys(uid, dict(obj.get("data") or {}), f"{kind}/{name}")


class KubeDesired:
    """The declared state that this agent follows, over two stores. Keeps the last seen objects when they vanish."""

    def __init__(self, pool: str, node: str, pools: Known[KVPool], nodes: Known[SeenNode], signal: Signal) -> None:
        self._pool_name = pool
        self._node_name = names.pool_node_name(pool, node)
        self._pools = pools
        self._nodes = nodes
        self._signal = signal
        self._last_pool: KVPool | None = None
        self._last_node: KVPoolNode | None = None
        self._was_withdrawn = False

    @property
    def pool(self) -> KVPool:
        """Last seen KVPool. `ready` must have returned before."""
        self._last_pool = self._pools.get(self._pool_name) or self._last_pool
        assert self._last_pool is not None, "ready() comes first"
        return self._last_pool

    @property
    def pool_node(self) -> KVPoolNode:
        """Last seen KVPoolNode. `ready` must have returned before."""
        seen = self._nodes.get(self._node_name)
        self._last_node = seen.declared if seen else self._last_node
        assert self._last_node is not None, "ready() comes first"
        return self._last_node

    @property
    def report(self) -> NodeReport | None:
        """What node preparation has reported of this machine; None where it does not run."""
        seen = self._nodes.get(self._node_name)
        return seen.report if seen is not None else None

    @property
    def answers(self) -> tuple[OrderAnswer, ...]:
        """Answers to orders as the API server holds them, also those of an earlier run of this agent."""
        seen = self._nodes.get(self._node_name)
        return order_answers(seen.status) if seen else ()

    @property
    def refused(self) -> tuple[OrderAnswer, ...]:
        """Answers to orders that this version cannot read, as last seen."""
        seen = self._nodes.get(self._node_name)
        return seen.refused if seen else ()

    @property
    def models(self) -> tuple[ModelReport, ...]:
        """Reports on models as the API server holds them, also those of an earlier run of this agent."""
        seen = self._nodes.get(self._node_name)
        return model_reports(seen.status) if seen else ()

    @property
    def refused_models(self) -> tuple[ModelReport, ...]:
        """Reports on models whose order this version cannot read, as last seen."""
        seen = self._nodes.get(self._node_name)
        return seen.refused_models if seen else ()

    @property
    def is_withdrawn(self) -> bool:
        """True while the KVPoolNode or the KVPool does not exist: nobody wants this agent any more."""
        return bool(self._missing())

    @property
    def pool_presence(self) -> Presence:
        """Whether the KVPool exists, at any time."""
        pool = self._pools.get(self._pool_name)
        return _presence(self._pools, self._pool_name, pool.metadata if pool else None)

    @property
    def node_presence(self) -> Presence:
        """Whether the KVPoolNode exists, at any time."""
        seen = self._nodes.get(self._node_name)
        return _presence(self._nodes, self._node_name, seen.declared.metadata if seen else None)

    @property
    def deletion_policy(self) -> str:
        """What the pool wants at its end; empty while none was seen. At any time."""
        pool = self._pools.get(self._pool_name) or self._last_pool
        return pool.spec.deletion_policy if pool else ""

    @property
    def tiers(self) -> tuple[NodeTier, ...]:
        """Tiers that were declared last; none while none were seen. At any time."""
        seen = self._nodes.get(self._node_name)
        node = seen.declared if seen else self._last_node
        return node.spec.tiers if node else ()

    async def ready(self) -> None:
        """Return when both objects exist; log now and then which one does not."""
        while missing := self._missing():
            _log.info("waiting for the declared state", extra={"missing": missing})
            await self._signal.wait(REMINDER_S)

    async def changed(self) -> None:
        """Return when either object differs from what was last read, or when one of them vanished or came back.

        Changes nothing; may be cancelled at any time.
        """
        while not self._differs():
            await self._signal.wait()
        self._was_withdrawn = self.is_withdrawn

    def _differs(self) -> bool:
        """True when a reader would see something else than last time."""
        pool, seen = self._pools.get(self._pool_name), self._nodes.get(self._node_name)
        has_new_pool = pool is not None and pool != self._last_pool
        has_new_node = seen is not None and seen.declared != self._last_node
        return has_new_pool or has_new_node or self.is_withdrawn != self._was_withdrawn

    def _missing(self) -> list[str]:
        """Objects that do not exist, as a user would name them."""
        wanted = {
            f"KVPool/{self._pool_name}": self._pools.get(self._pool_name),
            f"KVPoolNode/{self._node_name}": self._nodes.get(self._node_name),
        }
        return [name for name, value in wanted.items() if value is None]


def _presence(known: Known[Any], name: str, meta: ObjectMeta | None) -> Presence:
    """Distinguish absence from an object that cannot be read, and from one that no list has returned yet."""
    if meta is not None:
        return Presence.PRESENT if meta.deletion_timestamp is None else Presence.LEAVING
    return Presence.ABSENT if known.is_synced and name not in known.items else Presence.UNKNOWN
