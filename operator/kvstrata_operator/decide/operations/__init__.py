"""KVOperations: what each one orders and how far it is."""
