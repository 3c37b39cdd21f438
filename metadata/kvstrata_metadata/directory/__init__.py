"""Typed transitions on the directory: scope shards, the registry of agents, sessions, messages."""
