"""The nodes themselves: real kubelets that run pods, connect them, and show huge pages."""

from functools import partial

import pytest
from node.fleet import ROOT, Fleet
from node.manifests import HUGE_PAGES

from controlplane import KubectlError

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]
WEB = (ROOT / "tests/node/web.yaml").read_text()
ASK = """
import ssl, urllib.request as u
said = {u.urlopen('http://web.web/node', timeout=5).read().decode() for _ in range(40)}
secrets = '/var/run/secrets/kubernetes.io/serviceaccount'
token = {'Authorization': 'Bearer ' + open(secrets + '/token').read()}
trust = ssl.create_default_context(cafile=secrets + '/ca.crt')
u.urlopen(u.Request('https://kubernetes.default.svc/version', headers=token), context=trust, timeout=5).read()
print(' '.join(sorted(said)))
"""


def test_every_node_shows_the_huge_pages_of_the_machine(bare: Fleet) -> None:
    bare.kubectl("get", "nodes", "-o", "wide")
    found = bare.get("nodes")["items"]

    assert {node["metadata"]["name"] for node in found} == {"node-1", "node-2"}
    for node in found:
        assert int(node["status"]["allocatable"]["hugepages-2Mi"].removesuffix("Mi")) >= 2 * HUGE_PAGES


def test_pods_reach_each_other_by_service_and_the_api_server_by_token(bare: Fleet) -> None:
    image = bare.image("metadata")
    bare.kubectl("apply", "-f", "-", stdin=WEB.replace("IMAGE", f"{image['repository']}@{image['digest']}"))
    bare.kubectl("rollout", "status", "-n", "web", "daemonset/web", "--timeout=120s")
    pods = [pod["metadata"]["name"] for pod in bare.get("pods", "-n", "web")["items"]]

    def who_answers(pod: str) -> list[str]:
        try:
            return bare.kubectl("exec", "-n", "web", pod, "--", "python3.11", "-c", ASK).split()
        except KubectlError:  # Until kube-proxy has heard of a Service there is no way to it.
            return []

    for pod in pods:  # It may also hear of a ready pod a moment after the DaemonSet.
        bare.until(f"{pod} is answered from both nodes", partial(lambda p: who_answers(p) == ["node-1", "node-2"], pod))
        assert "GET /node" in bare.kubectl("logs", "-n", "web", pod)
    bare.kubectl("delete", "namespace", "web")
