"""The GPU tier on a real CUDA device, against the contract of all backends."""

from collections.abc import AsyncIterator

import pytest
from backend_contract import CAPACITY_BYTES, BackendContract

from kvfleet_agent.backends.base import TierBackend

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


class TestHbmCuda(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        from kvfleet_agent.backends.hbm import open_hbm

        backend = open_hbm("cuda", CAPACITY_BYTES)
        yield backend
        await backend.close()
