"""The issuer alone, under the operator's own identity, for tests that need certificates and no operator."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from controlplane import ControlPlane
from controlplane.credentials import token_user, write_kubeconfig
from kvstrata_api import names
from kvstrata_kube.api import KubeApi
from kvstrata_kube.certified import OwnCertificate
from kvstrata_operator.certificates.policy import Issuance
from kvstrata_operator.certificates.service import CertificateAuthority

SYSTEM = names.SYSTEM_NAMESPACE


class EveryAgent(Collection[str]):
    """Stands for KVPoolNodes of every name."""

    def __contains__(self, _: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@contextmanager
def issuing(
    plane: ControlPlane, folder: Path, rules: Issuance | None = None, agents: Callable[[], Collection[str]] = EveryAgent
) -> Iterator[None]:
    """Issue certificates on a thread of its own for as long as the block lasts."""
    kubeconfig = plane.service_account_kubeconfig(SYSTEM, "kvstrata-operator", folder / "issuer.kubeconfig")
    loop = asyncio.new_event_loop()

    async def run() -> None:
        api = await KubeApi.connect("issuer", kubeconfig)
        try:
            await CertificateAuthority(api, rules or Issuance(SYSTEM), lambda: True, agents, "issuer").run()
        finally:
            await api.close()

    task = loop.create_task(run())

    def serve() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            return
        finally:
            loop.close()

    thread = threading.Thread(target=serve, name="issuer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30.0)


@asynccontextmanager
async def holder(
    plane: ControlPlane,
    folder: Path,
    uri: str,
    account: str = names.AGENT_SERVICE_ACCOUNT,
    kubeconfig: Path | None = None,
) -> AsyncIterator[OwnCertificate]:
    """A process that asks for the certificate of `uri` under the identity of `account`."""
    path = folder / f"{account}.kubeconfig"
    api = await KubeApi.connect("test", kubeconfig or plane.service_account_kubeconfig(SYSTEM, account, path))
    own = OwnCertificate(api, SYSTEM, uri, ("127.0.0.1",) if "metadata" in account else ())
    task = asyncio.create_task(own.run())
    try:
        yield own
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await api.close()


def make_pod(plane: ControlPlane, namespace: str, name: str, account: str, node: str) -> dict[str, Any]:
    """A pod that nobody runs, on a node, which is made if absent; one of that name before it goes at once."""
    # Pods of nodes that do not exist are collected after 40 s (PodGC of kube-controller-manager).
    node_body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(node_body))
    plane.kubectl("delete", "pod", name, "-n", namespace, "--ignore-not-found", "--grace-period=0", "--force")
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    safe = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    containers = [{"name": "c", "image": "i", "securityContext": restricted}]
    spec = {"serviceAccountName": account, "nodeName": node, "containers": containers, "securityContext": safe}
    pod = {"metadata": {"name": name}, "spec": spec}
    made: dict[str, Any] = plane.api.post(f"/api/v1/namespaces/{namespace}/pods", pod)
    return made


def pod_token(plane: ControlPlane, pod: dict[str, Any], audience: str | None) -> str:
    """Token as the kubelet would project it into a pod; without audience it is for the API server."""
    meta, account = pod["metadata"], pod["spec"]["serviceAccountName"]
    bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
    spec = {"audiences": [audience] if audience else [], "expirationSeconds": 3600, "boundObjectRef": bound}
    path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
    return str(plane.api.post(path, {"spec": spec})["status"]["token"])


def pod_kubeconfig(plane: ControlPlane, pod: dict[str, Any], path: Path) -> Path:
    """Kubeconfig under which a program acts as a pod."""
    identity = token_user(pod_token(plane, pod, None))
    write_kubeconfig(path, plane.server, plane.ca_file.read_bytes(), identity, namespace=SYSTEM)
    return path
