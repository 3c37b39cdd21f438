"""Copies of blocks between tiers, and the queues that they wait in."""
