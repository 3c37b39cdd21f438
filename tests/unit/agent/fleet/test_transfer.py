"""Blocks from a peer: what lands is judged, and landing buffers come back when NIXL has ended with them."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstrata_agent.cache.ports import Wanted
from kvstrata_agent.fleet.peers import transfer, wire
from kvstrata_agent.fleet.peers.nixl import Landed, NixlReader, Read
from kvstrata_agent.fleet.peers.transfer import LANES, Leased, Result, Transfers, Transport
from kvstrata_api.blocks import BlockKey, LayoutId, ScopeId
from kvstrata_api.units import KIB
from kvstrata_metadata.store.records import Location

if TYPE_CHECKING:
    from kvstrata_agent.fleet.peers.client import Link

pytestmark = pytest.mark.unit

BLOCK_BYTES = 4 * KIB
DEADLINE_S = 1e9


class HeldNixl:
    """Reads that end when the test says so, all bytes zero."""

    generation = 1

    def __init__(self) -> None:
        self.flights: list[Future[None]] = []

    def register(self, _region: int, _view: memoryview) -> None:
        """Nothing to know."""

    def read(self, _name: str, _reads: Sequence[Read]) -> Landed:
        """Start one."""
        self.flights.append(Future())
        return self.flights[-1]


def leased(number: int) -> Leased:
    at = Location("p.n", 1, "dram", 1, BLOCK_BYTES)
    key = BlockKey(ScopeId("s"), number.to_bytes(20, "big"))
    wanted = Wanted(key, LayoutId(bytes(16)), at, memoryview(bytearray(b"\x01" * BLOCK_BYTES)), 7, 9)
    return Leased(wanted, wire.Loan(number, 0, BLOCK_BYTES, 1, 1, b"", bytes(16)))


def them() -> "Link":
    return cast("Link", SimpleNamespace(describing=asyncio.Lock(), nixl_generation=1, nixl_name="them"))


def some(nixl: HeldNixl) -> tuple[Transfers, list[Leased]]:
    transfers = Transfers(cast("NixlReader", nixl), landing_bytes=64 * BLOCK_BYTES)
    return transfers, [leased(number) for number in range(1, 3 * LANES)]


async def until(nixl: HeldNixl, bringing: "asyncio.Task[Any]") -> None:
    """End every read until the batch is over."""
    while not bringing.done():
        await asyncio.sleep(0.001)
        for flight in nixl.flights:
            if not flight.done():
                flight.set_result(None)


async def test_blocks_of_all_pieces_are_judged_and_no_buffer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", BLOCK_BYTES)
    nixl = HeldNixl()
    transfers, blocks = some(nixl)
    bringing = asyncio.create_task(transfers.bring(them(), blocks, 1, DEADLINE_S))
    await until(nixl, bringing)

    assert (await bringing) == dict.fromkeys(blocks, (Result.CORRUPT, Transport.NIXL))
    assert len(nixl.flights) == len(blocks)
    assert transfers.landing_bytes == 0


async def test_nobody_writes_into_targets_after_an_error_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl, may_verify, begun, ended = HeldNixl(), threading.Event(), [0], [0]

    def first_fails(_transfers: Transfers, piece: Sequence[Leased], _buffer: int) -> dict[Leased, Result]:
        begun[0] += 1
        if begun[0] == 1:
            raise ValueError("not foreseen")
        assert may_verify.wait(10.0)
        ended[0] += 1
        return dict.fromkeys(piece, Result.CORRUPT)

    monkeypatch.setattr(Transfers, "_take_over", first_fails)
    monkeypatch.setattr(transfer, "PIECE_BYTES", BLOCK_BYTES)
    transfers, blocks = some(nixl)
    bringing = asyncio.create_task(transfers.bring(them(), blocks, 1, DEADLINE_S))
    await asyncio.sleep(0)
    for flight in tuple(nixl.flights):
        flight.set_result(None)
    await asyncio.sleep(0.02)
    is_over = bringing.done()
    may_verify.set()

    with pytest.raises(ValueError, match="not foreseen"):
        await bringing
    assert is_over == (begun[0] == 1), "others still verified into their targets"
    assert begun[0] - 1 == ended[0]
    for flight in nixl.flights:
        if not flight.done():
            flight.set_result(None)
    assert transfers.landing_bytes == 0


async def test_what_nixl_does_not_end_keeps_its_buffers_until_it_does() -> None:
    nixl = HeldNixl()
    transfers, blocks = some(nixl)
    bringing = asyncio.create_task(transfers._by_nixl(them(), blocks, time.monotonic() + 0.05))

    assert await bringing == {}
    assert transfers.landing_bytes == len(blocks) * BLOCK_BYTES
    for flight in nixl.flights:
        flight.set_result(None)
    assert transfers.landing_bytes == 0
    assert bytes(blocks[0].wanted.into) == bytes(b"\x01" * BLOCK_BYTES)
