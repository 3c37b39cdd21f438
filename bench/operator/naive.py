"""The operator that one would write first: kopf, one handler per object, one KVPoolNode per Node.

`kopf.on.create` runs once for each Node; kopf notes that on the Node as an annotation, which is its way to know after a
restart what is done. What the handler returns would be filed under the Node's status, so it returns nothing and patches
an annotation of progress as such operators patch their status. It runs until it is killed.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any, Final

import kopf

from bench.operator.writes import KVPOOLNODES, pool_node_body
from kvstrata_kube.api import Call, KubeApi

POOL: Final = "naive"
LABEL: Final = "naive"
"""Nodes that it cares for have it; the value is `yes`."""


def registry(api: KubeApi, like: dict[str, Any]) -> kopf.OperatorRegistry:
    """Handlers that create a KVPoolNode with the spec `like` for each Node."""
    made = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        connection = api.connection
        return kopf.AiohttpSession(server=connection.configuration.host, aiohttp_session=connection.session())

    async def create(name: str, patch: kopf.Patch, **_: Any) -> None:
        answer = await api.call(Call("POST", KVPOOLNODES, body=pool_node_body(POOL, name, like)), timeout_s=30.0)
        if not answer.is_conflict:
            answer.content()
        patch.metadata.annotations["naive.kvstrata.io/state"] = "Created"

    kopf.on.login(registry=made)(login)
    kopf.on.create("", "v1", "nodes", registry=made, labels={LABEL: "yes"})(create)
    return made


async def serve(kubeconfig: Path, like: dict[str, Any]) -> None:
    """Run until killed."""
    api = await KubeApi.connect("naive", kubeconfig)
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="naive.kvstrata.io")
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix="naive.kvstrata.io")
    await kopf.operator(registry=registry(api, like), settings=settings, standalone=True, clusterwide=True)


def main() -> None:
    """Run kopf."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--like", required=True, help="JSON: the spec of a KVPoolNode")
    given = parser.parse_args()
    asyncio.run(serve(given.kubeconfig, json.loads(given.like)))


if __name__ == "__main__":
    main()
