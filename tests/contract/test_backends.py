"""Every backend that keeps records, and device memory, against the one contract."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controlplane.s3_gateway import s3_gateway
from kvstrata_agent.backends.base import SlotRef, TierBackend
from kvstrata_agent.backends.file.index_format import parse_name
from kvstrata_agent.backends.file.open_store import open_nvme, open_remote_flash
from kvstrata_agent.backends.file.striped import DEVICE_BITS
from kvstrata_agent.backends.object.client import ObjectClient
from kvstrata_agent.backends.object.object_tier import open_object_tier
from kvstrata_api.models.pool import NvmeTier, RemoteFlashTier
from support.agent.scope_keys import KeyRing, NamedKeys
from support.backends import contract as backend_contract
from support.backends.contract import (
    ANNA,
    BOB,
    CAPACITY_BYTES,
    BackendContract,
    PersistentContract,
    content,
    get,
    put,
)
from support.nursery import Nursery
from support.runner import leftovers

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1200)]  # The gateway is built once, for minutes.


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery(["support.backends.write_and_die"]) as warm:
        yield warm


class _RecordStoreContract(PersistentContract):
    io: str
    medium: str
    keys: KeyRing | None = None
    """Of a store that is sealed."""

    @property
    def _arguments(self) -> tuple[str, ...]:
        return (self.io, "plain" if self.keys is None else "sealed")

    @pytest.fixture
    def where(self, tmp_path: Path) -> Path:
        return tmp_path / "store"

    async def reopen(self, where: object) -> TierBackend:
        tier = NvmeTier(path=str(where), io=self.io)
        return await open_nvme(tier, "pool-a", "node-a", CAPACITY_BYTES, keys=self.keys)

    @pytest.fixture
    async def backend(self, where: Path) -> AsyncIterator[TierBackend]:
        backend = await self.reopen(where)
        assert backend.capabilities.medium == self.medium, backend.capabilities.fallback
        yield backend
        await backend.close()

    def segment(self, slot: SlotRef) -> int:
        """Number of the file that holds a slot."""
        return slot.extent

    async def test_files_never_take_more_than_the_capacity(self, backend: TierBackend, where: Path) -> None:
        slots: list[SlotRef] = []
        for n in range(120):
            while backend.used_bytes > 0.7 * backend.capacity_bytes:
                backend.drop(slots.pop(0))
            slots.append((await put(backend, n, size_bytes=32_000 - 1000 * (n % 7)))[0])
            assert _bytes_on_disk(where) <= backend_contract.CAPACITY_BYTES

    async def test_nothing_of_a_scope_is_left_on_disk_once_its_last_block_was_dropped(
        self, backend: TierBackend, where: Path
    ) -> None:
        stored = [await put(backend, n) for n in range(9)]
        kept = await put(backend, 77, BOB)
        for slot, _ in stored:
            backend.drop(slot)
        await asyncio.sleep(0.7)

        assert _segments(where) == [self.segment(kept[0])]
        assert await get(backend, *kept) == content(77)

    async def test_every_block_that_was_synced_survives_kill_9(self, nursery: Nursery, where: Path) -> None:
        written = _kill_writer_after(nursery, where, self._arguments, 60)

        again, found = await self.recovered(where)

        # The writer drops the oldest one after each new one beyond 20: a drop may be on the medium already or not.
        assert set(range(written - 19, written + 1)) <= set(found)
        for n, (slot, made) in found.items():
            if n <= written:
                assert await get(again, slot, made) == content(n)
        await again.close()

    async def test_five_kills_in_a_row_lose_nothing_and_serve_nothing_wrong(
        self, nursery: Nursery, where: Path
    ) -> None:
        last_stamp = 0
        for round_ in range(5):
            written = _kill_writer_after(nursery, where, self._arguments, 5 + 3 * round_)
            again, found = await self.recovered(where)
            assert written in found
            stamp = found[written][0].stamp
            assert stamp > last_stamp
            last_stamp = stamp
            assert await get(again, *found[written]) == content(written)
            for slot, _ in found.values():
                again.drop(slot)
            await again.close()


def _segments(where: Path) -> list[int]:
    return [name.id for p in where.rglob("seg-*") if (name := parse_name(p.name)) is not None]


def _bytes_on_disk(where: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in where.rglob("seg-*"))


def _kill_writer_after(nursery: Nursery, where: Path, arguments: tuple[str, ...], blocks: int) -> int:
    """Let a process write until it has reported `blocks` blocks, kill it, and return the last number it reported."""
    path, io, form, *spread = (str(where), *arguments)
    child = nursery.start("support.backends.write_and_die:write", path=path, io=io, form=form, spread="".join(spread))
    last = -1
    try:
        for _ in range(blocks):
            last = child.channel.hear()
        child.signal(signal.SIGKILL)
        with contextlib.suppress(EOFError):
            while True:
                last = child.channel.hear()  # What it said before it died.
    finally:
        child.end()
    return last


class TestNvmeUring(_RecordStoreContract):
    io, medium = "Uring", "file-uring"


class TestNvmePosix(_RecordStoreContract):
    io, medium = "Posix", "file-posix"


class TestNvmeBuffered(_RecordStoreContract):
    io, medium = "Uring", "file-buffered"

    @pytest.fixture
    def where(self) -> Iterator[Path]:
        directory = Path(tempfile.mkdtemp(prefix="kvstrata-test-", dir=leftovers.memory()))
        yield directory / "store"
        shutil.rmtree(directory)


class TestRemoteFlash(_RecordStoreContract):
    io, medium = "Posix", "shared-file-posix"

    async def reopen(self, where: object) -> TierBackend:
        tier = RemoteFlashTier(path=str(where))
        return await open_remote_flash(tier, "pool-a", "node-a", CAPACITY_BYTES, keys=self.keys)


class TestNvmeSealed(TestNvmeUring):
    keys = NamedKeys(ANNA, BOB)


class TestNvmeStriped(TestNvmeUring):
    """Over two directories, as over two devices."""

    @property
    def _arguments(self) -> tuple[str, ...]:
        return (*super()._arguments, "striped")

    @pytest.fixture(autouse=True)
    def _sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One device alone must hold the largest block of the contract, which is 1 MiB."""
        monkeypatch.setattr("support.backends.contract.CAPACITY_BYTES", 2 * CAPACITY_BYTES)

    async def reopen(self, where: object) -> TierBackend:
        tier = NvmeTier(paths=(f"{where}/a", f"{where}/b"), io=self.io)
        return await open_nvme(tier, "pool-a", "node-a", backend_contract.CAPACITY_BYTES, keys=self.keys)

    def segment(self, slot: SlotRef) -> int:
        return slot.extent >> DEVICE_BITS


