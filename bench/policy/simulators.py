"""Simulators of others on our traces, and pictures, in the environment `simulators` of hack/peers.py.

Each gets a trace as a file in its own format, with blocks numbered so that equal numbers are equal prefixes, and runs
in a process of its own.

| simulator | policy | what is counted |
|---|---|---|
| libcachesim | its LRU, ARC, GDSF, S3-FIFO, SIEVE, W-TinyLFU | all requests, by us: it knows no prefixes |
| kvcache-simulator | LRU that takes leaves first | the second half of the requests, once its cache is full |
| LMCache's `tool cache-simulator` | LRU that takes heads first | all requests |
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import peers
from bench.harness.drivers import AbsentError
from bench.policy.peers import PEERS, plain_lru
from kvstrata_agent.replay.cache import replay
from kvstrata_agent.replay.chains import Trace

ENVIRONMENT: Final = "simulators"
HOW: Final = f"the simulators' environment is not there: python hack/peers.py {ENVIRONMENT}"
VERSION: Final = "0.3.5"
"""Of libcachesim: requirements/peers-simulators.in pins it."""
LIMIT_S: Final = 1800.0
"""Of one process: the slowest replays a million blocks in a few seconds."""
LIBCACHESIM: Final = ("LRU", "ARC", "GDSF", "S3-FIFO", "SIEVE", "W-TinyLFU")
MODEL: Final = "deepseek-v3"
"""kvcache-simulator knows capacity as memory of a model; which one is the same to the hits."""
TOKENS: Final = 4096
"""For which it counts the bytes of a token."""
DIFFERENCE_POINTS_MAX: Final = 0.3
"""Between a simulator's LRU and ours."""
_GIB: Final = 1 << 30
_CHUNK_BYTES: Final = 1 << 20
_HITS: Final = re.compile(r"Hit tokens\s*:\s*([\d,]+)")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hits of one policy by a simulator and by our replay, in percent of what both count."""

    trace: str
    size_percent: int
    simulator: str
    policy: str
    theirs_percent: float
    ours_percent: float

    @property
    def difference_points(self) -> float:
        """Theirs beyond ours."""
        return self.theirs_percent - self.ours_percent


def is_ready() -> bool:
    """True when the environment is there."""
    return peers.is_ready(ENVIRONMENT)


def libcachesim(
    trace: Trace, capacity_blocks: int, policies: Sequence[str] = LIBCACHESIM, *, is_tail_first: bool = True
) -> tuple[dict[str, float], str]:
    """Percent of hits by policy, and the version. Raises `AbsentError`.

    Its API lets nobody say which objects may leave, so leaf first is no rule here, but what the order of uses makes
    likely: exact for LRU, while the others may take a block out of the middle of a chain.
    """
    blocks = [np.asarray(chain, np.int64) for chain in trace.chains()]
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as directory:
        path = Path(directory) / "trace.npz"
        np.savez(path, blocks=np.concatenate(blocks), ends=np.cumsum([len(chain) for chain in blocks]))
        script = Path(__file__).with_name("libcachesim_process.py")
        order = "tail" if is_tail_first else "head"
        answer = json.loads(_run(str(_python()), str(script), str(path), str(capacity_blocks), order, *policies))
    percent = {name: 100.0 * hits / trace.accesses for name, hits in answer["hits"].items()}
    return percent, str(answer["version"])


def kvcache_simulator(trace: Trace, capacities: Sequence[int]) -> dict[int, tuple[float, int]]:
    """By capacity in blocks: percent of hits, and the request from which they count.

    A capacity that is not filled before that is left out, as it leaves it out. Raises `AbsentError`.
    """
    rows = (
        {"hash_ids": chain, "input_length": len(chain) * trace.block_tokens, "block_size": trace.block_tokens}
        for chain in trace.chains()
    )
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as directory:
        path = _lines(Path(directory) / "trace.jsonl", rows)
        block_bytes = _sweep(path, [1.0])["metadata"]["bytesPerBlock"]
        # Half a block more, so that no rounding makes it one less.
        answer = _sweep(path, [(blocks + 0.5) * block_bytes / _GIB for blocks in capacities])
    first = int(answer["metadata"]["warmupRequests"])
    return {int(p["cacheBlocks"]): (100.0 * p["results"]["lru"]["hitRate"], first) for p in answer["points"]}


def lmcache(trace: Trace, capacity_blocks: int) -> float:
    """Percent of hits by LMCache's tool. Raises `AbsentError`."""
    size = trace.block_tokens
    rows = (
        {"timestamp": number, "chunk_size": size, "seq_len": size * len(chain), "chunk_hashes": list(map(str, chain))}
        for number, chain in enumerate(trace.chains())
    )
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as directory:
        path = _lines(Path(directory) / "lookup_hashes_1.jsonl", rows)
        said = _run(
            str(_python().with_name("lmcache")), "tool", "cache-simulator", "simulate", "-i", str(path),
            "--cache-capacity-gib", str(capacity_blocks * _CHUNK_BYTES / _GIB),
            "--kv-bytes-per-chunk", str(_CHUNK_BYTES), "-o", str(Path(directory) / "stats.png"),
        )  # fmt: skip
    found = _HITS.search(said)
    if found is None:
        raise AbsentError(f"LMCache's cache-simulator names no hit tokens: {said[-400:]}")
    return 100.0 * int(found[1].replace(",", "")) / (size * trace.accesses)


