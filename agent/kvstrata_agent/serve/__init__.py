"""The agent's unix socket: frames, descriptors, callers, and one handler for each verb."""
