"""The GPU tier on a real CUDA device, against the contract of all backends."""

from collections.abc import AsyncIterator

import pytest

from kvstrata_agent.backends.base import Reading, TierBackend, Writing
from kvstrata_api.units import MIB
from support.backends.contract import ANNA, CAPACITY_BYTES, BackendContract, content, record

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


class TestHbmCuda(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        from kvstrata_agent.backends.device.hbm import open_hbm

        backend = open_hbm("cuda", CAPACITY_BYTES)
        yield backend
        await backend.close()


async def test_groups_overlap_copies_and_what_was_freed_is_the_drivers_again() -> None:
    from kvstrata_agent.backends.device.hbm import open_hbm

    free_bytes, _ = torch.cuda.mem_get_info()
    tier = open_hbm("cuda", 256 * MIB)
    slots = [tier.reserve(ANNA, 2 * MIB) for _ in range(64)]
    blocks = [content(n, 2 * MIB) for n in range(len(slots))]
    writings = [Writing(s, b, record(n, b, s)) for n, (s, b) in enumerate(zip(slots, blocks, strict=True))]
    assert list(await tier.write_group(writings)) == [w.record for w in writings]

    rooms = [memoryview(bytearray(2 * MIB)) for _ in slots]
    readings = [Reading(w.slot, w.record, room) for w, room in zip(writings, rooms, strict=True)]
    assert list(await tier.read_group(readings)) == [w.record.checksum for w in writings]
    assert rooms == blocks

    await tier.close()
    assert torch.cuda.mem_get_info()[0] >= free_bytes - 32 * MIB
