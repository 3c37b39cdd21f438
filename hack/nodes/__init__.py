"""Real Kubernetes nodes on this machine: kubelet, containerd and kube-proxy, each node in namespaces of its own.

with nodes.start(state_dir, nodes=2) as cluster:
    cluster.plane.kubectl("get", "nodes")

Needs root and control groups of version 1 (hybrid too). Nothing is installed on the machine.
"""

from nodes.cluster import Cluster
from nodes.errors import NodesError, UnavailableError
from nodes.starting import attach, start

__all__ = ["Cluster", "NodesError", "UnavailableError", "attach", "start"]
