"""Blocks from and to other agents: control over TCP, bytes over NIXL or, where that is absent or fails, over TCP too.

The receiver trusts nothing that travels: it checks each block against the checksum that the owner bound to key,
epoch and stamp, after the transfer, before anybody sees it.
"""
