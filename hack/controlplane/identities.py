"""Identities of workloads on the embedded control plane: tokens and kubeconfigs of service accounts."""

from typing import Any

from controlplane.client import ApiClient


def request_token(api: ApiClient, namespace: str, name: str, audience: str | None, expiration_s: int) -> str:
    """Issue a token of a service account for `audience`; None means the API server itself.

    The API server grants no life span below 600 s. Raises `ApiError` (404) when the account does not exist.
    """
    spec: dict[str, Any] = {"expirationSeconds": expiration_s}
    if audience is not None:
        spec["audiences"] = [audience]
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    issued = api.post(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", body)
    token: str = issued["status"]["token"]
    return token
