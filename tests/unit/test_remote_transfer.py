"""Pieces from a peer: the wire has the next one while those that have landed are verified."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvfleet_agent.ports import Wanted
from kvfleet_agent.remote import transfer, wire
from kvfleet_agent.remote.nixl import Landed, NixlReader, Read
from kvfleet_agent.remote.transfer import LANES, MOVING, Leased, Result, Transfers
from kvfleet_api.blocks import BlockKey, LayoutId, ScopeId
from kvfleet_api.units import KIB
from kvfleet_metadata.records import Location

if TYPE_CHECKING:
    from kvfleet_agent.remote.link import Link

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

    @property
    def moving(self) -> int:
        """Reads that have not ended."""
        return sum(not flight.done() for flight in self.flights)


def leased(number: int) -> Leased:
    at = Location("p.n", 1, "dram", 1, BLOCK_BYTES)
    key = BlockKey(ScopeId("s"), number.to_bytes(20, "big"))
    wanted = Wanted(key, LayoutId(bytes(16)), at, memoryview(bytearray(BLOCK_BYTES)), 7, 9)
    return Leased(wanted, wire.Loan(number, 0, BLOCK_BYTES, 1, 1, b"", bytes(16)))


def them() -> "Link":
    return cast("Link", SimpleNamespace(describing=asyncio.Lock(), nixl_generation=1, nixl_name="them"))


def some(nixl: HeldNixl) -> tuple[Transfers, list[Leased]]:
    transfers = Transfers(cast("NixlReader", nixl), landing_bytes=64 * BLOCK_BYTES)
    return transfers, [leased(number) for number in range(1, 3 * LANES)]


async def test_pieces_that_have_landed_leave_the_wire_while_they_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl, may_verify, most = HeldNixl(), asyncio.Event(), 0

    async def held(_executor: object, _size_bytes: int, call: Callable[[], Any]) -> Any:
        await may_verify.wait()
        return call()

    monkeypatch.setattr(transfer, "here_or_in_thread", held)
    monkeypatch.setattr(transfer, "PIECE_BYTES", BLOCK_BYTES)
    transfers, blocks = some(nixl)
    bringing = asyncio.create_task(transfers.bring(them(), blocks, 1, DEADLINE_S))

    for _ in range(8 * len(blocks)):
        await asyncio.sleep(0)
        most = max(most, nixl.moving)
        for flight in nixl.flights:
            if not flight.done():
                flight.set_result(None)
    started = len(nixl.flights)
    may_verify.set()
    while not bringing.done():
        await asyncio.sleep(0)
        for flight in nixl.flights:
            if not flight.done():
                flight.set_result(None)

    assert most == MOVING
    assert started == LANES
    assert [result for result, _ in (await bringing).values()] == [Result.CORRUPT] * len(blocks)
    assert transfers.landing_bytes == 0


async def test_nobody_writes_into_targets_after_an_error_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl, may_verify, verified = HeldNixl(), asyncio.Event(), 0

    async def first_fails(_executor: object, _size_bytes: int, call: Callable[[], Any]) -> Any:
        nonlocal verified
        verified += 1
        if verified == 1:
            raise ValueError("not foreseen")
        await may_verify.wait()
        return call()

    monkeypatch.setattr(transfer, "here_or_in_thread", first_fails)
    monkeypatch.setattr(transfer, "PIECE_BYTES", BLOCK_BYTES)
    transfers, blocks = some(nixl)
    bringing = asyncio.create_task(transfers.bring(them(), blocks, 1, DEADLINE_S))

    while not bringing.done():
        await asyncio.sleep(0)
        for flight in nixl.flights:
            if not flight.done():
                flight.set_result(None)
        if verified == LANES and not may_verify.is_set():
            assert not bringing.done(), "others still verify into their targets"
            may_verify.set()

    with pytest.raises(ValueError, match="not foreseen"):
        await bringing
    assert may_verify.is_set()
    assert transfers.landing_bytes == 0
