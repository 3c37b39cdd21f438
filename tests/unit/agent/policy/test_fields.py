"""Each field of a pool's policy changes a decision: one that nobody reads fails here, and so does one without an entry.

Every entry plays one scene with each of its values, and nothing else different. What is decided differs each time.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
from pydantic import BaseModel

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.sessions import SessionState
from kvstrata_agent.cache.eviction_candidates import EvictionRequest
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_agent.movement.path import Priority
from kvstrata_api import wire
from kvstrata_api.blocks import Layout
from kvstrata_api.checksum import checksum
from kvstrata_api.models.pool import Compatibility, PoolPolicy
from kvstrata_api.models.poolnode import TierProbe
from kvstrata_metadata.duties.cluster import parse_pool
from kvstrata_metadata.duties.nominations import AgentFacts, OverReplicated, plan_nominations
from kvstrata_metadata.store.records import Copy, Incarnation
from support.agent.doubles import BLOCK_BYTES, SCOPE, Clock, dict_tier, digest, dram_tier, make_node, secret
from support.agent.engine import SLOTS, Engine, close, steps_until
from support.backends.generated_kv import kv_block

pytestmark = pytest.mark.unit

Policy = Mapping[str, Any]
"""`spec.policy` of a pool, as a manifest has it."""
NOTHING: Policy = {}
NOT_FULL: Policy = {"eviction": {"highWatermarkPercent": 100, "lowWatermarkPercent": 99}}
BF16 = Layout("tiny", "r1", "bf16", 16, layers=1, kv_heads=2, head_dim=64, element_bytes=2)
CALIBRATED = {"layoutId": BF16.layout_id().hex(), "maxRelativeErrorPermille": 30, "forms": "4444"}
LOSSY: Policy = {"compression": {"mode": "Auto", "maxRelativeErrorPermille": 30}}
TUNED: Policy = {"compression": {"mode": "Auto", "maxRelativeErrorPermille": 30, "calibration": [CALIBRATED]}}
GUESSED = ("int4_column", "int8_row")
"""Forms that planes get of which nobody knows anything."""
PRESSED: Policy = {"eviction": {"highWatermarkPercent": 50, "lowWatermarkPercent": 49}}


def fields(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, Any]]:
    """Path, as manifests write it, and type of each field that holds no other ones; `[]` stands for any of a list."""
    for name, field in model.model_fields.items():
        path, of = before + (field.alias or name), field.annotation
        if get_origin(of) is tuple:
            path, of = f"{path}[]", get_args(of)[0]
        if isinstance(of, type) and issubclass(of, BaseModel):
            yield from fields(of, f"{path}.")
        else:
            yield path, of


def merged(one: Any, other: Any) -> Any:
    """Both; of the same field the other's."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {key: merged(one.get(key), other.get(key)) for key in (*one, *other)}
    if isinstance(one, list) and isinstance(other, list):
        return [merged(*both) for both in zip(one, other, strict=True)]
    return one if other is None else other


def policy_with(path: str, value: object, beside: Policy) -> Policy:
    """A policy with one field set, and what the scene needs beside it."""
    made = value
    for part in reversed(path.split(".")):
        name, is_list = part.removesuffix("[]"), part.endswith("[]")
        made = {name: [made] if is_list else made}
    policy: Policy = merged(beside, made)
    return policy


def here(engine: Engine, *numbers: int) -> tuple[int, ...]:
    """Which of these blocks are in memory."""
    node = engine.core.node
    found = {n: node.index.find(*engine.key(n)) for n in numbers}
    return tuple(n for n, entry in found.items() if entry is not None and entry.residence(node.tiers[0]) is not None)


async def first_to_leave(policy: Policy) -> object:
    """Which of two chains is left once one had to leave: of a session that is expected, or a younger one."""
    engine = await Engine(**policy).attach()
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    engine.clock.now_s += 60.0
    await engine.store(11, 12)
    engine.clock.now_s += 60.0
    await engine.attach()
    await engine.ask(wire.TouchSession(1, "s", "idle", 0, 5.0))
    await engine.core.cache.evictor.evict(engine.core.node.tiers[0], EvictionRequest(2 * BLOCK_BYTES, "room"))
    left = here(engine, 1, 2, 11, 12)
    await close(engine)
    return left


async def left_by_the_watermarks(policy: Policy) -> object:
    """Blocks that a sweep leaves of 12 where 16 have room."""
    engine = await Engine(**policy).attach()
    await engine.store(*range(1, 13))
    await engine.core.cache.evictor.trim(engine.core.node.tiers[0])
    blocks = engine.core.node.contents(engine.core.node.tiers[0]).blocks
    await close(engine)
    return blocks


