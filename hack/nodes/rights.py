"""Rights of the components that only real nodes have. Pure."""

from typing import Any, Final

from controlplane.credentials import KUBELET_CLIENT

DNS_USER: Final = "coredns"
PROXY_USER: Final = "system:kube-proxy"
"""Bound by the API server's own bootstrap policy."""

_GROUP: Final = "rbac.authorization.k8s.io"
_PATH: Final = f"/apis/{_GROUP}/v1"
_DNS_RULES: Final = (
    {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
)


def bindings() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of what is posted once."""
    role = {"apiVersion": f"{_GROUP}/v1", "kind": "ClusterRole", "metadata": {"name": DNS_USER}, "rules": _DNS_RULES}
    return [
        (f"{_PATH}/clusterroles", role),
        (f"{_PATH}/clusterrolebindings", _binding(DNS_USER, DNS_USER)),
        (f"{_PATH}/clusterrolebindings", _binding("system:kubelet-api-admin", KUBELET_CLIENT)),
    ]


def _binding(role: str, user: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"kvstrata-nodes-{user}"},
        "roleRef": {"apiGroup": _GROUP, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": _GROUP, "kind": "User", "name": user}],
    }
