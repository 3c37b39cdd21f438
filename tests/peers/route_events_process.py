"""vLLM's own publisher of KV events, begun anew and silent by turns, before a listener of routes. One JSON line."""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from kvstrata_client.connectors.event_listener import RouteListener
from kvstrata_client.connectors.route_index import Costs

TOKENS: Final = 16
PAGES: Final = 8
COSTS: Final = Costs(1.0)
ROUNDS: Final = 20
LATEST_S: Final = 60.0
"""For what takes a second on a machine with nothing else to do."""


class Engine:
    """Pages of one prompt, published as vLLM does."""

    def __init__(self, folder: Path, name: str) -> None:
        self.ends = (f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay")
        self.depth = 0
        self.publisher: Any = None

    def up(self) -> None:
        """Begin anew, with nothing."""
        self.depth = 0
        self.publisher = ZmqEventPublisher(0, self.ends[0], self.ends[1])

    def down(self) -> None:
        """End, as a process does whose last batch was sent."""
        self.publisher.shutdown()
        self.publisher = None

    def go_to(self, depth: int) -> None:
        """Have so many pages."""
        hashes = [1000 + n for n in range(PAGES)]
        event: BlockStored | BlockRemoved
        if depth > self.depth:
            tokens = [int(t) for t in prompt()[self.depth * TOKENS : depth * TOKENS]]
            parent = hashes[self.depth - 1] if self.depth else None
            event = BlockStored(hashes[self.depth : depth], parent, tokens, TOKENS, None, "GPU", None)
        else:
            event = BlockRemoved(hashes[depth : self.depth], "GPU")
        self.depth = depth
        self.publisher.publish(KVEventBatch(ts=time.time(), events=[event]))


def prompt() -> "np.typing.NDArray[np.uint32]":
    """Tokens of all pages."""
    return np.arange(PAGES * TOKENS, dtype=np.uint32)


def stir(engine: Engine, draw: random.Random) -> None:
    """Let it end, begin anew, or go on; and publish, where it is up."""
    if engine.publisher is None:
        engine.up()
    elif draw.random() < 0.4:
        engine.down()
        if draw.random() < 0.5:
            engine.up()
    if engine.publisher is not None:
        for _ in range(draw.randint(1, 4)):
            engine.go_to(draw.choice([d for d in range(PAGES + 1) if d != engine.depth]))


def until(fact: Callable[[], bool]) -> float:
    """Seconds until something is true."""
    started_s = time.monotonic()
    while not fact():
        if time.monotonic() - started_s > LATEST_S:
            raise TimeoutError("did not become true")
        time.sleep(0.01)
    return time.monotonic() - started_s


def main() -> None:
    """Run it."""
    folder, draw = Path(sys.argv[1]), random.Random(1)
    engines = {name: Engine(folder, name) for name in ("a", "b", "c")}
    for engine in engines.values():
        engine.up()
        engine.go_to(draw.randint(1, PAGES))  # Before anybody hears: the replay has it.
    listener = RouteListener(TOKENS, {name: engine.ends for name, engine in engines.items()})

    def is_true() -> bool:
        found = {r.engine: r.pages for r in listener.route(prompt(), COSTS, most=9)}
        return found == {name: e.depth for name, e in engines.items() if e.publisher is not None}

    took_s = [until(is_true)]
    for _ in range(ROUNDS):
        stir(engines[draw.choice("abc")], draw)
        took_s.append(until(is_true))
    counts = listener.counts()
    listener.close()
    for engine in engines.values():
        if engine.publisher is not None:
            engine.down()
    sys.stdout.write(json.dumps({"took_s": took_s, "counts": counts}) + "\n")


if __name__ == "__main__":
    main()
