"""The tables of this node: blocks, copies, leases, reservations, sessions. No I/O."""
