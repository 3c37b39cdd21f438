"""Puts the world's clock, chance, threads and sockets in place of the machine's, in every module of the product.

Nothing of a run may depend on real time, on the machine's entropy, on addresses or on the seed of Python's hashes.
"""

import concurrent.futures
import importlib
import pkgutil
import random
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import kvstrata_agent.backends.file.record_store
import kvstrata_agent.blocks.block
import kvstrata_agent.blocks.sessions
import kvstrata_agent.serve.connection
import kvstrata_metadata.store.keys
from kvstrata_agent.backends.file.volume import DIRECT_BYTES
from sim.memory import SimExtents
from sim.network import ListenSocket
from sim.sockets import SimSocket

_LATE: Final = ("kvstrata_agent", "kvstrata_metadata", "kvstrata_client", "kvstrata_api")


class World:
    """What the patched modules reach: one seed at a time in a process."""

    loop: Any = None
    rng: random.Random = random.Random(0)
    local: Any = None


class _Time(ModuleType):
    """Stands for the module `time`."""

    def __init__(self) -> None:
        super().__init__("time")

    @staticmethod
    def monotonic() -> float:
        return float(World.loop.now_s)

    @staticmethod
    def time() -> float:
        return 1_760_000_000.0 + float(World.loop.now_s)

    @staticmethod
    def monotonic_ns() -> int:
        return int(World.loop.now_s * 1e9)

    perf_counter = monotonic
    time_ns = monotonic_ns

    @staticmethod
    def sleep(duration_s: float) -> None:  # noqa: ARG004
        raise AssertionError("nobody may sleep in a thread of the simulator")


class _Random(ModuleType):
    """Stands for the module `random`."""

    def __init__(self) -> None:
        super().__init__("random")

    def __getattr__(self, name: str) -> Any:
        if name == "Random":
            return lambda *_: random.Random(World.rng.getrandbits(64))
        return getattr(World.rng, name)


class _Secrets(ModuleType):
    """Stands for the module `secrets`."""

    def __init__(self) -> None:
        super().__init__("secrets")

    @staticmethod
    def token_hex(size: int) -> str:
        return World.rng.randbytes(size).hex()

    @staticmethod
    def token_bytes(size: int) -> bytes:
        return World.rng.randbytes(size)

    @staticmethod
    def randbits(bits: int) -> int:
        return World.rng.getrandbits(bits)


class InlineExecutor:
    """Stands for `ThreadPoolExecutor` where it is used without the loop: does at once what a thread would."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take no thread."""

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """Call now."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as e:  # noqa: BLE001  As an executor does: the waiter gets it.
            done.set_exception(e)
        return done

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing runs."""


def _new_socket(*_: Any, **__: Any) -> SimSocket:
    return SimSocket(World.local)


_ENGINE_SOCKETS: Final = SimpleNamespace(socket=_new_socket, AF_UNIX=socket.AF_UNIX, SOCK_STREAM=socket.SOCK_STREAM)
_PEER_SOCKETS: Final = SimpleNamespace(
    AF_INET=socket.AF_INET, AF_INET6=socket.AF_INET6, create_server=lambda address, **_: ListenSocket(address[0])
)
_CLOSES_NOTHING: Final = SimpleNamespace(close=lambda _: None, fspath=str)


@cache
def install() -> None:
    """Put everything in place, once for each process."""
    names: dict[int, Any] = {
        id(time): _Time(),
        id(random): _Random(),
        id(secrets): _Secrets(),
        id(concurrent.futures.ThreadPoolExecutor): InlineExecutor,
    }
    for module in _modules():
        for name, value in list(vars(module).items()):
            stand_in = names.get(id(value))
            if stand_in is not None:
                setattr(module, name, stand_in)
    _install_sockets()
    _install_hashes()
    # Simulated memory lies wherever the allocator put it; a node's own begins at a page.
    nvme: Any = kvstrata_agent.backends.file.record_store
    nvme.is_direct = lambda view: view.nbytes % DIRECT_BYTES == 0


def _modules() -> list[ModuleType]:
    for package in ("kvstrata_agent.fleet.peers", "kvstrata_agent.serve", "kvstrata_agent.backends", "kvstrata_client"):
        _import_all(package)
    return [m for name, m in sorted(sys.modules.items()) if name.startswith(_LATE)]


def _import_all(package: str) -> None:
    parent = importlib.import_module(package)
    for found in pkgutil.iter_modules(parent.__path__):
        if found.name in ("commands", "connectors", "device", "object", "cli"):
            continue
        name = f"{package}.{found.name}"
        if found.ispkg:
            _import_all(name)
        else:
            importlib.import_module(name)


def _install_sockets() -> None:
    for name, attribute, value in (
        ("kvstrata_client.async_client", "socket", _ENGINE_SOCKETS),
        ("kvstrata_client.connection.async_link", "os", _CLOSES_NOTHING),
        ("kvstrata_client.connection.protocol", "Extents", SimExtents),
        ("kvstrata_agent.fleet.peers.server", "socket", _PEER_SOCKETS),
    ):
        setattr(importlib.import_module(name), attribute, value)


def _install_hashes() -> None:
    """Give whatever lies in sets a hash that is the same in every process."""
    entry: Any = kvstrata_agent.blocks.block.Entry
    from_bytes = int.from_bytes
    entry.__hash__ = lambda self: from_bytes(self.digest[-7:])
    session: Any = kvstrata_agent.blocks.sessions.Session
    session.__hash__ = lambda self: zlib.crc32(self.name.encode())
    connection: Any = kvstrata_agent.serve.connection.Connection
    connection.__hash__ = lambda self: int(self.attachment.owner)
    shard: Any = kvstrata_metadata.store.keys.Shard
    shard.__hash__ = lambda self: zlib.crc32(self.key)
