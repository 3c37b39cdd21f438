"""The invariants of the metadata, each with a module of its own that runs it against faults: `python -m faults`."""
