"""The directory in Redis: schema, transitions, store, sweeper and service."""
