"""The same attacks on kvstrata, LMCache and Mooncake, each as it runs for its users: processes, sockets and files."""
