"""Eviction policies on recorded workloads: readers, the replay, peers and the limit."""
