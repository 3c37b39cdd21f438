"""File I/O through NIXL's POSIX plugin on io_uring. The only NIXL import of the storage side.

One thread owns the NIXL agent: it starts batches of transfers, many at a time, and polls those under way. What
NIXL reports as failed is repeated by plain POSIX calls, which either succeed or return the errno that NIXL hides.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from kvstrata_agent.backends.file.posix import PosixFile, PosixVolume
from kvstrata_agent.backends.file.volume import nothing
from kvstrata_agent.backends.scratch import address_of
from kvstrata_agent.backends.threads import in_thread, settle
from kvstrata_api.errors import UnsupportedError

_PLUGIN: Final = "POSIX"
_OPTIONS: Final = {"use_uring": "true", "use_aio": "false", "use_posix_aio": "false"}
_POLL_S: Final = 50e-6
"""A 2 MiB transfer takes 500 us or more; NIXL has no completion descriptor to wait on."""

_ACTIVE_MAX: Final = 32
"""Batches under way."""

_BATCH_MAX: Final = 8
"""Transfers of a batch, which are answered together: few enough that the first need not wait long for the last."""


@dataclass(slots=True, eq=False)
class _Asked:
    """Transfers that a caller waits for together. Of its event loop alone."""

    future: "asyncio.Future[None]"
    left: set[int]
    """Those that are under way, by number."""
    failed: set[int] = field(default_factory=set)
    """Those of which NIXL did not move all bytes."""

    def end(self, number: int, *, is_moved: bool) -> None:
        """Note the end of one of them."""
        self.left.discard(number)
        if not is_moved:
            self.failed.add(number)
        if not self.left and not self.future.done():
            self.future.set_result(None)


@dataclass(slots=True)
class _Transfer:
    operation: str
    fd: int
    offset: int
    parts: Sequence[memoryview]
    asked: _Asked
    number: int
    """Of those that were asked for with it."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Transfers of one direction that NIXL has as one: its calls cost as much as a small block."""

    transfers: Sequence[_Transfer]
    handle: Any = None
    registered: tuple[Any, ...] = ()


class NixlMover:
    """NIXL's POSIX plugin with io_uring, driven by one thread; shared by the files of a volume."""

    def __init__(self) -> None:
        """Start the agent and its thread. Raises `UnsupportedError` when NIXL or io_uring is not there."""
        self._agent, self._errors = _start_agent()
        self._is_stopped = False
        self._queue: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvstrata-nixl", daemon=True)
        self._thread.start()

    async def move(
        self, operation: str, fd: int, ranges: Sequence[tuple[int, Sequence[memoryview]]]
    ) -> Collection[int]:
        """READ or WRITE from offsets on; numbers of those that NIXL did not move, for a reason that it keeps."""
        if not ranges:
            return ()
        asked = _Asked(asyncio.get_running_loop().create_future(), set(range(len(ranges))))
        for number, (offset, parts) in enumerate(ranges):
            self._queue.put(_Transfer(operation, fd, offset, parts, asked, number))
        if self._is_stopped:
            self._refuse_queued()
        await settle(asked.future)
        return asked.failed

    async def close(self) -> None:
        """Wait for the transfers under way and stop the thread."""
        self._queue.put(None)
        await in_thread(None, self._thread.join)

    def _run(self) -> None:
        active: list[_Batch] = []
        try:
            self._serve(active)
        finally:  # Also when NIXL breaks its contract: waiting writers go on by POSIX calls instead of hanging.
            self._is_stopped = True
            for batch in active:
                _answer(batch.transfers, is_moved=False)
            self._refuse_queued()

    def _refuse_queued(self) -> None:
        with suppress(Empty):
            while True:
                transfer = self._queue.get(block=False)
                if transfer is not None:
                    _answer([transfer], is_moved=False)

    def _serve(self, active: list[_Batch]) -> None:
        while True:
            while len(active) < _ACTIVE_MAX and (active == [] or not self._queue.empty()):
                taken, is_last = self._take()
                self._begin(_batches(taken), active)
                if is_last:
                    return
            finished = [b for b in active if self._is_finished(b)]
            for batch in finished:
                active.remove(batch)
            if not finished:
                time.sleep(_POLL_S)

    def _begin(self, batches: list[_Batch], active: list[_Batch]) -> None:
        active += batches  # First, so that every batch is answered whatever becomes of one.
        for batch in batches:
            if not self._start(batch):
                active.remove(batch)

    def _take(self) -> tuple[list[_Transfer], bool]:
        """Wait for a transfer, and take those that wait behind it; true when they are the last ever."""
        taken: list[_Transfer] = []
        with suppress(Empty):
            while len(taken) < _BATCH_MAX:
                transfer = self._queue.get(block=not taken)
                if transfer is None:
                    return taken, True
                taken.append(transfer)
        return taken, False

    def _start(self, batch: _Batch) -> bool:
        agent, operation = self._agent, batch.transfers[0].operation
        memory = [(address_of(p), len(p)) for t in batch.transfers for p in t.parts]
        places = [place for t in batch.transfers for place in _places(t)]
        try:
            regions = agent.register_memory([(a, n, 0, "") for a, n in memory], "DRAM", [_PLUGIN])
            files = agent.register_memory([(*p, "") for p in places], "FILE", [_PLUGIN])
            batch.registered = (regions, files)
            local = agent.get_xfer_descs([(a, n, 0) for a, n in memory], "DRAM")
            remote = agent.get_xfer_descs(places, "FILE")
            batch.handle = agent.initialize_xfer(operation, local, remote, agent.name, b"", [_PLUGIN])
            state = agent.transfer(batch.handle)
        except self._errors:
            state = "ERR"
        if state == "PROC":
            return True
        self._finish(batch, is_moved=state == "DONE")
        return False

    def _is_finished(self, batch: _Batch) -> bool:
        try:
            state = self._agent.check_xfer_state(batch.handle)
        except self._errors:
            state = "ERR"
        if state == "PROC":
            return False
        self._finish(batch, is_moved=state == "DONE")
        return True

    def _finish(self, batch: _Batch, *, is_moved: bool) -> None:
        if batch.handle is not None:
            batch.handle.release()
        for registered in batch.registered:
            self._agent.deregister_memory(registered, [_PLUGIN])
        _answer(batch.transfers, is_moved=is_moved)


