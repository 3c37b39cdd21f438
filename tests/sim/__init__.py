"""A deterministic simulator: the real agent, store, metadata and client on a virtual clock: `python -m sim`."""
