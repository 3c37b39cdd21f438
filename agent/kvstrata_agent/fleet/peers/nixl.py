"""Reads of other agents' memory through NIXL's UCX plugin. The only NIXL import of the network side.

One thread owns the NIXL agent: it registers extents, starts reads, many at a time, and polls. NIXL's own progress
thread is off: it polls without a pause and takes a whole core for each agent that does nothing (measured, 1.5.1).
So the owner's side of a read needs our thread too: `attend` makes it poll quickly while blocks are lent.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import numpy as np

from kvstrata_api.errors import BackendFailedError, UnsupportedError

T = TypeVar("T")

_PLUGIN: Final = "UCX"
_POLL_S: Final = 100e-6
"""While blocks move: one of 1 MiB takes 100 us at 10 GB/s, and NIXL has no descriptor to wait on."""

_WORKED_S: Final = 8e-6
"""A poll that takes longer has moved bytes: one that finds nothing takes 2 us, one that reads a segment 10 to 20."""

_EAGER_S: Final = 200e-6
"""So long after bytes have come for us the thread polls again whenever nobody else wants its core: a segment takes 200
us at 10 Gbit/s, and a sleep 150. What peers read goes in larger parts after a sleep, as it waits in sockets."""

_IDLE_POLL_S: Final = 50e-3
"""While none move: connections that end are noticed, at 0.1 % of a core."""

UCX_SETTINGS: Final = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
"""Unless the environment sets another. UCX answers reads over TCP segment by segment, of 8 KiB where nobody asks for
more; larger ones take fewer calls for the same bytes (reads of 2 MiB blocks 1.2 to 2 times as fast)."""

CLOSE_TIMEOUT_S: Final = 5.0

Landed = Future[None]
"""End of a transfer: from then on NIXL writes no more."""


@dataclass(frozen=True, slots=True)
class Read:
    """One contiguous read of another process's memory."""

    remote_address: int
    local_address: int
    size_bytes: int


@dataclass(slots=True)
class _Flight:
    handle: Any
    landed: Landed


