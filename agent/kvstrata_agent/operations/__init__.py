"""KVOperations on this node: drain, warm, migrate, adopt."""
