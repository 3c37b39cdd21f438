"""Blocks from node to node: an engine's read through its own agent, which fetches from the other node's, verified.

The limit is raw NIXL between two processes over the same UCX transport, batches of 16 blocks, nothing verified. The
peer is Mooncake's store between two processes, over TCP. All take turns in every repeat and every byte is compared.
Two nodes share no memory, so UCX is held to TCP (`UCX_TLS=tcp`); what it does on one machine when it may choose, which
is to read the other process's memory, stands beside it as `local`.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

import peers
from bench.harness import common
from bench.harness.cases import BATCH_BLOCKS, KIB, MIB, Case
from bench.harness.common import Result, Sample, publish, rate_ratio, table
from bench.harness.drivers import AbsentError, Command, Driver, FailedError
from bench.harness.identity import POOL
from bench.harness.remote_node import OWNER, READER
from bench.harness.rounds import WrongBytesError
from bench.peer_tls import certified
from kvstrata_agent.fleet.peers.nixl import UCX_SETTINGS
from kvstrata_api import names
from kvstrata_operator.certificates import authority as certificates

OURS: Final = "kvstrata"
INTO_ENGINE: Final = "kvstrata into the engine"
"""The same load up to the engine's own memory: copied out of the agent's and verified once more."""
NIXL: Final = "nixl"
MOONCAKE: Final = "mooncake"

TRANSPORTS: Final = {"tcp": (("UCX_TLS", "tcp"), *UCX_SETTINGS.items()), "local": tuple(UCX_SETTINGS.items())}
"""What UCX is told, by the name in tables and keys; raw NIXL has the segments that the agents ask for."""
KEYED: Final = "tcp"
PYTHON: Final = Path(sys.executable)

_STARTED_S: Final = time.perf_counter()


@dataclass(slots=True)
class Figures:
    """What came out."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Nodes:
    """Two agents and a client of both."""

    def __init__(
        self, stack: contextlib.ExitStack, capacity_bytes: int, environment: tuple[tuple[str, str], ...]
    ) -> None:
        """Start them and make them known to each other."""
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-")))
        authority = certificates.make_authority(datetime.now(UTC), timedelta(days=1))
        self.sockets = {name: directory / name for name in (OWNER, READER)}
        self._agents: dict[str, Driver] = {}
        for name in (OWNER, READER):
            credential = directory / f"{name}.json"
            credential.write_bytes(msgspec.json.encode(certified(authority, names.pool_node_name(POOL, name))))
            at = ("--name", name, "--socket", str(directory / name), "--credential", str(credential))
            arguments = (*at, "--capacity-bytes", str(capacity_bytes))
            command = Command(name, PYTHON, "bench.harness.remote_node", arguments, environment)
            self._agents[name] = stack.enter_context(Driver(command))
        facts = {name: agent.read() for name, agent in self._agents.items()}
        self.nixl = str(facts[READER]["nixl"])
        self._agents[READER].ask("meet", name=OWNER, address=facts[OWNER]["address"])
        sockets = ("--owner", str(directory / OWNER), "--reader", str(directory / READER))
        self.client = stack.enter_context(Driver(Command(OURS, PYTHON, "bench.peers.ours_remote", sockets)))

    def clear(self) -> None:
        """Forget all blocks on both nodes, and keep the memory mapped."""
        for agent in self._agents.values():
            agent.ask("clear", keep=True)

    def fetched(self) -> dict[str, float]:
        """Blocks that the reader's agent has fetched, by transport and result."""
        return dict(self._agents[READER].ask("facts")["fetched"])


@dataclass(slots=True)
class Field:
    """All who take part with one transport."""

    transport: str
    nodes: Nodes
    present: dict[str, Driver]
    absent: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, why: str) -> None:
        """Go on without a peer that broke off."""
        self.absent[name] = why
        self.present.pop(name).close()


@contextlib.contextmanager
def start(transport: str, cases: Sequence[Case], wanted: Sequence[str], figures: Figures) -> Iterator[Field]:
    """Start everybody; stop them at the end."""
    environment = TRANSPORTS[transport]
    with contextlib.ExitStack() as stack:
        nodes = Nodes(stack, 3 * max(c.set_bytes for c in cases) + 256 * MIB, environment)
        made = Field(transport, nodes, {OURS: nodes.client})
        for command in _peers(wanted, environment, made.absent):
            made.present[command.name] = stack.enter_context(Driver(command))
        for name, driver in tuple(made.present.items()):
            try:
                figures.versions.update(driver.versions())
            except AbsentError as e:
                made.drop(name, str(e))
        yield made


def _peers(wanted: Sequence[str], environment: tuple[tuple[str, str], ...], absent: dict[str, str]) -> list[Command]:
    commands = [Command(NIXL, PYTHON, "bench.peers.nixl_raw", environment=environment)]
    if MOONCAKE not in wanted:
        absent[MOONCAKE] = "not asked for"
        return commands
    try:
        commands.append(Command(MOONCAKE, peers.ensure(MOONCAKE, say), "bench.peers.mooncake_remote"))
    except peers.InstallError as e:
        absent[MOONCAKE] = str(e)
    return commands


