"""Laws of provisioning, sweeping and reporting, over backends that are made, fail and come back on order."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kvstrata_agent.app.periodic import ERASE_GRACE_S, Sweeper
from kvstrata_agent.backends.base import Device, Record, SlotRef, TierBackend
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.provision.provisioner import RETRY_S
from kvstrata_api.blocks import BlockKey, ScopeId, ScopeSecret
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import BackendFailedError, InvalidInputError, TierFullError, UnsupportedError
from kvstrata_api.models.conditions import Condition, find
from kvstrata_api.models.pool import HostDramTier, NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from support.agent.doubles import (
    LAYOUT_ID,
    SCOPE,
    DictBackend,
    FakeAuthenticator,
    digest,
    secret,
    store_chain,
)
from support.agent.engine import steps_until
from support.agent.provisioned import GENERATION, REVISION, Provisioned

if TYPE_CHECKING:
    from kvstrata_agent.cache.ports import Directory

pytestmark = pytest.mark.unit

MIB = 1 << 20


def dram(capacity_bytes: int = MIB) -> NodeTier:
    settings = HostDramTier(page_size="4Ki")
    return NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=capacity_bytes, host_dram=settings)


def nvme(capacity_bytes: int = 4 * MIB, path: str = "/nowhere/at/all") -> NodeTier:
    return NodeTier(name="nvme", type=TierType.NVME, capacity_bytes=capacity_bytes, nvme=NvmeTier(path=path))


class Recovering(DictBackend):
    """Finds blocks of an earlier run, some of them twice; or fails to."""

    def __init__(self, records: list[int], *, is_broken: bool = False) -> None:
        super().__init__(4 * MIB)
        self.records = records
        self.is_broken = is_broken
        self.fails_with: Exception | None = None
        """What nobody expects of a recovery, a change of size and a close."""
        self.gate = asyncio.Event()
        """What holds the recovery up once its blocks are told, when the machine is slow."""
        self.gate.set()

    async def recover(self) -> AsyncIterator[tuple[SlotRef, Record]]:
        for number in self.records:
            slot = self.reserve(SCOPE, 4096)
            parent = digest(number - 1) if number > 1 else b""
            key = BlockKey(SCOPE, digest(number))
            yield slot, Record(key, parent, LAYOUT_ID, "raw", 4096, 4096, b"0" * 16, 3)
        await self.gate.wait()
        if self.fails_with:
            raise self.fails_with
        if self.is_broken:
            raise BackendFailedError("Input/output error")

    async def resize(self, capacity_bytes: int) -> frozenset[int]:
        if self.fails_with:
            raise self.fails_with
        return await super().resize(capacity_bytes)

    async def close(self) -> None:
        await super().close()
        if self.fails_with:
            raise self.fails_with


class Machine:
    """Makes backends, or raises what it is told to."""

    def __init__(self) -> None:
        self.refuses: dict[str, Exception] = {}
        self.records: list[int] = []
        self.is_broken = False
        self.is_slow = False
        self.fails_with: Exception | None = None
        self.made: list[str] = []

    async def make(self, spec: NodeTier) -> TierBackend:
        if spec.name in self.refuses:
            raise self.refuses[spec.name]
        self.made.append(spec.name)
        if spec.host_dram is not None:
            return open_host_dram(spec.host_dram, spec.capacity_bytes, ())
        found = Recovering(self.records, is_broken=self.is_broken)
        found.fails_with = self.fails_with
        if self.is_slow:
            found.gate.clear()
        return found


class Forgetful(FakeAuthenticator):
    """Knows no scope."""

    def secret(self, scope: ScopeId) -> ScopeSecret | None:  # noqa: ARG002  The signature of what it stands for.
        return None


class Setup(Provisioned):
    def __init__(self) -> None:
        self.machine = Machine()
        super().__init__(self.machine.make)

    def conditions(self, **drain: object) -> tuple[Condition, ...]:
        return self.status(**drain).conditions


@pytest.fixture
async def at() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    await made.close()


async def test_a_tier_that_fails_in_a_way_that_nobody_has_thought_of_costs_no_other(at: Setup) -> None:
    at.machine.records, at.machine.fails_with = [1, 2], ValueError("not a header")
    await at.provisioner.apply([nvme(), dram()])

    assert [t.name for t in at.core.node.tiers] == ["dram"]
    assert len(at.core.node.index) == 0
    assert at.provisioner.states["nvme"].error == "ValueError: not a header"
    at.machine.refuses["nvme"] = OSError(5, "Input/output error")
    at.clock.now_s += RETRY_S
    await at.provisioner.apply([nvme(), dram()])
    assert "Input/output error" in at.provisioner.states["nvme"].error

    at.machine.refuses.clear()
    at.machine.fails_with = None
    at.clock.now_s += RETRY_S
    await at.provisioner.apply([nvme(), dram()])
    assert at.provisioner.states["nvme"].error == ""
    assert len(at.core.node.index) == 2


async def test_a_medium_that_neither_changes_its_size_nor_closes_costs_nobody_else(at: Setup) -> None:
    await at.provisioner.apply([nvme(), dram()])
    backend = at.core.node.tiers[0].backend
    assert isinstance(backend, Recovering)
    backend.fails_with = RuntimeError("no such extent")

    await at.provisioner.apply([nvme(8 * MIB), dram()])
    assert at.provisioner.states["nvme"].error == "RuntimeError: no such extent"
    await at.provisioner.apply([dram()])

    assert [t.name for t in at.core.node.tiers] == ["dram"]
    assert list(at.provisioner.states) == ["dram"]


async def test_a_path_that_cannot_be_looked_at_costs_its_tier_alone(at: Setup) -> None:
    at.machine.refuses["nvme"] = InvalidInputError("File name too long")

    await at.provisioner.apply([nvme(path=f"/{256 * 'x'}/kv"), dram()])

    assert [t.name for t in at.core.node.tiers] == ["dram"]


async def test_a_tier_takes_nothing_new_until_its_last_run_is_entered(at: Setup) -> None:
    at.machine.records, at.machine.is_slow = [1, 2], True
    opening = asyncio.ensure_future(at.provisioner.apply([nvme()]))
    await steps_until(lambda: bool(at.core.node.tiers))
    (tier,) = at.core.node.tiers

    assert tier.phase(0.0) == "Pending"
    assert not tier.facts(0.0).takes_writes
    with pytest.raises(TierFullError, match="nvme: the blocks of an earlier run"):
        tier.allocate(SCOPE, "a", 4096)
    assert isinstance(tier.backend, Recovering)
    tier.backend.gate.set()
    await opening
    tier.allocate(SCOPE, "a", 4096)
    assert (at.core.node.contents(tier).blocks, tier.phase(0.0)) == (2, "Ready")


def reason(conditions: tuple[Condition, ...], type_: str) -> tuple[str, str]:
    found = find(conditions, type_)
    assert found is not None
    return found.status, found.reason


async def test_a_failed_tier_costs_no_other_and_comes_back_by_itself(at: Setup) -> None:
    at.machine.refuses["nvme"] = InvalidInputError("/data: Permission denied; the agent must be able to write there")
    await at.provisioner.apply([dram(), nvme()])
    status = at.status()
    assert [t.phase for t in status.tiers] == ["Ready", "Failed"]
    assert "Permission denied" in status.tiers[1].last_error
    assert reason(status.conditions, "TierReady") == ("False", "TierFailed")
    assert reason(status.conditions, "Ready") == ("True", "Serving")

    del at.machine.refuses["nvme"]
    await at.provisioner.apply([dram(), nvme()])
    assert at.machine.made == ["dram"]
    at.clock.now_s += RETRY_S
    await at.provisioner.apply([dram(), nvme()])

    assert [t.phase for t in at.status().tiers] == ["Ready", "Ready"]
    assert [t.level for t in at.core.node.tiers] == [0, 1]


async def test_what_the_machine_lacks_is_a_missing_device(at: Setup) -> None:
    at.machine.refuses["nvme"] = UnsupportedError("install torch")
    await at.provisioner.apply([dram(), nvme()])

    assert reason(at.conditions(), "DevicePresent") == ("False", "DeviceMissing")


async def test_more_than_there_is_is_clamped_and_said(at: Setup) -> None:
    await at.provisioner.apply([dram(1 << 41)])

    assert reason(at.conditions(), "CapacitySatisfied") == ("False", "InsufficientCapacity")
    assert at.core.node.tiers[0].backend.capacity_bytes <= 1 << 40


async def test_blocks_of_an_earlier_run_are_there_again_and_doubles_are_not(at: Setup) -> None:
    at.machine.records = [3, 1, 2, 3]
    await at.provisioner.apply([dram(), nvme()])

    tier = at.core.node.tier("nvme")
    assert tier is not None
    assert at.core.node.contents(tier).blocks == 3
    assert tier.backend.used_bytes == 3 * 4096
    assert at.core.node.index.blockers(next(e for e in at.core.node.index if e.digest == digest(1)), 7) == 1


async def test_a_store_that_breaks_while_it_is_read_is_a_failed_tier_without_blocks(at: Setup) -> None:
    at.machine.records, at.machine.is_broken = [1, 2], True
    await at.provisioner.apply([dram(), nvme()])

    assert [t.phase for t in at.status().tiers] == ["Ready", "Failed"]
    assert len(at.core.node.index) == 0
    assert [t.name for t in at.core.node.tiers] == ["dram"]


async def test_a_tier_that_is_no_longer_declared_goes_with_its_copies(at: Setup) -> None:
    at.machine.records = [1, 2]
    await at.provisioner.apply([dram(), nvme()])
    await at.provisioner.apply([dram()])

    assert len(at.core.node.index) == 0
    assert [t.name for t in at.status().tiers] == ["dram"]


async def test_gauges_of_a_tier_go_with_it_and_those_of_a_device_with_the_device(
    at: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(label: str) -> dict[str, set[str]]:
        """Labels' values by the gauge that has them."""
        found: dict[str, set[str]] = {}
        for family in at.core.node.counters._instruments.registry.collect():
            for sample in family.samples if family.type == "gauge" else ():
                if label in sample.labels:
                    found.setdefault(sample.name, set()).add(sample.labels[label])
        return found

    at.machine.records = [1, 2]
    await at.provisioner.apply([dram(), nvme()])
    sweeper, devices = Sweeper(at.core.cache, FakeAuthenticator()), list[Device]()
    monkeypatch.setattr(Tier, "devices", property(lambda tier: devices if tier.name == "nvme" else ()))
    for paths in (("/a", "/b"), ("/a", "/c")):
        devices[:] = [Device(path, MIB, 0, "") for path in paths]
        sweeper.gauges()
        assert shown("device") == {"kvstrata_device_up": set(paths), "kvstrata_device_used_bytes": set(paths)}
    assert {"kvstrata_tenant_used_bytes", "kvstrata_tier_used_bytes"} <= shown("tier").keys()

    await at.provisioner.apply([dram()])
    sweeper.gauges()

    assert [t.name for t in at.core.node.tiers] == ["dram"]
    assert shown("tier")["kvstrata_tier_used_bytes"] == {"dram"}
    assert not [name for name, tiers in shown("tier").items() if "nvme" in tiers]
    assert not shown("device")


