"""What is done to the fleet, each as a context manager: made at its beginning, taken back at its end.

Nothing here waits for the fleet to be whole before `settle`: what one fault leaves may need what another took away.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final

from demo.errors import DemoError
from demo.world import NODES, POOL, START_S, World
from kvstrata_agent.backends.file.claim import POOL_FILE, STORE_FILE

SIZES: Final = {"dram": "48Mi", "cxl": "16Mi", "nvme": "96Mi"}
"""Of the tiers while nothing is done to them: less than the sessions have, so that blocks are always on the move."""
SQUEEZED: Final = {"dram": "8Mi", "cxl": "2Mi"}
DISK: Final = "320m"
"""File system that both nodes' NVMe tiers lie on."""
DISK_AT_FIRST: Final = "1200m"
"""The same until the pool of the example, which asks for more, has the sizes of here."""
CUT_HOST: Final = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255 or 1}"
"""Address of the second node's agent alone, so that a route can take it away from everybody at once."""
FLIPS_MAX: Final = 64
"""Bytes that rot in one segment."""

Fault = Callable[[World, Random], contextlib.AbstractContextManager[None]]


@contextmanager
def agent_killed(world: World, chance: Random) -> Iterator[None]:
    """`kill -9` of an agent; what plays the kubelet starts it again."""
    world.kill_agent(chance.choice(NODES))
    yield


@contextmanager
def agent_frozen(world: World, chance: Random) -> Iterator[None]:
    """An agent that is there and answers nobody."""
    with stopped(world.processes.pid(world.runner.name(chance.choice(NODES)))):
        yield


@contextmanager
def operator_killed(world: World, _: Random) -> Iterator[None]:
    """`kill -9` of the operator."""
    with _killed(world, "operator"):
        yield


@contextmanager
def metadata_killed(world: World, _: Random) -> Iterator[None]:
    """`kill -9` of the metadata service, and with it of its Redis: the directory is lost."""
    with _killed(world, "metadata"):
        yield


@contextmanager
def redis_killed(world: World, _: Random) -> Iterator[None]:
    """`kill -9` of redis-server alone."""
    pid = _redis(world)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    yield


@contextmanager
def redis_frozen(world: World, _: Random) -> Iterator[None]:
    """A Redis that takes connections and answers nothing."""
    with stopped(_redis(world)):
        yield


@contextmanager
def engine_killed(world: World, chance: Random) -> Iterator[None]:
    """`kill -9` of an engine process amid its stores and loads."""
    argv = [sys.executable, "-m", "soak.engine_process", str(world.runner.socket(NODES[0])), "demo"]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([*argv, str(world.token("alpha"))], env=paths, stdout=subprocess.DEVNULL) as engine:
        try:
            yield
            time.sleep(chance.uniform(0.0, 1.0))
            if engine.poll() not in (None, 0):
                raise DemoError(f"the engine that was to be killed ended with status {engine.returncode}")
        finally:
            engine.kill()


@contextmanager
def disk_full(world: World, _: Random) -> Iterator[None]:
    """Not a byte is left where the NVMe tiers lie."""
    filler = disk(world) / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextmanager
def bytes_flipped(world: World, chance: Random) -> Iterator[None]:
    """Bytes at rest become others: in segments of the disks and in objects.

    Not in claims: a folder whose claim nobody can read is left alone, its tier `Failed`, until a person has looked.
    """
    host = world.root / "host" / POOL
    objects = (path for path in (host / "objects").rglob("*") if path.name not in (POOL_FILE, STORE_FILE))
    files = [path for path in (*host.rglob("seg-*.kv"), *objects) if path.is_file()]
    for path in chance.sample(files, min(len(files), 8)):
        with suppress(OSError), path.open("r+b") as file:  # Its owner has removed it.
            size = path.stat().st_size
            for _ in range(FLIPS_MAX if size else 0):
                at = chance.randrange(size)
                if byte := os.pread(file.fileno(), 1, at):
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << chance.randrange(8)]), at)
    yield


@contextmanager
def network_cut(_: World, __: Random) -> Iterator[None]:
    """Nobody reaches the second node's agent: connections that stand carry nothing, new ones have no route."""
    route = ("unreachable", f"{CUT_HOST}/32", "table", "local")
    subprocess.run(("ip", "route", "add", *route), check=True)
    try:
        yield
    finally:
        subprocess.run(("ip", "route", "del", *route), check=True)


