"""The declared part of an object: what somebody wants, without what others report about it. Pure."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from kvstrata_agent.policy.progress import MESSAGE_CHARS_MAX, UNKNOWN_ORDER
from kvstrata_api import __version__, names
from kvstrata_api.blocks import ScopeId
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.models.pool import KVPool
from kvstrata_api.models.poolnode import KVPoolNode, NodeOrder, OrderAnswer
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.wrapping import DATA_SUFFIX, data_entry
from kvstrata_kube.answers import Json
from kvstrata_node.declared import stored_report

_IDENTITY: Final = ("name", "namespace", "uid", "deletionTimestamp")
_FULL: Final = (*_IDENTITY, "generation", "labels", "annotations", "finalizers")


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A KVPoolNode as last seen: what is wanted of the agent, and which status the API server holds."""

    declared: KVPoolNode
    """Without status and resource version, so that status writes do not make it differ."""
    status: Mapping[str, Any]
    """As stored; empty when never written."""
    report: NodeReport | None = None
    """What node preparation has told in it."""
    refused: tuple[OrderAnswer, ...] = ()
    """Answers to orders that this version cannot read."""


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
    spec = {**kept["spec"], "orders": readable}
    return SeenNode(KVPoolNode.model_validate({**kept, "spec": spec}), status, stored_report(status), refused)


def _orders(wanted: Iterable[Any]) -> tuple[tuple[NodeOrder, ...], tuple[OrderAnswer, ...]]:
    """Tell orders that can be read from those of a newer operator, which are refused one by one."""
    readable, refused = [], []
    for order in wanted:
        try:
            readable.append(_order(order))
        except ValueError as e:
            uid = order.get("uid") if isinstance(order, Mapping) else None
            if uid and isinstance(uid, str):  # Nobody could tell whom another answer is for.
                told = f"{e} (agent {__version__})"[:MESSAGE_CHARS_MAX]
                refused.append(OrderAnswer(uid=uid[:64], phase="Failed", reason=UNKNOWN_ORDER, message=told))
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
    told = {"keyVersion": max(status.get("keyVersion", 0), KEY_VERSION), "lastErase": status.get("lastErase", "")}
    return KVTenant.model_validate({**_kept(obj, _IDENTITY), "status": told})


def trust_domain(obj: Json) -> KVTrustDomain:
    """Parse what trust needs of a KVTrustDomain: the spec, and who is named to hold which key."""
    status = obj.get("status") or {}
    told = {k: status[k] for k in ("keyVersion", "members") if k in status}
    return KVTrustDomain.model_validate({**_kept(obj, _IDENTITY), "status": told})


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
