"""I5: what a dead client held is free within 60 s: real engine processes, killed at named points of every verb.

The agent's clock is the real one plus an offset that the test moves, so that 60 s take no time; in full scale one
client more is stopped, not killed, for 60 real seconds. Peers that die with leases, on either side: `i5_peers`.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from faults import i5_peers
from faults.dying_client import POINTS
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.tier import Tier
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from support.agent.doubles import BLOCK_BYTES, FakeAuthenticator, caller, dict_tier, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import attached
from support.nursery import Nursery
from support.runner.outcome import Outcome, Scale

SLOTS: Final = 64
LOW_SLOTS: Final = 256
BOUND_S: Final = 60.0
NOTICE_S: Final = 60.0
"""Real time that a busy machine gets to tell the agent of a closed socket."""
EXTENT_FDS: Final = 3 * SLOTS
"""Descriptors of extents come and go with the blocks: two of the agent's and one of the working client's for each,
and an extent has one slot at least."""
MODULES: Final = ("faults.dying_client", "faults.i5_peers")


def run(scale: Scale) -> Outcome:
    """Kill a client at each point, again and again; then peers."""
    violations: list[str] = []
    kills = scale.first_seed
    with _lab() as lab:
        fds_before = _descriptors()
        for point in POINTS * scale.of(25, 1):
            kills += 1
            violations += lab.kill_at(point, kills)
            if scale.is_full and point == POINTS[-1]:
                sys.stderr.write(f"I5: {kills} clients killed, {len(violations)} violations\n")
            if violations:
                break  # Each is waited for, and what one client leaves is seen after the next one's death as well.
        violations += lab.stop_one(kills + 1)
        if scale.is_full:
            violations += lab.wait_for_real(kills + 2)
        if _descriptors() > fds_before + EXTENT_FDS:
            violations.append(f"{fds_before} descriptors before {kills} kills, {_descriptors()} after them")
        peer_kills, peer_violations = i5_peers.run(lab.nursery, scale.of(20, 1))
        is_caught = _control(lab)
    return Outcome(
        n=kills - scale.first_seed + peer_kills,
        unit="kills",
        violations=tuple(violations + peer_violations),
        is_control_caught=is_caught,
        values={"points": float(len(POINTS) + len(i5_peers.POINTS)), "released_seconds_max": lab.slowest_s},
    )


@contextmanager
def _lab() -> Iterator["Lab"]:
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-i5-") as folder,
        Nursery(MODULES) as nursery,
        AgentThread(Path(folder) / "agent.sock", _tiers, FakeAuthenticator(a=caller("a", expires_s=1e9))) as agent,
        attached(agent.socket) as client,
    ):
        yield Lab(nursery, agent, client)


def _tiers() -> list[Tier]:
    return [dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", LOW_SLOTS * BLOCK_BYTES, 1, 2)]


class Lab:
    """An agent, its warm nursery of clients, and a client that goes on working."""

    def __init__(self, nursery: Nursery, agent: AgentThread, client: Client) -> None:
        self.nursery = nursery
        self.slowest_s = 0.0
        self._agent = agent
        self._client = client
        self.patience_s = NOTICE_S
        self._offset_s = 0.0
        self._sweeper = Sweeper(agent.core.cache, agent.authenticator)
        agent.core.node.clock = lambda: time.monotonic() + self._offset_s

    @property
    def node(self) -> Node:
        """State of the agent."""
        return self._agent.core.node

    def kill_at(self, point: str, seed: int) -> list[str]:
        """Let one client die at a point; returns what is held by it after the bound."""
        child = self.nursery.start("faults.dying_client:live", path=str(self._agent.socket), seed=seed, point=point)
        died_s = time.monotonic()
        child.end() if point not in POINTS else _wait_gone(child.channel.hear)
        child.channel.close()
        if not self._until(lambda: self._agent.server.connections == 1):
            return [f"point {point!r}, seed {seed}: the connection is still there"]
        self.slowest_s = max(self.slowest_s, time.monotonic() - died_s)
        broken = self.bystander_works(seed)
        self.pass_time(BOUND_S)
        return [f"point {point!r}, seed {seed}: {left}" for left in (*broken, *self.left())]

    def stop_one(self, seed: int) -> list[str]:
        """A client that is stopped keeps its connection, but neither leases nor reservations beyond their time."""
        child = self.nursery.start("faults.dying_client:live", path=str(self._agent.socket), seed=seed, point="none")
        child.channel.hear()
        child.signal(signal.SIGSTOP)
        self.pass_time(BOUND_S)
        held = len(self.node.leases) + len(self.node.reservations)
        child.end()
        self._until(lambda: self._agent.server.connections == 1)
        left = self.left()
        return (
            [f"stopped client, seed {seed}: {held} leases and reservations after {BOUND_S} s"] if held else []
        ) + left

    def wait_for_real(self, seed: int) -> list[str]:
        """The same in real time, with the agent's own sweep running."""
        sweeping = self._agent.loop.call_soon_threadsafe
        task = self._agent.call(lambda: self._agent.loop.create_task(self._sweeper.run()))
        child = self.nursery.start("faults.dying_client:live", path=str(self._agent.socket), seed=seed, point="none")
        child.channel.hear()
        child.signal(signal.SIGSTOP)
        time.sleep(BOUND_S)
        held = len(self.node.leases) + len(self.node.reservations)
        child.end()
        sweeping(task.cancel)
        self._until(lambda: self._agent.server.connections == 1)
        return [f"{held} leases and reservations after {BOUND_S} real seconds"] if held else []

    def pass_time(self, seconds: float) -> None:
        """Move the agent's clock on and let it sweep."""
        self._offset_s += seconds
        self._agent.call(self._sweeper.expire)

    def left(self) -> list[str]:
        """What anybody holds, when nobody should hold anything."""
        seen: list[str] = []

        def is_nothing() -> bool:
            seen[:] = self._agent.call(lambda: _left(self.node))
            return not seen

        self._until(is_nothing)  # Moves that make room for others go on for a while.
        return seen

    def bystander_works(self, seed: int) -> list[str]:
        """Another client stores and loads its own blocks meanwhile."""
        tokens = np.arange(3 * 10**9 + seed * 100, 3 * 10**9 + seed * 100 + 64, dtype=np.uint32)
        rows = np.random.default_rng(seed).integers(0, 256, (4, BLOCK_BYTES), dtype=np.uint8)
        cache = PrefixCache(self._client)
        stored, loaded = cache.store(tokens, rows), cache.load(tokens)
        is_right = loaded.blocks == 4 and np.array_equal(loaded.data, rows)
        return [] if is_right else [f"bystander, seed {seed}: {stored}, then {loaded}, {self._client.counters}"]

    def _until(self, fact: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + self.patience_s
        while not fact():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.002)
        return True


