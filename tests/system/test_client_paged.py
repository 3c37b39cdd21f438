"""An engine with pages saves a prompt and loads it into other pages, from a real agent; on a device that is late."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent.doubles import FakeAuthenticator, caller, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import attached

torch = pytest.importorskip("torch", reason="the connector needs torch")

from kvstrata_api.errors import BlockCorruptError, InvalidInputError, LeaseLostError  # noqa: E402
from kvstrata_client.cache import PrefixCache  # noqa: E402
from kvstrata_client.client import Client  # noqa: E402
from kvstrata_client.connectors import paged  # noqa: E402
from kvstrata_client.connectors.paged import (  # noqa: E402
    ORDER,
    PagedConnector,
    PagedKv,
)
from support.backends.late_device import LateQueue  # noqa: E402
from support.client.paged_kv import LAYOUT, filled, pages_of  # noqa: E402

pytestmark = pytest.mark.system

BLOCKS, PAGE_TOKENS = 10, 32
TOKENS = list(range(BLOCKS * LAYOUT.block_tokens + 5))
TABLE = pages_of(BLOCKS + 1, PAGE_TOKENS)
OTHER_TABLE = list(reversed(TABLE))


class Engine:
    """KV in pages of 32 tokens, and what connects it."""

    def __init__(self, client: Client, *, is_empty: bool) -> None:
        self.tensors = filled(ORDER, PAGE_TOKENS)
        if is_empty:
            self.tensors = [torch.zeros_like(t) for t in self.tensors]
        self.device = LateQueue()
        self.connector = PagedConnector(PrefixCache(client), PagedKv(self.tensors, LAYOUT), self.device)

    def states(self, table: list[int], layer: int) -> Any:
        """KV of the prompt's full blocks in a layer: (2, tokens, heads, dim)."""
        return self.tensors[layer][:, table].flatten(1, 2)[:, : BLOCKS * LAYOUT.block_tokens]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine, AgentThread]]:
    """One engine that has computed the prompt, and one that has not, on an agent; three blocks in a batch."""
    monkeypatch.setattr(paged, "BATCH_BYTES", 3 * LAYOUT.block_bytes)
    party = FakeAuthenticator(a=caller("a"))
    with (
        AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], party) as agent,
        attached(agent.socket, strict=True, layout=LAYOUT) as client,
    ):
        yield Engine(client, is_empty=False), Engine(client, is_empty=True), agent


def test_what_one_engine_saved_lies_in_the_pages_of_another_layer_by_layer(
    engines: tuple[Engine, Engine, AgentThread],
) -> None:
    writer, reader, _ = engines
    assert writer.connector.save(TOKENS, TABLE).published == BLOCKS
    assert writer.device.most_under_way == 2
    assert writer.device.stagings == [3 * LAYOUT.block_bytes] * 2
    writer.tensors[0].zero_()
    expected = filled(ORDER, PAGE_TOKENS)

    with reader.connector.load(TOKENS, OTHER_TABLE) as load:
        assert load.tokens == BLOCKS * LAYOUT.block_tokens
        load.layer(0)
        assert reader.device.started == 1

    for layer, tensor in enumerate(expected):
        wanted = tensor[:, TABLE].flatten(1, 2)[:, : load.tokens]
        assert torch.equal(reader.states(OTHER_TABLE, layer), wanted)
        assert int((reader.tensors[layer] != 0).sum()) == int((wanted != 0).sum())


def test_saving_goes_on_where_it_is_told_to(engines: tuple[Engine, Engine, AgentThread]) -> None:
    writer, reader, _ = engines
    assert writer.connector.save(TOKENS[:64], TABLE).published == 4
    stored = writer.connector.save(TOKENS, TABLE, first_block=2)
    assert (stored.published, stored.refused) == (6, 0)
    assert writer.connector.save(TOKENS, TABLE, first_block=99).published == 0

    with reader.connector.load(TOKENS, OTHER_TABLE, blocks_max=7) as load:
        assert load.tokens == 7 * LAYOUT.block_tokens


def test_a_prompt_that_nobody_saved_loads_nothing(engines: tuple[Engine, Engine, AgentThread]) -> None:
    _, reader, _ = engines
    with reader.connector.load(TOKENS, OTHER_TABLE) as load:
        assert load.tokens == 0
        load.layer(1)

    assert reader.device.started == 0
    assert not any(bool(t.any()) for t in reader.tensors)


def test_a_block_that_is_not_what_it_was_reaches_no_page(engines: tuple[Engine, Engine, AgentThread]) -> None:
    writer, reader, agent = engines
    assert writer.connector.save(TOKENS, TABLE).published == BLOCKS
    load = reader.connector.load(TOKENS, OTHER_TABLE)
    spoil_second_layer(agent)

    load.layer(0)
    with pytest.raises(BlockCorruptError, match="layers 1 to 2"):
        load.finish()

    assert [bool(t.any()) for t in reader.tensors] == [True, False, False, False, False]
    assert load.close()


def spoil_second_layer(agent: AgentThread) -> None:
    """Change a bit in the second layer of every block, where it lies."""
    tier = agent.core.node.tiers[0]
    assert tier.backend.mappable is not None
    for entry in tuple(agent.core.node.contents(tier).residents()):
        there = entry.residence(tier)
        assert there is not None
        tier.backend.mappable.view(there.slot)[2 * LAYOUT.block_bytes // LAYOUT.layers - 1] ^= 1


def test_what_was_loaded_under_leases_that_are_over_is_void(engines: tuple[Engine, Engine, AgentThread]) -> None:
    writer, reader, agent = engines
    assert writer.connector.save(TOKENS, TABLE).published == BLOCKS
    load = reader.connector.load(TOKENS, OTHER_TABLE)
    load.layer(4)
    node = agent.core.node
    agent.call(lambda: node.end_leases(node.leases.end_where(lambda _: True)))

    with pytest.raises(LeaseLostError):
        load.finish()


def test_a_table_that_does_not_fit_moves_nothing(engines: tuple[Engine, Engine, AgentThread]) -> None:
    writer, reader, _ = engines
    with pytest.raises(InvalidInputError, match="a table of 2 pages"):
        writer.connector.save(TOKENS, TABLE[:2])
    with pytest.raises(InvalidInputError, match="twice"):
        reader.connector.load(TOKENS, TABLE[:1] * 6)
    with pytest.raises(InvalidInputError, match="layer 5: 0 to 4 are there"), reader.connector.load([], []) as load:
        load.layer(5)

    assert (writer.device.started, reader.device.started) == (0, 0)
