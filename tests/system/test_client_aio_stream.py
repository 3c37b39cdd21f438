"""Streams and hand-overs of the asyncio client, through real agents: the same as the blocking ones, and cancel-safe."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstrata import AsyncClient, AsyncPrefixCache, Published
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import BlockCorruptError, InvalidInputError, LeaseLostError
from kvstrata_api.wire import Handover
from kvstrata_client.prompt.handover import AsyncHandoverWriter
from kvstrata_client.prompt.streaming import AsyncLayerStream
from kvstrata_client.verbs.results import Bytes2D
from support.agent.handover_nodes import PeerThread, two_nodes
from support.agent.thread import AgentThread
from support.client.attached import PATIENT_S, target

pytestmark = pytest.mark.system

LAYOUT = Layout("tiny", "r1", "fp32", 16, 4, 2, 16, 4)
LAYERS, HEADS, BLOCKS = LAYOUT.layers, LAYOUT.kv_heads, 5
TOKENS = np.arange(16 * BLOCKS, dtype=np.uint32)
DATA: Bytes2D = np.random.default_rng(5).integers(0, 256, (BLOCKS, LAYOUT.block_bytes), np.uint8)
STORED = DATA.reshape(BLOCKS, LAYERS, -1)

Nodes = tuple[PeerThread, PeerThread]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with two_nodes(tmp_path) as made:
        yield made


@asynccontextmanager
async def cache_at(agent: AgentThread, *, strict: bool = True) -> AsyncIterator[AsyncPrefixCache]:
    client = await AsyncClient.attach(target(agent.socket, layout=LAYOUT), strict=strict, wait_s=PATIENT_S)
    async with client:
        assert client.is_attached, client.reason
        yield AsyncPrefixCache(client)


def leases(agent: AgentThread) -> int:
    return agent.call(lambda: len(agent.core.node.leases))


async def becomes(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENT_S):
        while not fact():  # noqa: ASYNC110  What an agent in another thread does gives no sign.
            await asyncio.sleep(0.005)


def with_stored(nodes: Nodes, test: Callable[[AsyncPrefixCache], Awaitable[None]]) -> None:
    """Run a test against the first node, which has all blocks, and see that it leaves no lease."""

    async def run() -> None:
        async with cache_at(nodes[0]) as cache:
            assert (await cache.store(TOKENS, DATA)).published == BLOCKS
            await test(cache)
            await becomes(lambda: leases(nodes[0]) == 0)

    asyncio.run(run())


@pytest.mark.parametrize("heads", [None, range(1), range(1, 2), range(2)])
def test_layers_come_in_order_and_are_those_of_the_whole(nodes: Nodes, heads: range | None) -> None:
    async def test(cache: AsyncPrefixCache) -> None:
        async with await cache.stream(TOKENS, heads=heads) as stream:
            assert (stream.blocks, set(stream.sources), stream.is_whole) == (BLOCKS, {"dram"}, True)
            assert leases(nodes[0]) == BLOCKS
            layers = [rows async for rows in stream]
        shaped = DATA.reshape(BLOCKS, LAYERS, 2, HEADS, -1)
        wanted = shaped if heads is None else shaped[:, :, :, heads.start : heads.stop]
        assert len(layers) == LAYERS
        for layer, rows in enumerate(layers):
            assert np.array_equal(rows, wanted[:, layer].reshape(BLOCKS, -1))
        with pytest.raises(LeaseLostError):
            await stream.read(range(1))

    with_stored(nodes, test)


def test_a_range_is_read_into_the_callers_memory(nodes: Nodes) -> None:
    async def test(cache: AsyncPrefixCache) -> None:
        into = np.zeros((3, 2 * LAYOUT.block_bytes // LAYERS), np.uint8)
        async with await cache.stream(TOKENS, blocks_max=3) as stream:
            assert await stream.read(range(1, 3), into) is into
            with pytest.raises(InvalidInputError):
                await stream.read(range(LAYERS, LAYERS + 1))
        assert np.array_equal(into, STORED[:3, 1:3].reshape(3, -1))

    with_stored(nodes, test)


def test_a_prompt_that_is_not_there_gives_an_empty_stream(nodes: Nodes) -> None:
    async def test(cache: AsyncPrefixCache) -> None:
        async with await cache.stream(TOKENS + np.uint32(7)) as stream:
            assert stream.blocks == 0
            assert [rows.shape async for rows in stream] == [(0, LAYOUT.block_bytes // LAYERS)] * LAYERS

    with_stored(nodes, test)


def test_a_hand_over_of_heads_is_refused(nodes: Nodes) -> None:
    async def test(cache: AsyncPrefixCache) -> None:
        with pytest.raises(InvalidInputError, match="whole layers"):
            await cache.stream(TOKENS, heads=range(1), handover=Handover("pool.node", 7, "x"))

    with_stored(nodes, test)


def test_leases_that_were_taken_back_void_the_stream(nodes: Nodes) -> None:
    node = nodes[0].core.node

    async def test(cache: AsyncPrefixCache) -> None:
        stream = await cache.stream(TOKENS)
        await stream.read(range(1))
        nodes[0].call(lambda: node.end_leases(node.leases.end_where(lambda _: True)))
        with pytest.raises(LeaseLostError):
            await stream.__aexit__(None, None, None)

    with_stored(nodes, test)


def test_a_layer_that_rots_is_not_read_and_the_agent_looks_at_it(nodes: Nodes) -> None:
    def flip(digest: bytes) -> None:
        (entry,) = (e for e in nodes[0].core.node.index if e.digest == digest)
        tier, slot, _ = entry.residences[0]
        assert tier.backend.mappable is not None
        with tier.backend.mappable.view(slot) as view:
            view[LAYOUT.block_bytes // LAYERS] ^= 1

    async def test(cache: AsyncPrefixCache) -> None:
        async with await cache.stream(TOKENS) as stream:
            nodes[0].call(lambda: flip(stream._leases[2].digest))
            await stream.read(range(1))
            with pytest.raises(BlockCorruptError, match="block 2"):
                await stream.read(range(1, 2))
        assert (await cache.lookup(TOKENS)).blocks == 2

    with_stored(nodes, test)


@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_reader_leaves_no_lease(nodes: Nodes, steps: int) -> None:
    """Cancelled after so many steps of the loop: while it leases, while it copies, while it gives back."""

    async def read(cache: AsyncPrefixCache) -> None:
        async with await cache.stream(TOKENS) as stream:
            async for _ in stream:
                pass

    async def test(cache: AsyncPrefixCache) -> None:
        reading = asyncio.create_task(read(cache))
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        reading.cancel()
        ends = await asyncio.gather(reading, return_exceptions=True)
        assert ends[0] is None or isinstance(ends[0], asyncio.CancelledError)

    with_stored(nodes, test)


def test_nothing_is_written_once_a_cancelled_read_has_returned(nodes: Nodes) -> None:
    async def test(cache: AsyncPrefixCache) -> None:
        async with await cache.stream(TOKENS) as stream:
            begun, goes_on, copy = threading.Event(), threading.Event(), stream._copy

            def slow(layers: range, into: Bytes2D | None) -> Bytes2D:
                begun.set()
                goes_on.wait(PATIENT_S)
                return copy(layers, into)

            stream._copy = slow  # type: ignore[method-assign]
            into = np.zeros_like(DATA)
            reading = asyncio.create_task(stream.read(range(LAYERS), into))
            await becomes(begun.is_set)
            reading.cancel()
            await asyncio.sleep(0.01)
            assert not reading.done(), "the copy is under way"
            goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert np.array_equal(into, DATA)
            assert np.array_equal(await stream.read(range(LAYERS)), DATA)

    with_stored(nodes, test)


async def write(growing: AsyncHandoverWriter, layer: int) -> None:
    await growing.write(np.ascontiguousarray(STORED[:, layer]))


@asynccontextmanager
async def handing_over(nodes: Nodes) -> AsyncIterator[tuple[AsyncHandoverWriter, AsyncLayerStream]]:
    async with cache_at(nodes[0], strict=False) as ours, cache_at(nodes[1], strict=False) as theirs:
        growing = await ours.hand_over(TOKENS)
        assert (growing.blocks, growing.first_block) == (BLOCKS, 0)
        stream = await theirs.stream(TOKENS, handover=growing.handover)
        try:
            yield growing, stream
        finally:
            await stream.close()


def test_a_layer_is_read_elsewhere_before_the_next_one_is_written(nodes: Nodes) -> None:
    async def run() -> None:
        async with handing_over(nodes) as (growing, stream):
            layer = 0
            await write(growing, 0)
            async for rows in stream:
                assert np.array_equal(rows, STORED[:, layer])
                layer += 1
                if layer < LAYERS:
                    await write(growing, layer)
            assert await growing.finish() == (Published.PUBLISHED,) * BLOCKS
            assert await growing.finish() == ()

    asyncio.run(run())


def test_a_reader_that_waits_for_a_layer_leaves_the_loop_to_its_writer(nodes: Nodes) -> None:
    async def run() -> None:
        async with handing_over(nodes) as (growing, stream):
            reading = asyncio.create_task(stream.read(range(LAYERS)))
            await asyncio.sleep(0)
            for layer in range(LAYERS):
                await write(growing, layer)
            assert np.array_equal(await reading, DATA)

    asyncio.run(run())


def test_what_a_cancelled_writer_left_is_lost_for_its_reader_and_given_back(nodes: Nodes) -> None:
    async def run() -> None:
        async with handing_over(nodes) as (growing, stream):
            await write(growing, 0)
            assert np.array_equal(await stream.read(range(1)), STORED[:, 0])
            writing = asyncio.create_task(write(growing, 1))
            await asyncio.sleep(0)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            await becomes(lambda: nodes[0].call(lambda: len(nodes[0].core.node.reservations)) == 0)
            with pytest.raises(LeaseLostError, match="layer 1"):
                await stream.read(range(1, 2))
            await write(growing, 2)
            assert await growing.finish() == ()

    asyncio.run(run())