async def test_a_tier_in_front_of_others_gets_its_level_and_the_books_follow(at: Setup) -> None:
    at.machine.records = [1, 2, 3]
    await at.provisioner.apply([nvme()])
    await at.provisioner.apply([dram(), nvme()])

    assert {e.level for e in at.core.node.index} == {1}
    first = at.core.node.index.find(SCOPE, digest(1))
    assert first is not None
    assert (at.core.node.index.blockers(first, 0), at.core.node.index.blockers(first, 1)) == (0, 1)


async def test_a_scope_without_a_secret_is_erased_after_the_grace_and_not_before(at: Setup) -> None:
    at.machine.records = [1, 2]
    await at.provisioner.apply([dram(), nvme()])
    sweeper = Sweeper(at.core.cache, Forgetful())
    sweeper.expire()
    at.clock.now_s += ERASE_GRACE_S - 0.1
    sweeper.expire()
    assert len(at.core.node.index) == 2
    at.clock.now_s += 0.1
    sweeper.expire()
    assert len(at.core.node.index) == 0


async def test_a_scope_that_was_empty_meanwhile_gets_its_grace_anew(at: Setup) -> None:
    await at.provisioner.apply([dram()])
    place = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, 4096)
    node, sweeper = at.core.node, Sweeper(at.core.cache, Forgetful())
    await store_chain(at.core, place, [7])
    sweeper.expire()
    node.drop_scope(SCOPE)
    sweeper.expire()
    at.clock.now_s += 10 * ERASE_GRACE_S
    await store_chain(at.core, place, [7])

    sweeper.expire()

    assert len(node.index) == 1


