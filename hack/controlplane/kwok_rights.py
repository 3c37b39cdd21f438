"""The rights of kwok: what a kubelet of every fake node needs, and nothing else. Pure."""

from typing import Any

from controlplane.credentials import KWOK_USER

_RULES = (
    ("", ("nodes", "pods"), ("get", "list", "watch")),
    ("", ("pods",), ("patch", "delete")),
    ("", ("nodes/status", "pods/status"), ("patch", "update")),
    ("", ("events",), ("create", "patch", "update")),
    ("coordination.k8s.io", ("leases",), ("get", "list", "watch", "create", "patch", "update")),
)
_NAME = "kvstrata-embedded-kwok"
_GROUP = "rbac.authorization.k8s.io"


def cluster_role() -> dict[str, Any]:
    """Return the role that lists the rights."""
    rules = [{"apiGroups": [g], "resources": list(r), "verbs": list(v)} for g, r, v in _RULES]
    return {"apiVersion": f"{_GROUP}/v1", "kind": "ClusterRole", "metadata": {"name": _NAME}, "rules": rules}


def cluster_role_binding() -> dict[str, Any]:
    """Return the binding of the role to kwok's user."""
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": _NAME},
        "roleRef": {"apiGroup": _GROUP, "kind": "ClusterRole", "name": _NAME},
        "subjects": [{"apiGroup": _GROUP, "kind": "User", "name": KWOK_USER}],
    }
