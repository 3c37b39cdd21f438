"""Bridges from inference engines to the client; each needs its engine installed and nothing else does."""
