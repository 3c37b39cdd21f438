"""The systems that are attacked, as processes on this machine, in the configurations that are compared.

Each is served on the loopback or a unix socket, has two tenants, `a` and `b`, and a directory for what it writes.
"""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import peers
from bench.harness.drivers import ROOT, WITH_PARENT, Command, Driver
from kvstrata_agent.backends.record.layout import HEADER_BYTES, MAGIC
from redteam.callers import BLOCK_BYTES
from support.agent.standalone import Up, pool, tenant

HOST: Final = "127.0.0.1"
START_S: Final = 60.0
POLL_S: Final = 0.05
SETTLE_S: Final = 1.0
"""Files that have not changed for so long are written."""
MIB: Final = 1 << 20
TENANTS: Final = ("a", "b")
CODE: Final = (("PYTHONPATH", os.pathsep.join((str(ROOT / "tests"), str(ROOT)))),)
"""Where processes in environments of peers find the modules of this folder."""
QUIET: Final = {"LMCACHE_TRACK_USAGE": "false"}
"""LMCache sends no reports to its makers."""


class AbsentError(Exception):
    """A system cannot be had here; says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """All that is stored of one block: bytes of a file, of which the block is the end."""

    file: Path
    offset: int
    size_bytes: int

    def read(self) -> bytes:
        """What lies there."""
        with self.file.open("rb") as opened:
            opened.seek(self.offset)
            return opened.read(self.size_bytes)

    def write(self, content: bytes) -> None:
        """Put something else there."""
        with self.file.open("r+b") as opened:
            opened.seek(self.offset)
            opened.write(content)


@dataclass
class System(ABC):
    """One configuration. `home` is for sockets and logs, `disk` is what attacks on bytes at rest look at."""

    home: Path
    disk: Path
    stops_to_rest: ClassVar[bool] = True
    """Whether it is another process that reads from files; where it is none, clients stay connected."""

    @abstractmethod
    def start(self) -> None:
        """Start what serves; callers attach to it afterwards. Raises `AbsentError`."""

    @abstractmethod
    def kill(self) -> None:
        """End what serves by SIGKILL."""

    @abstractmethod
    def command(self, who: str) -> Command:
        """How to start a client of a tenant, or, by the name `nobody`, one without credentials."""

    @abstractmethod
    def pids(self) -> Sequence[int]:
        """Processes that serve."""

    def rest(self, owner: Driver, prompts: list[int]) -> list[int]:
        """Bring what is stored to files, and stop, so that it is read from there; those prompts that are there.

        Raises `TimeoutError`.
        """
        del owner
        self._wait_for_files()
        self.stop()
        return prompts

    def stop(self) -> None:
        """End what serves as an administrator does."""
        self.kill()

    def wake(self) -> None:
        """Serve again what lies in files."""
        self.start()

    def listed(self) -> Mapping[str, str]:
        """What management ports tell without credentials, by path; empty where there are none."""
        return {}

    def caller(self, who: str) -> Driver:
        """A client in a process of its own, attached. Raises `AbsentError`."""
        driver = Driver(self.command(who))
        try:
            driver.versions()
        except Exception:
            driver.kill()
            driver.close()
            raise
        return driver

    def files(self) -> list[Path]:
        """Files with blocks."""
        return sorted(p for p in self.disk.rglob("*") if p.is_file())

    def places(self, files: Sequence[Path], blocks: Sequence[bytes]) -> list[Place]:
        """Where blocks lie in files, by their bytes."""
        found = []
        for file in (f for f in files if f.stat().st_size):
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as seen:
                starts = (seen.find(block[:64]) for block in blocks)
                found += [Place(file, at, BLOCK_BYTES) for at in starts if at >= 0]
        return found

    def _wait_for_files(self) -> None:
        until_s, before, since_s = time.monotonic() + START_S, "", time.monotonic()
        while time.monotonic() < until_s:
            seen = str([(p, p.stat().st_size, p.stat().st_mtime_ns) for p in self.files() if p.exists()])
            if seen != before:
                before, since_s = seen, time.monotonic()
            elif self.files() and time.monotonic() > since_s + SETTLE_S:
                return
            time.sleep(POLL_S)
        raise TimeoutError(f"files went on changing, or there are none, after {START_S:.0f} s")


@dataclass
class Kvstrata(System):
    """`kvstrata up` with memory and a tier of files; each tenant has a token."""

    encryption: str = "None"
    _up: Up | None = None

    def start(self) -> None:
        """See `System`."""
        if self._up is None:
            options: list[str] = []
            for name in TENANTS:
                (self.home / name).write_text(f"token-of-{name}-" + name * 16)
                options += ["--token", f"{name}={self.home / name}"]
            self._up = Up(self.home, options)
            declared = (tenant(f"team-{name}", f"token/{name}") for name in TENANTS)
            self._up.declare(pool(self.disk, encryption=self.encryption), *declared)
        self._up.start()

    @property
    def up(self) -> Up:
        """The process. It was started."""
        assert self._up is not None
        return self._up

    def kill(self) -> None:
        """See `System`."""
        if self._up is not None and self._up.process is not None:
            self._up.stop(signal.SIGKILL)

    def stop(self) -> None:
        """See `System`."""
        self.up.stop()

    def rest(self, owner: Driver, prompts: list[int]) -> list[int]:
        """See `System`: the agent writes what it holds when it is told to end."""
        del owner
        self.stop()
        return prompts

    def listed(self) -> Mapping[str, str]:
        """See `System`: the agent's metrics."""
        address = json.loads(self.up.ready_file.read_text())["metrics"]
        return {"/metrics": _fetched(f"http://{address}/metrics")}

    def command(self, who: str) -> Command:
        """See `System`."""
        token = (str(self.home / who),) if who in TENANTS else ()
        arguments = (str(self.up.socket), *token)
        code = os.pathsep.join((str(ROOT / "tests"), os.environ.get("PYTHONPATH", str(ROOT))))
        return Command("kvstrata", Path(sys.executable), "redteam.kvstrata_caller", arguments, (("PYTHONPATH", code),))

    def pids(self) -> Sequence[int]:
        """See `System`."""
        assert self.up.process is not None
        return [self.up.process.pid]

    def files(self) -> list[Path]:
        """See `System`: segments, and not what is written beside them."""
        return [p for p in super().files() if p.stat().st_size >= MIB]

    def places(self, files: Sequence[Path], blocks: Sequence[bytes]) -> list[Place]:
        """See `System`: records by the begin of their headers, for payloads may be sealed."""
        del blocks
        found = []
        for file in files:
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as seen:
                pages = range(0, len(seen) - HEADER_BYTES - BLOCK_BYTES + 1, HEADER_BYTES)
                found += [
                    Place(file, at, HEADER_BYTES + BLOCK_BYTES) for at in pages if seen[at : at + len(MAGIC)] == MAGIC
                ]
        return found


