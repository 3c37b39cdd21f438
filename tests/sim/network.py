"""The network between agents: asyncio transports that are slow, are cut with bytes under way, and split messages."""

import asyncio
import contextvars
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.loop import SimLoop
from sim.process import PROCESS, Process
from sim.sockets import LocalNet, SimSocket


@dataclass(slots=True)
class NetFaults:
    """Chances for each write, and for each connection."""

    slow: float = 0.0
    cut: float = 0.0
    split: float = 0.0
    flip: float = 0.0
    """Of a bit of a long write to change on the way, past TCP's checksum."""
    refuse: float = 0.0


@dataclass(slots=True)
class NetTally:
    """Faults so far."""

    cuts: int = 0
    flips: int = 0
    refused: int = 0
    connections: int = 0


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, net: "Network", protocol: asyncio.BaseProtocol, process: Process | None) -> None:
        super().__init__()
        self._net = net
        self.protocol: Any = protocol
        self.process = process
        self.peer: Transport | None = None
        self.is_closed = False
        self.is_broken = False
        """True once bytes were lost: nothing that follows may arrive."""
        self._free_s = 0.0

    def is_closing(self) -> bool:
        """True once closed."""
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002
        """Nothing is known."""
        return default

    def get_write_buffer_size(self) -> int:
        """What is written is on the way at once."""
        return 0

    def pause_reading(self) -> None:
        """Buffers have no bound here."""

    def resume_reading(self) -> None:
        """See `pause_reading`."""

    def write(self, data: Any) -> None:
        """Send bytes; a cut loses them and ends both ends."""
        if self.is_closed or self.peer is None:
            return
        chunk, rng, faults = bytes(data), self._net.rng, self._net.faults
        if faults.cut and rng.random() < faults.cut:
            self._net.tally.cuts += 1
            self._deliver(chunk[: rng.randrange(len(chunk) + 1)])
            self.cut()
            return
        if faults.flip and len(chunk) > 1024 and rng.random() < faults.flip:
            self._net.tally.flips += 1
            at = rng.randrange(len(chunk))
            chunk = chunk[:at] + bytes((chunk[at] ^ 1 << rng.randrange(8),)) + chunk[at + 1 :]
        if faults.split and len(chunk) > 1 and rng.random() < faults.split:
            at = rng.randrange(1, len(chunk))
            self._deliver(chunk[:at])
            self._deliver(chunk[at:])
        else:
            self._deliver(chunk)

    def _deliver(self, chunk: bytes) -> None:
        peer = self.peer
        assert peer is not None
        self.is_broken = self.is_broken or self._net.is_apart(self.process, peer.process)
        if self.is_broken:
            return
        self._free_s = max(self._free_s, self._net.loop.now_s + self._net.delay_s())
        self._net.loop.call_at(self._free_s, peer._arrive, chunk, context=peer.context())

    def context(self) -> contextvars.Context:
        """Where the callbacks of this end run."""
        return self.process.context.copy() if self.process is not None else contextvars.Context()

    def _arrive(self, chunk: bytes) -> None:
        if not self.is_closed and chunk:
            self.protocol.data_received(chunk)

    def cut(self) -> None:
        """Reset both ends, each when it learns of it."""
        for end in (self, self.peer):
            if end is not None:
                self._net.loop.call_later(self._net.delay_s(), end._lose, ConnectionResetError(), context=end.context())

    def _lose(self, error: Exception | None) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.protocol.connection_lost(error)

    def close(self) -> None:
        """End; the other end learns of it after what is on the way."""
        if self.is_closed:
            return
        self.is_closed = True
        loop, peer = self._net.loop, self.peer
        loop.call_soon(self.protocol.connection_lost, None, context=self.context())
        if peer is not None:
            due_s = max(self._free_s, loop.now_s + self._net.delay_s())
            loop.call_at(due_s, peer._lose, ConnectionResetError(), context=peer.context())

    def abort(self) -> None:
        """End at once."""
        self.close()


class ListenSocket:
    """What `socket.create_server` gives to a listener."""

    _ports = itertools.count(20_000)

    def __init__(self, host: str) -> None:
        self._name = (host, next(self._ports))

    def getsockname(self) -> tuple[str, int]:
        """Host and port."""
        return self._name

    def close(self) -> None:
        """Nothing is held."""


class _Listening:
    """What `create_server` of a loop gives."""

    def __init__(self, net: "Network", address: str) -> None:
        self._net = net
        self._address = address

    def close(self) -> None:
        """Accept nothing more."""
        self._net.listening.pop(self._address, None)


class Network:
    """All connections between agents, and the local sockets."""

    def __init__(self, loop: SimLoop, rng: random.Random, local: LocalNet) -> None:
        self.loop = loop
        self.rng = rng
        self.faults = NetFaults()
        self.tally = NetTally()
        self.partitioned: set[str] = set()
        """Processes that reach nobody and whom nobody reaches."""
        self.listening: dict[str, tuple[Process | None, Callable[[], Any]]] = {}
        self._local = local

    def delay_s(self) -> float:
        """From one node to another."""
        if self.faults.slow and self.rng.random() < self.faults.slow:
            return self.rng.random() ** 3 * 12.0
        return 0.0002

    def is_apart(self, *ends: Process | None) -> bool:
        """True when the network between two processes is cut."""
        return bool(self.partitioned) and any(end is not None and end.name in self.partitioned for end in ends)

    async def connect_local(self, sock: SimSocket, path: Any) -> None:
        """See `LocalNet.connect`."""
        await self._local.connect(sock, str(path))

    def listen(self, factory: Callable[[], Any], bound: ListenSocket) -> _Listening:
        """Accept connections at the bound address."""
        host, port = bound.getsockname()
        address = f"{host}:{port}"
        self.listening[address] = (PROCESS.get(), factory)
        return _Listening(self, address)

    async def connect(self, factory: Callable[[], Any], address: str) -> tuple[Transport, Any]:
        """Connect. Raises `ConnectionRefusedError`, or waits for ever when the way is cut."""
        me = PROCESS.get()
        await asyncio.sleep(self.delay_s())
        process, serve = self.listening.get(address, (None, None))
        if self.is_apart(me, process):
            await asyncio.sleep(60.0)
        is_refused = self.faults.refuse and self.rng.random() < self.faults.refuse
        if serve is None or is_refused or (process is not None and process.is_dead):
            self.tally.refused += 1
            raise ConnectionRefusedError(address)
        self.tally.connections += 1
        near = Transport(self, factory(), me)
        far = Transport(self, self._accepted(process, serve), process)
        near.peer, far.peer = far, near
        for end in (near, far):
            if end.process is not None:
                end.process.at_exit.append(end.close)
        self.loop.call_soon(far.protocol.connection_made, far, context=far.context())
        near.protocol.connection_made(near)
        return near, near.protocol

    @staticmethod
    def _accepted(process: Process | None, serve: Callable[[], Any]) -> Any:
        return process.call(serve) if process is not None else serve()