class NixlReader:
    """NIXL over UCX. Methods may be called from any thread; each answer is a future of `concurrent.futures`."""

    def __init__(self, name: str, host: str) -> None:
        """Start the agent and its thread; `name` is made unique, for NIXL refuses a name that comes back changed.

        Raises `UnsupportedError` when NIXL or its UCX plugin is not there.
        """
        self._agent, self._errors = _start_agent(f"{name}#{os.getpid()}-{time.time_ns()}", host)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._flights: list[_Flight] = []
        self._regions: set[int] = set()
        self._registered: dict[int, Any] = {}
        self._peers: dict[str, int] = {}
        self._generation = 0
        self._attend_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvstrata-ucx", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        """Moves on when regions come or go."""
        return self._generation

    @property
    def in_flight(self) -> int:
        """Reads that NIXL has not ended, those given up by their callers included."""
        return len(self._flights)

    def attend(self, duration_s: float) -> None:
        """Expect reads by peers for so long."""
        self._attend_until_s = max(self._attend_until_s, time.monotonic() + duration_s)
        self._jobs.put(_nothing)

    def register(self, region: int, view: memoryview) -> Landed:
        """Make memory readable by peers and writable by our own reads. Idempotent by `region`.

        The generation moves on at once: a description asked for from now on has the region.
        """
        if region not in self._regions:
            self._regions.add(region)
            self._generation += 1
        return self._do(lambda: self._register(region, view))

    def unregister(self, region: int) -> Landed:
        """Undo `register`; the memory may go away when the future is done."""
        if region in self._regions:
            self._regions.discard(region)
            self._generation += 1
        return self._do(lambda: self._unregister(region))

    def describe(self) -> "Future[bytes]":
        """What a peer's `meet` needs."""
        return self._do(self._agent.get_agent_metadata)

    def meet(self, described: bytes) -> "Future[str]":
        """Learn or relearn a peer's regions; its NIXL name."""
        return self._do(lambda: _text(self._agent.add_remote_agent(described)))

    def forget(self, name: str) -> Landed:
        """Unlearn a peer. Reads under way may still write to their targets."""
        return self._do(lambda: self._agent.remove_remote_agent(name))

    def read(self, name: str, reads: Sequence[Read]) -> Landed:
        """Start reads from a peer as one transfer. Done when NIXL has ended it: from then on it writes no more.

        The future fails with `BackendFailedError`; cancelling it does not stop NIXL and is therefore refused.
        """
        landed: Future[None] = Future()
        landed.set_running_or_notify_cancel()
        self._jobs.put(lambda: self._start(name, reads, landed))
        return landed

    def close(self) -> None:
        """End the thread. Reads under way are left to NIXL, so their targets must stay mapped."""
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _do(self, job: "Callable[[], Any]") -> "Future[Any]":
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()

        def run() -> None:
            try:
                answer.set_result(job())
            except self._errors as e:
                answer.set_exception(BackendFailedError(f"nixl: {e}"))

        self._jobs.put(run)
        return answer

    def _run(self) -> None:
        pause_s, worked_s = 0.0, 0.0
        while True:
            with contextlib.suppress(Empty):
                job = self._jobs.get(pause_s > 0, pause_s or None)
                while job is not None:
                    job()
                    job = self._jobs.get_nowait()
                return
            looked_s = time.monotonic()
            self._progress()
            self._flights = [f for f in self._flights if not self._has_landed(f)]
            now_s = time.monotonic()
            if now_s - looked_s > _WORKED_S:
                worked_s = now_s
            pause_s = pause_of(
                now_s - worked_s, is_reading=bool(self._flights), is_lending=now_s < self._attend_until_s
            )
            if not pause_s:
                os.sched_yield()

    def _progress(self) -> None:
        """Let UCX serve peers; we use no notifications, but asking for them is what moves it."""
        with contextlib.suppress(*self._errors):
            self._agent.get_new_notifs([_PLUGIN])

    def _register(self, region: int, view: memoryview) -> None:
        if region not in self._registered:
            self._registered[region] = self._agent.register_memory(
                [(address_of(view), len(view), 0, "")], "DRAM", [_PLUGIN]
            )

    def _unregister(self, region: int) -> None:
        registered = self._registered.pop(region, None)
        if registered is not None:
            self._agent.deregister_memory(registered, [_PLUGIN])

    def _start(self, name: str, reads: Sequence[Read], landed: Landed) -> None:
        try:
            local = self._agent.get_xfer_descs([(r.local_address, r.size_bytes, 0) for r in reads], "DRAM")
            remote = self._agent.get_xfer_descs([(r.remote_address, r.size_bytes, 0) for r in reads], "DRAM")
            handle = self._agent.initialize_xfer("READ", local, remote, name, b"", [_PLUGIN])
            state = self._agent.transfer(handle)
        except self._errors as e:
            landed.set_exception(BackendFailedError(f"nixl read from {name}: {e}"))
            return
        flight = _Flight(handle, landed)
        if state == "PROC" or not self._settle(flight, state):
            self._flights.append(flight)

    def _has_landed(self, flight: _Flight) -> bool:
        try:
            state = self._agent.check_xfer_state(flight.handle)
        except self._errors as e:
            state = f"ERR: {e}"
        return self._settle(flight, state)

    @staticmethod
    def _settle(flight: _Flight, state: str) -> bool:
        """Answer when the transfer has ended, which is the only time at which its handle may be released."""
        if state == "PROC":
            return False
        flight.handle.release()
        if state == "DONE":
            flight.landed.set_result(None)
        else:
            flight.landed.set_exception(BackendFailedError(f"nixl transfer: {state}"))
        return True


def pause_of(idle_s: float, *, is_reading: bool, is_lending: bool) -> float:
    """How long to wait for jobs before the next poll, `idle_s` after one that found something. Pure."""
    if not is_reading:
        return _POLL_S if is_lending else _IDLE_POLL_S
    return 0.0 if idle_s < _EAGER_S else _POLL_S


def _nothing() -> None:
    """A job that only wakes the thread."""


def address_of(view: memoryview) -> int:
    """Address of the first byte; the view must stay alive while the address is used."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


async def answer_of(future: "Future[T]") -> T:
    """Wait for a future of the NIXL thread; a cancelled wait leaves the work under way."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # Seen, also when nobody waits.
    return await asyncio.shield(waiting)


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _start_agent(name: str, host: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL agent with the UCX plugin, and the exceptions that NIXL raises (they share no base of their own)."""
    try:
        from nixl_cu12 import _bindings
        from nixl_cu12._api import nixl_agent, nixl_agent_config
    except ImportError as e:
        raise UnsupportedError(f"NIXL is not installed ({e}); install requirements/nixl.txt") from e
    if host.startswith("127.") or host == "::1":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX listens on every interface that it uses.
    for setting, value in UCX_SETTINGS.items():
        os.environ.setdefault(setting, value)
    errors = tuple(v for v in vars(_bindings).values() if isinstance(v, type) and issubclass(v, Exception))
    errors += (RuntimeError,)
    logging.getLogger("nixl").setLevel(logging.WARNING)  # Its handler writes to stdout.
    try:
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend(_PLUGIN, {})
    except errors as e:
        raise UnsupportedError(f"NIXL's UCX plugin does not start: {e}") from e
    return agent, errors
