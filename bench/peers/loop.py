"""Child side of a driven process: verbs as lines of JSON on stdin, answers on stdout. Needs numpy and nothing of ours.

The timing happens here, beside the work, so that the pipe costs nothing. Blocks are the same in every process: the
same seed gives the same bytes, and what comes back is compared with what was stored.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Bytes2D = npt.NDArray[np.uint8]
"""(blocks, block bytes) uint8, C-contiguous."""


@dataclass(frozen=True, slots=True)
class Work:
    """A set of blocks to store and to load again."""

    block_bytes: int
    blocks: int
    batch: int
    """Blocks of one call, where the store has calls for several."""
    client: int = 0
    """Several clients of one store take different keys."""

    def batches(self) -> Iterator[slice]:
        """Cut the set into batches, in order."""
        for start in range(0, self.blocks, self.batch):
            yield slice(start, min(start + self.batch, self.blocks))


class Store(Protocol):
    """One way to keep blocks. A generation is one pass over the set under keys of its own."""

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Prepare for a set; `source` and `sink` stay where they are until the next `open`."""

    def put(self, generation: int) -> dict[str, float]:
        """Store all of `source`; returns seconds of parts worth knowing."""

    def get(self, generation: int) -> dict[str, float]:
        """Load the set into `sink`; returns seconds of parts worth knowing."""

    def lookup(self, generation: int) -> int:
        """Count how many leading blocks of the set are there, without moving bytes."""

    def clear(self, generation: int) -> None:
        """Make room for the next generation."""

    def prepare(self, generation: int) -> None:
        """Make the keys of a generation: hashing prompts is not part of what is timed."""

    def close(self) -> None:
        """Let go of everything."""


S = TypeVar("S", bound=Store)


class Bench:
    """Answers the verbs with one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._source: Bytes2D = np.zeros((0, 0), np.uint8)
        self._sink = self._source

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carry out one verb."""
        verb = asked.pop("verb")
        if verb == "open":
            return self._open(Work(**asked))
        generation = int(asked["generation"])
        if verb == "prepare":
            self._store.prepare(generation)
        elif verb == "put":
            return self._timed(lambda: self._store.put(generation))
        elif verb == "get":
            return self._timed(lambda: self._store.get(generation))
        elif verb == "check":
            return self._check()
        elif verb == "lookup":
            return self._lookup(generation, int(asked["rounds"]))
        elif verb == "clear":
            self._store.clear(generation)
        return {}

    def _fill(self, work: Work) -> None:
        rng = np.random.default_rng(work.client)
        self._source = rng.integers(0, 256, (work.blocks, work.block_bytes), np.uint8)

    def _open(self, work: Work) -> dict[str, Any]:
        self._fill(work)
        self._sink = np.zeros_like(self._source)
        self._sink.fill(1)  # Touched once: page faults of the reader's memory are not the store's.
        self._store.open(work, self._source, self._sink)
        return {"work": asdict(work)}

    def _check(self) -> dict[str, Any]:
        is_same = bool(np.array_equal(self._source, self._sink))
        self._sink[:, 0] ^= 0xFF  # A load that does nothing cannot pass the next comparison.
        return {"is_same": is_same}

    def _lookup(self, generation: int, rounds: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        hits = [self._store.lookup(generation) for _ in range(rounds)]
        return {"seconds": time.perf_counter() - start_s, "hits": min(hits)}

    @staticmethod
    def _timed(run: Callable[[], dict[str, float]]) -> dict[str, Any]:
        start_s = time.perf_counter()
        parts = run()
        return {"seconds": time.perf_counter() - start_s, "parts": parts}


def serve(make: Callable[[], S], answering: Callable[[S], Bench] = Bench) -> None:
    """Answer verbs until stdin ends. A store that cannot be had is one line `{"absent": why}`.

    Libraries print to stdout; the answers go to a descriptor of their own and stdout joins stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        store = make()
    except (ImportError, OSError, RuntimeError) as e:
        print(json.dumps({"absent": f"{type(e).__name__}: {e}"}), file=answers)
        return
    bench = answering(store)
    print(json.dumps({"versions": store.versions()}), file=answers)
    with contextlib.closing(store):
        for line in sys.stdin:
            print(json.dumps(bench.answer(json.loads(line))), file=answers)
