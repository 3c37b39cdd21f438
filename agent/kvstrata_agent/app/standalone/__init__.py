"""`kvstrata up`: an agent on one machine, declared by manifests, without Kubernetes and without Redis.

Start with `main`; `world.StandaloneWorld` stands in for the cluster, with the same stores, views and parsers.
"""
