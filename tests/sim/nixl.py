"""A simulated NIXL: one-sided reads that may be torn, late, or done long after everybody gave up."""

import contextvars
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvstrata_agent.fleet.peers.nixl import Read, address_of
from kvstrata_api.errors import BackendFailedError
from sim.loop import SimLoop
from sim.process import Process


@dataclass(slots=True)
class NixlFaults:
    """Chances for each transfer."""

    fail: float = 0.0
    late: float = 0.0
    """Done seconds after the reader's patience, perhaps after the owner's lease."""
    tear: float = 0.0
    """The two halves are read at different times."""


class NixlNet:
    """All readers, by name."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.faults = NixlFaults()
        self.readers: dict[str, SimNixl] = {}
        self.world = contextvars.Context()
        self.late = 0
        self.torn = 0


class SimNixl:
    """What `NixlReader` is to one agent."""

    def __init__(self, net: NixlNet, name: str, process: Process) -> None:
        self._net = net
        self.name = name
        self.process = process
        self.generation = 0
        self.regions: dict[int, tuple[int, memoryview]] = {}
        net.readers[name] = self

    def attend(self, duration_s: float) -> None:
        """Always attentive."""

    def register(self, region: int, view: memoryview) -> "Future[None]":
        """Make memory readable."""
        if region not in self.regions:
            self.regions[region] = (address_of(view), view)
            self.generation += 1
        return _done(None)

    def unregister(self, region: int) -> "Future[None]":
        """Undo `register`."""
        if self.regions.pop(region, None) is not None:
            self.generation += 1
        return _done(None)

    def describe(self) -> "Future[bytes]":
        """Name."""
        return _done(self.name.encode())

    def meet(self, described: bytes) -> "Future[str]":
        """Know another reader."""
        return _done(described.decode())

    def read(self, name: str, reads: Sequence[Read]) -> "Future[None]":
        """Start to copy from another process's memory."""
        landed: Future[None] = Future()
        landed.set_running_or_notify_cancel()
        rng, faults = self._net.rng, self._net.faults
        delay_s = 0.0002
        if faults.late and rng.random() < faults.late:
            self._net.late += 1
            delay_s = rng.random() * 45.0
        gap_s = rng.random() * 20.0 if faults.tear and rng.random() < faults.tear else 0.0
        self._net.torn += gap_s > 0
        loop, world = self._net.loop, self._net.world
        loop.call_later(delay_s, self._copy, name, reads, 0, context=world)
        loop.call_later(delay_s + gap_s, self._copy, name, reads, 1, context=world)
        context = self.process.context.copy()
        is_failed = bool(faults.fail) and rng.random() < faults.fail
        loop.call_later(delay_s + gap_s + 1e-5, self._end, name, landed, is_failed, context=context)
        return landed

    def _copy(self, name: str, reads: Sequence[Read], half: int) -> None:
        """Copy the first or the second half of every block, whatever lies there now."""
        owner = self._net.readers.get(name)
        if owner is None or owner.process.is_dead or self.process.is_dead:
            return
        for one in reads:
            middle = one.size_bytes // 2
            start, stop = (0, middle) if half == 0 else (middle, one.size_bytes)
            source = owner._at(one.remote_address + start, stop - start)
            target = self._at(one.local_address + start, stop - start)
            if source is not None and target is not None:
                target[:] = source

    def _at(self, address: int, size_bytes: int) -> memoryview | None:
        for base, view in self.regions.values():
            if base <= address and address + size_bytes <= base + len(view):
                return view[address - base : address - base + size_bytes]
        return None

    def _end(self, name: str, landed: "Future[None]", is_failed: bool) -> None:  # noqa: FBT001
        owner = self._net.readers.get(name)
        if is_failed or owner is None or owner.process.is_dead:
            landed.set_exception(BackendFailedError(f"nixl read from {name}: gone"))
        else:
            landed.set_result(None)

    def close(self) -> None:
        """End."""
        self._net.readers.pop(self.name, None)


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future
