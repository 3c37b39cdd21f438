"""What `kvstrata plan` predicts, beside what real processes do: hit ratios, times to the first token, and queues.

Hits: recorded requests go through a real `kvstrata up` with memory and files, lookup, leases and stores one by one, as
in `bench.policy --live`. First tokens: a real transformer on one core serves a made trace at its arrivals, restores
prefixes out of such an agent and saves what it computed; its rates are measured before on prompts of other tokens, those
of the tiers are taken from the agent's own metrics. The same simulation that plans predicts both. Queues: Poisson
arrivals without any cache against the mean wait of M/D/1 and M/G/1 (Pollaczek and Khinchine), and, with `--blis`,
against a binary of BLIS (inference-sim) whose time for a prompt alone is taken over.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import torch
import yaml
from transformers import LlamaConfig

from bench.first_token import made
from bench.harness import common
from bench.harness.common import Result, publish, table
from bench.harness.drivers import WITH_PARENT, FailedError
from bench.harness.identity import BLOCK_TOKENS, MODEL, REVISION, layout_of
from bench.policy.live import replayed
from bench.policy.synthetic import synthetic
from kvstrata import NO_TOKEN, Client, Layout, Target
from kvstrata_agent.replay import hardware, planning
from kvstrata_agent.replay.chains import Request, Trace, build
from kvstrata_agent.replay.hardware import Hardware
from kvstrata_agent.replay.planning import Fleet, Floats
from kvstrata_agent.replay.reuse_aware import Hints
from kvstrata_agent.replay.tiers import Ours
from kvstrata_agent.replay.traces import read_folder
from kvstrata_api import __version__
from kvstrata_api.models.pool import KVPool
from kvstrata_api.names import API_VERSION
from kvstrata_api.tiers import TierType
from kvstrata_client.connectors import transformers as connector
from kvstrata_client.connectors.transformers_cache import KvstrataCache

POOL: Final = "bench"
START_S: Final = 60.0
BLOCK_BYTES: Final = 32_768
RECORD_BYTES: Final = 4096
"""In front of each block in a file: its header, up to where O_DIRECT may write."""
PERCENTS: Final = ((5, 20), (10, 30))
"""Sizes of memory and files, of a recording's different blocks."""
REQUESTS, REQUESTS_QUICK, REQUESTS_TINY = 3_000, 800, 60
CONFIG: Final = LlamaConfig(
    vocab_size=32_000, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=131_072,
)  # fmt: skip
"""As the demo's model: 4 KiB of KV a token."""
THIN: Final = 4
"""One of so many blocks of the made trace is kept: prompts of some 2,000 tokens instead of 8,500."""
SESSIONS, SESSIONS_QUICK, SESSIONS_TINY = 70, 25, 3
LENGTHS: Final = (64, 512, 1024, 2048, 3072)
"""Prompts that rates are measured with, in tokens."""
REPEATS: Final = 5
SERVED: Final = (("LeafLRU", 0.4), ("ReuseAware", 0.4), ("ReuseAware", 0.7))
"""Eviction, and load: part of what the engine serves when everything waits, by the simulation."""
QUANTILES: Final = tuple(range(10, 100, 10))
QUEUED, QUEUED_QUICK = 50_000, 5_000
BLIS_TOKENS, BLIS_REQUESTS = 8192, 4000


@dataclass(frozen=True, slots=True)
class Agent:
    """A `kvstrata up` that serves."""

    socket: Path
    metrics_url: str

    def attach(self, layout: Layout) -> Client:
        """A client that raises what goes wrong, and waits for a busy disk."""
        target = Target(self.socket, POOL, NO_TOKEN, layout, timeout_s=30.0, move_timeout_s=60.0, silence_s=60.0)
        return Client.attach(target, strict=True, wait_s=START_S)

    def metrics(self) -> str:
        """What it serves at /metrics."""
        with urllib.request.urlopen(self.metrics_url, timeout=START_S) as answer:  # noqa: S310  Of its own ready file.
            return str(answer.read().decode())


def pool_of(memory_bytes: int, file_bytes: int, eviction: str, files: Path) -> KVPool:
    """Memory, and files below it; nothing is packed, and all that is there is fetched."""
    tiers = [
        {"name": "dram", "type": "HostDRAM", "capacityPerNode": memory_bytes, "hostDRAM": {"pageSize": "4Ki"}},
        {"name": "nvme", "type": "NVMe", "capacityPerNode": file_bytes, "nvme": {"path": str(files)}},
    ]
    policy = {
        "eviction": {"type": eviction},
        "compression": {"mode": "None"},
        "recompute": {"type": "AlwaysFetch"},
    }
    spec = {"compatibility": {"model": "*", "revision": "*", "dtype": "bf16"}, "tiers": tiers, "policy": policy}
    return KVPool.model_validate(
        {"apiVersion": "kvstrata.io/v1alpha1", "kind": "KVPool", "metadata": {"name": POOL}, "spec": spec}
    )


