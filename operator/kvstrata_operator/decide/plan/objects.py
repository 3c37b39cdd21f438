"""Bodies of the objects that the operator makes. Pure."""

from typing import Any

from kvstrata_api import names
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.pool import KVPool
from kvstrata_operator.observe.kinds import CONFIG_MAP, CONNECTION_LABELS, POOL, SECRET, Kind, Ref, digest


def body_of(ref: Ref, metadata: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Put an object together; its name and namespace come from `ref`."""
    place = {"namespace": ref.namespace} if ref.namespace else {}
    return {
        "apiVersion": ref.kind.api_version,
        "kind": ref.kind.name,
        "metadata": {"name": ref.name, **place, **metadata},
        **parts,
    }


def sealed(ref: Ref, metadata: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Put an object together whose content its annotation names: the API server fills in more than we write."""
    annotations = {names.ANNOTATION_DIGEST: digest([metadata, parts])}
    return body_of(ref, {**metadata, "annotations": annotations}, **parts)


def owner_reference(kind: Kind, meta: ObjectMeta) -> dict[str, Any]:
    """Let the garbage collector delete what outlives its owner, also when the operator is away."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": meta.name,
        "uid": meta.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def connection_ref(pool: str, namespace: str) -> Ref:
    """Address of the ConfigMap that engine pods read to attach."""
    return Ref(CONFIG_MAP, f"{pool}-connection", namespace)


def connection_data(pool: KVPool, socket_template: str) -> dict[str, str]:
    """Return what an engine pod needs to know of a pool; all values are text."""
    compatibility = pool.spec.compatibility
    return {
        "pool": pool.metadata.name,
        "audience": names.AUDIENCE,
        "socket": socket_template.format(pool=pool.metadata.name),
        "model": compatibility.model,
        "revision": compatibility.revision,
        "dtype": compatibility.dtype,
        "blockTokens": str(compatibility.block_tokens),
    }


def connection_body(ref: Ref, pool: ObjectMeta, content: dict[str, str]) -> dict[str, Any]:
    """Return the connection ConfigMap."""
    labels = {**CONNECTION_LABELS, names.LABEL_POOL: pool.name}
    return body_of(ref, {"labels": labels, "ownerReferences": [owner_reference(POOL, pool)]}, data=content)


def scope_secret_ref(scope: str, name: str, namespace: str) -> Ref:
    """Address of the Secret with the keys of a scope; `scope` is `tenant`, `domain` or `share`."""
    return Ref(SECRET, names.scope_secret_name(scope, name), namespace)


def kek_secret_body(ref: Ref) -> dict[str, Any]:
    """Return the KEK Secret without its key. It belongs to nobody: no deletion takes it along."""
    return body_of(ref, {"labels": {names.LABEL_MANAGED_BY: names.MANAGED_BY}}, type="Opaque")


def scope_name(owner: ObjectMeta) -> str:
    """Name of the owner's scope: that of the owner, behind its namespace where it has one."""
    return f"{owner.namespace}.{owner.name}" if owner.namespace else owner.name


def scope_secret_body(ref: Ref, scope: str, kind: Kind, owner: ObjectMeta) -> dict[str, Any]:
    """Return a scope Secret without its keys. Deleting the owner deletes it, and so shreds the scope.

    An owner of another namespace cannot be referred to; the planner deletes what such an owner leaves behind.
    """
    metadata: dict[str, Any] = {
        "labels": {names.LABEL_SCOPE: scope, names.LABEL_MANAGED_BY: names.MANAGED_BY},
        "annotations": {names.ANNOTATION_OWNER_UID: owner.uid},
    }
    if not owner.namespace:
        metadata["ownerReferences"] = [owner_reference(kind, owner)]
    return body_of(ref, metadata, type="Opaque")
