"""Blocks that are read on one node while another still computes them: layer by layer, or not at all."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstrata import Client
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.blocks import handovers
from kvstrata_agent.cache.handover import Fault
from kvstrata_agent.fleet.peers import wire
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError, LeaseLostError
from kvstrata_api.wire import Handover
from kvstrata_client.cache import PrefixCache
from kvstrata_client.prompt.handover import HandoverWriter
from kvstrata_client.verbs.results import Published
from kvstrata_telemetry.catalog import BY_NAME
from kvstrata_telemetry.metrics import Kind
from support.agent.handover_nodes import PeerThread, two_nodes
from support.client.attached import attached

pytestmark = pytest.mark.system

LAYOUT = Layout("tiny", "r1", "fp32", 16, 4, 2, 16, 4)
LAYERS = LAYOUT.layers
BLOCKS = 5
TOKENS = list(range(16 * BLOCKS + 3))
STORED = np.random.default_rng(5).integers(0, 256, (BLOCKS, LAYERS, LAYOUT.block_bytes // LAYERS), np.uint8)

Nodes = tuple[PeerThread, PeerThread]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with two_nodes(tmp_path) as made:
        yield made


def client_of(agent: PeerThread, tenant: str = "a") -> Client:
    return attached(agent.socket, tenant, layout=LAYOUT)


def counted(agent: PeerThread, name: str, **label: str) -> float:
    """A metric of an agent, as its sweep shows it."""
    agent.call(Sweeper(agent.core.cache, agent.authenticator).gauges)
    made = agent.core.node.counters._instruments
    kind = made.gauge if BY_NAME[name].kind is Kind.GAUGE else made.counter
    value: float = kind(name, pool="pool", node="node", **label)._value.get()
    return value


def broken(reader: PeerThread) -> dict[Fault, float]:
    return {fault: counted(reader, "kvstrata_handovers_broken_total", reason=fault) for fault in Fault}


def delivered(reader: PeerThread) -> float:
    """Tokens that a reader was given, by the account of its agent."""
    named = ("dram", "remote", "unknown")
    count = partial(counted, reader, "kvstrata_load_tokens_total", tenant="a", stage="delivered")
    return sum(count(tier=name) for name in named)


def written(growing: HandoverWriter, layers: range) -> None:
    for layer in layers:
        growing.write(np.ascontiguousarray(STORED[:, layer]))


def test_a_layer_is_read_elsewhere_before_the_next_one_is_written(nodes: Nodes) -> None:
    writer, reader = nodes
    with client_of(writer) as ours, client_of(reader) as theirs:
        growing = PrefixCache(ours).hand_over(TOKENS)
        assert (growing.blocks, growing.first_block) == (BLOCKS, 0)
        with PrefixCache(theirs).stream(TOKENS, handover=growing.handover) as stream:
            assert stream.blocks == BLOCKS
            assert counted(writer, "kvstrata_handover_blocks", role="writer") == BLOCKS
            assert counted(reader, "kvstrata_handover_blocks", role="reader") == BLOCKS
            for layer in range(LAYERS):
                written(growing, range(layer, layer + 1))
                assert np.array_equal(stream.read(range(layer, layer + 1)), STORED[:, layer])
                assert PrefixCache(theirs).lookup(TOKENS).blocks == 0
                assert PrefixCache(ours).lookup(TOKENS).blocks == 0
            assert growing.finish() == (Published.PUBLISHED,) * BLOCKS
        PrefixCache(theirs).lookup(TOKENS)  # Answered behind what the stream said at its end.
        assert delivered(reader) == theirs.counters.loaded_blocks.total() * 16 == BLOCKS * 16

        for cache in (PrefixCache(ours), PrefixCache(theirs)):
            loaded = cache.load(TOKENS)
            for _ in range(100):
                if loaded.blocks == BLOCKS:
                    break
                loaded = cache.load(TOKENS)
            assert np.array_equal(loaded.data, STORED.reshape(BLOCKS, -1))
        assert reader.call(lambda: len(reader.core.node.leases)) == 0
        for agent, role in ((writer, "writer"), (reader, "reader")):
            assert counted(agent, "kvstrata_handover_blocks", role=role) == 0
        assert broken(reader) == dict.fromkeys(Fault, 0)
        layers = [counted(reader, "kvstrata_handover_layers_total", wait=wait) for wait in ("none", "waited")]
        assert sum(layers) == LAYERS


def test_a_reader_with_room_for_fewer_blocks_follows_as_many_as_it_has_room_for(tmp_path: Path) -> None:
    room = BLOCKS - 2
    with (
        two_nodes(tmp_path, reader_bytes=room * LAYOUT.block_bytes) as (writer, reader),
        client_of(writer) as ours,
        client_of(reader) as theirs,
    ):
        growing = PrefixCache(ours).hand_over(TOKENS)
        assert growing.blocks == BLOCKS
        with PrefixCache(theirs).stream(TOKENS, handover=growing.handover) as stream:
            assert stream.blocks == room
            for layer in range(LAYERS):
                written(growing, range(layer, layer + 1))
                assert np.array_equal(stream.read(range(layer, layer + 1)), STORED[:room, layer])
            growing.finish()
        assert broken(reader) == dict.fromkeys(Fault, 0)


def test_of_more_blocks_than_one_question_may_name_the_leading_ones_are_followed(tmp_path: Path) -> None:
    tokens = list(range(16 * (wire.KEYS_MAX + 1)))
    size_bytes = 2 * (wire.KEYS_MAX + 1) * LAYOUT.block_bytes
    stored = np.zeros((wire.KEYS_MAX + 1, LAYOUT.block_bytes // LAYERS), np.uint8)
    with (
        two_nodes(tmp_path, size_bytes) as (writer, reader),
        client_of(writer) as ours,
        client_of(reader) as theirs,
    ):
        growing = PrefixCache(ours).hand_over(tokens)
        assert growing.blocks == wire.KEYS_MAX + 1
        stored[:, 0] = np.arange(wire.KEYS_MAX + 1) % 256
        with PrefixCache(theirs).stream(tokens, handover=growing.handover) as stream:
            assert stream.blocks == wire.KEYS_MAX
            growing.write(stored)
            assert np.array_equal(stream.read(range(1)), stored[: wire.KEYS_MAX])
            growing.abandon()


def test_who_asks_for_more_of_what_is_whole_is_answered_at_once(nodes: Nodes) -> None:
    writer, reader = nodes
    with client_of(writer) as ours, client_of(reader) as theirs:
        growing = PrefixCache(ours).hand_over(TOKENS)
        with PrefixCache(theirs).stream(TOKENS, handover=growing.handover) as stream:
            written(growing, range(LAYERS))
            growing.finish()
            stream.read(range(LAYERS))
            for _ in range(100):
                if not counted(reader, "kvstrata_handover_blocks", role="reader"):
                    break
            asked_s = time.monotonic()
            assert stream._arrive(stream._leases, LAYERS, 8.0) == (b"",) * BLOCKS
            assert time.monotonic() - asked_s < 4.0


def test_what_is_not_handed_over_is_stored_as_usual(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handovers, "BLOCKS_MAX", BLOCKS - 1)
    writer, _ = nodes
    with client_of(writer) as ours:
        growing = PrefixCache(ours).hand_over(TOKENS)
        assert (growing.blocks, growing.handover) == (0, None)
        stored = PrefixCache(ours).store(TOKENS, STORED.reshape(BLOCKS, -1))
        assert (stored.published, stored.existed) == (BLOCKS, 0)
        assert np.array_equal(PrefixCache(ours).load(TOKENS).data, STORED.reshape(BLOCKS, -1))
        assert not ours.counters.errors


def test_a_reader_waits_for_a_layer_that_comes_later(nodes: Nodes) -> None:
    writer, reader = nodes
    with client_of(writer) as ours, client_of(reader) as theirs:
        growing = PrefixCache(ours).hand_over(TOKENS)
        with PrefixCache(theirs).stream(TOKENS, handover=growing.handover) as stream:
            writing = threading.Timer(0.1, written, (growing, range(LAYERS)))
            writing.start()
            assert np.array_equal(stream.read(range(LAYERS - 1, LAYERS)), STORED[:, LAYERS - 1])
            writing.join()
        assert counted(reader, "kvstrata_handover_layers_total", wait="waited") > 0


def test_what_arrived_before_the_writer_gave_up_was_right_and_the_rest_is_lost(nodes: Nodes) -> None:
    writer, reader = nodes
    with client_of(writer) as ours, client_of(reader) as theirs:
        used = reader.call(lambda: reader.core.node.tiers[0].backend.used_bytes)
        growing = PrefixCache(ours).hand_over(TOKENS)
        written(growing, range(2))
        stream = PrefixCache(theirs).stream(TOKENS, handover=growing.handover)
        assert np.array_equal(stream.read(range(2)).reshape(BLOCKS, 2, -1), STORED[:, :2])
        growing.abandon()
        written(growing, range(2, LAYERS))
        with pytest.raises(LeaseLostError, match="layer 2"):
            stream.read(range(2, 3))
        stream.close()

        assert PrefixCache(theirs).lookup(TOKENS).blocks == 0
        assert theirs.counters.wanted_blocks == BLOCKS
        assert delivered(reader) == theirs.counters.loaded_blocks.total() == 0
        assert reader.call(lambda: reader.core.node.tiers[0].backend.used_bytes) == used
        assert reader.call(lambda: len(reader.core.node.index)) == 0
        assert broken(reader) == {**dict.fromkeys(Fault, 0), Fault.GIVEN_UP: 1}


def test_a_writer_that_dies_is_a_miss_for_the_layers_that_have_not_arrived(nodes: Nodes) -> None:
    writer, reader = nodes
    with client_of(reader) as theirs:
        ours = client_of(writer)
        growing = PrefixCache(ours).hand_over(TOKENS)
        written(growing, range(1))
        stream = PrefixCache(theirs).stream(TOKENS, handover=growing.handover)
        stream.read(range(1))
        ours.close()
        with pytest.raises(LeaseLostError):
            stream.read(range(1, 2))
        stream.close()


def test_an_agent_that_goes_away_is_told_from_a_writer_that_gives_up(nodes: Nodes) -> None:
    writer, reader = nodes
    with client_of(writer) as ours, client_of(reader) as theirs:
        growing = PrefixCache(ours).hand_over(TOKENS)
        written(growing, range(1))
        stream = PrefixCache(theirs).stream(TOKENS, handover=growing.handover)
        stream.read(range(1))
        writer.wait(writer.listener.close())
        with pytest.raises(LeaseLostError):
            stream.read(range(1, 2))
        stream.close()
        assert broken(reader) == {**dict.fromkeys(Fault, 0), Fault.AWAY: 1}


def test_nobody_sees_growing_blocks_without_their_name_or_their_scope(nodes: Nodes) -> None:
    writer, reader = nodes
    with client_of(writer) as ours, client_of(reader) as theirs, client_of(reader, "b") as stranger:
        growing = PrefixCache(ours).hand_over(TOKENS)
        written(growing, range(LAYERS))
        named = growing.handover
        assert named is not None

        for cache, handover in (
            (PrefixCache(theirs), None),
            (PrefixCache(theirs), Handover(named.agent, named.epoch, "guessed")),
            (PrefixCache(theirs), Handover(named.agent, named.epoch + 1, named.name)),
            (PrefixCache(theirs), Handover("pool.elsewhere", named.epoch, named.name)),
            (PrefixCache(stranger), named),
        ):
            with cache.stream(TOKENS, handover=handover) as stream:
                assert stream.blocks == 0
        with PrefixCache(theirs).stream(TOKENS, handover=named) as stream:
            assert stream.blocks == BLOCKS


def test_damaged_parts_are_never_read(nodes: Nodes) -> None:
    writer, reader = nodes
    with client_of(writer) as ours, client_of(reader) as theirs:
        growing = PrefixCache(ours).hand_over(TOKENS)
        written(growing, range(1))
        stream = PrefixCache(theirs).stream(TOKENS, handover=growing.handover)
        stream.read(range(1))
        slot = growing._slots[2]
        assert slot.view is not None
        size = LAYOUT.block_bytes // LAYERS
        filled = growing._fill

        def spoil(i: int, layer: int, row: memoryview) -> bytes:
            made = filled(i, layer, row)
            if i == 2:
                slot.view[size] ^= 1  # type: ignore[index]
            return made

        growing._fill = spoil  # type: ignore[method-assign]
        written(growing, range(1, 2))
        with pytest.raises(LeaseLostError):
            stream.read(range(1, 2))
        stream.close()
        assert reader.call(lambda: len(reader.core.node.index)) == 0
        assert broken(reader) == {**dict.fromkeys(Fault, 0), Fault.DAMAGED: 1}


def test_rows_of_another_shape_and_layers_too_many_are_refused(nodes: Nodes) -> None:
    writer, _ = nodes
    with client_of(writer) as ours:
        growing = PrefixCache(ours).hand_over(TOKENS)
        with pytest.raises(InvalidInputError, match="layer 0 of"):
            growing.write(np.zeros((1, 1), np.uint8))
        written(growing, range(LAYERS))
        with pytest.raises(InvalidInputError, match="layer 4 of"):
            written(growing, range(1))
        assert growing.finish() == (Published.PUBLISHED,) * BLOCKS
        assert growing.finish() == ()