async def sent_down_when_new(policy: Policy) -> object:
    """Whether new blocks are copied down at once: the first four, and the last four of a full memory."""
    engine = await Engine(**policy).attach()
    sent: list[bool] = []
    for first in range(1, SLOTS, 4):
        await engine.store(*range(first, first + 4))
        sent.append(engine.core.cache.archiver.waiting > sum(sent) * 4)
    await close(engine)
    return sent[0], sent[-1]


async def tier_of_what_leaves(policy: Policy) -> object:
    """Where two blocks go: while the next tier has room, and once a place there costs more than it brings."""
    engine = await Engine(cxl_slots=8, **policy).attach()
    dram, cxl, _ = engine.core.node.tiers
    for number in (1, 11):
        await engine.store(number)
        await engine.core.cache.evictor.evict(dram, EvictionRequest(dram.backend.capacity_bytes, "room"))
        cxl.price.per_s = 1e9  # Uses a second.
    found = [engine.core.node.index.find(*engine.key(n)) for n in (1, 11)]
    await close(engine)
    return tuple(copy.tier.name for entry in found if entry is not None for copy in entry.residences)


async def prefetched(policy: Policy) -> object:
    """How many of three blocks below begin to come up when a client asks for that."""
    engine = await Engine(**policy).attach()
    await engine.store(1, 2, 3)
    await engine.push_down()
    hinted = await engine.ask(wire.Prefetch(1, SCOPE, b"".join(map(digest, (1, 2, 3)))))
    await steps_until(lambda: not engine.core.cache.mover.bytes_under_way)
    up = len(here(engine, 1, 2, 3))
    await close(engine)
    return up, hinted.outcome


async def read_from_a_slow_tier(policy: Policy) -> object:
    """How many of three blocks, half of a megabyte a second away, a reader gets."""
    engine = await Engine(**policy).attach()
    await engine.store(1, 2, 3)
    await engine.push_down()
    engine.core.node.tiers[1].probe = TierProbe(read_bytes_per_second=500_000, read_latency_microseconds=50_000)
    acquired = await engine.acquire(1, 2, 3, deadline_s=5.0)
    await close(engine)
    return len(acquired.blocks)


async def up_after_a_tool_call(policy: Policy) -> object:
    """Blocks of a session that come up within four seconds of a tool call of which nobody knows how long it takes."""
    engine = await Engine(**policy).attach()
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    await engine.push_down()
    await engine.ask(wire.TouchSession(1, "s", "tool"))
    engine.clock.now_s += 4.0
    engine.core.cache.life.bring_up(engine.clock.now_s)
    await steps_until(lambda: not engine.core.cache.mover.bytes_under_way)
    up = len(here(engine, 1, 2))
    await close(engine)
    return up


async def session_after_ten_minutes(policy: Policy) -> object:
    """What has become of a session that nobody has touched since; None: it is forgotten."""
    engine = await Engine(**policy).attach()
    await engine.ask(wire.OpenSession(1, "s"))
    await engine.store(1, 2, session="s")
    await engine.ask(wire.TouchSession(1, "s", "idle"))
    engine.clock.now_s += 600.0
    engine.core.cache.life.sweep(engine.clock.now_s)
    session = engine.core.node.sessions.find("a", "s")
    await close(engine)
    return session.state if session is not None else None


async def superfluous_copies(policy: Policy) -> object:
    """How many of four copies of a block the metadata service nominates."""
    pool = parse_pool(json.dumps({"metadata": {"name": "p"}, "spec": {"policy": policy}}).encode())
    holders = [Incarnation(bytes((n,)) * 5) for n in range(4)]
    block = OverReplicated("tag", digest(1), tuple(Copy(holder, "NVMe", 1, 1) for holder in holders))
    living = {holder: AgentFacts(f"p.n{n}") for n, holder in enumerate(holders)}
    return len(plan_nominations([block], living, {pool.name: pool.copies}))


async def stored_form(policy: Policy) -> object:
    """Codec of a block behind the root that has left memory, and the forms of its planes."""
    node = make_node([dram_tier(16 * BF16.block_bytes), dict_tier("nvme", 1 << 20, 1, 2)], Clock(), policy=policy)
    bf16 = Compatibility(model="tiny", revision="r1", dtype="bf16", block_tokens=16)
    node.spec = node.spec.model_copy(update={"compatibility": bf16})
    core = AgentParts(node, CodecRegistry())
    place = RequestContext(1, "a", secret(SCOPE), BF16.layout_id(), BF16.block_bytes)
    node.remember_layout(place.layout_id, BF16)
    made, *_ = await core.cache.writer.reserve(place, b"", [digest(1), digest(2)])
    sums = []
    for reservation, number in zip(made, (1, 2), strict=True):
        assert reservation is not None
        assert reservation.tier.backend.mappable is not None
        raw = kv_block(number, heads=2, dim=64, layers=1)
        reservation.tier.backend.mappable.view(reservation.slot)[: len(raw)] = raw
        sums.append(checksum(raw, digest(number), node.epoch, reservation.slot.stamp))
    core.cache.writer.publish_now(1, [r.id for r in made if r is not None], sums)
    entry = node.index.find(SCOPE, digest(2))
    assert entry is not None
    move = core.cache.mover.plan(entry, entry.residences[0], node.tiers[1])
    assert await core.cache.mover.copy_all([move], node.tiers[1], Priority.DEMOTE) == [True]
    counted = node.counters._children.items()
    forms = {labels[0] for (name, *labels), c in counted if name == "kvstrata_codec_planes_total" and c._value.get()}
    codec = entry.residences[1].record.codec
    await core.close()
    for tier in node.tiers:
        await tier.backend.close()
    return codec, *sorted(forms)


