"""The directory in Redis: its store, typed transitions, an agent's side of it, and the service that keeps it clean."""
