"""What `kvstrata plan` predicts, beside what real processes do: hit ratios, times to the first token, and queues.

Hits: recorded requests go through a real `kvstrata up` with memory and files, lookup, leases and stores one by one, as
in `bench.policy --live`. First tokens: a real transformer on one core serves a made trace at its arrivals, restores
prefixes out of such an agent and saves what it computed. Rates of the engine are those that every second of its prompts
had, as a live fleet reports them, and besides those of another trace that was served before; rates of the tiers are in
the agent's own metrics. The same simulation that plans predicts both. Queues: Poisson arrivals without any cache beside
the mean wait of M/D/1 and M/G/1 (Pollaczek and Khinchine), and, with `--blis`, that of M/D/1 against a binary of BLIS
(inference-sim) whose time for a prompt alone is taken over.
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
SWEPT_S: Final = 0.5
BATCH: Final = 128
"""Blocks that are stored at a time: 2,048 tokens in blocks of 16, a step of an engine that computes in chunks. What
they take the place of is gone from memory, even if they are the first to leave it then."""
REQUESTS, REQUESTS_QUICK, REQUESTS_TINY = 3_000, 800, 60
CONFIG: Final = LlamaConfig(
    vocab_size=32_000, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=131_072,
)  # fmt: skip
"""As the demo's model: 4 KiB of KV a token."""
THIN: Final = 4
"""One of so many blocks of the made trace is kept: prompts of some 2,000 tokens instead of 8,500."""
SESSIONS, SESSIONS_QUICK, SESSIONS_TINY = 35, 20, 3
SERVED: Final = (("LeafLRU", 0.2), ("ReuseAware", 0.3))
"""Eviction, and load: part of what the engine serves when everything waits, by the simulation."""
REPEATS: Final = 3
"""Runs of each, of which each prompt's median counts."""
QUANTILES: Final = tuple(range(10, 100, 10))
LOADS: Final = (0.3, 0.6, 0.8)
QUEUED, QUEUED_QUICK, QUEUED_TINY = 100_000, 20_000, 500
ACCESSES_MAX: Final = 120_000
"""Blocks asked for in one run: 4 GB at most."""
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
            high = pool.spec.policy.eviction.high_watermark_percent
            measured, at_s = replayed(trace, client, client.grants.write_scope, BATCH, lambda: _swept(client, high))
    engine = {"kvBytesPerToken": BLOCK_BYTES // trace.block_tokens, "kvMemory": 1, "layers": 1}
    fleet = planning.fleet_of(pool, described(engine, BLOCK_BYTES))
    return 100.0 * found_part(fleet, replace(trace, at_s=at_s)), measured


def _swept(client: Client, high_percent: int) -> None:
    """Wait until no tier is above its high watermark, or nothing there can leave: agents look five times a second.

    Between requests as they were recorded there is time for it; here they follow each other, and a tier of megabytes
    would turn over between two looks, always full to the brim.
    """
    ends_s = time.monotonic() + SWEPT_S
    while any(tier["used_percent"] > high_percent for tier in json.loads(client.stats())["tiers"]):
        if time.monotonic() > ends_s:
            return
        time.sleep(0.01)


def found_part(fleet: Fleet, trace: Trace) -> float:
    """Part of the blocks that a pool's tiers have when they are asked for, without any engine or queue."""
    rules = fleet.rules.without_engine(BATCH * trace.block_tokens)
    tiers = Ours(trace, fleet.capacities(trace)[1:], lambda _tier, _blocks: True, Hints.NONE, rules)
    return sum(tiers.play(trace)) / max(1, trace.accesses)


class Engine:
    """A transformer that has its prefixes from an agent, one prompt after the other."""

    def __init__(self, agent: Agent) -> None:
        """Attach it; the caller closes `client`."""
        self.model = made(CONFIG, torch.device("cpu"))
        self.layout = connector.layout_of(CONFIG, MODEL, REVISION, "bf16")
        self.client = agent.attach(self.layout)

    def first_token(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Restore, compute the rest, save; returns how many tokens were restored, and how many of them from files."""
        cache = KvstrataCache(self.model, self.client)
        with torch.inference_mode():
            self.model(input_ids=torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
        return int(cache.hit_tokens.total()), int(cache.hit_tokens["nvme"])


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt as it was served."""

    tokens: int
    restored: int
    from_files: int
    """Of the restored ones."""
    service_s: float
    first_token_s: float
    """From its arrival."""


def serve(trace: Trace, pool: KVPool, speed: float, home: Path, seed: int) -> tuple[list[Turn], str]:
    """Serve a trace so many times as fast as it was recorded, on an agent of its own; also the agent's last metrics."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, CONFIG.vocab_size, (trace.unique_blocks, BLOCK_TOKENS))
    prompts = [words[list(chain)].reshape(-1).tolist() for chain in trace.chains()]
    turns = []
    with running(pool, home) as agent:
        engine = Engine(agent)
        with engine.client:
            engine.first_token(rng.integers(0, CONFIG.vocab_size, BLOCK_TOKENS).tolist())  # The first one warms up.
            begin_s = time.perf_counter()
            for prompt, at_s in zip(prompts, trace.at_s, strict=True):
                arrives_s = begin_s + (at_s - trace.at_s[0]) / speed
                time.sleep(max(0.0, arrives_s - time.perf_counter()))
                starts_s = time.perf_counter()
                restored, from_files = engine.first_token(prompt)
                ends_s = time.perf_counter()
                turns.append(Turn(len(prompt), restored, from_files, ends_s - starts_s, ends_s - arrives_s))
        return turns, agent.metrics()


def middle(same: Sequence[Turn]) -> Turn:
    """Medians of one prompt in several runs: what else a shared machine does hits one of them."""
    return Turn(
        same[0].tokens,
        int(median(t.restored for t in same)),
        int(median(t.from_files for t in same)),
        median(t.service_s for t in same),
        median(t.first_token_s for t in same),
    )


def tiers_for(trace: Trace, eviction: str, files: Path) -> KVPool:
    """Memory of an eighth of a trace's different blocks, and files of half of them."""
    total = trace.unique_blocks * connector.layout_of(CONFIG, MODEL, REVISION, "bf16").block_bytes
    return pool_of(max(4 << 20, total // 8), max(16 << 20, total // 2), eviction, files)


def measured_rates(home: Path, sessions: int) -> Hardware:
    """What the engine and the tiers can do: by another made trace, served prompt by prompt, and the agent's metrics."""
    trace = thinned(sessions, seed=2)
    pool = tiers_for(trace, "LeafLRU", home / "files")
    turns, metrics = serve(trace, pool, planning.AT_ONCE, home / "home", seed=2)
    return rates_of(turns, metrics, pool)


def rates_of(turns: Sequence[Turn], metrics: str, pool: KVPool) -> Hardware:
    """What prompts that were served, and the metrics of their agent, say of engine and tiers."""
    layout = connector.layout_of(CONFIG, MODEL, REVISION, "bf16")
    token_bytes = layout.block_bytes // BLOCK_TOKENS
    base = described({"kvBytesPerToken": token_bytes}, layout.block_bytes)
    found, _ = hardware.calibrated(base, pool, hardware.parse_samples(metrics, "the agent's metrics"))
    files = found.tiers[TierType.NVME]
    part, link_s = _fitted(turns, token_bytes / files.read_bytes_per_second)
    link = token_bytes / max(link_s, 1e-9)
    base = described({**part, "kvBytesPerToken": token_bytes}, layout.block_bytes, link)
    # What is in files comes to memory first, and from there to the engine.
    through = 1 / (1 / files.read_bytes_per_second + 1 / link)
    update = {"read_bytes_per_second": through, "stored_ratio": base.tiers[TierType.NVME].stored_ratio}
    return base.model_copy(update={"tiers": {**base.tiers, TierType.NVME: files.model_copy(update=update)}})


def _fitted(turns: Sequence[Turn], file_s: float) -> tuple[dict[str, Any], float]:
    """The engine, and seconds of a restored token, by least squares; terms that would be negative are left out.

    Seconds = overhead + computed / rate + computed x (restored + computed / 2) / (half-rate length x rate) + restored x
    seconds of one, beside `file_s` for each that came from files. Large prompts and small ones count by the square root
    of what they took.
    """
    took_s = np.asarray([max(1e-3, t.service_s - file_s * t.from_files) for t in turns])
    restored = np.asarray([min(t.restored, t.tokens - 1) for t in turns], np.float64)
    computed = np.asarray([t.tokens for t in turns]) - restored
    terms = np.stack((np.ones_like(took_s), computed, computed * (restored + computed / 2), restored))
    kept, solved = [0, 1, 2, 3], np.zeros(4)
    while True:
        weights = 1 / np.sqrt(took_s)
        solved[:] = 0.0
        solved[kept] = np.linalg.lstsq((terms[kept] * weights).T, took_s * weights, rcond=None)[0]
        if (solved >= 0).all():
            break
        kept = [i for i in kept if solved[i] > 0]
    overhead_s, linear, square, restored_s = (float(x) for x in solved)
    return {
        "overheadSeconds": overhead_s,
        "prefillTokensPerSecond": 1 / max(linear, 1e-9),
        "halfRateTokens": min(1 << 40, max(1, round(linear / max(square, 1e-18)))),
        "stepSeconds": 0.0,
        "ahead": 0,  # It looks a prompt up when it begins with it, and saves before it goes on.
        "slots": 1 << 20,
        "memoryBytesPerSecond": 1e17,  # Nothing decodes.
        "kvMemory": 1,
    }, restored_s


def thinned(sessions: int, seed: int = 1) -> Trace:
    """The made trace with prompts of a length that one core computes; no tokens are generated."""
    whole = synthetic(sessions, seed)
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
    """By the rates of this run: of every second of its prompts, and the agent's own metrics."""
    planned_before_s: Floats
    """By those of another trace that was served before."""
    measured_s: Floats
    planned_hits: float
    measured_hits: float
    """Percent of the tokens."""

    @property
    def mape(self) -> float:
        """By the rates of this run."""
        return mape(self.planned_s, self.measured_s)

    @property
    def mape_before(self) -> float:
        """By the rates of the run before."""
        return mape(self.planned_before_s, self.measured_s)


def mape(planned_s: Floats, measured_s: Floats) -> float:
    """Mean of the relative errors of the mean and of nine quantiles."""
    pairs = [(float(planned_s.mean()), float(measured_s.mean()))]
    pairs += [(float(np.percentile(planned_s, q)), float(np.percentile(measured_s, q))) for q in QUANTILES]
    return fmean(abs(planned - measured) / measured for planned, measured in pairs)


def served(trace: Trace, rates: Hardware, eviction: str, load: float, home: Path) -> Served:
    """Plan, then serve the trace at the same arrivals."""
    pool = tiers_for(trace, eviction, home / "files")
    fleet = planning.fleet_of(pool, rates)
    rate = load * planning.saturated_per_s(fleet, trace, Hints.NONE)
    before = planning.simulate(fleet, trace, rate, Hints.NONE)
    runs, metrics = list[list[Turn]](), ""
    for repeat in range(REPEATS):
        files = home / str(repeat)
        again = tiers_for(trace, eviction, files / "files")
        turns, metrics = serve(trace, again, rate / planning.recorded_per_s(trace), files / "home", seed=5)
        runs.append(turns)
    turns = [middle(same) for same in zip(*runs, strict=True)]
    now = planning.fleet_of(pool, rates_of(turns[::2], metrics, pool))
    outcome = planning.simulate(now, trace, rate, Hints.NONE)
    return Served(
        f"{eviction}, load {load:g}",
        np.asarray(outcome.ttft_s),
        np.asarray(before.ttft_s),
        np.asarray([t.first_token_s for t in turns]),
        100.0 * sum(outcome.found_blocks) / trace.accesses,
        100.0 * sum(t.restored for t in turns) / (trace.accesses * BLOCK_TOKENS),
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
    """Mean wait in seconds of equal prompts at Poisson arrivals: of M/D/1 with BLIS's own time of one, and by BLIS."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, measure, and print the tables and the last line."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="folder of recordings for hits; without it one is made"
    )
    parser.add_argument("--blis", type=Path, metavar="FILE", help="blis, beside its sources in src/")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    is_short = bool(given.quick or given.tiny)
    values: dict[str, float] = {}
    _first_tokens(SESSIONS_TINY if given.tiny else SESSIONS_QUICK if given.quick else SESSIONS, values)
    _hits(given, values)
    _queues(QUEUED_TINY if given.tiny else QUEUED_QUICK if given.quick else QUEUED, given.blis, values)
    versions = {"kvstrata": __version__, "blis": "given" if given.blis else "absent: no --blis"}
    publish(Result("plan", is_short, versions, {}, values), given.json)
    named = ("hit_ratio_error_points", "ttft_mape", "ttft_mape_rates_of_before", "md1_error", "mg1_error")
    print(json.dumps({"plan": {name: round(values[name], 4) for name in (*named, "blis_error") if name in values}}))
    return 0


def _queues(count: int, blis: Path | None, values: dict[str, float]) -> None:
    """Waits without a cache."""
    rows = []
    for name, lengths in (("md1", (2000,)), ("mg1", (500, 1000, 8000))):
        pairs = {load: queue_error(count, load, lengths) for load in LOADS}
        rows += [
            (f"{name}, load {load:g}", f"{a:.4f}", f"{b:.4f}", f"{a / b - 1:+.1%}") for load, (a, b) in pairs.items()
        ]
        values[f"{name}_error"] = max(abs(a / b - 1) for a, b in pairs.values())
    if blis is not None:
        found = {load: blis_wait(blis, load) for load in LOADS}
        rows += [
            (f"BLIS, load {load:g}", f"{b:.4f}", f"{a:.4f}", f"{b / a - 1:+.1%}") for load, (a, b) in found.items()
        ]
        values["blis_error"] = max(abs(a / b - 1) for a, b in found.values())
    print(table(("mean wait in s", "simulated", "expected", "error"), rows), "\n", flush=True)


def _hits(given: Any, values: dict[str, float]) -> None:
    """Hit ratios of real agents."""
    limit = REQUESTS_TINY if given.tiny else REQUESTS_QUICK if given.quick else REQUESTS
    found = list(read_folder(given.traces).traces) if given.traces else [synthetic(60 if given.tiny else 400)]
    rows, errors = [], []
    for whole in found:
        trace = _cut(planning.fitting(whole, 1 << 20, limit)[0])
        for percents in PERCENTS[:1] if given.quick or given.tiny else PERCENTS:
            for eviction in ("LeafLRU", "ReuseAware"):
                planned, measured = hits(trace, percents, eviction)
                errors.append(abs(planned - measured))
                name = f"{whole.name}, {percents[0]} + {percents[1]} %, {eviction}"
                rows.append((name, f"{planned:.2f}", f"{measured:.2f}", f"{planned - measured:+.2f}"))
                values |= {f"{name}, planned hits %": planned, f"{name}, measured hits %": measured}
    values["hit_ratio_error_points"] = max(errors)
    values["hit_ratio_error_points_mean"] = fmean(errors)
    print(table(("hits in %", "planned", "measured", "points"), rows), "\n", flush=True)


def _cut(trace: Trace) -> Trace:
    """As many of the first requests as move gigabytes, and not more."""
    asked = np.cumsum([sum(trace.lengths[run] for run in path) for path in trace.paths])
    return planning.fitting(trace, 1 << 30, max(1, int(np.searchsorted(asked, ACCESSES_MAX))))[0]


def _first_tokens(sessions: int, values: dict[str, float]) -> None:
    """Times to the first token of a real engine."""
    trace, rows, found = thinned(sessions), [], []
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir="/dev/shm") as name:
        rates = measured_rates(Path(name) / "rates", max(2, sessions // 2))
        for number, (eviction, load) in enumerate(SERVED):
            one = served(trace, rates, eviction, load, Path(name) / str(number))
            found.append(one)
            times = [
                f"{np.percentile(one.planned_s, q):.3f} / {np.percentile(one.measured_s, q):.3f}" for q in (50, 90)
            ]
            mean = f"{one.planned_s.mean():.3f} / {one.measured_s.mean():.3f}"
            hits_of = f"{one.planned_hits:.1f} / {one.measured_hits:.1f}"
            rows.append((one.name, *times, mean, hits_of, f"{one.mape:.1%}", f"{one.mape_before:.1%}"))
            values |= {f"{one.name} ttft_mape": one.mape, f"{one.name} ttft_mape, rates of before": one.mape_before}
            values[f"{one.name} hit error points"] = abs(one.planned_hits - one.measured_hits)
    values["ttft_mape"] = fmean(one.mape for one in found)
    values["ttft_mape_rates_of_before"] = fmean(one.mape_before for one in found)
    head = (
        f"{len(trace.paths)} prompts, planned / measured",
        "p50",
        "p90",
        "mean",
        "hits %",
        "MAPE",
        "rates of before",
    )
    print(table(head, rows), "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
