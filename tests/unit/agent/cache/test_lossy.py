"""Blocks that lost something once never lose more, and never pass for what their writer wrote."""

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.block import Entry, Residence
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_agent.movement.path import Priority
from kvstrata_api.blocks import Layout
from kvstrata_api.checksum import checksum
from kvstrata_api.models.pool import Compatibility, CompressionPolicy
from kvstrata_native.forms import ROTATED, Rung
from support.agent.doubles import SCOPE, Clock, DictBackend, dict_tier, digest, dram_tier, make_node, secret
from support.backends.generated_kv import kv_block

pytestmark = pytest.mark.unit

LAYOUT = Layout("tiny", "r1", "bf16", 16, layers=1, kv_heads=2, head_dim=64, element_bytes=2)
BLOCK_BYTES = LAYOUT.block_bytes
PERMITTED = 0.03
PLACE = RequestContext(1, "a", secret(SCOPE), LAYOUT.layout_id(), BLOCK_BYTES)


def permit(core: AgentParts, mode: str, permille: int) -> None:
    compression = CompressionPolicy.model_validate({"mode": mode, "maxRelativeErrorPermille": permille})
    policy = core.node.spec.policy.model_copy(update={"compression": compression})
    core.node.spec = core.node.spec.model_copy(update={"policy": policy})


@pytest.fixture
async def core() -> AsyncIterator[AgentParts]:
    tiers = [
        dram_tier(64 * BLOCK_BYTES),
        *(dict_tier(n, 64 * BLOCK_BYTES, i, i + 1) for i, n in ((1, "nvme"), (2, "s3"))),
    ]
    made = AgentParts(make_node(tiers, Clock()), CodecRegistry())
    bf16 = Compatibility(model="tiny", revision="r1", dtype="bf16", block_tokens=16)
    made.node.spec = made.node.spec.model_copy(update={"compatibility": bf16})
    made.node.remember_layout(PLACE.layout_id, LAYOUT)
    permit(made, "Auto", round(1000 * PERMITTED))
    yield made
    await made.close()
    for tier in made.node.tiers:
        await tier.backend.close()


def raw_of(number: int) -> bytes:
    return kv_block(number, heads=2, dim=64, layers=1)


async def written(core: AgentParts) -> tuple[Entry, Entry]:
    """A block at the root, and the one behind it."""
    made, *_ = await core.cache.writer.reserve(PLACE, b"", [digest(1), digest(2)])
    sums = []
    for reservation, number in zip(made, (1, 2), strict=True):
        assert reservation is not None
        assert reservation.tier.backend.mappable is not None
        reservation.tier.backend.mappable.view(reservation.slot)[:BLOCK_BYTES] = raw_of(number)
        sums.append(checksum(raw_of(number), digest(number), core.node.epoch, reservation.slot.stamp))
    core.cache.writer.publish_now(1, [r.id for r in made if r is not None], sums)
    first, second = (core.node.index.find(SCOPE, digest(n)) for n in (1, 2))
    assert first is not None
    assert second is not None
    return first, second


def tier(core: AgentParts, name: str) -> Tier:
    found = core.node.tier(name)
    assert found is not None
    return found


async def moved(core: AgentParts, entry: Entry, source: str, target: str) -> Residence:
    """Copy between tiers and drop the source; the copy that was made."""
    residence = entry.residence(tier(core, source))
    assert residence is not None
    move = core.cache.mover.plan(entry, residence, tier(core, target))
    assert await core.cache.mover.copy_all([move], tier(core, target), Priority.DEMOTE) == [True]
    core.node.drop_copy(entry, tier(core, source))
    made = entry.residence(tier(core, target))
    assert made is not None
    return made


async def loaded(core: AgentParts, entry: Entry) -> tuple[str, bytes]:
    """Form and verified bytes of the copy that comes up to memory."""
    assert await core.cache.promoter.promote(entry, "a") is not None
    residence = entry.residence(tier(core, "dram"))
    assert residence is not None
    assert residence.tier.backend.mappable is not None
    content = bytes(residence.tier.backend.mappable.view(residence.slot)[:BLOCK_BYTES])
    assert checksum(content, entry.digest, core.node.epoch, residence.slot.stamp) == residence.record.checksum
    return residence.record.codec, content


def stored(residence: Residence) -> bytes:
    assert isinstance(residence.tier.backend, DictBackend)
    return residence.tier.backend.stored[residence.slot.stamp]


def floats(raw: bytes) -> npt.NDArray[np.float64]:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(4, -1)


