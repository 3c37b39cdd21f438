"""The per-node agent: tiers, blocks, leases, movement, and the socket that engines attach to."""
