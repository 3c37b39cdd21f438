"""Eviction policies on recorded workloads: the agent's own in its replay, peers and the limit."""
