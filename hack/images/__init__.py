"""Container images of operator, metadata service, agent and Redis, built without a daemon, a registry or root.

A root file system of pinned Debian packages, wheels from the hash-pinned requirement files, and the wheel of this tree
become layers whose bytes depend on nothing else: the same pins give the same digests.
"""