@contextmanager
def running(pool: KVPool, home: Path) -> Iterator[Agent]:
    """Run an agent for a pool; leaving ends it. Raises `FailedError`."""
    home.mkdir(parents=True, exist_ok=True)
    manifest, ready = home / "pool.yaml", home / "ready.json"
    declared = {"apiVersion": API_VERSION, "kind": "KVPool", **pool.to_json()}
    manifest.write_text(yaml.safe_dump(declared))
    command = (
        *WITH_PARENT, sys.executable, "-m", "kvstrata_client.cli", "up", "-f", str(manifest),
        "--state-dir", str(home / "state"), "--ready-file", str(ready),
    )  # fmt: skip
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    try:
        ends_s = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > ends_s:
                raise FailedError(f"the agent does not serve: {(home / 'log').read_text()[-400:]}")
            time.sleep(0.05)
        addresses = json.loads(ready.read_text())
        addresses = addresses.get("addresses", addresses)
        yield Agent(home / "state" / "run" / "agent.sock", f"http://{addresses['metrics']}/metrics")
    finally:
        process.terminate()
        process.wait(START_S)


def described(engine: dict[str, Any], block_bytes: int, link: float = 1e10) -> Hardware:
    """A hardware file of one engine alone with both tiers; what files can do is replaced by what an agent measures."""
    memory = {"latencySeconds": 0.0, "readBytesPerSecond": link, "writeBytesPerSecond": 1e10}
    files = {
        "latencySeconds": 0.0,
        "readBytesPerSecond": 1e9,
        "writeBytesPerSecond": 1e9,
        "storedRatio": block_bytes / (block_bytes + RECORD_BYTES),
    }
    return Hardware.model_validate(
        {"engine": engine, "nodeGpus": 1, "gpuHour": 0, "tiers": {"HostDRAM": memory, "NVMe": files}}
    )