def test_changes_of_a_scope_that_is_gone_for_good_are_forgotten() -> None:
    index = Index()
    directory = cast("Directory", SimpleNamespace(owes_all=True))  # It is told nothing.
    announcer = Announcer(index, directory, lambda _: None)
    entry = index.begin(SCOPE, digest(1), b"", LAYOUT_ID, 0.0)
    announcer.mark(entry.scope, entry.digest)
    announcer.flush()
    assert announcer.waiting == 1  # Its key may only be late.

    index.forget(entry)
    announcer.flush()

    assert announcer.waiting == 0


def test_what_a_report_tells_is_not_gathered_before_it_begins() -> None:
    directory = SimpleNamespace(owes_all=True)
    announcer = Announcer(Index(), cast("Directory", directory), {SCOPE: secret(SCOPE)}.get)

    announcer.mark(SCOPE, digest(1), digest(2))
    assert announcer.waiting == 0
    announcer.mark(ScopeId("tenant/b/uid/v1"), digest(1))  # Its key is not known yet, so a report leaves it out.
    assert announcer.waiting == 1
    directory.owes_all = False
    announcer.mark(SCOPE, digest(3))
    assert announcer.waiting == 2


async def test_a_drain_is_done_when_all_that_is_left_survives(at: Setup) -> None:
    await at.provisioner.apply([dram(), nvme()])
    assert reason(at.conditions(), "Draining") == ("False", "NotRequested")
    core, node = at.core, at.core.node
    place = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, 4096)
    made = core.cache.writer.reserve_now(place, b"", [digest(1), digest(2)])
    for r in made:
        assert r is not None
        mappable = r.tier.backend.mappable
        assert mappable is not None
        block = mappable.view(r.slot)
        core.cache.writer.publish_now(1, [r.id], [checksum(block[:4096], r.entry.digest, node.epoch, r.slot.stamp)])
    node.is_draining = True
    assert reason(at.conditions(requested=True), "Draining") == ("True", "MovingBlocks")
    assert reason(at.conditions(requested=True, mode="Drop"), "Draining") == ("False", "Drained")
    late = at.conditions(requested=True, deadline="2020-01-01T00:00:00Z")
    assert reason(late, "Draining") == ("True", "DeadlinePassed")

    await Sweeper(core.cache, FakeAuthenticator())._tend()

    assert reason(at.conditions(requested=True), "Draining") == ("False", "Drained")
    assert core.cache.writer.reserve_now(place, b"", [digest(9)]) == []


async def test_every_condition_speaks_of_the_generation_that_was_observed(at: Setup) -> None:
    await at.provisioner.apply([dram()])
    status = at.status()
    assert status.observed_generation == GENERATION
    assert status.observed_revision == REVISION
    assert {c.observed_generation for c in status.conditions} == {GENERATION}


async def test_without_a_memory_tier_the_node_is_not_ready(at: Setup) -> None:
    await at.provisioner.apply([nvme()])
    assert reason(at.conditions(), "Ready") == ("False", "NoMemoryTier")
