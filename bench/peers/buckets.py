"""How a set is cut into the buckets of Mooncake's SSD offload. Pure."""

from bench.peers.loop import Work

BUCKET_BYTES, BUCKET_KEYS = 250_000_000, 500
"""Its default limits, the first with room for keys."""


def keys_of_bucket(work: Work) -> int:
    """Blocks of each bucket: only full ones are written, so they are even, and as few as the limits allow."""
    set_bytes = work.blocks * work.block_bytes
    buckets = max(-(-set_bytes // BUCKET_BYTES), -(-work.blocks // BUCKET_KEYS))
    while work.blocks % buckets:
        buckets += 1
    return work.blocks // buckets