def _wait_gone(hear: Callable[[], object]) -> None:
    """Wait until a child has died by itself; a child that says something instead did not get to its point."""
    try:
        said = hear()
    except EOFError:
        return
    raise AssertionError(f"the client lives on: {said}")


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _left(node: Node) -> list[str]:
    """Everything that is held, by whatever table or set holds it."""
    entries = tuple(node.index)
    held = {
        "leases": len(node.leases),
        "reservations": len(node.reservations),
        "pins": len(node.pins),
        "condemned copies": len(node.deferred_frees),
        "leased blocks": sum(1 for e in entries if e.leases),
        "pinned blocks": sum(1 for e in entries if e.pins),
        "guarded blocks": sum(1 for e in entries if e.guards),
        "moving blocks": sum(1 for e in entries if e.move),
        "pending blocks": sum(1 for e in entries if not e.residences),
        "open sessions": sum(1 for s in node.sessions if s.state in ("open", "decoding")),
    }
    for tier in node.tiers:
        blocks_bytes = sum(r.slot.size_bytes for e in entries for r in e.residences if r.tier is tier)
        held[f"bytes of nobody in {tier.name}"] = tier.backend.used_bytes - blocks_bytes
    return [f"{count} {what}" for what, count in held.items() if count]


def _control(lab: Lab) -> bool:
    """An agent that forgets the pins of the dead must be seen."""
    node = lab.node
    lab.patience_s = 1.0
    node.pins.end_owner = lambda owner: []  # type: ignore[method-assign]  # noqa: ARG005
    try:
        return bool(lab.kill_at("doing nothing", 1_000_000))
    finally:
        del node.pins.end_owner
