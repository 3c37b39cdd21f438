"""I8: an agent that restarts under its name serves no slot of its old epoch, and is warm again.

Each life of the agent is a process of its own over the same memory files, NVMe directory and state; it ends by a clean
stop, by kill -9 at rest, or by kill -9 amid a burst of writes. The engine is this process: it keeps its mappings, its
leases and its reservations from one life of the agent to the next, and goes on writing where it may not any more.
"""

import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from faults.raw_engine import Held, RawEngine
from kvstrata_agent.fleet.peers import wire as peer_wire
from kvstrata_api import wire
from kvstrata_api.blocks import pack_digests
from kvstrata_api.checksum import checksum
from support.agent.doubles import BLOCK_BYTES, LAYOUT_ID
from support.nursery import Child, Nursery
from support.runner import leftovers
from support.runner.outcome import Outcome, Scale

CHAIN: Final = 8
"""Blocks of one chain; a life writes several."""
CHAINS_MAX: Final = 64
"""Chains kept: half of the memory tier, so that nothing is evicted."""
CONTROLS: Final = ("epoch stays", "writers overlooked", "drops forgotten")
CONTROL_RESTARTS_MAX: Final = 40
ENDS: Final = ("stop", "kill", "kill", "burst")
BURST_S_MAX: Final = 0.002
"""From a publication's last byte to the kill; the agent takes about as long for it."""


@dataclass(slots=True)
class Chain:
    """What the engine knows of one chain of blocks."""

    is_sure: bool = True
    """Whether its publication was answered; a burst is cut short by a kill."""
    is_sunk: bool = False
    """Whether it lies on NVMe alone."""


@dataclass(slots=True)
class Stale:
    """What is left of an earlier life of the agent."""

    engine: RawEngine
    leases: tuple[wire.Leased, ...]
    lease_keys: tuple[bytes, ...]
    lease_epoch: int
    content: tuple[bytes, ...]
    held: Held
    sums: tuple[bytes, ...]


