"""Starts what takes part in `bench.local`: the agent, our clients, the limits and the peers. Owns their processes."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import peers
from bench.harness.drivers import AbsentError, Command, Driver

OURS: Final = "kvstrata"
TOKENS: Final = "kvstrata tokens"
MEMCPY: Final = "memcpy"
NON_TEMPORAL: Final = "memcpy nt"
LMCACHE: Final = "lmcache"
MOONCAKE: Final = "mooncake"
REDIS: Final = "redis"

PEER_MODULES: Final = {LMCACHE: "bench.peers.lmcache_local", MOONCAKE: "bench.peers.mooncake_store"}
"""Peers with environments of their own."""

PYTHON: Final = Path(sys.executable)
ALL_NON_TEMPORAL: Final = (("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=0x8000"),)
"""32 KiB: every block is copied with non-temporal stores (glibc manual, Hardware Capability Tunables)."""


@dataclass(slots=True)
class Field:
    """The agent and everybody who takes part, by name."""

    agent: Driver
    agent_facts: dict[str, object]
    socket: Path
    present: dict[str, Driver]
    versions: dict[str, str]
    absent: dict[str, str] = field(default_factory=dict)
    """Why a peer takes no part."""

    def drop(self, name: str, reason: str) -> None:
        """Take a peer that broke off out of the rest of the run."""
        self.absent[name] = reason
        self.versions[name] = f"absent: {reason}"
        self.present.pop(name).close()


@contextlib.contextmanager
def start(capacity_bytes: int, wanted_peers: Sequence[str], say: Callable[[str], None]) -> Iterator[Field]:
    """Start the agent and one process for each participant, all at once; stop them at the end."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-")))
        socket = directory / "agent.sock"
        commands, absent = _commands(socket, wanted_peers, say)
        drivers = {c.name: stack.enter_context(Driver(c)) for c in commands}
        arguments = ("--socket", str(socket), "--capacity-bytes", str(capacity_bytes))
        agent = stack.enter_context(Driver(Command("agent", PYTHON, "bench.harness.agent_process", arguments)))
        agent_facts = agent.read()
        made = Field(agent, agent_facts, socket, {}, {"agent memory": str(agent_facts["medium"])})
        for name, driver in drivers.items():
            try:
                made.versions.update(driver.versions())
            except AbsentError as e:
                absent[name] = str(e)
            else:
                made.present[name] = driver
        made.absent.update(absent)
        made.versions.update({name: f"absent: {why}" for name, why in absent.items()})
        yield made


@contextlib.contextmanager
def more(made: Field, name: str, count: int) -> Iterator[tuple[Driver, ...]]:
    """Start `count` more clients of the kind `name`."""
    with contextlib.ExitStack() as stack:
        drivers = tuple(stack.enter_context(Driver(_own(name, made.socket))) for _ in range(count))
        for driver in drivers:
            driver.versions()
        yield drivers


@contextlib.contextmanager
def with_full_tier(capacity_bytes: int) -> Iterator[Driver]:
    """Start another agent with a tier of this size, and one of our clients for it."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-full-")))
        socket = directory / "agent.sock"
        arguments = ("--socket", str(socket), "--capacity-bytes", str(capacity_bytes))
        stack.enter_context(Driver(Command("full agent", PYTHON, "bench.harness.agent_process", arguments))).read()
        client = stack.enter_context(Driver(_own(OURS, socket)))
        client.versions()
        yield client


def _own(name: str, socket: Path) -> Command:
    """Command of a participant that runs in our own environment."""
    at = ("--socket", str(socket))
    return {
        OURS: Command(OURS, PYTHON, "bench.peers.ours", at),
        TOKENS: Command(TOKENS, PYTHON, "bench.peers.ours", (*at, "--tokens")),
        MEMCPY: Command(MEMCPY, PYTHON, "bench.peers.memcpy"),
        NON_TEMPORAL: Command(NON_TEMPORAL, PYTHON, "bench.peers.memcpy", environment=ALL_NON_TEMPORAL),
        REDIS: Command(REDIS, PYTHON, "bench.peers.redis_values"),
    }[name]


def _commands(socket: Path, wanted: Sequence[str], say: Callable[[str], None]) -> tuple[list[Command], dict[str, str]]:
    """Commands of everybody, and why some are missing. Makes environments of peers that are not there yet."""
    commands = [_own(name, socket) for name in (OURS, TOKENS, MEMCPY, NON_TEMPORAL)]
    absent: dict[str, str] = {}
    for name, module in PEER_MODULES.items():
        if name not in wanted:
            absent[name] = "not asked for"
            continue
        try:
            commands.append(Command(name, peers.ensure(name, say), module))
        except peers.InstallError as e:
            absent[name] = str(e)
    if REDIS in wanted:
        commands.append(_own(REDIS, socket))
    else:
        absent[REDIS] = "not asked for"
    return commands, absent
