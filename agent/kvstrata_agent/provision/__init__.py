"""Tiers of this node, made as the KVPoolNode declares them."""