def compare(trace: Trace, sizes: Iterable[int]) -> list[Comparison]:
    """LRU of all simulators beside ours, in each size. Raises `AbsentError`."""
    found: list[Comparison] = []
    blocks = {size: max(1, trace.unique_blocks * size // 100) for size in sizes}
    swept = kvcache_simulator(trace, list(blocks.values()))
    for size, capacity in blocks.items():
        leaf_first = replay(trace, capacity, PEERS["leaf-LRU"])
        head_first = plain_lru(trace, capacity).hit_percent

        def row(simulator: str, policy: str, theirs: float, ours: float, size: int = size) -> None:
            found.append(Comparison(trace.name, size, simulator, policy, theirs, ours))

        for is_tail_first, policy, ours in (
            (True, "leaf-LRU", leaf_first.hit_percent),
            (False, "plain LRU", head_first),
        ):
            percent, _ = libcachesim(trace, capacity, ("LRU",), is_tail_first=is_tail_first)
            row("libcachesim", policy, percent["LRU"], ours)
        row("LMCache", "plain LRU", lmcache(trace, capacity), head_first)
        if capacity in swept:
            theirs, first = swept[capacity]
            late = replay(trace, capacity, PEERS["leaf-LRU"], counted_from=first)
            row("kvcache-simulator", "leaf-LRU", theirs, late.hit_percent)
    return found


def plot(directory: Path, cells: Sequence[Mapping[str, object]]) -> list[str]:
    """Draw figures with that environment's matplotlib; returns the files. Raises `AbsentError`."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as scratch:
        path = Path(scratch) / "cells.json"
        path.write_text(json.dumps(cells))
        script = Path(__file__).with_name("plot_process.py")
        return _run(str(_python()), str(script), str(path), str(directory.absolute())).splitlines()


def _sweep(path: Path, budgets_gib: Sequence[float]) -> dict[str, Any]:
    said = _run(
        str(_python().with_name("kvcache-simulator")), "run", "--trace", str(path), "--model", MODEL,
        "--estimate-tokens", str(TOKENS), "--budgets-gib", ",".join(map(repr, budgets_gib)), "--policies", "lru",
        "--backend", "python", "--no-progress", "--format", "json",
    )  # fmt: skip
    found: dict[str, Any] = json.loads(said)
    return found


def _lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    with path.open("w") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")
    return path


def _python() -> Path:
    if not is_ready():
        raise AbsentError(HOW)
    return peers.python_of(ENVIRONMENT)


def _run(*command: str) -> str:
    """What a program prints. Raises `AbsentError` with the end of what it said."""
    environment = {**os.environ, "PYTHONPATH": "", "LMCACHE_DISABLE_BANNER": "1", "MPLBACKEND": "Agg"}
    try:
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=LIMIT_S
        )  # fmt: skip
    except subprocess.CalledProcessError as e:
        raise AbsentError(f"{Path(command[0]).name}: {e.stderr[-400:]}") from e
    except (OSError, subprocess.TimeoutExpired) as e:
        raise AbsentError(str(e)) from e
    return done.stdout
