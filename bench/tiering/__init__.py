"""Time to the first token with a hierarchy of memories behind an engine, by simulation."""
