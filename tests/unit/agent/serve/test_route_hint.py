"""Which nodes have a prompt, through the verb: this one and those of the directory, and nothing of other tenants."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.poolnode import TierProbe
from kvstrata_metadata.store.records import Announcement
from support.agent.doubles import BLOCK_BYTES, SCOPE, digest, secret
from support.agent.engine import Engine, close
from support.agent.pair import FakeDirectory

pytestmark = pytest.mark.unit


class Fleet:
    """An agent, and what the directory has of others."""

    def __init__(self) -> None:
        self.shared: dict[tuple[str, bytes], dict[str, Announcement]] = {}
        self.directory = FakeDirectory(self.shared, "pool.node")

    def has(self, node: str, medium: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            held = self.shared.setdefault((secret(SCOPE).tag(), digest(number)), {})
            held[f"pool.{node}"] = Announcement(digest(number), medium, number, BLOCK_BYTES)

    async def engine(self) -> Engine:
        return await Engine(self.directory, recompute={"type": "AlwaysFetch", "prefillTokensPerSecond": 16}).attach()


async def hint(engine: Engine, *numbers: int, scope: ScopeId = SCOPE) -> dict[str, Any]:
    answer = await engine.ask(wire.RouteHint(9, scope, b"".join(map(digest, numbers))))
    told: dict[str, Any] = json.loads(answer.json)
    return told


async def test_the_longest_and_the_soonest_are_named_with_what_they_have() -> None:
    fleet = Fleet()
    engine = await fleet.engine()
    await engine.store(1, 2)
    fleet.has("long", "NVMe", [1, 2, 3, 4])
    fleet.has("short", "HostDRAM", [1])
    fleet.has("gap", "HostDRAM", [2, 3, 4])
    node = engine.core.node

    told = await hint(engine, 1, 2, 3, 4)
    assert (told["blocks"], told["longest"], told["is_alone"]) == (4, "long", False)
    assert [(n["node"], n["blocks"], n["media"]) for n in told["nodes"]] == [
        ("long", 4, {"NVMe": 4}),
        (node.name, 2, {"HostDRAM": 2}),
        ("short", 1, {"HostDRAM": 1}),
    ]
    assert told["nodes"][1]["seconds"] == pytest.approx(2 * node.spec.compatibility.block_tokens / 16)

    node.tiers[1].probe = TierProbe(read_bytes_per_second=1, read_latency_microseconds=60_000_000)
    told = await hint(engine, 1, 2, 3, 4)
    assert (told["longest"], told["nodes"][0]["node"]) == ("long", node.name)
    await close(engine)


async def test_without_a_directory_this_node_answers_and_says_that_it_is_alone() -> None:
    fleet = Fleet()
    engine = await fleet.engine()
    await engine.store(1)
    fleet.has("long", "HostDRAM", [1, 2])
    fleet.directory.is_up = False

    told = await hint(engine, 1, 2)
    assert (told["is_alone"], [n["node"] for n in told["nodes"]]) == (True, [engine.core.node.name])
    await close(engine)


async def test_what_is_not_the_callers_is_answered_like_what_never_was() -> None:
    fleet = Fleet()
    engine = await fleet.engine()
    await engine.store(1)

    others = await engine.ask(wire.RouteHint(9, "tenant/b/uid-b/v1", digest(1)))
    assert others == await engine.ask(wire.RouteHint(9, SCOPE, digest(77)))
    assert json.loads(others.json)["nodes"] == []
    with pytest.raises(InvalidInputError, match="digests of 0 B"):
        await hint(engine)
    await close(engine)


async def test_a_question_is_no_use_of_the_blocks() -> None:
    fleet = Fleet()
    engine = await fleet.engine()
    await engine.store(1)
    entry = engine.core.node.index.find(*engine.key(1))
    assert entry is not None
    before = entry.used_at_s, entry.mark
    engine.clock.now_s += 100.0
    await hint(engine, 1, 2)

    assert (entry.used_at_s, entry.mark) == before
    await close(engine)
