"""The only Kubernetes client of kvstrata: credentials, requests, lists and watches, Leases and Secrets as plain JSON.

Start with `api.KubeApi`. Metrics and decisions belong to the callers, who pass functions in.
"""