def _places(transfer: _Transfer) -> list[tuple[int, int, int]]:
    places, at = [], transfer.offset
    for part in transfer.parts:
        places.append((at, len(part), transfer.fd))
        at += len(part)
    return places


def _batches(transfers: Sequence[_Transfer]) -> list[_Batch]:
    """Transfers of one direction together, in order."""
    ways: dict[str, list[_Transfer]] = {}
    for transfer in transfers:
        ways.setdefault(transfer.operation, []).append(transfer)
    return [_Batch(same) for same in ways.values()]


def _answer(transfers: Sequence[_Transfer], *, is_moved: bool) -> None:
    """Wake the callers, once for each loop: waking a loop is a system call."""
    loops: dict[asyncio.AbstractEventLoop, list[_Transfer]] = {}
    for transfer in transfers:
        loops.setdefault(transfer.asked.future.get_loop(), []).append(transfer)
    for loop, ended in loops.items():
        loop.call_soon_threadsafe(_end, ended, is_moved)


def _end(transfers: Sequence[_Transfer], is_moved: bool) -> None:  # noqa: FBT001 - call_soon does so.
    for transfer in transfers:
        transfer.asked.end(transfer.number, is_moved=is_moved)


def _start_agent() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL agent with the POSIX plugin, and the exceptions that NIXL raises (they share no base of their own)."""
    try:
        from nixl_cu12 import _bindings
        from nixl_cu12._api import nixl_agent, nixl_agent_config
    except ImportError as e:
        raise UnsupportedError(f"NIXL is not installed ({e}); install requirements/nixl.txt") from e
    errors = tuple(v for v in vars(_bindings).values() if isinstance(v, type) and issubclass(v, Exception))
    errors += (RuntimeError,)
    logging.getLogger("nixl").setLevel(logging.WARNING)  # Its handler writes to stdout.
    try:
        agent = nixl_agent(f"kvstrata-file-{os.getpid()}-{time.monotonic_ns()}", nixl_agent_config(backends=[]))
        agent.create_backend(_PLUGIN, _OPTIONS)
    except errors as e:
        raise UnsupportedError(f"NIXL's POSIX plugin does not start with io_uring: {e}") from e
    return agent, errors


class NixlFile(PosixFile):
    """A file whose bytes NIXL moves; what NIXL fails to move is repeated by POSIX calls."""

    def __init__(self, fd: int, movers: ThreadPoolExecutor, namers: ThreadPoolExecutor, mover: NixlMover) -> None:
        super().__init__(fd, movers, namers)
        self._mover = mover

    async def write(self, offset: int, made: Callable[[], Sequence[memoryview]]) -> None:
        """Transfer; durable then, because the file was opened with O_DSYNC."""
        parts = await in_thread(self._movers, made)
        if parts and await self._mover.move("WRITE", self.fd, [(offset, parts)]):
            await super().write(offset, lambda: parts)

    async def read(self, ranges: Sequence[tuple[int, memoryview]], then: Callable[[], None] = nothing) -> None:
        """Fill each memory."""
        failed = await self._mover.move("READ", self.fd, [(offset, (into,)) for offset, into in ranges])
        left = [ranges[number] for number in failed]
        if left or then is not nothing:
            await super().read(left, then)


class NixlVolume(PosixVolume):
    """Files of one directory through NIXL. A `Volume`."""

    medium = "file-uring"

    def __init__(self, directory: Path, lock_fd: int, mover: NixlMover) -> None:
        """Take over descriptor and mover."""
        super().__init__(directory, lock_fd, is_direct=True)
        self._flags |= os.O_DSYNC  # NIXL has no flags for a transfer, and no sync.
        self._mover = mover

    def _file(self, fd: int) -> NixlFile:
        return NixlFile(fd, self._movers, self._namers, self._mover)

    async def close(self) -> None:
        """Stop NIXL, the threads, and let go of the lock."""
        await self._mover.close()
        await super().close()
