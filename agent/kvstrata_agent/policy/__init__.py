"""Decisions of the agent: one pure module each. No clock, no random, no I/O."""
