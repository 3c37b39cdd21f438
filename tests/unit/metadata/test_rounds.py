"""Laws of the metadata service's rounds: what fails costs itself, and the next round comes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.directory.registry import Fleet, Member
from kvstrata_metadata.duties import eraser
from kvstrata_metadata.duties.authority import Alone
from kvstrata_metadata.duties.eraser import Eraser
from kvstrata_metadata.duties.nominator import Nominator
from kvstrata_metadata.service.rounds import Rounds
from kvstrata_metadata.store.keys import SHARDS, Shard, mailbox_key
from kvstrata_metadata.store.records import Incarnation, Mandate
from kvstrata_metadata.store.scripts import Script
from kvstrata_metadata.store.store import Call, Store
from support.agent.engine import steps_until

pytestmark = pytest.mark.unit

HERE, AWAY = Incarnation(b"here."), Incarnation(b"away.")
TAG_HERE, TAG_AWAY = "0123456789abcdef", "fedcba9876543210"


class Puzzling(Store):
    """Answers something that nobody has thought of."""

    def __init__(self) -> None:  # Opens nothing.
        self.asked = 0

    async def is_installed(self) -> bool:
        self.asked += 1
        raise ValueError("not an answer")


class PartlyAway(Store):
    """A cluster of which one part does not answer: that of one mailbox and one scope."""

    def __init__(self) -> None:  # Opens nothing.
        self.posted: list[bytes] = []
        self.settled: list[Any] = []

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        for call in calls:
            if call.key == mailbox_key(AWAY) or TAG_AWAY.encode() in call.key:
                raise DirectoryAwayError("redis: away", is_partial=True)
        return [self.reply(call) for call in calls]

    def reply(self, call: Call) -> Any:
        if call.script is Script.CLAIMS:
            return [TAG_AWAY.encode(), 1, 1, b"gone", TAG_HERE.encode(), 1, 1, b"gone"]
        if call.script is Script.ERASE:
            return [0, -1]
        (self.settled if call.script is Script.SETTLE_CLAIM else self.posted).append(call.key)
        return 1


class Vast(PartlyAway):
    """Has one scope that so many agents had that its erasure takes longer than anybody waits."""

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        if calls[0].script is Script.ERASE and TAG_AWAY.encode() in calls[0].key:
            await asyncio.sleep(0.01)
            return [[0, int(call.args[0]) + 1] for call in calls]
        return [self.reply(call) for call in calls]


async def nobody_owns() -> dict[str, int]:
    return {}


async def test_a_round_that_fails_in_a_way_that_nobody_has_thought_of_is_not_the_last() -> None:
    store = Puzzling()
    rounds = Rounds(Alone(), None, None, 0.0, CollectorRegistry())
    going = asyncio.create_task(rounds.run(store))

    await steps_until(lambda: store.asked >= 3)

    assert not rounds.is_ready()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)


async def test_advice_goes_round_a_mailbox_that_is_away() -> None:
    store, authority = PartlyAway(), Alone()
    nominator, mandate = Nominator(store, authority), Mandate(0, "alone")
    every = tuple(Shard("tag", index) for index in range(SHARDS))

    await nominator.nominate_erased(["tag"], Fleet("", (Member(AWAY, None, every), Member(HERE, None, every))), mandate)

    assert store.posted == [mailbox_key(HERE)]
    assert nominator.nominated.refused == 1


async def test_a_scope_that_is_away_keeps_no_other_from_being_erased() -> None:
    store, authority = PartlyAway(), Alone()

    erased = await Eraser(store, nobody_owns, authority).erase(Mandate(0, "alone"))

    assert erased == [TAG_HERE]
    assert len(store.settled) == 1


async def test_a_round_ends_however_long_an_erasure_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nobody who dies is fenced meanwhile, and the leader is restarted for a loop that does not turn."""
    monkeypatch.setattr(eraser, "ERASING_S_MAX", 0.1)
    store = Vast()
    made = Eraser(store, nobody_owns, Alone())

    assert await asyncio.wait_for(made.erase(Mandate(0, "alone")), 5.0) == []
    assert not store.settled
    assert made.erased.waiting == 2
