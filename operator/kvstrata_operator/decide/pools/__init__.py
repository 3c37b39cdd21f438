"""Where a pool's tiers go, and what becomes of its nodes."""
