"""The Kubernetes side of the agent: declared state in, status and heartbeat out, callers authenticated.

Start with `world.KubeWorld`. The API server is reached through `kvstrata_kube`.
"""
