"""The Redis directory as this agent uses it."""
