"""Weights of a model: staging against the rate of their source, and reading what was staged against fio.

Everybody takes turns in every repeat over the same files of random bytes, and nothing of them is in the page cache at
the start of a turn. The first pod waits for a staging: from a folder in memory, and from an S3 server on this machine
(versitygw). Its limits: the source alone, read by the same client as far ahead, and a plain pull of the objects into
files that are then synced, which verifies nothing. The second pod reads files that are there: by read and by memory
maps, against fio over the same files with as many jobs, safetensors' own load, and Run:ai's model streamer on the CPU.
What was staged is compared with the source. Everything shares the cores: the S3 server too. Two cores hash, serve
and sync at once, so a third source is as far away as sources are: the folder behind a link (`--link`),
which is emulated by waiting.
"""

import asyncio
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from prometheus_client import CollectorRegistry

import peers
from bench.harness import common
from bench.harness.common import Result, Sample, publish, rate_ratio, table
from bench.harness.drivers import AbsentError, Command, Driver, FailedError
from bench.harness.fio import TIMEOUT_S, Fio, FioError
from controlplane.s3_gateway import s3_gateway
from kvstrata_agent.backends.object.client import ObjectClient
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.movement.scheduler import PIECE_BYTES_MAX, MoveScheduler
from kvstrata_agent.weights.folder import ModelFolder
from kvstrata_agent.weights.source import FolderSource, ObjectSource, Source, SourceFile
from kvstrata_agent.weights.staging import FILES_AT_ONCE, RUNS_AHEAD, Staging, Wanted
from kvstrata_api import __version__
from kvstrata_api.models.pool import HostDramTier, KVPoolSpec, PoolTier
from kvstrata_api.tiers import TierType
from kvstrata_api.units import GIB, MIB
from kvstrata_telemetry.agent_metrics import Counters
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

FILES: Final = 4
TENSOR_BYTES: Final = 32 * MIB
SET_BYTES, SET_BYTES_QUICK, SET_BYTES_TINY = 2 * GIB, GIB // 2, 16 * MIB
REPEATS, REPEATS_QUICK = 7, 5
BUCKET, PREFIX = "models", "m"
READ_BYTES: Final = MIB
"""Of one read of a second pod and of fio: what loaders ask for."""

LINK_BYTES_PER_S: Final = 250e6
"""2 Gbit/s: what many machines have towards an object store for one of their eight GPUs."""

Turn = Callable[[], Awaitable[float]]
"""Does the work once; returns the seconds that count."""


@dataclass(slots=True)
class Set:
    """The files of one run."""

    size_bytes: int
    home: Path
    memory: Path
    """The same files where reading is fastest."""
    gateway: Path
    settings: dict[str, str]
    link_bytes_per_s: float
    rates: dict[str, list[float]] = field(default_factory=dict)

    @property
    def objects(self) -> Path:
        """The files that the S3 server has."""
        return self.gateway / BUCKET / PREFIX

    @property
    def staged(self) -> Path:
        """What the second pod reads."""
        return self.home / "kept" / "kvstrata-models" / "m" / "r"

    @property
    def memory_turn(self) -> Path:
        """Where a turn stages that goes to memory: a tmpfs, as a HostDRAM tier has one."""
        return self.memory.with_name("turn")

    @property
    def bytes_of_all(self) -> int:
        """Bytes of one pass."""
        return sum(p.stat().st_size for p in self.memory.iterdir())


class LinkSource:
    """A source behind an emulated link of a given rate, shared by all that is read."""

    def __init__(self, source: Source, bytes_per_s: float) -> None:
        self._source = source
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def files(self) -> list[SourceFile]:
        """Those of the source."""
        return await self._source.files()

    async def read(self, path: str, start: int, end: int) -> memoryview:
        """As the source does, once the link has carried it."""
        self._free_s = max(self._free_s, time.perf_counter()) + (end - start) / self._bytes_per_s
        arrives_s = self._free_s
        found = await self._source.read(path, start, end)
        await asyncio.sleep(max(0.0, arrives_s - time.perf_counter()))
        return found

    async def close(self) -> None:
        """Close the source."""
        await self._source.close()


