"""A node whose memory others took: the tier is full, with its reason; nothing is killed and nothing lies elsewhere."""

import pages
import pytest
from recorded import Record

from kvstrata_agent.backends.memory.cxl import open_cxl
from kvstrata_agent.backends.memory.host_dram import make_bound
from kvstrata_agent.backends.memory.mapping import Placement
from kvstrata_api.errors import TierFullError
from kvstrata_api.models.pool import CxlTier
from kvstrata_api.units import MIB
from kvstrata_node.discovery import discover
from support.backends.contract import ANNA, put_until_refused


async def test_a_node_that_others_filled_is_a_full_tier_and_no_death(
    record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.backends.contract.BLOCK_BYTES", MIB)
    far = next(n for n in discover().cpuless if n.id == 1)
    backend = open_cxl(CxlTier(), 128 * MIB, (far,))
    theirs = make_bound(pages.free_bytes(1) - 48 * MIB, 4096, Placement((1,)))
    theirs.populate()

    stored, error = await put_until_refused(backend)

    record_property("stored", len(stored))
    record_property("error", str(error))
    assert isinstance(error, TierFullError)
    assert "node 1" in str(error)
    assert "node 1" in backend.last_error
    found = {node for slot, _ in stored for node in pages.nodes_of(backend.extent_view(slot.extent))}
    assert found <= {1, pages.UNTOUCHED}
    theirs.release()
    backend.reserve(ANNA, MIB)
    await backend.close()