@dataclass
class Server(System):
    """A system whose server is started here by a command."""

    _process: "subprocess.Popen[bytes] | None" = None
    _ports: list[int] = field(default_factory=list)

    def _free_ports(self, count: int) -> list[int]:
        """The same ports at every start, so that clients find it again."""
        if not self._ports:
            held = [socket.create_server((HOST, 0)) for _ in range(count)]
            self._ports = [s.getsockname()[1] for s in held]
            for s in held:
                s.close()
        return self._ports

    def _run(self, command: Sequence[str], port: int) -> None:
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                (*WITH_PARENT, *command), stdout=log, stderr=log, cwd=self.home, env={**os.environ, **QUIET},
                start_new_session=True,
            )  # fmt: skip
        until_s = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection((HOST, port), 1.0):
                return
            if self._process.poll() is not None or time.monotonic() > until_s:
                end = (self.home / "log").read_text(errors="replace")[-400:]
                raise AbsentError(f"{Path(command[0]).name} does not serve: {' '.join(end.split())}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """See `System`."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def pids(self) -> Sequence[int]:
        """See `System`."""
        assert self._process is not None
        return [self._process.pid]


@dataclass
class LMCache(Server):
    """LMCache's server with memory and its adapter of files, in the mode for engines without a GPU."""

    salts: Mapping[str, str] = field(default_factory=dict)
    """By tenant; empty: nobody has one, and files are as they are by default."""

    def start(self) -> None:
        """See `System`."""
        port, http_port = self._free_ports(2)
        python = _python("lmcache")
        self.disk.mkdir(exist_ok=True)
        serde = {}
        if self.salts:
            key = self.home / "master.key"
            if not key.exists():
                key.write_bytes(os.urandom(32))
            serde = {"serde": {"type": "aesgcm", "master_key_path": str(key)}}
        adapter = json.dumps({"type": "fs", "base_path": str(self.disk), **serde})
        places = ["--host", HOST, "--port", str(port), "--http-host", HOST, "--http-port", str(http_port)]
        memory = ["--l1-size-gb", "0.03125", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
        mode = ["--chunk-size", "16", "--supported-transfer-mode", "engine_driven", "--l2-adapter", adapter]
        self._run([str(python), str(python.with_name("lmcache")), "server", *places, *memory, *mode], http_port)

    def command(self, who: str) -> Command:
        """See `System`."""
        arguments = (str(self._free_ports(2)[0]), self.salts.get(who, ""))
        return Command("lmcache", _python("lmcache"), "redteam.lmcache_caller", arguments, CODE)

    def places(self, files: Sequence[Path], blocks: Sequence[bytes]) -> list[Place]:
        """See `System`: a file is a block, which may be sealed."""
        del blocks
        return [Place(file, 0, file.stat().st_size) for file in files]

    def listed(self) -> Mapping[str, str]:
        """See `System`."""
        paths = ("/cache/objects?tier=l2", "/cache/objects?tier=l1", "/quota", "/status", "/metrics")
        return {path: _fetched(f"http://{HOST}:{self._free_ports(2)[1]}{path}") for path in paths}


@dataclass
class LMCacheDisk(System):
    """LMCache's LocalDisk backend: files of one engine, in whose process it is, and nobody else's."""

    stops_to_rest: ClassVar[bool] = False

    def start(self) -> None:
        """See `System`: nothing serves."""
        _python("lmcache")
        self.disk.mkdir(exist_ok=True)

    def kill(self) -> None:
        """See `System`: it ends with its client."""

    def stop(self) -> None:
        """See `System`: it goes on; nothing of a block stays in memory."""

    def wake(self) -> None:
        """See `System`: it was not stopped."""

    def pids(self) -> Sequence[int]:
        """See `System`."""
        return []

    def command(self, who: str) -> Command:
        """See `System`."""
        del who
        return Command("lmcache", _python("lmcache"), "redteam.lmcache_disk_caller", (str(self.disk),), CODE)


@dataclass
class Mooncake(Server):
    """Mooncake's master; clients bring the memory, and the files."""

    has_tenants: bool = False
    has_checksums: bool = False
    stops_to_rest: ClassVar[bool] = False

    def start(self) -> None:
        """See `System`."""
        port, http_port = self._free_ports(2)
        python = _python("mooncake")
        master = next(python.parents[1].glob("lib/python*/site-packages/mooncake/mooncake_master"))
        places = [
            f"--rpc_port={port}",
            f"--metrics_port={http_port}",
            f"--rpc_address={HOST}",
            f"--metrics_host={HOST}",
        ]
        flags = ["--enable_offload=true", "--default_kv_lease_ttl=1000"]
        if self.has_tenants:
            policy = self.home / "tenants.yaml"
            quotas = "".join(f"  - {{name: {name}, quota: {256 * MIB}}}\n" for name in TENANTS)
            policy.write_text(f"version: 1\ntenants:\n{quotas}")
            flags += ["--enable_multi_tenants=true", f"--tenant_quota_connector_uri={policy}"]
        self._run([str(master), *places, *flags], port)

    def command(self, who: str) -> Command:
        """See `System`."""
        name = who if self.has_tenants and who in TENANTS else ""
        disk = str(self.disk / who) if who in TENANTS else ""
        arguments = (str(self._free_ports(2)[0]), name, disk)
        checks = (("MOONCAKE_STORE_CHECKSUM", "1"),) if self.has_checksums else ()
        return Command("mooncake", _python("mooncake"), "redteam.mooncake_caller", arguments, (*CODE, *checks))

    def rest(self, owner: Driver, prompts: list[int]) -> list[int]:
        """See `System`: the store that holds the blocks writes them by itself, and is told to clear its memory."""
        answer = owner.ask("rest", prompts=prompts)
        if "error" in answer:
            raise TimeoutError(answer["error"])
        return list(answer["prompts"])

    def wake(self) -> None:
        """See `System`: nothing was stopped."""

    def listed(self) -> Mapping[str, str]:
        """See `System`."""
        return {"/get_all_keys": _fetched(f"http://{HOST}:{self._free_ports(2)[1]}/get_all_keys")}


def _fetched(url: str) -> str:
    """What an address answers to whoever asks, or why it does not."""
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:  # noqa: S310  Of our own processes.
            return str(answer.read(1 << 20).decode(errors="replace"))
    except OSError as e:  # `URLError` is one.
        return f"{type(e).__name__}: {e}"


def _python(name: str) -> Path:
    if not peers.is_ready(name):
        raise AbsentError(f"its environment is not there: `hack/peers.py {name}` makes it")
    return peers.python_of(name)


@dataclass(frozen=True, slots=True)
class Entry:
    """A configuration in the table."""

    title: str
    peer: str
    """Name of its environment (`hack/peers.py`); empty: ours."""
    make: Callable[[Path, Path], System]
    outside: Mapping[str, str] = field(default_factory=dict)
    """Attacks that are outside of what it claims to withstand, and why."""
    attacks: tuple[str, ...] = ()
    """Those that have something to attack; empty: all."""
    why: str = ""
    """Why the others have nothing."""

    @property
    def is_ours(self) -> bool:
        """Whether a harm is a defect of this project."""
        return not self.peer


SALTS: Final = {"a": "5f0c3a0e7b1d4f26", "b": "c91e58d2604b7a3f"}
"""Drawn once; whoever is not told cannot guess them."""
_TRUSTED: Final = "clients of one server trust each other"
_NETWORK: Final = "ports are for a private network"
_DISK: Final = "whoever may write its files is trusted"
_SALT: Final = "clients that reach its port are trusted to set their salt"
_NAME: Final = "a tenant's name is a name space and an account, no credential"

SYSTEMS: Final[Mapping[str, Entry]] = {
    "kvstrata": Entry("kvstrata", "", Kvstrata),
    "kvstrata-sealed": Entry("kvstrata, AESGCM", "", lambda home, disk: Kvstrata(home, disk, "AESGCM")),
    "lmcache": Entry(
        "LMCache server", "lmcache", LMCache,
        {"read": _TRUSTED, "guess": _TRUSTED, "stolen": _NETWORK, "nobody": _NETWORK, "listing": _NETWORK,
         "timing": _TRUSTED, "flip": _DISK, "swap": _DISK},
    ),
    "lmcache-salted": Entry(
        "LMCache server, cache_salt and aesgcm", "lmcache", lambda home, disk: LMCache(home, disk, salts=SALTS),
        {"stolen": _SALT, "nobody": _NETWORK, "listing": _NETWORK, "flip": _DISK, "swap": _DISK},
    ),
    "lmcache-disk": Entry(
        "LMCache LocalDisk backend, in the engine's process", "lmcache", LMCacheDisk,
        {"flip": _DISK, "swap": _DISK},
        ("flip", "swap", "crash", "full"),
        "it belongs to one engine process, has no port and no tenants",
    ),
    "mooncake": Entry(
        "Mooncake store", "mooncake", Mooncake,
        {"read": _TRUSTED, "guess": _TRUSTED, "stolen": _NETWORK, "nobody": _NETWORK, "listing": _NETWORK,
         "timing": _TRUSTED, "stale": _NETWORK, "flip": _DISK, "swap": _DISK},
    ),
    "mooncake-checksums": Entry(
        "Mooncake store, MOONCAKE_STORE_CHECKSUM", "mooncake",
        lambda home, disk: Mooncake(home, disk, has_checksums=True),
        {"flip": _DISK, "swap": _DISK},
        ("swap", "flip"),
        "nothing but what is read from files is another than without",
    ),
    "mooncake-tenants": Entry(
        "Mooncake store, enable_multi_tenants and checksums", "mooncake",
        lambda home, disk: Mooncake(home, disk, has_tenants=True, has_checksums=True),
        {"stolen": _NAME, "guess": _NAME, "nobody": _NETWORK, "listing": _NETWORK, "stale": _NETWORK,
         "flip": _DISK, "swap": _DISK},
    ),
}  # fmt: skip
"""What is compared, by the name that the command line takes."""