@contextmanager
def pool_squeezed(world: World, _: Random) -> Iterator[None]:
    """The memory tiers shrink to an eighth, and grow again."""
    world.resize(**SQUEEZED)
    yield
    world.resize(**{name: SIZES[name] for name in SQUEEZED})


@contextmanager
def pool_edited(world: World, chance: Random) -> Iterator[None]:
    """Another eviction, other watermarks and other compression, and what there was again."""
    before = json.loads(world.cluster.kubectl("get", "kvpool", POOL, "-o", "json"))["spec"]["policy"]
    low = chance.randrange(40, 70)
    edited = {
        "eviction": {"type": "LeafLRU", "highWatermarkPercent": low + 20, "lowWatermarkPercent": low},
        "compression": {"mode": "None"},
    }
    _set_policy(world, edited)
    yield
    _set_policy(world, {name: before.get(name) for name in edited})


@contextmanager
def tenant_erased(world: World, chance: Random) -> Iterator[None]:
    """All blocks of a tenant are erased while its engines work, and its keys move on."""
    asked = f"soak {time.time_ns()}"
    tenant = chance.choice(("alpha", "beta"))
    spec = {"spec": {"eraseRequested": asked}}
    world.cluster.kubectl("patch", "kvtenant", tenant, "--type=merge", "-p", json.dumps(spec))
    yield


FAULTS: Final[dict[str, Fault]] = {
    made.__name__: made
    for made in (
        agent_killed, redis_killed, bytes_flipped, network_cut, disk_full, engine_killed, pool_squeezed,
        metadata_killed, tenant_erased, operator_killed, agent_frozen, redis_frozen, pool_edited,
    )
}  # fmt: skip
NEED_ROOT: Final = frozenset({"network_cut", "disk_full"})
"""They change a route and mount a file system."""


def possible() -> list[str]:
    """Faults that can be made here."""
    return [name for name in FAULTS if os.geteuid() == 0 or name not in NEED_ROOT]


@contextmanager
def prepared(world: World) -> Iterator[None]:
    """Before the pool is declared: the file system that can be full, where it can be mounted."""
    if os.geteuid() != 0:
        yield
        return
    mount = disk(world)
    mount.mkdir(parents=True)
    options = ("-t", "tmpfs", "-o", f"size={DISK_AT_FIRST}", "kvstrata-soak", str(mount))
    subprocess.run(("mount", *options), check=True)
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(mount)), check=True)


def settle(world: World) -> None:
    """Once all faults are taken back: wait until both services are up and what was asked for has begun."""
    for name in ("operator", "metadata"):
        world.processes.wait_ready(name, START_S)
    for tenant in json.loads(world.cluster.kubectl("get", "kvtenants", "-o", "json"))["items"]:
        if asked := tenant["spec"].get("eraseRequested"):
            started = f"--for=jsonpath={{.status.eraseStarted}}={asked}"
            world.cluster.kubectl(
                "wait", started, f"kvtenant/{tenant['metadata']['name']}", f"--timeout={START_S:.0f}s"
            )


def resize(world: World) -> None:
    """Give the pool the sizes of a soak, and the disk below it."""
    world.resize(**SIZES)
    if os.geteuid() == 0:
        subprocess.run(("mount", "-o", f"remount,size={DISK}", str(disk(world))), check=True)


def disk(world: World) -> Path:
    """Where the NVMe tiers of the example's pool lie."""
    return world.root / "host" / POOL / "nvme"


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """A process is stopped by SIGSTOP and goes on again."""
    if pid is None:  # Killed by another fault just now.
        yield
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _killed(world: World, name: str) -> Iterator[None]:
    world.processes.kill(name)
    yield
    world.processes.restart(name)


def _redis(world: World) -> int | None:
    """The redis-server of this world's metadata service, once there is one; None while that service is killed.

    Raises `DemoError` for a service that runs and starts none.
    """
    mark, ends_s = os.fsencode(str(world.root)), time.monotonic() + START_S
    while world.processes.pid("metadata") is not None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if (entry / "comm").read_text().strip() == "redis-server" and (
                        mark in (entry / "cmdline").read_bytes() or mark in os.fsencode((entry / "cwd").readlink())
                    ):
                        return int(entry.name)
        if time.monotonic() > ends_s:
            raise DemoError("the metadata service has no redis-server")
        time.sleep(0.1)  # Killed by another fault just now.
    return None


def _set_policy(world: World, policy: dict[str, object]) -> None:
    patch = json.dumps({"spec": {"policy": policy}})
    world.cluster.kubectl("patch", "kvpool", POOL, "--type=merge", "-p", patch)
