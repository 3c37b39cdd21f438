"""Weights of models on this node: staged from a source or from other agents, verified, and evicted for KV when idle."""
