"""The probe of a tier whose medium fails: no write of it goes on once its slots are given back."""

import asyncio
from typing import cast

import pytest

from kvstrata_agent.backends.base import Record, SlotRef, TierBackend
from kvstrata_agent.provision.probe import probe
from kvstrata_api.errors import BackendFailedError
from support.agent.doubles import DictBackend

pytestmark = pytest.mark.unit

BLOCK_BYTES = 4096


class Failing(DictBackend):
    """Its tenth write fails at once; those beside it take long."""

    late = 0
    """Writes that went on in a slot that was given back."""

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        self.writes += 1
        if self.writes == 10:
            raise BackendFailedError("Input/output error")
        for _ in range(20 if self.writes > 5 else 0):
            await asyncio.sleep(0)
        self.late += slot.stamp not in self.live
        self.writes -= 1
        await super().write(slot, record, stored)


async def test_no_write_goes_on_in_a_slot_that_was_given_back() -> None:
    backend = Failing(1024 * BLOCK_BYTES)

    measured = await probe(cast("TierBackend", backend), BLOCK_BYTES)
    for _ in range(100):
        await asyncio.sleep(0)

    assert backend.writes >= 10
    assert backend.late == 0
    assert backend.used_bytes == 0
    assert measured.write_bytes_per_second >= 0