async def test_a_block_below_memory_is_within_the_permitted_error_and_says_that_it_is_worn(core: AgentParts) -> None:
    _, entry = await written(core)

    below = await moved(core, entry, "dram", "nvme")
    form, content = await loaded(core, entry)

    assert below.record.codec == "mixed"
    assert below.record.stored_bytes < 0.6 * BLOCK_BYTES
    assert form == "worn"
    assert content != raw_of(2)
    for was, came in zip(floats(raw_of(2)), floats(content), strict=True):
        assert np.linalg.norm(was - came) <= PERMITTED * np.linalg.norm(was)


async def test_the_first_block_of_a_prompt_loses_nothing(core: AgentParts) -> None:
    entry, _ = await written(core)

    below = await moved(core, entry, "dram", "nvme")

    assert below.record.codec == "packed"
    assert await loaded(core, entry) == ("raw", raw_of(1))


async def test_a_worn_block_goes_down_again_without_loss(core: AgentParts) -> None:
    _, entry = await written(core)
    await moved(core, entry, "dram", "nvme")
    _, content = await loaded(core, entry)
    core.node.drop_copy(entry, tier(core, "nvme"))

    for mode, permille, form in (("Auto", 200, "mixed"), ("Lossless", 0, "mixed"), ("None", 0, "worn")):
        permit(core, mode, permille)
        below = await moved(core, entry, "dram", "nvme")
        assert below.record.codec == form
        assert await loaded(core, entry) == ("worn", content)
        core.node.drop_copy(entry, tier(core, "nvme"))


async def test_a_lossy_form_goes_from_medium_to_medium_as_it_is(core: AgentParts) -> None:
    _, entry = await written(core)
    above = await moved(core, entry, "dram", "nvme")
    was = stored(above)
    permit(core, "Auto", 400)

    below = await moved(core, entry, "nvme", "s3")

    assert below.record.codec == "mixed"
    assert stored(below) == was


@pytest.mark.parametrize("is_archive", [True, False])
async def test_archives_alone_get_forms_that_take_long_within_the_same_error(
    core: AgentParts, *, is_archive: bool
) -> None:
    _, entry = await written(core)
    backend = tier(core, "s3").backend
    assert isinstance(backend, DictBackend)
    backend.capabilities = replace(backend.capabilities, is_archive=is_archive)

    archived = await moved(core, entry, "dram", "s3")
    rungs = np.frombuffer(stored(archived)[24:40], "<u4") >> 24
    form, content = await loaded(core, entry)

    assert (archived.record.codec, form) == ("mixed", "worn")
    assert any(Rung(int(rung)) in ROTATED for rung in rungs) == is_archive
    for was, came in zip(floats(raw_of(2)), floats(content), strict=True):
        assert np.linalg.norm(was - came) <= PERMITTED * np.linalg.norm(was)


async def test_an_exact_copy_is_read_before_a_lossy_one(core: AgentParts) -> None:
    _, entry = await written(core)
    permit(core, "Lossless", 0)
    source = entry.residence(tier(core, "dram"))
    assert source is not None
    move = core.cache.mover.plan(entry, source, tier(core, "s3"))
    assert await core.cache.mover.copy_all([move], tier(core, "s3"), Priority.ARCHIVE) == [True]
    permit(core, "Auto", 30)
    assert (await moved(core, entry, "dram", "nvme")).record.codec == "mixed"

    assert await loaded(core, entry) == ("raw", raw_of(2))


async def test_a_rotten_lossy_copy_is_a_miss(core: AgentParts) -> None:
    _, entry = await written(core)
    below = await moved(core, entry, "dram", "nvme")
    assert isinstance(below.tier.backend, DictBackend)
    below.tier.backend.stored[below.slot.stamp] = stored(below)[:-1] + b"\xff"

    assert await core.cache.promoter.promote(entry, "a") is None
    assert core.node.index.find(SCOPE, entry.digest) is None


async def test_blocks_from_peers_may_be_worn_where_errors_are_permitted(core: AgentParts) -> None:
    assert core.node.arriving_form == "worn"
    permit(core, "Auto", 0)
    assert core.node.arriving_form == "raw"


async def test_what_became_of_planes_is_counted(core: AgentParts) -> None:
    _, entry = await written(core)
    told = []
    core.node.counters.add = lambda name, amount=1, **labels: told.append((name, amount, labels))  # type: ignore[method-assign]
    await moved(core, entry, "dram", "nvme")

    assert sum(amount for name, amount, _ in told if name == "kvstrata_codec_planes_total") == 4


async def test_an_unknown_layout_loses_nothing(core: AgentParts) -> None:
    core.node.layouts.clear()
    _, entry = await written(core)

    assert (await moved(core, entry, "dram", "nvme")).record.codec == "packed"
