"""LMCache's benchmark of L2 adapters on ours and on two of its own: `lmcache bench l2`, unmodified, with verification.

kvstrata: `kvstrata_client.connectors.lmcache` and a real agent as a process. fs_native: LMCache's C++ adapter
for files, on /dev/shm, which is memory as the agent's tier is (`--directory` for another file system). resp: LMCache's
C++ adapter for Redis, with a real redis-server on loopback. All with the workers that they have by default, in turns,
each run under new keys; memory of earlier runs is freed before. The limit is one thread's memcpy of as many bytes.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import redis

import peers
from bench.harness import common
from bench.harness.common import REPEATS_MIN, Result, Sample, publish, rate_ratio, table
from bench.harness.drivers import ROOT, AbsentError, Command, Driver, FailedError
from bench.harness.engines import Endpoint, redis_server
from bench.harness.identity import BLOCK_TOKENS, HEAD_DIM, LAYER_BYTES, TOKEN
from bench.harness.participants import MEMCPY, OURS, PYTHON
from kvstrata_api import __version__
from kvstrata_api.units import GIB, KIB, MIB

FS: Final = "fs_native"
RESP: Final = "resp"
BENCH_MODEL: Final = "bench-model"
"""Model in the keys that the tool makes."""

OPERATIONS: Final = {"Store": "store", "Lookup": "lookup", "Load": "load"}
CAPACITY_BYTES: Final = GIB
_STARTED_S: Final = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Case:
    """What the tool is told."""

    size_bytes: int
    keys: int
    in_flight: int
    rounds: int
    repeats: int

    @property
    def size(self) -> str:
        """Size of an object, as in the keys of the last line."""
        return f"{self.size_bytes // MIB}MiB" if self.size_bytes >= MIB else f"{self.size_bytes // KIB}KiB"

    @property
    def round_bytes(self) -> int:
        """Bytes that one round stores and loads."""
        return self.size_bytes * self.keys * self.in_flight

    @property
    def arguments(self) -> list[str]:
        """Arguments of the tool beside the adapter."""
        counts = {"--num-keys": self.keys, "--in-flight": self.in_flight, "--rounds": self.rounds}
        sized = {**counts, "--data-size-kb": self.size_bytes // KIB, "--lookup-max-hit-rate": 1.0}
        return ["--quiet", *(str(part) for pair in sized.items() for part in pair)]


TINY: Final = (Case(256 * KIB, keys=4, in_flight=1, rounds=1, repeats=REPEATS_MIN),)
QUICK: Final = (Case(2 * MIB, keys=16, in_flight=1, rounds=2, repeats=REPEATS_MIN),)
FULL: Final = (
    Case(256 * KIB, keys=32, in_flight=4, rounds=4, repeats=9),
    Case(2 * MIB, keys=16, in_flight=4, rounds=2, repeats=9),
    Case(16 * MIB, keys=4, in_flight=2, rounds=2, repeats=9),
)


class Participant(Protocol):
    """One adapter and what stands behind it."""

    def adapter(self, case: Case, number: int) -> dict[str, Any]:
        """Adapter's JSON for the `number`-th run of all."""

    def clear(self) -> None:
        """Free what earlier runs stored."""


class Ours:
    """The plugin and a real agent."""

    def __init__(self, agent: Driver, directory: Path) -> None:
        """Use an agent that serves on `agent.sock` in `directory`."""
        self._agent = agent
        self._at = Endpoint(directory / "agent.sock", directory / "token")
        self._at.token.write_text(TOKEN)

    def adapter(self, case: Case, number: int) -> dict[str, Any]:
        """Blocks as large as the objects; the hash seed makes the tool's keys new ones."""
        layout = {"dtype": "bf16", "layers": case.size_bytes // LAYER_BYTES, "kv_heads": 1, "head_dim": HEAD_DIM}
        named = {"model_name": BENCH_MODEL, "chunk_tokens": BLOCK_TOKENS, "hash_seed": str(number)}
        return self._at.lmcache_adapter({**layout, "element_bytes": 2}, **named, lookup_timeout_s=10)

    def clear(self) -> None:
        """Drop blocks; memory stays mapped, as in a full tier."""
        self._agent.ask("clear", keep=True)


class Files:
    """LMCache's file adapter on a directory."""

    def __init__(self, directory: Path) -> None:
        """Use a directory of its own."""
        self._directory = directory

    def adapter(self, _: Case, number: int) -> dict[str, Any]:
        """A folder for each run."""
        folder = self._directory / str(number)
        folder.mkdir()
        return {"type": FS, "base_path": str(folder)}

    def clear(self) -> None:
        """Remove the files."""
        for path in self._directory.rglob("*"):
            if path.is_file():
                path.unlink()


class Resp:
    """LMCache's Redis adapter and a real Redis."""

    def __init__(self, port: int) -> None:
        """Use the server on `port` of loopback."""
        self._port = port
        self._redis = redis.Redis(port=port)

    def adapter(self, _: Case, __: int) -> dict[str, Any]:
        """The keys are new ones because the server is empty."""
        return {"type": RESP, "host": "127.0.0.1", "port": self._port}

    def clear(self) -> None:
        """Remove everything."""
        self._redis.flushall()


@dataclass(slots=True)
class Field:
    """Everybody who takes part."""

    tool: Driver
    participants: dict[str, Participant]
    versions: dict[str, str]


@contextlib.contextmanager
def start(files: Path) -> Iterator[Field]:
    """Start the agent, Redis and the tool's process. Raises `AbsentError` without LMCache, `FailedError`."""
    try:
        python = peers.ensure("lmcache", say)
    except peers.InstallError as e:
        raise AbsentError(str(e)) from e
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-")))
        own_files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=files)))
        arguments = ("--socket", str(directory / "agent.sock"), "--capacity-bytes", str(CAPACITY_BYTES))
        path = (("PYTHONPATH", f"{ROOT / 'crds'}:{ROOT / 'agent'}"), ("LMCACHE_DISABLE_BANNER", "1"))
        tool = stack.enter_context(Driver(Command("lmcache", python, "bench.peers.lmcache_l2", environment=path)))
        agent = stack.enter_context(Driver(Command("agent", PYTHON, "bench.harness.agent_process", arguments)))
        medium = agent.read()["medium"]
        resp = Resp(stack.enter_context(redis_server(directory)))
        participants: dict[str, Participant] = {OURS: Ours(agent, directory), FS: Files(own_files), RESP: resp}
        versions = {OURS: __version__, **tool.versions(), "agent memory": str(medium), "fs_native on": str(files)}
        yield Field(tool, participants, versions)