@dataclass(slots=True)
class Lab:
    """One directory through many lives of its agent, and what must be found there."""

    root: Path
    nursery: Nursery
    seed: int
    defect: str = ""
    chains: dict[int, Chain] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    epochs: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    engine: RawEngine | None = None
    stale: Stale | None = None
    restarts: int = 0
    reads: int = 0
    warm: dict[str, int] = field(default_factory=lambda: {"dram": 0, "nvme": 0})
    start_s: float = 0.0
    _next: int = 1

    def run(self, restarts: int) -> None:
        """Restart so many times; a seeded defect ends the run when it is seen."""
        for life in range(restarts + 1):
            self._live(random.Random(f"{self.seed}/{life}"), life)
            if self.defect and self.violations:
                break
            if life % 100 == 99:
                sys.stderr.write(f"I8: {self.restarts} restarts, {len(self.violations)} violations\n")
        if self.stale is not None:
            self.stale.engine.close()

    def _live(self, rng: random.Random, life: int) -> None:
        started_s = time.monotonic()
        child = self.nursery.start("faults.i8_agent:live", root=str(self.root), defect=self.defect)
        try:
            born = child.channel.hear()
            self.start_s = max(self.start_s, time.monotonic() - started_s)
            self._is_new(born["epoch"], life)
            self._use(child, born, rng, life)
        finally:
            child.end()
            _wait_gone(child.pid)
        self.restarts = life

    def _broken(self, life: int, what: str) -> None:
        self.violations.append(f"seed {self.seed}, restart {life}: {what}")

    def _is_new(self, epoch: int, life: int) -> None:
        if self.epochs and epoch <= self.epochs[-1]:
            self._broken(life, f"epoch {epoch} after {self.epochs[-1]}")
        self.epochs.append(epoch)

    def _use(self, child: Child, born: dict[str, object], rng: random.Random, life: int) -> None:
        engine = self.engine = RawEngine(str(self.root / "agent.sock"), 0)
        engine.attach()
        stale, self.stale = self.stale, None
        if stale is not None:
            self._old_rights_are_void(engine, stale, life)
            self._ask_as_peer(str(born["address"]), engine, life)
            self._scribble(stale, rng)
        self._read_all(engine, life)
        for _ in range(rng.randint(1, 3)):
            self._write(engine, life)
        if stale is not None:
            self._scribble(stale, rng)
            self._leases_hold(stale, life)
            stale.engine.close()
        self._read_all(engine, life)
        self._demote_and_drop(child, rng)
        self.stale = self._keep_something(engine)
        self._end(child, engine, rng)

    def _old_rights_are_void(self, engine: RawEngine, stale: Stale, life: int) -> None:
        """Names of leases and reservations of an earlier life mean nothing in this one."""
        leases = tuple(lease.lease for lease in stale.leases)
        if engine.ask(wire.Release(engine.next_id(), leases), wire.Done).count:
            self._broken(life, "a lease of an earlier life was released")
        results = engine.ask(engine.publish_request(stale.held, stale.sums), wire.Published).results
        if any(results):
            self._broken(life, "a reservation of an earlier life was published")

    def _ask_as_peer(self, address: str, engine: RawEngine, life: int) -> None:
        """A peer with a location of the old epoch gets nothing; with one of the new epoch it gets blocks."""
        chains = [n for n, c in self.chains.items() if c.is_sure and not c.is_sunk]
        if not chains or len(self.epochs) < 2:
            return
        engine.seed = chains[0]
        digests = pack_digests(engine.keys(CHAIN))
        loans = [_lend(address, engine.scope, digests, epoch) for epoch in self.epochs[-2:]]
        if loans[0]:
            self._broken(life, f"{loans[0]} blocks were lent to a peer that knows the epoch {self.epochs[-2]} only")
        if loans[1] != CHAIN:
            self._broken(life, f"{loans[1]} of {CHAIN} blocks were lent under the epoch of this life")

    @staticmethod
    def _scribble(stale: Stale, rng: random.Random) -> None:
        """Write into slots that an earlier life has given out."""
        for slot in stale.held.slots:
            view = stale.engine.extents.view(slot.extent, slot.offset, BLOCK_BYTES, is_writable=True)
            view[:] = rng.randbytes(BLOCK_BYTES)

    def _leases_hold(self, stale: Stale, life: int) -> None:
        """Whoever copies under an old lease has the right bytes, or knows that they are not."""
        for lease, key, content in zip(stale.leases, stale.lease_keys, stale.content, strict=True):
            copied = bytes(stale.engine.view(lease))
            epoch = lease.epoch or stale.lease_epoch
            if checksum(copied, key, epoch, lease.stamp) == lease.checksum and copied != content:
                self._broken(life, f"an old lease of slot {lease.stamp} passed with other bytes")

    def _read_all(self, engine: RawEngine, life: int) -> None:
        """Everything that was published is there, byte for byte, under an epoch that it was written in."""
        for number, chain in self.chains.items():
            engine.seed = number
            found = self._read(engine, number, life)
            if chain.is_sure and found < CHAIN:
                where = "nvme" if chain.is_sunk else "dram"
                self._broken(life, f"{found} of {CHAIN} blocks of chain {number} are left, all were in {where}")
        for number in self.gone:
            engine.seed = number
            if self._read(engine, number, life):
                self._broken(life, f"chain {number} was dropped and is back")
        self.gone.clear()

    def _read(self, engine: RawEngine, number: int, life: int) -> int:
        held = engine.acquire(CHAIN)
        for i, (lease, key) in enumerate(zip(held.leases, held.keys, strict=False)):
            copied = bytes(engine.view(lease))
            epoch = lease.epoch or held.epoch
            self.reads += 1
            if checksum(copied, key.digest, epoch, lease.stamp) != lease.checksum:
                self._broken(life, f"block {i} of chain {number} does not match its checksum")
            elif copied != engine.content(i):
                self._broken(life, f"block {i} of chain {number} is another one's")
            if lease.source in self.warm:
                self.warm[lease.source] += 1
        leases = tuple(lease.lease for lease in held.leases)
        if engine.ask(wire.Release(engine.next_id(), leases), wire.Done).count != len(leases):
            self._broken(life, f"leases of chain {number} had ended before they were released")
        return len(held.leases)

    def _write(self, engine: RawEngine, life: int) -> None:
        engine.seed = number = self._number()
        held = engine.reserve(0, CHAIN)
        sums = engine.fill(held, 0)
        results = engine.ask(engine.publish_request(held, sums), wire.Published).results
        if set(results) != {1}:
            self._broken(life, f"chain {number} was published as {list(results)}")
        self.chains[number] = Chain()

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _demote_and_drop(self, child: Child, rng: random.Random) -> None:
        """Send one chain to NVMe; drop old ones that are in memory alone, so that the room suffices."""
        in_memory = [n for n, c in self.chains.items() if c.is_sure and not c.is_sunk]
        if in_memory and rng.random() < 0.3:
            number = rng.choice(in_memory)
            self._tell(child, "sink", number)
            self.chains[number].is_sunk = True
            in_memory.remove(number)
        while in_memory and (len(self.chains) > CHAINS_MAX or rng.random() < 0.4):
            number = in_memory.pop(0)
            self._tell(child, "drop", number)
            del self.chains[number]
            self.gone.add(number)
        for number in [n for n, c in self.chains.items() if c.is_sunk or not c.is_sure][: -CHAINS_MAX // 2]:
            self._tell(child, "drop", number)  # On NVMe a drop takes half a second to last.
            del self.chains[number]

    def _tell(self, child: Child, verb: str, number: int) -> None:
        assert self.engine is not None
        self.engine.seed = number
        child.channel.say([verb, [key.digest.hex() for key in self.engine.keys(CHAIN)]])
        child.channel.hear()

    def _keep_something(self, engine: RawEngine) -> Stale:
        """Lease a chain, and reserve slots that are half written when the agent ends."""
        known = [n for n, c in self.chains.items() if c.is_sure and not c.is_sunk]
        leased = Held()
        content: tuple[bytes, ...] = ()
        if known:
            engine.seed = known[-1]
            leased = engine.acquire(CHAIN)
            content = tuple(engine.content(i) for i in range(len(leased.leases)))
        engine.seed = self._number()
        held = engine.reserve(0, CHAIN)
        sums = engine.fill(held, 0, CHAIN // 2)
        sums += (bytes(16),) * (CHAIN - len(sums))
        keys = tuple(key.digest for key in leased.keys[: len(leased.leases)])
        return Stale(engine, leased.leases, keys, leased.epoch, content, held, sums)

    def _end(self, child: Child, engine: RawEngine, rng: random.Random) -> None:
        end = rng.choice(ENDS)
        if end == "stop":
            child.channel.say(["stop", []])
            with suppress(EOFError):
                child.channel.hear()
        elif end == "burst":
            engine.seed = number = self._number()
            held = engine.reserve(0, CHAIN)
            engine.send(wire.encode(engine.publish_request(held, engine.fill(held, 0))))
            self.chains[number] = Chain(is_sure=False)
            time.sleep(rng.random() * BURST_S_MAX)


def run(scale: Scale) -> Outcome:
    """Restart one agent again and again; then with seeded defects."""
    with _lab(scale.first_seed) as lab:
        lab.run(scale.of(1000, 15))
    is_caught = all(_is_caught(defect, scale.first_seed) for defect in CONTROLS)
    return Outcome(
        n=lab.restarts,
        unit="restarts",
        violations=tuple(lab.violations),
        is_control_caught=is_caught,
        values={
            "reads": float(lab.reads),
            "warm_dram_reads": float(lab.warm["dram"]),
            "warm_nvme_reads": float(lab.warm["nvme"]),
            "start_seconds_max": lab.start_s,
        },
    )


def _is_caught(defect: str, seed: int) -> bool:
    with _lab(seed, defect) as lab:
        lab.run(CONTROL_RESTARTS_MAX)
    return bool(lab.violations)


@contextmanager
def _lab(seed: int, defect: str = "") -> Iterator[Lab]:
    """Directories on a tmpfs, which memory files need; NVMe records take them as well."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-i8-", dir=leftovers.memory()) as folder,
        Nursery(("faults.i8_agent",)) as nursery,
    ):
        yield Lab(Path(folder), nursery, seed, defect)


def _wait_gone(pid: int) -> None:
    """Return when the process is no more: only then nobody holds its locks."""
    for _ in range(2000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.002)
    raise TimeoutError(f"process {pid} does not end")


def _lend(address: str, scope: str, digests: bytes, epoch: int) -> int:
    """Ask as a peer that knows of one epoch; returns how many blocks were lent."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10.0) as connected:
        connected.sendall(peer_wire.encode(peer_wire.Hello(1, peer_wire.PROTOCOL_VERSION, "pool.other", "token")))
        _answer(connected)
        connected.sendall(peer_wire.encode(peer_wire.Lend(2, scope, LAYOUT_ID, digests, 10.0, epoch)))
        lending = _answer(connected)
    assert isinstance(lending, peer_wire.Lending), lending
    return sum(1 for loan in lending.loans if loan.lease)


def _answer(connected: socket.socket) -> peer_wire.Answer:
    with connected.makefile("rb") as stream:
        size_bytes = peer_wire.decode_length(stream.read(peer_wire.LENGTH_BYTES))
        return peer_wire.decode_answer(stream.read(size_bytes))