def make_files(root: Path, size_bytes: int) -> None:
    """Write safetensors files of random bytes."""
    root.mkdir(parents=True)
    each_bytes = size_bytes // FILES
    tensor_bytes = min(TENSOR_BYTES, each_bytes)
    for number in range(FILES):
        entries = {
            f"layers.{i}": {
                "dtype": "U8",
                "shape": [tensor_bytes],
                "data_offsets": [i * tensor_bytes, (i + 1) * tensor_bytes],
            }
            for i in range(each_bytes // tensor_bytes)
        }
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with (root / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _ in entries:
                file.write(np.random.default_rng().bytes(tensor_bytes))


def forget(root: Path) -> None:
    """Take files out of the page cache, written back first."""
    for path in sorted(root.iterdir()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def make_scheduler() -> MoveScheduler:
    """The agent's own, over a node without tiers: a staging's writes take their turns there."""
    counters = Counters(Instruments(AGENT, CollectorRegistry()), "pool", "node")
    tier = PoolTier(name="dram", type=TierType.HOST_DRAM, capacity_per_node="1Gi", host_dram=HostDramTier())
    spec = KVPoolSpec(tiers=(tier,))
    index = Index()
    announcer = Announcer(index, None, lambda _: None)
    return MoveScheduler(Node("pool", "node", 1, spec, time.monotonic, index, counters, announcer))


async def stage(open_source: Callable[[], Awaitable[Source]], root: Path) -> float:
    """Stage as the agent does; seconds until the revision has its name."""
    await asyncio.to_thread(root.mkdir)
    scheduler = make_scheduler()
    folder = ModelFolder(root)
    folder.scan()

    async def reserve(_: int) -> None:
        return

    started_s = time.perf_counter()
    turn = partial(scheduler.weights, "dram", "nvme", "m", 100)
    await Staging(Wanted("m", "r", ""), folder, open_source, turn, reserve).run()
    took_s = time.perf_counter() - started_s
    folder.close()
    return took_s


async def read_source(source: Source, into: Path | None = None) -> float:
    """Read all files as far ahead as a staging does; with `into` write and sync them, verified by nobody."""
    files = await source.files()
    gate = asyncio.Semaphore(FILES_AT_ONCE * (RUNS_AHEAD + 1))
    started_s = time.perf_counter()

    async def piece(path: str, start: int, end: int, fd: int) -> None:
        async with gate:
            found = await source.read(path, start, end)
            if fd >= 0:
                await asyncio.to_thread(_written, fd, start, found)

    fds = [os.open(into / f.path, os.O_WRONLY | os.O_CREAT) if into is not None else -1 for f in files]
    async with asyncio.TaskGroup() as group:
        for file, fd in zip(files, fds, strict=True):
            for start in range(0, file.size_bytes, PIECE_BYTES_MAX):
                group.create_task(piece(file.path, start, min(start + PIECE_BYTES_MAX, file.size_bytes), fd))
    for fd in fds:
        if fd >= 0:
            await asyncio.to_thread(os.fsync, fd)
            os.close(fd)
    return time.perf_counter() - started_s


def _written(fd: int, offset: int, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        done += os.pwrite(fd, piece[done:], offset + done)


def read_files(root: Path) -> float:
    """A second pod that reads, one thread for each file."""
    return _each(root, _read_one)


def map_files(root: Path) -> float:
    """A second pod that maps the files and copies every byte out, one thread for each file."""
    return _each(root, _map_one)


def _each(root: Path, work: Callable[[Path], int]) -> float:
    paths = sorted(root.iterdir())
    with ThreadPoolExecutor(len(paths)) as pool:
        started_s = time.perf_counter()
        done = sum(pool.map(work, paths))
        took_s = time.perf_counter() - started_s
    assert done == sum(p.stat().st_size for p in paths)
    return took_s


def _read_one(path: Path) -> int:
    buffer, done = bytearray(READ_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            done += count
    return done


def _map_one(path: Path) -> int:
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        view = memoryview(mapped)
        try:
            for at in range(0, len(view), READ_BYTES):
                part = view[at : at + READ_BYTES]
                buffer[: len(part)] = part
                part.release()
            return len(view)
        finally:
            view.release()


def load_safetensors(root: Path) -> float:
    """Load all files with the format's own library, one after the other, as engines do."""
    from safetensors.numpy import load_file

    started_s = time.perf_counter()
    for path in sorted(root.iterdir()):
        load_file(path)
    return time.perf_counter() - started_s


def fio_seconds(fio: Fio, root: Path, engine: str) -> float:
    """One pass of fio over the same files, one job for each, through the page cache as pods read."""
    jobs = [f for i, p in enumerate(sorted(root.iterdir())) for f in (f"--name=f{i}", f"--filename={p}")]
    found = _fio_jobs(fio, "--rw=read", f"--ioengine={engine}", "--invalidate=1", "--readonly", *jobs)
    return float(max(job["read"]["runtime"] for job in found)) / 1000.0


def fio_write_seconds(fio: Fio, root: Path, like: Path) -> float:
    """Write as many bytes as there are in `like` through the page cache, and sync each file at its end."""
    root.mkdir()
    sizes = [p.stat().st_size for p in sorted(like.iterdir())]
    jobs = [
        option
        for i, size_bytes in enumerate(sizes)
        for option in (f"--name=f{i}", f"--filename={root / str(i)}", f"--size={size_bytes}")
    ]
    found = _fio_jobs(fio, "--rw=write", "--ioengine=psync", "--end_fsync=1", "--refill_buffers", *jobs)
    return float(max(job["job_runtime"] for job in found)) / 1000.0


def _fio_jobs(fio: Fio, *options: str) -> list[dict[str, Any]]:
    command = [fio.program, f"--bs={READ_BYTES}", "--thread", "--output-format=json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise FioError(" ".join(done.stderr.split())[-400:])
    found: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return found


def same(one: Path, other: Path) -> bool:
    """Whether two folders have the same files."""

    def sums(root: Path) -> dict[str, str]:
        return {p.name: hashlib.file_digest(p.open("rb"), "sha256").hexdigest() for p in root.iterdir()}

    return sums(one) == sums(other)


def turns_of(made: Set, fio: Fio | None, runai: Driver | None) -> dict[str, Turn]:
    """Everybody who takes part, by name, in the order of the first repeat."""
    url, target = f"s3://{BUCKET}/{PREFIX}", made.home / "turn"

    async def folder() -> Source:
        return FolderSource(made.memory)

    async def objects() -> Source:
        return ObjectSource(ObjectClient(url, made.settings))

    async def behind_link() -> Source:
        return LinkSource(FolderSource(made.memory), made.link_bytes_per_s)

    async def staged_from(opened: Callable[[], Awaitable[Source]], to: Path = target) -> float:
        took_s = await stage(opened, to)
        assert await asyncio.to_thread(same, to / "kvstrata-models" / "m" / "r", made.memory), "other bytes"
        return took_s

    async def reading(opened: Callable[[], Awaitable[Source]], *, is_kept: bool) -> float:
        source = await opened()
        if is_kept:
            target.mkdir()
        try:
            return await read_source(source, target if is_kept else None)
        finally:
            await source.close()

    async def second(work: Callable[[Path], float]) -> float:
        forget(made.staged)
        return await asyncio.to_thread(work, made.staged)

    turns: dict[str, Turn] = {
        "source file": partial(reading, folder, is_kept=False),
        "first pod file": partial(staged_from, folder),
        "first pod memory file": partial(staged_from, folder, made.memory_turn),
        "pull file": partial(reading, folder, is_kept=True),
        "source s3": partial(reading, objects, is_kept=False),
        "first pod s3": partial(staged_from, objects),
        "first pod memory s3": partial(staged_from, objects, made.memory_turn),
        "pull s3": partial(reading, objects, is_kept=True),
        "source link": partial(reading, behind_link, is_kept=False),
        "first pod link": partial(staged_from, behind_link),
        "second pod read": partial(second, read_files),
        "second pod mmap": partial(second, map_files),
        "safetensors": partial(second, load_safetensors),
    }
    if fio is not None:
        turns["fio"] = partial(second, partial(fio_seconds, fio, engine="psync"))
        turns["fio mmap"] = partial(second, partial(fio_seconds, fio, engine="mmap"))
        turns["fio write"] = partial(asyncio.to_thread, fio_write_seconds, fio, target, made.memory)
    return turns | (_runai_turns(made, runai, url) if runai is not None else {})


def _runai_turns(made: Set, runai: Driver, url: str) -> dict[str, Turn]:
    """Run:ai's streamer, from the S3 server and from what was staged."""

    async def streamed(files: list[str]) -> float:
        answer = await asyncio.to_thread(runai.ask, "stream", files=files)
        if "failed" in answer:
            raise FailedError(answer["failed"])
        return float(answer["seconds"])

    async def of_folder() -> float:
        forget(made.staged)
        return await streamed([str(made.staged / name) for name in names])

    names = sorted(p.name for p in made.memory.iterdir())
    return {"runai s3": partial(streamed, [f"{url}/{name}" for name in names]), "runai": of_folder}


async def run(made: Set, turns: dict[str, Turn], repeats: int, versions: dict[str, str]) -> None:
    """Once to warm up, then every repeat in another order."""
    names = list(turns)
    for repeat in range(-1, repeats):
        start = repeat % len(names)
        for name in (*names[start:], *names[:start]):
            if name not in turns:
                continue
            forget(made.objects)
            try:
                took_s = await turns[name]()
            except (FailedError, FioError) as e:
                versions[name] = f"absent: {e}"
                del turns[name]
                continue
            finally:
                for place in (made.home / "turn", made.memory_turn):
                    shutil.rmtree(place, ignore_errors=True)
            if repeat >= 0:
                made.rates.setdefault(name, []).append(made.bytes_of_all / took_s)


def result(made: Set, repeats: int, versions: dict[str, str], *, quick: bool) -> Result:
    """Ratios of pairs of one repeat."""

    def sample(name: str) -> Sample | None:
        values = made.rates.get(name, [])
        return Sample(tuple(values)) if len(values) == repeats else None

    def ratio(ours: str, other: str) -> float | None:
        mine = sample(ours)
        return rate_ratio(mine, sample(other)) if mine is not None else None

    def limited(ours: str, source: str) -> float | None:
        """Against what the slower of source and disk gives in the same repeat."""
        mine, one, disk = sample(ours), sample(source), sample("fio write")
        if mine is None or one is None or disk is None:
            return None
        return rate_ratio(mine, Sample(tuple(map(min, one.values, disk.values))))

    ratios = {
        "first_pod_vs_source": ratio("first pod s3", "source s3"),
        "first_pod_vs_source_file": ratio("first pod file", "source file"),
        "first_pod_vs_source_link": ratio("first pod link", "source link"),
        "vs_object_pull": ratio("first pod s3", "pull s3"),
        "vs_copy": ratio("first pod file", "pull file"),
        "second_pod_vs_fio": ratio("second pod read", "fio"),
        "second_pod_mmap_vs_fio": ratio("second pod mmap", "fio"),
        "second_pod_mmap_vs_fio_mmap": ratio("second pod mmap", "fio mmap"),
        "first_pod_memory_vs_source": ratio("first pod memory s3", "source s3"),
        "first_pod_memory_vs_source_file": ratio("first pod memory file", "source file"),
        "first_pod_vs_limit": limited("first pod s3", "source s3"),
        "first_pod_vs_limit_file": limited("first pod file", "source file"),
        "first_pod_vs_limit_link": limited("first pod link", "source link"),
        "vs_safetensors": ratio("second pod read", "safetensors"),
        "vs_runai": ratio("second pod read", "runai"),
        "second_pod_vs_runai_s3": ratio("second pod read", "runai s3"),
    }
    values = {
        f"{n.replace(' ', '_')}_bytes_per_second": s.spread[1] for n in made.rates if (s := sample(n)) is not None
    }
    rows = [(n, *(f"{v / 1e6:.0f}" for v in s.spread)) for n in made.rates if (s := sample(n)) is not None]
    print(table(("MB/s", "least", "median", "most"), rows))
    return Result("weights", quick, versions, ratios, values)


@contextmanager
def run_ai(settings: dict[str, str], versions: dict[str, str]) -> Iterator[Driver | None]:
    """Run:ai's streamer in its environment; None where there is none, and `versions` says why."""
    python = peers.python_of("runai")
    if not peers.is_ready("runai"):
        versions["runai"] = "absent: hack/peers.py runai makes its environment"
        yield None
        return
    environment = {
        "AWS_ACCESS_KEY_ID": settings["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": settings["aws_secret_access_key"],
        "AWS_ENDPOINT_URL": settings["aws_endpoint"],
        "AWS_REGION": settings["aws_region"],
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with Driver(Command("runai", python, "bench.peers.runai_weights", (), tuple(environment.items()))) as driver:
        try:
            versions |= driver.versions()
        except AbsentError as e:
            versions["runai"] = f"absent: {e}"
            yield None
            return
        yield driver


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and the agreed line; 1 when what was staged was not the source."""
    parser = common.parser(__doc__, has_tiny=True)
    parser.add_argument("--directory", type=Path, help="file system to stage on; default: that of temporary files")
    parser.add_argument(
        "--link", type=float, default=LINK_BYTES_PER_S, help="bytes per second of the emulated link; %(default)g"
    )
    given = parser.parse_args(argv)
    size_bytes = SET_BYTES_TINY if given.tiny else SET_BYTES_QUICK if given.quick else SET_BYTES
    repeats = REPEATS_QUICK if given.quick or given.tiny else REPEATS
    versions = {"kvstrata": __version__, "safetensors": version("safetensors")}
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.directory)))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        make_files(memory / "m", size_bytes)
        gateway = home / "gateway"
        shutil.copytree(memory / "m", gateway / BUCKET / PREFIX)
        settings = stack.enter_context(s3_gateway(gateway, BUCKET))
        made = Set(size_bytes, home, memory / "m", gateway, settings, given.link)
        try:
            fio = Fio.found(home)
            versions["fio"] = fio.version()
        except FioError as e:
            fio, versions["fio"] = None, f"absent: {e}"
        runai = stack.enter_context(run_ai(settings, versions))
        asyncio.run(_all(made, fio, runai, repeats, versions))
        publish(result(made, repeats, versions, quick=given.quick or given.tiny), given.json)
    return 0


async def _all(made: Set, fio: Fio | None, runai: Driver | None, repeats: int, versions: dict[str, str]) -> None:
    async def folder() -> Source:
        return FolderSource(made.memory)

    await stage(folder, made.home / "kept")
    await run(made, turns_of(made, fio, runai), repeats, versions)


if __name__ == "__main__":
    sys.exit(main())
