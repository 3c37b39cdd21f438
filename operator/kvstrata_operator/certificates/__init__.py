"""The authority of the fleet's certificates."""
