"""libcachesim's own policies over the blocks of a trace: `libcachesim_process.py TRACE.npz BLOCKS ORDER POLICY...`.

Runs in the environment `simulators` with that environment's packages only. Its policies know single blocks, so hits are
counted here: blocks of the unbroken beginning that `find` sees before the request changes anything. Then all blocks of
the request are got in `ORDER`: `tail` first, so that of one request the head is the most recent, or `head` first.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import libcachesim
import numpy as np

POLICIES: Final[dict[str, Callable[..., Any]]] = {
    "LRU": libcachesim.LRU,
    "ARC": libcachesim.ARC,
    "GDSF": libcachesim.GDSF,
    "S3-FIFO": libcachesim.S3FIFO,
    "SIEVE": libcachesim.Sieve,
    "W-TinyLFU": libcachesim.WTinyLFU,
}
HASH_POWER: Final = 16
"""Slots of a cache's table to begin with, as a power of two; it grows."""


def hits(policy: str, chains: list[list[int]], capacity_blocks: int, *, is_tail_first: bool) -> int:
    """Blocks of unbroken beginnings that were there."""
    cache = POLICIES[policy](cache_size=capacity_blocks, hashpower=HASH_POWER)
    find, get, found = cache.find, cache.get, 0
    request = libcachesim.Request()
    request.obj_size = 1
    for chain in chains:
        for block in chain:
            request.obj_id = block
            if find(request, False) is None:  # noqa: FBT003  Its binding takes no names.
                break
            found += 1
        for block in reversed(chain) if is_tail_first else chain:
            request.obj_id = block
            get(request)
    return found


def main() -> None:
    """Print one line of JSON: the version, and hits by policy."""
    path, capacity_blocks, order, *names = sys.argv[1:]
    trace = np.load(path)
    blocks = (trace["blocks"] + 1).tolist()
    ends = [0, *trace["ends"].tolist()]
    chains = [blocks[start:end] for start, end in pairwise(ends)]
    found = {name: hits(name, chains, int(capacity_blocks), is_tail_first=order == "tail") for name in names}
    print(json.dumps({"version": importlib.metadata.version("libcachesim"), "hits": found}))


if __name__ == "__main__":
    main()