class Entry(NamedTuple):
    """What is decided by each value of a field."""

    play: Callable[[Policy], Awaitable[object]]
    decided: dict[Any, object]
    beside: Policy = NOTHING


FIELDS: dict[str, Entry] = {
    "eviction.type": Entry(first_to_leave, {"ReuseAware": (1, 2), "LeafLRU": (11, 12)}, NOT_FULL),
    "eviction.highWatermarkPercent": Entry(
        left_by_the_watermarks, {70: 8, 80: 12}, {"eviction": {"lowWatermarkPercent": 50}}
    ),
    "eviction.lowWatermarkPercent": Entry(
        left_by_the_watermarks, {25: 4, 50: 8}, {"eviction": {"highWatermarkPercent": 70}}
    ),
    "admission.type": Entry(
        sent_down_when_new, {"Always": (False, False), "Auto": (False, True), "Never": (True, True)}, PRESSED
    ),
    "placement.type": Entry(
        tier_of_what_leaves,
        {"ReuseInterval": ("cxl", "nvme"), "Cascade": ("cxl", "cxl")},
        {"eviction": {"highWatermarkPercent": 2, "lowWatermarkPercent": 1}},
    ),
    "prefetch.type": Entry(prefetched, {"Urgency": (3, wire.Outcome.ACCEPTED), "None": (0, wire.Outcome.REFUSED)}),
    "prefetch.maxInflightBytes": Entry(
        prefetched, {BLOCK_BYTES: (1, wire.Outcome.PARTIAL), 3 * BLOCK_BYTES: (3, wire.Outcome.ACCEPTED)}
    ),
    "recompute.type": Entry(
        read_from_a_slow_tier,
        {"CostModel": 0, "AlwaysFetch": 3},
        {"recompute": {"prefillTokensPerSecond": 100_000_000}},
    ),
    "recompute.prefillTokensPerSecond": Entry(read_from_a_slow_tier, {100: 3, 100_000_000: 0}),
    "retention.toolGapSeconds": Entry(up_after_a_tool_call, {5: 2, 300: 0}),
    "retention.idleSeconds": Entry(session_after_ten_minutes, {300: SessionState.ARCHIVING, 3600: SessionState.IDLE}),
    "retention.archive": Entry(
        session_after_ten_minutes,
        {True: SessionState.ARCHIVING, False: None},
        {"retention": {"idleSeconds": 300}},
    ),
    "retention.copies": Entry(superfluous_copies, {1: 3, 3: 1, 4: 0}),
    "compression.mode": Entry(
        stored_form, {"None": ("raw",), "Lossless": ("packed",), "Auto": ("mixed", *GUESSED)}, LOSSY
    ),
    "compression.maxRelativeErrorPermille": Entry(
        stored_form, {0: ("packed",), 30: ("mixed", *GUESSED)}, {"compression": {"mode": "Auto"}}
    ),
    "compression.calibration[].layoutId": Entry(
        stored_form, {CALIBRATED["layoutId"]: ("mixed", "int8_column"), "0" * 32: ("mixed", *GUESSED)}, TUNED
    ),
    "compression.calibration[].maxRelativeErrorPermille": Entry(
        stored_form, {30: ("mixed", "int8_column"), 60: ("mixed", *GUESSED)}, TUNED
    ),
    "compression.calibration[].forms": Entry(
        stored_form, {"4444": ("mixed", "int8_column"), "3333": ("mixed", "int8_row")}, TUNED
    ),
}


def test_every_field_and_every_named_value_is_played() -> None:
    found = dict(fields(PoolPolicy))
    assert FIELDS.keys() == found.keys()
    for path, of in found.items():
        if get_origin(of) is Literal:
            assert set(FIELDS[path].decided) == set(get_args(of)), path
        if of is bool:
            assert set(FIELDS[path].decided) == {True, False}, path


@pytest.mark.parametrize("path", FIELDS)
async def test_a_field_changes_what_is_decided(path: str) -> None:
    play, expected, beside = FIELDS[path]
    decided = {value: await play(policy_with(path, value, beside)) for value in expected}
    assert decided == expected
    assert len(set(decided.values())) == len(decided) > 1, "ignored, it would decide the same"
