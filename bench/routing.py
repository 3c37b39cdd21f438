"""Which of a thousand engines has most of a prompt, and which would have it soonest: time of one answer.

Engines publish pages of shared prompts, each as far as it has them, in its own memory, its node's or on disk. An answer
walks the prompt once, tells how much each engine has and how near, and puts the engines in order by queue, fetching and
computing. Beside it, in the same process, a set of engines for each page, which is what a router writes first: it tells
the longest prefix alone. Answers are compared: the longest has to be equal.
Times are the thread's own, because an answer waits for nothing and a shared machine does.
"""

import random
import time
from collections import defaultdict
from typing import Final

import numpy as np

from bench.harness import common
from bench.harness.common import Result, Sample, publish, table, time_ratio
from kvstrata_api import __version__
from kvstrata_client.connectors.engine_events import PagesStored, Reach
from kvstrata_client.connectors.route_index import Costs, RouteIndex

ENGINES: Final = 1000
PAGE_TOKENS: Final = 16
PROMPTS: Final = 8
SHARED: Final = 0.2
"""Part of the engines that has the begin of a prompt."""
PAGES: Final = (128, 512, 2048)
"""Of a prompt: 2,048, 8,192 and 32,768 tokens."""
REPEATS: Final = 200
COSTS: Final = Costs(0.002, (0.0, 0.0002, 0.001, 0.003))
"""Seconds of a page: 8,000 tokens a second, and media of 1 to 10 GB/s for pages of 2 MiB, rounded."""


class SetsByPage:
    """A set of engines for each page."""

    def __init__(self) -> None:
        self.has: defaultdict[tuple[int, int], set[int]] = defaultdict(set)

    def longest(self, prompt: int, pages: int) -> int:
        """Pages of the longest beginning that some engine has."""
        alive: set[int] | None = None
        for at in range(pages):
            alive = self.has[prompt, at] if alive is None else alive & self.has[prompt, at]
            if not alive:
                return at
        return pages


def _tokens(prompt: int, pages: int) -> "np.typing.NDArray[np.uint32]":
    return np.random.default_rng(prompt).integers(0, 128_000, pages * PAGE_TOKENS, np.uint32)


def filled(engines: int, pages: int, draw: random.Random) -> tuple[RouteIndex, SetsByPage]:
    """Engines that have prompts as far as chance has it."""
    index, sets = RouteIndex(PAGE_TOKENS), SetsByPage()
    tokens = [tuple(_tokens(prompt, pages).tolist()) for prompt in range(PROMPTS)]
    for i in range(engines):
        engine = f"engine-{i}"
        index.know(engine, is_known=True)
        index.wait(engine, draw.expovariate(2.0))
        for prompt in range(PROMPTS):
            if draw.random() > SHARED:
                continue
            depth = draw.randint(1, pages)
            names = tuple(range((prompt + 1) << 32, ((prompt + 1) << 32) + depth))
            near = draw.randint(0, depth)
            for first, stop, reach in ((0, near, Reach.ENGINE), (near, depth, draw.choice(list(Reach)[1:]))):
                if first < stop:
                    parent = names[first - 1] if first else None
                    part = tokens[prompt][first * PAGE_TOKENS : stop * PAGE_TOKENS]
                    index.learn(engine, PagesStored(names[first:stop], parent, part, reach))
            for at in range(depth):
                sets.has[prompt, at].add(i)
    return index, sets


def measure(engines: int, pages: int, repeats: int) -> tuple[Sample, Sample]:
    """Milliseconds of the thread's time for an answer, ours and that of sets by page, by turns."""
    index, sets = filled(engines, pages, random.Random(pages))
    asked = [_tokens(prompt, pages) for prompt in range(PROMPTS)]
    ours, others = [], []
    for i in range(repeats):
        prompt = i % PROMPTS
        started_s = time.thread_time()
        index.route(asked[prompt], COSTS)
        ours.append(1e3 * (time.thread_time() - started_s))
        started_s = time.thread_time()
        longest = sets.longest(prompt, pages)
        others.append(1e3 * (time.thread_time() - started_s))
        if i < PROMPTS:
            most = max(route.pages for route in index.route(asked[prompt], COSTS, most=engines))
            assert most == longest, (prompt, most, longest)
    return Sample(tuple(ours)), Sample(tuple(others))


def main() -> int:
    """Run it."""
    given = common.parser(__doc__, has_tiny=True).parse_args()
    engines = 100 if given.tiny else ENGINES
    sizes = PAGES[:1] if given.tiny else PAGES
    rows, values, ratios = [], dict[str, float](), dict[str, float | None]()
    for pages in sizes:
        ours, others = measure(engines, pages, 20 if given.tiny or given.quick else REPEATS)
        p99 = sorted(ours.values)[int(0.99 * len(ours.values))]
        middle = ours.spread[1]
        rows.append((f"{pages * PAGE_TOKENS}", f"{middle:.3f}", f"{p99:.3f}", f"{others.spread[1]:.3f}"))
        values[f"route_ms_{pages}_pages"] = middle
        values[f"route_p99_ms_{pages}_pages"] = p99
        ratios[f"sets_by_page_{pages}_pages"] = time_ratio(ours, others)
    print(table(("tokens", "ours, ms", "p99, ms", "sets by page, ms"), rows))
    values["engines"] = engines
    publish(
        Result(
            "routing", given.quick or given.tiny, {"kvstrata": __version__, "numpy": np.__version__}, ratios, values
        ),
        given.json,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
