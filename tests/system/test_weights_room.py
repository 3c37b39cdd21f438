"""Weights in memory of the node, and on a disk that is full: real tiers, file systems and files."""

import asyncio
import mmap
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata_agent.backends.memory.persistence import PersistenceRoot, read_mounts, remove_abandoned
from kvstrata_agent.weights import runner
from kvstrata_agent.weights.folder import ModelFolder
from kvstrata_agent.weights.source import FolderSource
from kvstrata_agent.weights.staging import FILES_OPEN_MAX
from kvstrata_api import names
from support.agent.weights_nodes import HOST, POOL, WeightsFleet, WeightsNode, weights_fleet
from support.backends import contract
from support.backends.contract import ANNA, content, get, put
from support.runner import leftovers

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

MIB = 1 << 20
FILES, FILE_BYTES = 3, 20 * MIB
CAPACITY_BYTES = 256 * MIB


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[WeightsFleet]:
    async with weights_fleet(tmp_path) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    for i in range(FILES):
        (root / f"model-{i}.bin").write_bytes(os.urandom(FILE_BYTES + i))
    return root


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-", dir=leftovers.memory()) as directory:
        yield Path(directory)


@contextmanager
def mounted(home: Path, *options: str) -> Iterator[Path]:
    """Mount a file system; not below pytest's own directory, which other runs tidy up."""
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = home / "mount"
    mount.mkdir()
    done = subprocess.run(["mount", *options, str(mount)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"it cannot be mounted here: {done.stderr}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A tmpfs that holds the tier, and little more."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-small-") as home:
        options = ("-t", "tmpfs", "-o", f"size={CAPACITY_BYTES + 16 * MIB}", "kvstrata-test")
        with mounted(Path(home), *options) as mount:
            yield mount


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 160 MiB: ext4 in a file, where allocating begins before it fails."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-small-") as home:
        image = Path(home, "image")
        with image.open("wb") as file:
            file.truncate(160 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        with mounted(Path(home), "-o", "loop", str(image)) as mount:
            yield mount


def files(root: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in root.iterdir()}


def sizes(root: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in root.iterdir()}


def kv_bytes(node: WeightsNode) -> int:
    """What KV may have of the tier."""
    return node.models._node.tiers[0].backend.capacity_bytes


async def test_weights_in_memory_are_plain_files_and_bytes_of_the_tier(
    fleet: WeightsFleet, source: Path, memory: Path
) -> None:
    node = await fleet.add("n1", memory=memory)
    await node.order(source)
    report = await node.staged()

    size_bytes = sum(sizes(source).values())
    assert files(node.folder) == files(source)
    assert report.path == str(HOST / POOL / "dram" / names.MODELS_FOLDER / "m" / "r1")
    assert kv_bytes(node) == (CAPACITY_BYTES - size_bytes) // 4096 * 4096
    model = node.folder / "model-0.bin"
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == (source / "model-0.bin").read_bytes()
        await node.models.tend()
        assert node.report().in_use
    await node.models.tend()
    assert not node.report().in_use

    await node.models.follow([])
    await node.models.tend()

    assert not node.folder.exists()
    assert kv_bytes(node) == CAPACITY_BYTES


async def test_weights_in_memory_outlive_the_agent_and_leave_with_the_tier(
    fleet: WeightsFleet, source: Path, small_memory: Path
) -> None:
    memory = small_memory
    node = await fleet.add("n1", memory=memory)
    await node.order(source)
    await node.staged()
    wanted, folder = files(source), node.folder
    await fleet.remove("n1")
    for name in wanted:
        (source / name).unlink()

    node = await fleet.add("n1", memory=memory)
    assert not node.models._node.tiers[0].backend.capabilities.fallback
    await node.order(source)
    await node.staged()
    assert files(folder) == wanted
    assert kv_bytes(node) < CAPACITY_BYTES

    root = PersistenceRoot(memory, POOL, "n1", read_mounts())
    assert remove_abandoned(root, frozenset({"dram"})) == []
    assert remove_abandoned(root, frozenset()) == [], "a running agent has it"
    await fleet.remove("n1")
    assert remove_abandoned(root, frozenset()) == ["dram"]
    assert not folder.exists()


async def test_memory_without_a_tmpfs_holds_no_weights_and_says_what_is_missing(
    fleet: WeightsFleet, source: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    node = await fleet.add("n1", memory=disk)
    await node.order(source)

    await node.until(lambda: node.report().state == "Failed")

    assert (node.report().reason, node.report().message) == (
        "Unsupported",
        f"tier dram: {disk} is not on a tmpfs; mount one there",
    )
    assert kv_bytes(node) == CAPACITY_BYTES


async def test_weights_wait_for_blocks_that_leave_memory(fleet: WeightsFleet, source: Path, memory: Path) -> None:
    """What lies where weights are to be leaves first: both never have more than the tier together."""
    node = await fleet.add("n1", 80 * MIB, memory=memory)
    tier = node.models._node.tiers[0]
    slots = contract.fill(tier.backend, ANNA)
    await node.order(source)

    await node.until(lambda: node.report().reason == "WaitingForRoom")
    assert not node.folder.exists()
    for slot in slots:
        tier.backend.drop(slot)

    await node.staged()
    assert files(node.folder) == files(source)
    assert kv_bytes(node) < 80 * MIB - FILES * FILE_BYTES


def fill(disk: Path, left_bytes: int) -> Path:
    """Take the room of a file system but for so many bytes."""
    status = os.statvfs(disk)
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - left_bytes)
    return ballast


async def test_a_full_disk_is_a_reason_with_numbers_and_staging_goes_on_when_there_is_room(
    fleet: WeightsFleet, source: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.1)
    node = await fleet.add("n1", 120 * MIB, root=small_disk / "tier")
    tier = node.models._node.tiers[0]
    slot, record = await put(tier.backend, 1)
    ballast = fill(small_disk, 30 * MIB)
    await node.order(source)

    await node.until(lambda: node.report().reason == "DiskFull")

    report = node.report()
    size_bytes = sum(sizes(source).values())
    assert report.message.startswith(f"{small_disk}/tier/{names.MODELS_FOLDER}: {size_bytes} B wanted")
    assert (report.state, report.staged_bytes, report.path) == ("Failed", 0, "")
    assert not node.folder.exists()
    assert await get(tier.backend, slot, record) == content(1)
    again = await put(tier.backend, 2)
    assert await get(tier.backend, *again) == content(2)
    await node.until(lambda: kv_bytes(node) == 120 * MIB)

    ballast.unlink()
    await node.staged()
    assert files(node.folder) == files(source)


async def test_a_disk_that_fills_while_a_file_is_allocated_keeps_what_came_and_no_part_of_a_file(
    fleet: WeightsFleet, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first bytes have come somebody else takes the room: a later file gets a part of its blocks."""
    monkeypatch.setattr(runner, "RETRY_S", 0.1)
    source = tmp_path / "many"
    source.mkdir()
    for i in range(FILES_OPEN_MAX + 4):
        (source / f"model-{i:02}.bin").write_bytes(os.urandom(5 * MIB))
    read, ballast = FolderSource.read, small_disk / "ballast"

    async def read_and_fill(self: FolderSource, path: str, start: int, end: int) -> memoryview:
        if not ballast.exists():
            fill(small_disk, 7 * MIB)
        return await read(self, path, start, end)

    monkeypatch.setattr(FolderSource, "read", read_and_fill)
    node = await fleet.add("n1", 120 * MIB, root=small_disk / "tier")
    await node.order(source)

    await node.until(lambda: node.report().reason == "DiskFull")

    staging = small_disk / "tier" / names.MODELS_FOLDER / "m" / ".r1.staging"
    assert not node.folder.exists()
    begun = sizes(staging)
    assert begun.items() <= sizes(source).items()
    await node.until(lambda: kv_bytes(node) <= 120 * MIB - sum(begun.values()))

    monkeypatch.setattr(FolderSource, "read", read)
    ballast.unlink()
    await node.staged()
    assert files(node.folder) == files(source)


async def test_whatever_fails_between_two_tries_there_is_a_next_one(
    fleet: WeightsFleet, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.05)
    node = await fleet.add("n1")
    failures = iter(
        [FileNotFoundError(2, "gone", "weights"), None, RuntimeError("worse"), OSError(5, "broken", "disk")]
    )

    def staging_bytes(_folder: ModelFolder, _model: str, _revision: str) -> int:
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return 0

    monkeypatch.setattr(ModelFolder, "staging_bytes", staging_bytes)
    later = source.with_name("later")
    await node.order(later)
    await node.until(lambda: node.report().message == "disk: broken")
    await asyncio.to_thread(source.rename, later)

    await node.staged()
    assert files(node.folder) == files(later)
