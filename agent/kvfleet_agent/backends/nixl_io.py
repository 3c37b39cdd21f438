"""File I/O through NIXL's POSIX plugin on io_uring. The only NIXL import of the storage side.

One thread owns the NIXL agent: it starts transfers, many at a time, and polls those under way. A transfer that
NIXL reports as failed is repeated by plain POSIX calls, which either succeed or tell the errno that NIXL hides.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from kvfleet_agent.backends.memory import address_of
from kvfleet_agent.backends.posix_io import PosixFile, PosixVolume
from kvfleet_agent.backends.waiting import in_thread, settle
from kvfleet_api.errors import UnsupportedError

_PLUGIN: Final = "POSIX"
_OPTIONS: Final = {"use_uring": "true", "use_aio": "false", "use_posix_aio": "false"}
_POLL_S: Final = 50e-6
"""A 2 MiB transfer takes 500 us or more; NIXL has no completion descriptor to wait on."""

_ACTIVE_MAX: Final = 64


@dataclass(slots=True)
class _Transfer:
    operation: str
    fd: int
    offset: int
    parts: Sequence[memoryview]
    future: "asyncio.Future[bool]"
    """True when NIXL moved all bytes."""
    handle: Any = None
    registered: tuple[Any, ...] = ()


class NixlMover:
    """NIXL's POSIX plugin with io_uring, driven by one thread; shared by the files of a volume."""

    def __init__(self) -> None:
        """Start the agent and its thread. Raises `UnsupportedError` when NIXL or io_uring is not there."""
        self._agent, self._errors = _start_agent()
        self._is_stopped = False
        self._queue: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvfleet-nixl", daemon=True)
        self._thread.start()

    async def move(self, operation: str, fd: int, offset: int, parts: Sequence[memoryview]) -> bool:
        """READ or WRITE a range; false when NIXL did not, for a reason that it does not tell."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.put(_Transfer(operation, fd, offset, parts, future))
        if self._is_stopped:
            self._refuse_queued()
        return await settle(future)

    async def close(self) -> None:
        """Wait for the transfers under way and stop the thread."""
        self._queue.put(None)
        await in_thread(None, self._thread.join)

    def _run(self) -> None:
        active: list[_Transfer] = []
        try:
            self._serve(active)
        finally:  # Also when NIXL breaks its contract: waiting writers go on by POSIX calls instead of hanging.
            self._is_stopped = True
            for transfer in active:
                self._answer(transfer, is_moved=False)
            self._refuse_queued()

    def _refuse_queued(self) -> None:
        with suppress(Empty):
            while True:
                transfer = self._queue.get(block=False)
                if transfer is not None:
                    self._answer(transfer, is_moved=False)

    def _serve(self, active: list[_Transfer]) -> None:
        while True:
            while len(active) < _ACTIVE_MAX and (active == [] or not self._queue.empty()):
                transfer = self._queue.get()
                if transfer is None:
                    return
                if self._start(transfer):
                    active.append(transfer)
            finished = [t for t in active if self._is_finished(t)]
            for transfer in finished:
                active.remove(transfer)
            if not finished:
                time.sleep(_POLL_S)

    def _start(self, transfer: _Transfer) -> bool:
        agent = self._agent
        memory = [(address_of(p), len(p)) for p in transfer.parts]
        places, at = [], transfer.offset
        for _, size in memory:
            places.append((at, size, transfer.fd))
            at += size
        try:
            regions = agent.register_memory([(a, n, 0, "") for a, n in memory], "DRAM", [_PLUGIN])
            files = agent.register_memory([(*p, "") for p in places], "FILE", [_PLUGIN])
            transfer.registered = (regions, files)
            local = agent.get_xfer_descs([(a, n, 0) for a, n in memory], "DRAM")
            remote = agent.get_xfer_descs(places, "FILE")
            transfer.handle = agent.initialize_xfer(transfer.operation, local, remote, agent.name, b"", [_PLUGIN])
            state = agent.transfer(transfer.handle)
        except self._errors:
            state = "ERR"
        if state == "PROC":
            return True
        self._finish(transfer, is_moved=state == "DONE")
        return False

    def _is_finished(self, transfer: _Transfer) -> bool:
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except self._errors:
            state = "ERR"
        if state == "PROC":
            return False
        self._finish(transfer, is_moved=state == "DONE")
        return True

    def _finish(self, transfer: _Transfer, *, is_moved: bool) -> None:
        if transfer.handle is not None:
            transfer.handle.release()
        for registered in transfer.registered:
            self._agent.deregister_memory(registered, [_PLUGIN])
        self._answer(transfer, is_moved=is_moved)

    def _answer(self, transfer: _Transfer, *, is_moved: bool) -> None:
        future = transfer.future
        future.get_loop().call_soon_threadsafe(_resolve, future, is_moved)


def _resolve(future: "asyncio.Future[bool]", is_moved: bool) -> None:  # noqa: FBT001 - call_soon passes by position.
    if not future.done():
        future.set_result(is_moved)


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
        agent = nixl_agent(f"kvfleet-file-{os.getpid()}-{time.monotonic_ns()}", nixl_agent_config(backends=[]))
        agent.create_backend(_PLUGIN, _OPTIONS)
    except errors as e:
        raise UnsupportedError(f"NIXL's POSIX plugin does not start with io_uring: {e}") from e
    return agent, errors


class _GroupSync:
    """fdatasync of one file, shared by the writes that finished before it began; a failure is final."""

    def __init__(self, fd: int, threads: Executor | None) -> None:
        self._fd = fd
        self._threads = threads
        self._lock = asyncio.Lock()
        self._asked = 0
        self._done = 0
        self._failure: OSError | None = None

    async def run(self) -> None:
        """Return when everything that was written before the call is durable. Raises `OSError`."""
        self._asked += 1
        mine = self._asked
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._done >= mine:
                return
            covers = self._asked
            try:
                await in_thread(self._threads, partial(os.fdatasync, self._fd))
            except OSError as e:
                self._failure = e
                raise
            self._done = covers


class NixlFile(PosixFile):
    """A file whose bytes NIXL moves; what NIXL fails to move is repeated by POSIX calls."""

    def __init__(self, fd: int, movers: ThreadPoolExecutor, namers: ThreadPoolExecutor, mover: NixlMover) -> None:
        super().__init__(fd, movers, namers)
        self._mover = mover
        self._sync = _GroupSync(fd, namers)

    async def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Transfer, then make durable by a fdatasync shared with the other writes of the file."""
        if await self._mover.move("WRITE", self.fd, offset, parts):
            await self._sync.run()
        else:
            await super().write(offset, parts)

    async def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`."""
        if not await self._mover.move("READ", self.fd, offset, [into]):
            await super().read(offset, into)


class NixlVolume(PosixVolume):
    """Files of one directory through NIXL. A `Volume`."""

    medium = "file-uring"

    def __init__(self, directory: Path, lock_fd: int, mover: NixlMover) -> None:
        """Take over descriptor and mover."""
        super().__init__(directory, lock_fd, is_direct=True)
        self._mover = mover

    def _file(self, fd: int) -> NixlFile:
        return NixlFile(fd, self._movers, self._namers, self._mover)

    async def close(self) -> None:
        """Stop NIXL, the threads, and let go of the lock."""
        await self._mover.close()
        await super().close()