def hits(trace: Trace, percents: tuple[int, int], eviction: str) -> tuple[float, float]:
    """Percent of blocks found: predicted, and by an agent that had the requests at the same times."""
    used = {run for path in trace.paths for run in path}
    blocks = sum(trace.lengths[run] for run in used)
    memory, files = (max(512, blocks * percent // 100 // 512 * 512) * BLOCK_BYTES for percent in percents)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as name:
        pool = pool_of(memory, files, eviction, Path(name) / "files")
        with running(pool, Path(name) / "home") as agent, agent.attach(layout_of(BLOCK_BYTES)) as client:
            if client.grants is None:
                raise client.reason
            measured, at_s = replayed(trace, client, client.grants.write_scope)
    engine = {"kvBytesPerToken": BLOCK_BYTES // trace.block_tokens, "kvMemory": 1, "layers": 1}
    fleet = planning.fleet_of(pool, described(engine, BLOCK_BYTES))
    return 100.0 * found_part(fleet, replace(trace, at_s=at_s)), measured


def found_part(fleet: Fleet, trace: Trace) -> float:
    """Part of the blocks that a pool's tiers have when they are asked for, without any engine or queue."""
    rules = replace(fleet.rules, engine_levels=0, memories=fleet.rules.memories - 1)
    tiers = Ours(trace, fleet.capacities(trace)[1:], lambda _tier, _blocks: True, Hints.NONE, rules)
    found = 0
    for number, (path, at_s) in enumerate(zip(trace.paths, trace.at_s, strict=True)):
        tiers.asked(number, path, at_s)
        found += sum(source.blocks for source in tiers.sources(path))
        tiers.used(number, path, at_s)
    return found / max(1, trace.accesses)


class Engine:
    """A transformer that has its prefixes from an agent, one prompt after the other."""

    def __init__(self, agent: Agent) -> None:
        """Attach it; the caller closes `client`."""
        self.model = made(CONFIG, torch.device("cpu"))
        self.layout = connector.layout_of(CONFIG, MODEL, REVISION, "bf16")
        self.client = agent.attach(self.layout)

    def first_token(self, tokens: Sequence[int]) -> int:
        """Restore, compute the rest, save; returns how many tokens were restored."""
        cache = KvstrataCache(self.model, self.client)
        with torch.inference_mode():
            self.model(input_ids=torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
        return int(cache.hit_tokens.total())

    def timed(self, tokens: Sequence[int]) -> float:
        """Seconds of a prompt."""
        begin_s = time.perf_counter()
        self.first_token(tokens)
        return time.perf_counter() - begin_s


def measured_rates(home: Path) -> Hardware:
    """What the engine and the tiers can do, by prompts that the trace does not have and the agent's own metrics."""
    pool = pool_of(512 << 20, 64 << 20, "LeafLRU", home / "files")
    rng = np.random.default_rng(99)
    computed: dict[int, list[float]] = {length: [] for length in LENGTHS}
    restored: dict[int, list[float]] = {length: [] for length in LENGTHS}
    with running(pool, home / "home") as agent:
        engine = Engine(agent)
        with engine.client:
            for repeat in range(-1, REPEATS):
                for length in LENGTHS:
                    tokens = rng.integers(0, CONFIG.vocab_size, length).tolist()
                    new_s, again_s = engine.timed(tokens), engine.timed(tokens)
                    if repeat >= 0:
                        computed[length].append(new_s)
                        restored[length].append(again_s)
        samples = hardware.parse_samples(agent.metrics(), "the agent's metrics")
        layout = engine.layout
    lengths = np.asarray(LENGTHS, np.float64)
    new_s, again_s = (np.asarray([median(found[n]) for n in LENGTHS]) for found in (computed, restored))
    part = {**_fitted(lengths, new_s), "kvBytesPerToken": layout.block_bytes // BLOCK_TOKENS}
    slope_s, _ = np.polyfit(lengths, again_s, 1)
    link = layout.block_bytes / BLOCK_TOKENS / max(slope_s, 1e-9)
    base = described(part, layout.block_bytes, link)
    found, _ = hardware.calibrated(base, pool, samples)
    files = base.tiers[TierType.NVME].model_copy(
        update={
            # What is in files comes to memory first, and from there to the engine.
            "read_bytes_per_second": 1 / (1 / found.tiers[TierType.NVME].read_bytes_per_second + 1 / link),
            "write_bytes_per_second": found.tiers[TierType.NVME].write_bytes_per_second,
        }
    )
    return base.model_copy(update={"tiers": {**base.tiers, TierType.NVME: files}})


def _fitted(lengths: Floats, took_s: Floats) -> dict[str, Any]:
    """Overhead, rate and half-rate length of an engine by seconds of prompts: a + n / r + n^2 / 2hr, relative errors."""
    terms = np.stack((np.ones_like(lengths), lengths, lengths**2)) / took_s
    overhead_s, linear, square = np.linalg.lstsq(terms.T, np.ones_like(took_s), rcond=None)[0]
    linear, square = max(linear, 1e-9), max(square, 1e-15)
    return {
        "overheadSeconds": max(0.0, float(overhead_s)),
        "prefillTokensPerSecond": float(1 / linear),
        "halfRateTokens": max(1, round(linear / (2 * square))),
        "stepSeconds": 0.0,
        "ahead": 0,  # It looks a prompt up when it begins with it, and saves before it goes on.
        "slots": 1 << 20,
        "memoryBytesPerSecond": 1e17,  # Nothing decodes.
        "kvMemory": 1,
    }


def thinned(sessions: int) -> Trace:
    """The made trace with prompts of a length that one core computes; no tokens are generated."""
    whole = synthetic(sessions)
    requests = [
        Request(at_s, chain[::THIN], session)
        for at_s, chain, session in zip(whole.at_s, whole.chains(), whole.sessions, strict=True)
    ]
    return build(f"made-{sessions}", BLOCK_TOKENS, requests)


@dataclass(frozen=True, slots=True)
class Served:
    """A trace at one load: as planned, and as it was served."""

    name: str
    planned_s: Floats
    measured_s: Floats
    planned_hits: float
    measured_hits: float
    """Percent of the tokens."""

    @property
    def mape(self) -> float:
        """Mean of the relative errors of the mean and of nine quantiles."""
        pairs = [(float(self.planned_s.mean()), float(self.measured_s.mean()))]
        pairs += [(float(np.percentile(self.planned_s, q)), float(np.percentile(self.measured_s, q))) for q in QUANTILES]
        return fmean(abs(planned - measured) / measured for planned, measured in pairs)


def served(trace: Trace, rates: Hardware, eviction: str, load: float, home: Path) -> Served:
    """Plan, then serve the trace at the same arrivals."""
    used = {run for path in trace.paths for run in path}
    block_bytes = BLOCK_TOKENS * rates.engine.kv_bytes_per_token
    total = sum(trace.lengths[run] for run in used) * block_bytes
    pool = pool_of(max(4 << 20, total // 8), max(16 << 20, total // 2), eviction, home / "files")
    fleet = planning.fleet_of(pool, rates)
    rate = load * planning.saturated_per_s(fleet, trace, Hints.NONE)
    outcome = planning.simulate(fleet, trace, rate, Hints.NONE)
    speed = rate / planning.recorded_per_s(trace)
    rng = np.random.default_rng(5)
    words = rng.integers(0, CONFIG.vocab_size, (trace.unique_blocks, BLOCK_TOKENS))
    prompts = [words[list(chain)].reshape(-1).tolist() for chain in trace.chains()]
    took_s, restored = [], 0
    with running(pool, home / "home") as agent:
        engine = Engine(agent)
        with engine.client:
            engine.timed(rng.integers(0, CONFIG.vocab_size, BLOCK_TOKENS).tolist())  # Its first one warms up.
            begin_s = time.perf_counter()
            for prompt, at_s in zip(prompts, trace.at_s, strict=True):
                arrives_s = begin_s + (at_s - trace.at_s[0]) / speed
                time.sleep(max(0.0, arrives_s - time.perf_counter()))
                restored += engine.first_token(prompt)
                took_s.append(time.perf_counter() - arrives_s)
    asked = trace.accesses
    return Served(
        f"{eviction}, load {load:g}",
        np.asarray(outcome.ttft_s),
        np.asarray(took_s),
        100.0 * sum(outcome.found_blocks) / asked,
        100.0 * restored / (asked * BLOCK_TOKENS),
    )


def poisson(count: int, rate: float, lengths: Sequence[int], seed: int = 3) -> Trace:
    """Arrivals of prompts of which none has anything in common with another, in blocks of one token."""
    draw, at_s, first = random.Random(seed), 0.0, 0
    requests = []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        length = draw.choice(lengths)
        requests.append(Request(at_s, range(first, first + length)))
        first += length
    return build("poisson", 1, requests)


def queue_error(count: int, load: float, lengths: Sequence[int]) -> tuple[float, float]:
    """Mean wait in seconds: simulated, and by Pollaczek and Khinchine for the load that came."""
    engine = {"stepSeconds": 0.0, "memoryBytesPerSecond": 1e17, "kvMemory": 1, "slots": 1 << 20}
    fleet = planning.fleet_of(pool_of(1, 1, "LeafLRU", Path("/none")), described(engine, BLOCK_BYTES))
    compute_s = fleet.engine.load.compute_s
    trace = poisson(count, 1.0, lengths)
    each_s = np.asarray([compute_s(0, sum(trace.lengths[run] for run in path)) for path in trace.paths])
    speed = load / each_s.mean() / (count / (trace.at_s[-1] - trace.at_s[0]))
    outcome = planning.simulate(fleet, trace, speed * planning.recorded_per_s(trace), Hints.NONE)
    expected_s = load * (each_s**2).mean() / each_s.mean() / (2 * (1 - load))
    return float(np.mean(outcome.ttft_s) - each_s.mean()), float(expected_s)


def blis_wait(binary: Path, load: float) -> tuple[float, float]:
    """Mean wait in seconds of equal prompts at Poisson arrivals: by this simulation, and by BLIS."""
    alone_s = _blis(binary, 0.05, 50)
    theirs_s = _blis(binary, load / alone_s, BLIS_REQUESTS) - alone_s
    return load * alone_s / (2 * (1 - load)), theirs_s


def _blis(binary: Path, rate: float, count: int) -> float:
    """Mean time to the first token that BLIS finds. Raises `FailedError`."""
    spec = {
        "version": "2", "aggregate_rate": rate, "num_requests": count,
        "clients": [{
            "id": "one", "rate_fraction": 1.0, "arrival": {"process": "poisson"},
            "input_distribution": {"type": "constant", "params": {"value": BLIS_TOKENS}},
            "output_distribution": {"type": "constant", "params": {"value": 1}},
        }],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as name:
        workload, said = Path(name) / "workload.yaml", Path(name) / "metrics.json"
        workload.write_text(yaml.safe_dump(spec))
        done = subprocess.run(
            (str(binary.resolve()), "run", "--model", "meta-llama/llama-3.1-8b-instruct", "--hardware", "H100",
             "--tp", "1", "--latency-model", "roofline", "--workload-spec", str(workload), "--num-requests", str(count),
             "--metrics-path", str(said)),
            cwd=binary.resolve().parent / "src", capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode or not said.exists():
            raise FailedError(f"BLIS: {done.stderr[-400:]}")
        return float(json.loads(said.read_text())["ttft_mean_ms"]) / 1e3
