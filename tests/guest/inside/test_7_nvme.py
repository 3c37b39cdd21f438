"""The record store on a real NVMe driver: contract, a sector that cannot be read, a device that is pulled out."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import breakage
import pytest
import regions
from recorded import Record

from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.file.index_format import parse_name
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.backends.file.record_store import RecordStore
from kvstrata_agent.backends.record.layout import HEADER_BYTES
from kvstrata_api.errors import BackendFailedError, KvStrataError
from kvstrata_api.models.pool import NvmeTier
from kvstrata_node.discovery import discover
from support.backends.contract import CAPACITY_BYTES, PersistentContract, content, get, put


def mounted(number: int) -> Path:
    """The file system of the device with a serial; nvmeN are numbered as they are found."""
    serials = {c.name: regions.read(c / "serial") for c in Path("/sys/class/nvme").iterdir()}
    name = next(name for name, serial in serials.items() if serial == f"KVSTRATA{number}")
    at = Path("/mnt") / name
    if not at.is_mount():
        at.mkdir(exist_ok=True)
        subprocess.run(["/bin/mount", "-t", "ext4", f"/dev/{name}n1", str(at)], check=True)
    return at


async def opened(where: Path) -> RecordStore:
    store = await open_nvme(NvmeTier(path=str(where), io="Posix"), "pool-a", "node-a", CAPACITY_BYTES)
    assert isinstance(store, RecordStore)
    assert store.capabilities.medium == "file-posix", store.capabilities.fallback
    return store


_stores = iter(range(1000))


class TestNvme(PersistentContract):
    @pytest.fixture
    def where(self) -> Iterator[Path]:
        path = mounted(0) / f"store-{next(_stores)}"
        yield path
        subprocess.run(["/bin/busybox", "rm", "-rf", str(path)], check=True)

    async def reopen(self, where: object) -> TierBackend:
        return await opened(Path(str(where)))

    @pytest.fixture
    async def backend(self, where: Path) -> AsyncIterator[TierBackend]:
        backend = await self.reopen(where)
        yield backend
        await backend.close()


async def test_a_sector_that_cannot_be_read_loses_its_block_and_no_other(record_property: Record) -> None:
    where = mounted(0) / "media"
    store = await opened(where)
    stored = [await put(store, n) for n in range(8)]
    lost = stored[3]
    segment = next(p for p in where.rglob("seg-*") if (name := parse_name(p.name)) and name.id == lost[0].extent)
    breakage.break_reads("nvme0", breakage.place_on_medium(segment, lost[0].offset + HEADER_BYTES))

    with pytest.raises(BackendFailedError) as failed:
        await get(store, *lost)

    record_property("error", str(failed.value))
    assert str(failed.value) == store.last_error
    for n, one in enumerate(stored):
        if one is not lost:
            assert await get(store, *one) == content(n)
    slot, made = await put(store, 99)
    assert slot.extent != lost[0].extent
    assert await get(store, slot, made) == content(99)
    await store.close()


async def test_a_device_that_is_pulled_out_gives_failures_and_no_wrong_bytes(record_property: Record) -> None:
    where = mounted(1)
    device = f"{where.name}n1"
    store = await opened(where / "store")
    stored = [await put(store, n) for n in range(8)]
    assert device in {d.name for d in discover().nvme}
    breakage.unplug("nvme1")
    regions.until(lambda: device not in {d.name for d in discover().nvme})

    errors = set()
    for one in stored:
        with pytest.raises(BackendFailedError) as failed:
            await get(store, *one)
        errors.add(str(failed.value))
    record_property("read_errors", sorted(errors))
    with pytest.raises(KvStrataError) as refused:
        await put(store, 99)
    record_property("write_error", str(refused.value))
    assert store.last_error
    await store.close()
