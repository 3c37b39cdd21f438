"""What benchmarks share: statistics, participants, rounds, traces, one agent."""
