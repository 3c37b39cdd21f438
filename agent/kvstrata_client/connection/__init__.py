"""The socket to the agent: bytes, descriptors, mapped memory, life cycle."""
