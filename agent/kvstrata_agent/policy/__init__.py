"""Decisions of the agent: one pure module each, replayable on traces. No clock, no random, no I/O."""