def measure(made: Field, case: Case) -> dict[str, list[float]]:
    """Seconds of each repeat, by participant."""
    seconds: dict[str, list[float]] = {}
    work = {
        "block_bytes": case.block_bytes,
        "blocks": case.blocks,
        "batch": min(BATCH_BLOCKS, case.blocks),
        "client": 0,
    }
    for driver in made.present.values():
        driver.ask("open", **work)
    for repeat in range(-1, case.repeats):
        order = tuple(made.present)
        start_at = repeat % len(order)
        for name in (*order[start_at:], *order[:start_at]):
            try:
                took = _turn(made, name, repeat + 1)
            except FailedError as e:
                if name == OURS:
                    raise
                made.drop(name, str(e))
                continue
            for who, took_s in took.items() if repeat >= 0 else ():
                seconds.setdefault(who, []).append(took_s)
    return seconds


def _turn(made: Field, name: str, generation: int) -> dict[str, float]:
    driver = made.present[name]
    for verb in ("prepare", "put"):
        driver.ask(verb, generation=generation)
    answer = driver.ask("get", generation=generation)
    if not driver.ask("check", generation=generation)["is_same"]:
        raise WrongBytesError(f"{name}: what was read is not what the owner holds")
    driver.ask("clear", generation=generation)
    if name != OURS:
        return {name: answer["seconds"]}
    made.nodes.clear()
    return {OURS: answer["parts"]["fetch"], INTO_ENGINE: answer["seconds"]}


def note(figures: Figures, transport: str, case: Case, seconds: dict[str, list[float]]) -> None:
    """Put one case into the table and the last line."""
    rates = {
        who: Sample(tuple(case.set_bytes / s for s in taken))
        for who, taken in seconds.items()
        if len(taken) == case.repeats
    }
    limit = rates.get(NIXL)
    for who, sample in rates.items():
        share = rate_ratio(sample, limit)
        spread = (f"{v / 1e9:.3f}" for v in sample.spread)
        self_row = (f"{transport}, {case.size}, GB/s", who, *spread, "" if share is None else f"{share:.2f}")
        figures.rows.append(self_row)
    key = case.size if transport == KEYED else f"{case.size}_{transport}"
    for peer in (NIXL, MOONCAKE):
        figures.ratios[f"read_{key}_vs_{peer}"] = rate_ratio(rates[OURS], rates.get(peer))
    for who, sample in rates.items():
        figures.values[f"{who.replace(' ', '_')}_{key}_bytes_per_s"] = median(sample.values)


def say(line: str) -> None:
    """Tell how far we are."""
    print(f"[bench.remote {time.perf_counter() - _STARTED_S:5.1f} s] {line}", file=sys.stderr, flush=True)


def cases_of(chosen: argparse.Namespace) -> tuple[Case, ...]:
    """Sets to read."""
    if chosen.tiny:
        return (Case(2 * MIB, 4, 1, 5), Case(256 * KIB, 8, 1, 5))
    if chosen.quick:
        return (Case(2 * MIB, 32, 1, 5), Case(256 * KIB, 128, 1, 5))
    return (Case(2 * MIB, 64, 1, 9), Case(256 * KIB, 512, 1, 9))


def choose(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument("--peers", default=MOONCAKE, help="peers to compare with: mooncake, or none")
    parser.add_argument("--transports", help="of UCX, comma-separated: tcp, local; --quick: tcp alone")
    chosen = parser.parse_args(arguments)
    chosen.peers = [] if chosen.peers == "none" else chosen.peers.split(",")
    is_short = chosen.quick or chosen.tiny
    chosen.transports = (chosen.transports or (KEYED if is_short else ",".join(TRANSPORTS))).split(",")
    if unknown := set(chosen.peers) - {MOONCAKE}:
        parser.error(f"--peers {','.join(sorted(unknown))}: there is {MOONCAKE}")
    if unknown := set(chosen.transports) - set(TRANSPORTS):
        parser.error(f"--transports {','.join(sorted(unknown))}: there are {','.join(TRANSPORTS)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and the last line."""
    chosen = choose(arguments)
    figures, cases = Figures(), cases_of(chosen)
    absent: dict[str, str] = {}
    fetched: dict[str, Any] = {}
    for transport in chosen.transports:
        say(f"{transport}: starting two agents, their client, the limit and peers")
        with start(transport, cases, chosen.peers, figures) as made:
            figures.versions[f"nixl in the agents, {transport}"] = made.nodes.nixl
            for case in cases:
                say(f"{transport}: {case.blocks} blocks of {case.size}, {case.repeats} repeats")
                note(figures, transport, case, measure(made, case))
            absent |= made.absent
            fetched[transport] = made.nodes.fetched()
    print(table(("what", "who", "min", "median", "max", "of nixl"), figures.rows))
    figures.versions.update({name: f"absent: {why}" for name, why in absent.items()})
    for name, why in absent.items():
        print(f"absent: {name}: {why}")
    for transport, blocks in fetched.items():
        print(f"{transport}: blocks fetched by the reader's agent: {blocks}")
    say("done")
    publish(
        Result("remote", bool(chosen.quick or chosen.tiny), figures.versions, figures.ratios, figures.values),
        chosen.json,
    )


if __name__ == "__main__":
    main()
