"""What happened in one seed, and in many."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Tally:
    """Counts; all of them add up."""

    operations: int = 0
    """Verbs that agents carried out."""
    checks: int = 0
    """Times that all tables of an agent were held against each other."""
    reads: int = 0
    """Blocks copied and judged."""
    hits: int = 0
    """Among them those whose copy passed the client's check."""
    misses: int = 0
    corrupt: int = 0
    """Copies that the client's check refused."""
    lost_leases: int = 0
    """Reads that the client voided because a lease had not lived until their end."""
    late_writes: int = 0
    agent_crashes: int = 0
    agent_stops: int = 0
    engine_crashes: int = 0
    engine_stops: int = 0
    shredded_scopes: int = 0
    resizes: int = 0
    drains: int = 0
    bit_flips: int = 0
    redis_restarts: int = 0
    redis_failovers: int = 0
    redis_lost_effects: int = 0
    redis_away: int = 0
    redis_lost_requests: int = 0
    redis_lost_replies: int = 0
    redis_repeats: int = 0
    redis_cuts: int = 0
    partitions: int = 0
    api_away: int = 0
    connections_cut: int = 0
    peer_connections: int = 0
    peer_flips: int = 0
    nixl_late: int = 0
    nixl_torn: int = 0
    frames_repeated: int = 0
    frames_reordered: int = 0
    disk_errors: int = 0
    disk_lies: int = 0
    disk_rot: int = 0
    power_losses: int = 0
    lent_blocks: int = 0
    recovered_blocks: int = 0
    fenced: int = 0
    pressed_stores: int = 0
    """Stores right after a load that filled memory, by the only engine of a node."""
    virtual_s: float = 0.0

    def add(self, other: "Tally") -> None:
        """Add another seed's counts."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
