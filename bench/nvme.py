"""The NVMe tier against the disk: demotion and onboarding by a real agent's core, fio, NIXL alone, and others' tiers.

Everybody takes turns in every repeat on one file system, with the same blocks, from memory to the disk and back. The
limit is fio with O_DIRECT and 16 transfers at a time, over a file that was laid out before. Ours is measured in the
clear and sealed, with blocks as they are and through the pool's Lossless codec (rates are of raw bytes then); what
comes back is compared with what went in. Nobody else's files are synced; with O_DIRECT they reach the disk, without
they lie in the page cache (Mooncake's always do), and so do their reads.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import peers
from bench.harness import common
from bench.harness.cases import Case
from bench.harness.common import REPEATS_MIN, Result, Sample, publish, rate_ratio, table
from bench.harness.drivers import AbsentError, Command, Driver, FailedError
from bench.harness.fio import Fio, FioError
from kvstrata_api import __version__
from kvstrata_api.units import KIB, MIB

OURS: Final = "kvstrata"
FORMS: Final = {
    OURS: (),
    f"{OURS} sealed": ("--sealed",),
    f"{OURS} lossless": ("--mode", "Lossless"),
    f"{OURS} lossless sealed": ("--mode", "Lossless", "--sealed"),
}
FIO, FIO_DURABLE, NIXL = "fio", "fio dsync", "nixl"


@dataclass(frozen=True, slots=True)
class Peer:
    """A tier of somebody else's."""

    environment: str
    """Of `hack/peers.py`."""
    module: str
    arguments: tuple[str, ...] = ()


PEERS: Final = {
    "lmcache": Peer("lmcache", "bench.peers.lmcache_disk", ("--direct",)),
    "lmcache buffered": Peer("lmcache", "bench.peers.lmcache_disk"),
    "lmcache raw_block": Peer("raw-block", "bench.peers.lmcache_raw"),
    "vllm": Peer("vllm", "bench.peers.vllm_files"),
    "mooncake": Peer("mooncake", "bench.peers.mooncake_disk", ("--direct",)),
    "mooncake buffered": Peer("mooncake", "bench.peers.mooncake_disk"),
}
ENVIRONMENTS: Final = tuple(dict.fromkeys(p.environment for p in PEERS.values()))
WAYS: Final = {"write": "put", "read": "get"}
QUICK: Final = (OURS, f"{OURS} sealed", NIXL, "lmcache")
"""Who takes part in a quick run: starting torch once more, and the codec's turns, take longer than all the rest.
vLLM's tier imports for 15 s, Mooncake's waits for heartbeats and leases, 4 s a turn."""
ROOM_FACTOR: Final = 24
"""Bytes on the file system by bytes of a set, at most: four forms of ours hold two and a half sets and more, each of
Mooncake's three, the others one, and half as much stays free."""

PYTHON: Final = Path(sys.executable)
_STARTED_S = time.perf_counter()


class NoRoomError(Exception):
    """The file system is too full for this."""


@dataclass(slots=True)
class Field:
    """Who takes part."""

    fio: Fio | None
    drivers: dict[str, Driver]
    versions: dict[str, str]

    def drop(self, name: str, why: str) -> None:
        """Leave out somebody who broke off."""
        self.versions[name] = f"absent: {why}"
        self.drivers.pop(name).close()


@dataclass(slots=True)
class Turns:
    """Bytes per second of each repeat, by who and way."""

    case: Case
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def sample(self, who: str, way: str) -> Sample | None:
        """All repeats; None when it took no part to the end."""
        values = self.rates.get((who, way), [])
        return Sample(tuple(values)) if len(values) == self.case.repeats else None


def run(case: Case, made: Field) -> Turns:
    """Let everybody store and load the set, once to warm up and then `case.repeats` times."""
    turns = Turns(case)
    for driver in made.drivers.values():
        with suppress(FailedError):  # Who has gone says so below.
            driver.send("open", **asdict(case.work))
    for name in tuple(made.drivers):
        _try(made, name, "", {})
    for repeat in range(-1, case.repeats):
        names = [FIO, *made.drivers]
        start = repeat % len(names)
        for name in (*names[start:], *names[:start]):
            rates = _fio_turn(made, case) if name == FIO else _turn(made, name, case, repeat + 2)
            for at, rate in rates.items() if repeat >= 0 else ():
                turns.rates.setdefault(at, []).append(rate)
    return turns