@dataclass(slots=True)
class Figures:
    """Rates of one case, by participant and operation; one value for each repeat."""

    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, who: str, what: str, rate: float) -> None:
        """Note a rate."""
        self.rates.setdefault((who, what), []).append(rate)

    def sample(self, who: str, what: str) -> Sample:
        """All values."""
        return Sample(tuple(self.rates[who, what]))


def measure(made: Field, case: Case, numbers: Iterator[int]) -> Figures:
    """Let everybody have a turn in every repeat. Raises `FailedError` for a run that is not verified."""
    figures = Figures()
    for _ in range(case.repeats):
        copied = made.tool.ask("memcpy", size_bytes=case.round_bytes)
        figures.add(MEMCPY, "copy", copied["bytes_per_s"])
        for who, participant in made.participants.items():
            participant.clear()
            answer = made.tool.ask("bench", adapter=participant.adapter(case, next(numbers)), arguments=case.arguments)
            note(figures, who, answer)
            participant.clear()
    return figures


def note(figures: Figures, who: str, answer: dict[str, Any]) -> None:
    """Take rates out of the tool's report. Raises `FailedError` when it found fault."""
    if answer["status"] != 0 or answer["report"] is None:
        raise FailedError(f"{who}: lmcache bench l2 ended with {answer['status']}")
    for said in answer["report"]["metrics"].values():
        what = OPERATIONS.get(said.get("operation", ""))
        if what is None:
            continue
        if said["rounds_timed_out"] or said["total_success"] != said["total_keys"]:
            raise FailedError(f"{who}: {what}: {said['total_success']} of {said['total_keys']} keys")
        is_lookup = what == "lookup"
        figures.add(who, what, said["ops_per_sec_avg"] if is_lookup else said["throughput_avg_mbps"] * MIB)


def summary(case: Case, figures: Figures) -> tuple[list[tuple[str, ...]], dict[str, float | None], dict[str, float]]:
    """Rows of the table, ratios and values of one case."""
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float | None] = {}
    values: dict[str, float] = {}
    suffix = "" if case.size_bytes == 2 * MIB else f"_{case.size}"
    copies = figures.sample(MEMCPY, "copy")
    for what in OPERATIONS.values():
        scale, unit = (1e3, "kkeys/s") if what == "lookup" else (1e9, "GB/s")
        ours = figures.sample(OURS, what)
        values[f"l2_{what}{suffix}_per_s"] = median(ours.values)
        for who in (OURS, FS, RESP):
            sample = figures.sample(who, what)
            rows.append((f"{what} {case.size}, {unit}", who, *(f"{v / scale:.2f}" for v in sample.spread)))
            if who != OURS:
                ratios[f"l2_{what}_vs_{who}{suffix}"] = rate_ratio(ours, sample)
        if what != "lookup":
            ratios[f"l2_{what}_vs_memcpy{suffix}"] = rate_ratio(ours, copies)
    rows.append((f"memcpy of {case.round_bytes // MIB} MiB, GB/s", "", *(f"{v / 1e9:.2f}" for v in copies.spread)))
    return rows, ratios, values


def say(line: str) -> None:
    """Tell how far we are."""
    print(f"[bench.l2 {time.perf_counter() - _STARTED_S:5.1f} s] {line}", file=sys.stderr, flush=True)


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    made = common.parser(__doc__, has_tiny=True)
    made.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="file system for fs_native")  # noqa: S108  Memory.
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = choose(arguments)
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float | None] = {}
    values: dict[str, float] = {}
    cases = TINY if chosen.tiny else QUICK if chosen.quick else FULL
    say("starting the agent, Redis and LMCache (which takes seconds to import)")
    with start(chosen.directory) as made:
        numbers = iter(range(1 << 30))
        for case in cases:
            say(f"{case.keys} x {case.in_flight} objects of {case.size}, {case.repeats} repeats")
            more = summary(case, measure(made, case, numbers))
            rows += more[0]
            ratios.update(more[1])
            values.update(more[2])
        result = Result("l2", chosen.quick or chosen.tiny, made.versions, ratios, values)
    print(table(("what", "who", "min", "median", "max"), rows))
    say("done")
    publish(result, chosen.json)


if __name__ == "__main__":
    main()
