"""Runs in an engine's pod: stores and loads prompts through the agent of its node, and compares every byte.

`engine.py store|load SEED...` does so once and prints a line of JSON. `engine.py serve SEED...` goes round until it is
ended and prints a line for each round: an engine under load, which computes what is missing and stores it.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstrata import Client, PrefixCache, Target
from kvstrata_api.blocks import Layout

LAYOUT = Layout("demo/llama", "seed-1", "bf16", 16, layers=8, kv_heads=8, head_dim=128, element_bytes=2)
"""Blocks of 512 KiB."""
BLOCKS = 8
"""Of each prompt."""
WAIT_S = 20.0
TARGET = Target(Path("/run/kvstrata/demo/agent.sock"), "demo", Path("/var/run/secrets/kvstrata.io/token"), LAYOUT)

Rows = npt.NDArray[np.uint8]


def prompt(seed: int) -> npt.NDArray[np.uint32]:
    """Tokens of one prompt; no two share a block."""
    return np.arange(seed * 10_000, seed * 10_000 + BLOCKS * LAYOUT.block_tokens, dtype=np.uint32)


def content(seed: int) -> Rows:
    """What its blocks hold, as everybody can compute it."""
    rows = [np.random.default_rng((seed, i)).bytes(LAYOUT.block_bytes) for i in range(BLOCKS)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(BLOCKS, -1)


def load(cache: PrefixCache, seed: int) -> tuple[int, int, list[str]]:
    """Load one prompt: blocks that came, how many of them hold a wrong byte, and where each was."""
    loaded = cache.load(prompt(seed))
    expected = content(seed)[: loaded.blocks]
    wrong = int(np.count_nonzero((loaded.data != expected).any(axis=1)))
    return loaded.blocks, wrong, list(loaded.sources)


def store(cache: PrefixCache, seed: int, first_block: int = 0) -> int:
    """Store one prompt from a block on; how many blocks are there now that were not."""
    return cache.store(prompt(seed), content(seed)[first_block:], first_block=first_block).published


def rounds(cache: PrefixCache, seeds: list[int]) -> Iterator[dict[str, object]]:
    """Ask for every prompt, store what was missing, and tell."""
    while True:
        began_s = time.monotonic()
        hits, wrong, slowest_s = 0, 0, 0.0
        for seed in seeds:
            asked_s = time.monotonic()
            blocks, bad, _ = load(cache, seed)
            slowest_s = max(slowest_s, time.monotonic() - asked_s)
            hits, wrong = hits + blocks, wrong + bad
            if blocks < BLOCKS:
                store(cache, seed, blocks)
        took_s = time.monotonic() - began_s
        yield {"at": time.time(), "hits": hits, "asked": BLOCKS * len(seeds), "wrong": wrong, "slowest_s": slowest_s}
        time.sleep(max(0.0, 0.5 - took_s))


def main() -> None:
    verb, seeds = sys.argv[1], [int(word) for word in sys.argv[2:]]
    with Client.attach(TARGET, wait_s=WAIT_S) as client:
        cache = PrefixCache(client)
        if verb == "serve":
            for told in rounds(cache, seeds):
                print(json.dumps(told), flush=True)  # noqa: T201 - its log is what tests read
        told = {"attached": client.is_attached, "reason": str(client.reason)}
        if verb == "store":
            told |= {"stored": sum(store(cache, seed) for seed in seeds)}
        else:
            found = [load(cache, seed) for seed in seeds]
            places = [place for _, _, sources in found for place in sources]
            told |= {"blocks": len(places), "wrong": sum(wrong for _, wrong, _ in found)}
            told |= {"from": {place: places.count(place) for place in sorted(set(places))}}
        print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main()
