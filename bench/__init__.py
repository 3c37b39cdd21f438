"""Benchmarks: ours, the machine's limit and the peers, interleaved in one run on one machine."""
