"""Weights from agent to agent: real tiers, certificates and connections; the source is read once for a fleet."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstrata_agent.weights import staging
from kvstrata_agent.weights.source import FolderSource
from support.agent.weights_nodes import WeightsFleet, weights_fleet

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

MIB = 1 << 20


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[WeightsFleet]:
    async with weights_fleet(tmp_path) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    for i in range(3):
        (root / f"model-{i}.bin").write_bytes(os.urandom(20 * MIB + i))
    return root


def content(root: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in root.iterdir()}


async def test_the_second_node_gets_all_of_it_from_the_first(fleet: WeightsFleet, source: Path) -> None:
    first, second = await fleet.add("n1"), await fleet.add("n2")
    await first.order(source)
    size_bytes = (await first.staged()).source_bytes
    wanted = content(source)
    for name in wanted:
        (source / name).unlink()

    await second.order(source, ("n1",))
    report = await second.staged()

    assert (report.peer_bytes, report.source_bytes) == (size_bytes, 0)
    assert content(second.folder) == wanted
    assert report.digest == first.report().digest


async def test_a_node_that_comes_later_follows_one_that_is_still_staging(
    fleet: WeightsFleet, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet reads the source once also when all nodes begin at the same time."""
    read, read_bytes = FolderSource.read, 0

    async def counted(self: FolderSource, path: str, start: int, end: int) -> memoryview:
        nonlocal read_bytes
        read_bytes += end - start
        await asyncio.sleep(0.02)
        return await read(self, path, start, end)

    monkeypatch.setattr(FolderSource, "read", counted)
    nodes = [await fleet.add(f"n{i}") for i in range(3)]
    for i, node in enumerate(nodes):
        await node.order(source, tuple(f"n{k}" for k in reversed(range(i))))

    reports = [await node.staged() for node in nodes]

    size_bytes = sum(map(len, content(source).values()))
    assert read_bytes == size_bytes
    assert [r.source_bytes for r in reports] == [size_bytes, 0, 0]
    for node in nodes:
        assert content(node.folder) == content(source)


async def test_an_owner_that_goes_away_leaves_the_source(
    fleet: WeightsFleet, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PATIENCE_S", 1.0)
    first, second = await fleet.add("n1"), await fleet.add("n2")
    await first.order(source)
    await first.staged()
    took, send = 0, first.models.read

    async def some(*args: object) -> memoryview:
        nonlocal took
        took += 1
        if took > 2:
            await fleet.remove("n1")
        return await send(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(first.models, "read", some)
    await second.order(source, ("n1",))
    report = await second.staged()

    assert report.source_bytes > 0
    assert content(second.folder) == content(source)


async def test_budget_is_kvs_again_when_a_model_is_gone(fleet: WeightsFleet, source: Path) -> None:
    node = await fleet.add("n1")
    tier = node.models._node.tiers[0]
    before = tier.backend.capacity_bytes
    await node.order(source)
    report = await node.staged()
    assert tier.backend.capacity_bytes == before - report.size_bytes
    await node.models.follow([])
    with (node.folder / "model-0.bin").open("rb"):
        await node.models.tend()
        assert node.folder.exists()
    await node.models.tend()

    assert not node.folder.exists()
    assert tier.backend.capacity_bytes == before


async def test_another_revision_replaces_one_that_is_idle_for_long_enough(fleet: WeightsFleet, source: Path) -> None:
    node = await fleet.add("n1")
    await node.order(source)
    await node.staged()
    (source / "model-0.bin").write_bytes(b"other")
    await node.order(source, revision="r2", generation=2, idle_seconds=0)
    await node.until(lambda: node.report("r2").state == "Staged")

    await node.models.tend()

    assert [r.revision for r in node.models.reports()] == ["r2"]
    assert (node.folder.parent / "r2" / "model-0.bin").read_bytes() == b"other"
    assert not node.folder.exists()


async def test_a_tier_of_a_foreign_agent_is_said_so(fleet: WeightsFleet, source: Path) -> None:
    """Two agents over one directory would remove each other's weights."""
    first = await fleet.add("n1")
    await first.order(source)
    await first.staged()
    other = await fleet.add("n2")
    other.models._node.tiers[0].spec = first.tier
    await other.order(source)
    await other.until(lambda: other.report().state == "Failed")
    assert "another agent process holds it" in other.report().message