def _fio_turn(made: Field, case: Case) -> dict[tuple[str, str], float]:
    if made.fio is None:
        return {}
    write, durable, read = made.fio.rates(case.block_bytes, case.set_bytes)
    return {(FIO, "write"): write, (FIO_DURABLE, "write"): durable, (FIO, "read"): read}


def _turn(made: Field, name: str, case: Case, generation: int) -> dict[tuple[str, str], float]:
    if name not in made.drivers:
        return {}
    at = {"generation": generation}
    rates = {}
    _try(made, name, "prepare", at)
    for way, verb in WAYS.items():
        answer = _try(made, name, verb, at)
        if answer:
            rates[name, way] = case.set_bytes / answer["seconds"]
    checked = _try(made, name, "check", at)
    if not checked:
        return {}  # Nothing that was not compared counts.
    if not checked["is_same"]:
        why = "what was loaded is not what was stored"
        if name in FORMS:
            raise SystemExit(f"{name}: {why}")
        made.drop(name, why)
        return {}
    _try(made, name, "clear", at)
    return rates


def _try(made: Field, name: str, verb: str, arguments: dict[str, int]) -> dict[str, float]:
    """Ask (or read the answer to what was asked before), unless it is out.

    A peer that breaks off, or loads other bytes than it stored, is left out from there on; ours may not.
    """
    driver = made.drivers.get(name)
    if driver is None:
        return {}
    try:
        return driver.ask(verb, **arguments) if verb else driver.read()
    except FailedError as e:
        if name in FORMS:
            raise
        made.drop(name, str(e))
        return {}


@contextmanager
def start(directory: Path, who: Sequence[str], environments: Sequence[str]) -> Iterator[Field]:
    """Start `who` takes part, peers as far as their environment is among `environments`; stop them at the end."""
    with ExitStack() as stack:
        versions = {"kvstrata": __version__}
        forms = [(name, more) for name, more in FORMS.items() if name in who]
        commands = [_command(name, directory, "bench.peers.ours_disk", more) for name, more in forms]
        commands.append(_command(NIXL, directory, "bench.peers.nixl_posix", ()))
        for name in PEERS:
            try:
                commands.append(_peer_command(name, directory, who, environments))
            except AbsentError as e:
                versions[name] = f"absent: {e}"
        made = Field(None, {}, versions)
        drivers = {c.name: stack.enter_context(Driver(c)) for c in commands}
        for name, driver in drivers.items():
            try:
                versions.update(driver.versions())
                made.drivers[name] = driver
            except AbsentError as e:
                versions[name] = f"absent: {e}"
        try:
            made.fio = Fio.found(directory)
            versions[FIO] = made.fio.version()
        except FioError as e:
            versions[FIO] = f"absent: {e}"
        yield made


def _peer_command(name: str, directory: Path, who: Sequence[str], environments: Sequence[str]) -> Command:
    """How to start a peer; makes its environment. Raises `AbsentError`."""
    peer = PEERS[name]
    if peer.environment not in environments:
        raise AbsentError("not asked for")
    if name not in who:
        raise AbsentError("not in a quick run")
    try:
        python = peers.ensure(peer.environment, say)
    except peers.InstallError as e:
        raise AbsentError(str(e)) from e
    return _command(name, directory, peer.module, peer.arguments, python)


def _command(name: str, directory: Path, module: str, more: Sequence[str], python: Path = PYTHON) -> Command:
    own = directory / name.replace(" ", "-")
    own.mkdir()
    return Command(name, python, module, ("--directory", str(own), *more))


