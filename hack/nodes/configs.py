"""Configuration files of the programs of one node. Pure: layouts in, texts out. JSON is valid YAML."""

import json
from pathlib import Path
from typing import Any, Final

from nodes.layout import HOST_ADDRESS, POD_NETWORK, NodeLayout

PAUSE_IMAGE: Final = "kvstrata.local/pause:1"
CONTAINERD_SOCKET: Final = "/run/containerd/containerd.sock"
"""Inside the node."""
CLUSTER_DOMAIN: Final = "cluster.local"

_OOM_SCORE: Final = 0
"""Lower scores need CAP_SYS_RESOURCE, which root of a container or of a small virtual machine may lack."""


def containerd(plugins: Path) -> str:
    """Return containerd's settings; `plugins` is the folder of the CNI programs.

    Without `restrict_oom_score_adj` no sandbox starts where CAP_SYS_RESOURCE is missing ("can't get final child's PID
    from pipe: EOF").
    """
    cri = "io.containerd.grpc.v1.cri"
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."{cri}"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  sandbox_image = "{PAUSE_IMAGE}"
  [plugins."{cri}".containerd]
    snapshotter = "overlayfs"
  [plugins."{cri}".cni]
    bin_dir = "{plugins}"
    conf_dir = "/run/cni"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
"""


def cni(node: NodeLayout) -> str:
    """Return the network of the node's pods: a cable for each pod, routed by the node."""
    ipam = {
        "type": "host-local",
        "dataDir": "/run/cni-addresses",
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return _text({"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]})


def kubelet(node: NodeLayout, authority: Path) -> str:
    """Return the kubelet's settings: who asks it is known by certificate or token and authorized by the API server."""
    return _text(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority)},
            },
            "authorization": {"mode": "Webhook"},
            "address": node.address,
            "healthzPort": 0,
            "tlsCertFile": str(node.config("kubelet.crt")),
            "tlsPrivateKeyFile": str(node.config("kubelet.key")),
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": node.cgroup,
            "clusterDNS": [HOST_ADDRESS],
            "clusterDomain": CLUSTER_DOMAIN,
            "resolvConf": "",
            "failSwapOn": False,
            "oomScoreAdj": _OOM_SCORE,
            # The machine's own disk and images are not the cluster's to tidy.
            "evictionHard": {"imagefs.available": "1%", "nodefs.available": "1%", "memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "imageMaximumGCAge": "0s",
        }
    )


def kube_proxy(node: NodeLayout) -> str:
    """Return kube-proxy's settings; it leaves the machine's connection tracking as it is."""
    unchanged = {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"}
    return _text(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": POD_NETWORK,
            "hostnameOverride": node.name,
            "clientConnection": {"kubeconfig": str(node.config("kube-proxy.kubeconfig"))},
            "conntrack": unchanged,
            "oomScoreAdj": _OOM_SCORE,
        }
    )


def corefile(kubeconfig: Path) -> str:
    """Return CoreDNS's settings: the names of the cluster and no others."""
    return f""".:53 {{
    bind {HOST_ADDRESS}
    errors
    kubernetes {CLUSTER_DOMAIN} {{
        kubeconfig {kubeconfig} kvstrata
        ttl 5
    }}
}}
"""


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"