class TestNvmeStripedSealed(TestNvmeStriped):
    keys = NamedKeys(ANNA, BOB)


class TestRemoteFlashSealed(TestRemoteFlash):
    keys = NamedKeys(ANNA, BOB)


class _ObjectContract(PersistentContract):
    keys: KeyRing | None = None

    @pytest.fixture
    async def backend(self, where: object) -> AsyncIterator[TierBackend]:
        backend = await self.reopen(where)
        yield backend
        await backend.close()


class TestObjectFile(_ObjectContract):
    @pytest.fixture
    def where(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/objects"

    async def reopen(self, where: object) -> TierBackend:
        return await open_object_tier(ObjectClient(str(where)), "pool-a", "node-a", CAPACITY_BYTES, keys=self.keys)


class TestObjectSealed(TestObjectFile):
    keys = NamedKeys(ANNA, BOB)


class TestObjectMemory(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        backend = await open_object_tier(ObjectClient("memory://"), "pool-a", "node-a", CAPACITY_BYTES)
        yield backend
        await backend.close()


class TestObjectS3(_ObjectContract):
    @pytest.fixture(scope="class")
    def gateway(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
        with s3_gateway(tmp_path_factory.mktemp("s3"), "kvstrata") as settings:
            yield settings

    @pytest.fixture
    def where(self, gateway: dict[str, str], request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
        return f"s3://kvstrata/{abs(hash(request.node.nodeid)):x}", gateway

    async def reopen(self, where: object) -> TierBackend:
        assert isinstance(where, tuple)
        return await open_object_tier(ObjectClient(*where), "pool-a", "node-a", CAPACITY_BYTES)


class TestHbmDouble(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        torch = pytest.importorskip("torch")
        assert torch
        from kvstrata_agent.backends.device.hbm import open_hbm

        backend = open_hbm("cpu", CAPACITY_BYTES)
        yield backend
        await backend.close()


class TestHbmOnALateDevice(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        pytest.importorskip("torch")
        from kvstrata_agent.backends.device.hbm import HbmTier
        from support.backends.late_device import LateQueue

        backend = HbmTier([LateQueue("late:0"), LateQueue("late:1")], CAPACITY_BYTES, threads=1)
        yield backend
        await backend.close()


class TestHbmOfSeveralThreads(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        pytest.importorskip("torch")
        from kvstrata_agent.backends.device.hbm import HbmTier
        from support.backends.late_device import LateQueue

        backend = HbmTier([LateQueue("late:0"), LateQueue("late:1")], CAPACITY_BYTES, threads=3)
        yield backend
        await backend.close()
