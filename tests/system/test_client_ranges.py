"""Layers and heads of blocks, read alone and verified alone, through the real agent."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata import Client, PrefixCache
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.cache.part_checksums import ENTRY_BYTES
from kvstrata_api.blocks import BlockKey, chain_keys
from kvstrata_api.errors import BlockCorruptError, InvalidInputError, LeaseLostError
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.copying import HeadRange
from kvstrata_client.verbs.results import Bytes2D
from support.agent.doubles import LAYOUT
from support.agent.thread import AgentThread
from support.client import attached as attached_client
from support.client.attached import serving_two_tenants

pytestmark = pytest.mark.system

LAYERS, HEADS, BLOCKS = 4, 2, 5
WIDE = replace(LAYOUT, layers=LAYERS, kv_heads=HEADS, head_dim=16)
TOKENS = np.arange(BLOCKS * WIDE.block_tokens, dtype=np.uint32)
DATA: Bytes2D = np.random.default_rng(3).integers(0, 256, (BLOCKS, WIDE.block_bytes), np.uint8)
SHAPED = DATA.reshape(BLOCKS, LAYERS, 2, HEADS, -1)
ranges = st.integers(0, LAYERS - 1).flatmap(lambda a: st.integers(a + 1, LAYERS).map(lambda b: range(a, b)))
heads = st.none() | st.sampled_from([range(1), range(1, 2), range(2)])


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentThread]:
    with serving_two_tenants(tmp_path_factory.mktemp("agent")) as running:
        with attached(running.socket) as client:
            assert PrefixCache(client).store(TOKENS, DATA).published == BLOCKS
        yield running


def attached(socket: Path) -> Client:
    return attached_client.attached(socket, strict=True, layout=WIDE)


@given(layers=ranges, wanted=heads)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_range_is_that_part_of_the_whole(agent: AgentThread, layers: range, wanted: range | None) -> None:
    with attached(agent.socket) as client, PrefixCache(client).stream(TOKENS, heads=wanted) as stream:
        read = stream.read(layers)

    some = SHAPED[:, layers.start : layers.stop]
    expected = some if wanted is None else some[:, :, :, wanted.start : wanted.stop]
    assert np.array_equal(read, expected.reshape(BLOCKS, -1))


def test_heads_of_a_layout_with_one_part_for_k_and_v_are_those_of_their_layer(agent: AgentThread) -> None:
    latent = replace(WIDE, kv_parts=1)
    data = DATA[:, : latent.block_bytes]
    whole = data.reshape(BLOCKS, LAYERS, HEADS, -1)
    with attached_client.attached(agent.socket, strict=True, layout=latent) as client:
        assert PrefixCache(client).store(TOKENS, np.ascontiguousarray(data)).published == BLOCKS
        for wanted in (range(1), range(1, 2), range(2)):
            with PrefixCache(client).stream(TOKENS, heads=wanted) as stream:
                for layer in range(LAYERS):
                    expected = whole[:, layer, wanted.start : wanted.stop].reshape(BLOCKS, -1)
                    assert np.array_equal(stream.read(range(layer, layer + 1)), expected)


def test_nothing_is_leased_when_the_stream_has_ended(agent: AgentThread) -> None:
    with attached(agent.socket) as client:
        with PrefixCache(client).stream(TOKENS, blocks_max=3) as stream:
            assert (stream.blocks, set(stream.sources)) == (3, {"dram"})
            assert agent.call(lambda: len(agent.core.node.leases)) == 3
        assert agent.call(lambda: len(agent.core.node.leases)) == 0
        with pytest.raises(LeaseLostError):
            stream.read(range(1))


def test_a_prompt_that_is_not_there_gives_an_empty_stream(agent: AgentThread) -> None:
    with attached(agent.socket) as client, PrefixCache(client).stream(TOKENS + np.uint32(7)) as stream:
        assert stream.blocks == 0
        assert stream.read(range(LAYERS)).shape == (0, WIDE.block_bytes)


@pytest.mark.parametrize(
    ("layers", "wanted"), [(range(0), None), (range(2, 5), None), (range(-1, 1), None), (range(1), range(1, 3))]
)
def test_what_the_layout_has_not_is_refused(agent: AgentThread, layers: range, wanted: range | None) -> None:
    with attached(agent.socket) as client, pytest.raises(InvalidInputError, match=r"wanted$"):  # noqa: SIM117  One raises.
        with PrefixCache(client).stream(TOKENS, heads=wanted) as stream:
            stream.read(layers)


@pytest.mark.parametrize("part_bytes", [-1, 3, WIDE.block_bytes + 1, WIDE.block_bytes * 2, 1])
def test_parts_that_do_not_fit_the_block_are_refused(agent: AgentThread, part_bytes: int) -> None:
    with attached(agent.socket) as client:
        call = calls.acquire(client.target, keys_of(client), "", 30.0, 1.0, part_bytes)
        with pytest.raises(InvalidInputError, match="part_bytes"):
            client._one(call)


class TestDamage:
    """Each test has an agent of its own, because what is damaged is dropped."""

    @pytest.fixture
    def damaged(self, tmp_path: Path) -> Iterator[AgentThread]:
        with serving_two_tenants(tmp_path) as running:
            with attached(running.socket) as client:
                assert PrefixCache(client).store(TOKENS, DATA).published == BLOCKS
            yield running

    def test_a_layer_that_rots_after_the_lease_is_not_read(self, damaged: AgentThread) -> None:
        with attached(damaged.socket) as client:
            stream = PrefixCache(client).stream(TOKENS)
            damaged.call(lambda: flip(damaged.core, stream._leases[2].digest, 2))
            assert np.array_equal(stream.read(range(2)), SHAPED[:, :2].reshape(BLOCKS, -1))
            with pytest.raises(BlockCorruptError, match="block 2"):
                stream.read(range(2, 3))
            assert stream.close()

            assert PrefixCache(client).lookup(TOKENS).blocks == 2, "the agent looked at the block and dropped it"

    def test_a_block_that_has_rotted_before_is_not_leased_in_parts(self, damaged: AgentThread) -> None:
        with attached(damaged.socket) as client:
            with client.acquire(keys_of(client)) as leases:
                damaged.call(lambda: flip(damaged.core, leases[3].digest, 0))
            with PrefixCache(client).stream(TOKENS) as stream:
                assert stream.blocks == 3
                assert np.array_equal(stream.read(range(LAYERS)), DATA[:3])

    def test_a_stream_whose_leases_were_taken_back_says_so(self, damaged: AgentThread) -> None:
        with attached(damaged.socket) as client:
            stream = PrefixCache(client).stream(TOKENS)
            stream.read(range(1))
            node = damaged.core.node
            damaged.call(lambda: node.end_leases(node.leases.end_where(lambda _: True)))
            with pytest.raises(LeaseLostError), stream:
                stream.read(range(1, 2))

    def test_an_agent_that_knows_no_parts_gives_an_empty_stream(
        self, damaged: AgentThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def none(leases: list[object], part_bytes: int) -> list[bytes]:
            del part_bytes
            return [b"?"] * len(leases)

        monkeypatch.setattr(damaged.core.cache.parts, "of", none)
        with attached(damaged.socket) as client, PrefixCache(client).stream(TOKENS) as stream:
            assert stream.blocks == 0
        damaged.call(lambda: None)
        assert damaged.call(lambda: len(damaged.core.node.leases)) == 0

    def test_checksums_of_parts_are_made_once(self, damaged: AgentThread) -> None:
        with attached(damaged.socket) as client:
            for _ in range(3):
                PrefixCache(client).stream(TOKENS).close()
            assert len(damaged.core.cache.parts._kept) == BLOCKS
            assert damaged.core.cache.parts._kept_bytes == BLOCKS * (ENTRY_BYTES + LAYERS * 16)


def keys_of(client: Client) -> list[BlockKey]:
    assert client.grants is not None
    assert client.grants.own is not None
    return chain_keys(client.grants.own.secret, WIDE.layout_id(), TOKENS, WIDE.block_tokens)


def flip(core: AgentParts, digest: bytes, layer: int) -> None:
    """Change one byte of a layer of a block where it lies."""
    (entry,) = (e for e in core.node.index if e.digest == digest)
    tier, slot, _ = entry.residences[0]
    assert tier.backend.mappable is not None
    with tier.backend.mappable.view(slot) as view:
        view[layer * HeadRange(WIDE).part_bytes + 9] ^= 1


def test_parts_of_a_head_range_are_where_the_layout_has_them() -> None:
    heads = HeadRange(WIDE, range(1, 2))

    assert tuple(heads.parts(range(2))) == (1, 3, 5, 7)
    assert (HeadRange(WIDE).part_bytes, heads.part_bytes) == (
        WIDE.block_bytes // LAYERS,
        WIDE.block_bytes // LAYERS // 4,
    )
    assert heads.layer_bytes == 2 * heads.part_bytes
