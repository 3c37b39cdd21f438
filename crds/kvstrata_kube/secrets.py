"""Reads and writes single Secrets, such as the one with the Redis connection."""

import base64
from collections.abc import Mapping

from kvstrata_api import names
from kvstrata_kube.api import Call, KubeApi


async def read_secret(api: KubeApi, namespace: str, name: str) -> dict[str, bytes] | None:
    """Return the decoded data of a Secret, None when it does not exist. Changes nothing.

    Raises `ApiServerAwayError` when the API server is away and `ForbiddenError` without the right to read it.
    """
    answer = await api.call(Call("GET", f"{_collection(namespace)}/{name}"))
    if answer.is_absent:
        return None
    return {key: base64.b64decode(value) for key, value in (answer.content().get("data") or {}).items()}


async def write_secret(api: KubeApi, namespace: str, name: str, content: Mapping[str, str], field_owner: str) -> None:
    """Make a Secret hold exactly `content`. Idempotent.

    Raises `ApiServerAwayError` when the server cannot be asked now, `RetryableError` when somebody else wrote at the
    same time, and `ForbiddenError` without the right to write it.
    """
    metadata = {"name": name, "labels": {names.LABEL_MANAGED_BY: names.MANAGED_BY}}
    coded = {key: base64.b64encode(value.encode()).decode() for key, value in content.items()}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": coded}
    query = {"fieldManager": field_owner}
    answer = await api.call(Call("PUT", f"{_collection(namespace)}/{name}", query, body))
    if answer.is_absent:
        answer = await api.call(Call("POST", _collection(namespace), query, body))
    answer.content()


def _collection(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/secrets"
