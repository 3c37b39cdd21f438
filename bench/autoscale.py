"""What autoscaling brings on recorded workloads: hit ratio and memory of a tier that scales, against fixed sizes.

The agent's reuse curve measures the requests and the operator's `decide` makes the steps, on a least-recently-used
cache of one node, each cooldown of the recording's own time. The size that a tier begins with is a part of all blocks
that the recording ever needs, so one that is far too small and one that is far too large are both tried.
"""

import argparse
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.harness.common import table
from kvstrata_agent.policy.reuse_curve import ASKED_BLOCKS_MIN, ReuseCurve
from kvstrata_agent.replay.chains import Trace
from kvstrata_agent.replay.traces import RECORDINGS, TraceError, recording
from kvstrata_api.models.pool import LOW_WATERMARK_PERCENT, TierAutoscale
from kvstrata_api.tiers import step_down, step_up
from kvstrata_operator.decide.pools.autoscaling import Signal, decide

PARTS: Final = (0.02, 0.1, 0.5)
"""Sizes to begin with, by the unique blocks of the recording."""
BLOCK_BYTES: Final = 2 << 20
COOLDOWN_S: Final = 60.0


@dataclass(slots=True)
class Cache:
    """Blocks of one node, least recently used first."""

    blocks: int
    kept: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    hits: int = 0
    asked: int = 0
    block_seconds: float = 0.0
    at_s: float = 0.0

    def serve(self, at_s: float, keys: Sequence[bytes]) -> None:
        """Count the unbroken prefix that is found, and keep the chain."""
        self.block_seconds += self.blocks * max(0.0, at_s - self.at_s)
        self.at_s = at_s
        self.asked += len(keys)
        self.hits += next((i for i, key in enumerate(keys) if key not in self.kept), len(keys))
        for key in reversed(keys):
            self.kept[key] = None
            self.kept.move_to_end(key)
        self.fit()

    def fit(self) -> None:
        """Let go of what has no room."""
        while len(self.kept) > self.blocks:
            self.kept.popitem(last=False)


@functools.cache
def key_of(block: int) -> bytes:
    """Digest of a block, as uniform as the product's."""
    return hashlib.blake2b(str(block).encode(), digest_size=20).digest()


def signal(curve: ReuseCurve, cache: Cache) -> Signal | None:
    """What the agent would report."""
    if curve.asked_blocks < ASKED_BLOCKS_MIN:
        return None
    here = curve.hit_ratio(cache.blocks)
    gain = curve.hit_ratio(step_up(cache.blocks, 1)) - here
    loss = here - curve.hit_ratio(step_down(cache.blocks, 1))
    is_full = 100 * len(cache.kept) >= LOW_WATERMARK_PERCENT * cache.blocks
    return Signal(round(1000 * gain), round(1000 * loss), 0, is_full=is_full, is_short=False)


def replay(trace: Trace, blocks: int, policy: TierAutoscale | None) -> tuple[Cache, int]:
    """Serve all requests; returns the cache and how many steps were made."""
    cache, curve, steps = Cache(blocks, at_s=trace.at_s[0]), ReuseCurve(), 0
    look_s = trace.at_s[0] + COOLDOWN_S
    for at_s, chain in zip(trace.at_s, trace.chains(), strict=True):
        keys = [key_of(block) for block in chain]
        cache.serve(at_s, keys)
        curve.note(keys, at_s)
        if policy is None or at_s < look_s:
            continue
        look_s = at_s + COOLDOWN_S
        told = signal(curve, cache)
        step = decide(policy, cache.blocks, told, 1) if told is not None else None
        if step is not None:
            cache.blocks, steps = step.capacity_bytes, steps + 1
            cache.fit()
    return cache, steps


def rows(name: str, trace: Trace, permille: int) -> list[tuple[str, ...]]:
    """Fixed and scaled, for each size to begin with."""
    unique = trace.unique_blocks
    policy = TierAutoscale(
        min_per_node=max(1, unique // 100), max_per_node=unique, min_gain_permille=permille, cooldown_seconds=60
    )
    span_s = max(1.0, trace.at_s[-1] - trace.at_s[0])
    made: list[tuple[str, ...]] = []
    for part in PARTS:
        for how, rule in (("fixed", None), ("scaled", policy)):
            cache, steps = replay(trace, max(1, int(unique * part)), rule)
            gib = cache.block_seconds / span_s * BLOCK_BYTES / (1 << 30)
            percent = 100 * cache.hits / cache.asked
            figures = (
                f"{percent:.1f}",
                f"{gib:.1f}",
                f"{percent / gib:.2f}",
                str(steps),
                f"{cache.blocks / unique:.3f}",
            )
            made.append((name, f"{part:.0%} {how}", *figures))
    return made


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=sorted(RECORDINGS))
    parser.add_argument("--min-gain-permille", type=int, default=10)
    given = parser.parse_args()
    head = ("workload", "begins with", "hit %", "mean GiB", "hit % per GiB", "steps", "ends with")
    for name in given.only or RECORDINGS:
        try:
            trace = recording(given.traces, name)
        except TraceError as e:
            parser.exit(2, f"bench.autoscale: {e}\n")
        print(table(head, rows(name, trace, given.min_gain_permille)), flush=True)


if __name__ == "__main__":
    main()
