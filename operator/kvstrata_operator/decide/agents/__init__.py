"""Pods of agents, and how they are rolled."""