def cases(chosen: argparse.Namespace) -> tuple[Case, ...]:
    """Sizes and sets."""
    if chosen.tiny:
        return Case(2 * MIB, 4, 1, REPEATS_MIN), Case(256 * KIB, 8, 1, REPEATS_MIN)
    if chosen.quick:
        return Case(2 * MIB, 32, 1, REPEATS_MIN), Case(256 * KIB, 128, 1, REPEATS_MIN)
    return Case(2 * MIB, 192, 1, 9), Case(256 * KIB, 768, 1, 9)


@dataclass(slots=True)
class Figures:
    """What came out."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    def note(self, turns: Turns, names: Sequence[str]) -> None:
        """Add one size: rows of everybody, and our ratios."""
        size = turns.case.size
        for way in WAYS:
            limit = turns.sample(FIO, way) or turns.sample(NIXL, way)
            for who in (FIO, FIO_DURABLE, *names):
                sample = turns.sample(who, way)
                if sample is not None:
                    share = rate_ratio(sample, limit)
                    spread = (f"{v / 1e9:.2f}" for v in sample.spread)
                    self.rows.append((f"{way} {size}, GB/s", who, *spread, "" if share is None else f"{share:.2f}"))
                    self.values[f"{_key(who)}_{way}_{size}_bytes_per_s"] = sample.spread[1]
            self._ratios(turns, way, size)

    def _ratios(self, turns: Turns, way: str, size: str) -> None:
        ours = turns.sample(OURS, way)
        assert ours is not None
        for other in (FIO, FIO_DURABLE, NIXL, *PEERS):
            if way == "write" or other != FIO_DURABLE:
                self.ratios[f"{way}_{size}_vs_{_key(other)}"] = rate_ratio(ours, turns.sample(other, way))
        for form in FORMS:
            sample = turns.sample(form, way)
            if form != OURS and sample is not None:
                self.ratios[f"{_key(form.removeprefix(OURS))}_{way}_{size}_vs_plain"] = rate_ratio(sample, ours)


def _key(name: str) -> str:
    return name.strip().replace(" ", "_")


def say(line: str) -> None:
    """Tell how far we are."""
    print(f"[bench.nvme {time.perf_counter() - _STARTED_S:5.1f} s] {line}", file=sys.stderr, flush=True)


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument(
        "--directory", type=Path, help="on the file system to measure; default: one for temporary files"
    )
    all_of_them = ",".join(ENVIRONMENTS)
    parser.add_argument("--peers", default=all_of_them, help="besides fio and NIXL, comma-separated; or none")
    chosen = parser.parse_args(arguments)
    chosen.peers = [] if chosen.peers == "none" else chosen.peers.split(",")
    if unknown := set(chosen.peers) - set(ENVIRONMENTS):
        parser.error(f"--peers {','.join(sorted(unknown))}: there are {all_of_them}")
    return chosen


def _check_room(directory: Path, plan: Sequence[Case]) -> None:
    need_bytes = ROOM_FACTOR * max(c.set_bytes for c in plan) + 1024 * MIB
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < need_bytes:
        raise NoRoomError(f"{directory}: {free_bytes} B free, {need_bytes} B wanted; --directory chooses another place")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = choose(arguments)
    plan, figures = cases(chosen), Figures()
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=chosen.directory) as name:
        _check_room(Path(name), plan)
        chosen_ones = QUICK if chosen.quick else (*FORMS, NIXL, *PEERS)
        with start(Path(name), chosen_ones, chosen.peers) as made:
            for case in plan:
                say(f"{case.blocks} blocks of {case.size}, {case.repeats} repeats, {len(made.drivers) + 1} take turns")
                figures.note(run(case, made), tuple(made.drivers))
            versions = dict(made.versions)
    print(table(("what", "who", "min", "median", "max", "of limit"), figures.rows))
    for who, said in versions.items():
        if said.startswith("absent"):
            print(f"{who} {said}")
    figures.ratios["encrypted_write_vs_plain"] = figures.ratios["sealed_write_2MiB_vs_plain"]
    say("done")
    publish(Result("nvme", bool(chosen.quick or chosen.tiny), versions, figures.ratios, figures.values), chosen.json)


if __name__ == "__main__":
    main()
