"""Recorded workloads through a prefix cache that the agent's own policy decides for: `kvstrata replay`."""
