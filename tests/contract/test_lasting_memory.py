"""Memory that outlives the agent: who may still write, what a restart gives back, and what it never brings back."""

import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata_agent.app.periodic import ERASE_GRACE_S, Sweeper
from kvstrata_agent.backends.base import Record, SlotRef, TierBackend
from kvstrata_agent.backends.memory import ledger
from kvstrata_agent.backends.memory import persistence as homes
from kvstrata_agent.backends.memory import persistent_extents as lasting
from kvstrata_agent.backends.memory.arena import Arena
from kvstrata_agent.backends.memory.host_dram import open_host_dram
from kvstrata_agent.backends.memory.mapping import has_writers
from kvstrata_agent.backends.memory.persistence import PersistenceRoot, read_mounts, remove_abandoned
from kvstrata_agent.provision.provisioner import Provisioner
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import BackendFailedError, InvalidInputError
from kvstrata_api.models.pool import HostDramTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from support.agent.doubles import FakeAuthenticator, make_core
from support.backends.contract import ANNA, BLOCK_BYTES, BOB, CAPACITY_BYTES, content, fill, get, put, record
from support.backends.damage import flip
from support.runner import leftovers

pytestmark = pytest.mark.contract

SETTINGS = HostDramTier(page_size="4Ki", persistence="AgentRestart")
Found = dict[int, tuple[SlotRef, Record]]


@pytest.fixture
def home() -> Iterator[PersistenceRoot]:
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-", dir=leftovers.memory()) as directory:
        yield PersistenceRoot(Path(directory), "pool-a", "node-a", read_mounts(), "dram")


def open_at(home: PersistenceRoot, capacity_bytes: int = CAPACITY_BYTES) -> Arena:
    return open_host_dram(SETTINGS, capacity_bytes, (), home)


async def reopened(home: PersistenceRoot, capacity_bytes: int = CAPACITY_BYTES) -> tuple[Arena, Found]:
    arena = open_at(home, capacity_bytes)
    return arena, {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in arena.recover()}


def mapped(arena: Arena, slot: SlotRef) -> mmap.mmap:
    """An engine's mapping of the extent of a slot."""
    return mmap.mmap(arena.extent_fd(slot.extent, is_writable=True), arena.extent_bytes(slot.extent))


def files(home: PersistenceRoot) -> list[str]:
    assert home.directory is not None
    return sorted(p.name for p in home.directory.rglob("ext-*"))


async def test_where_a_writer_of_the_dead_agent_lives_nothing_new_is_put(home: PersistenceRoot) -> None:
    arena = open_at(home)
    slot, made = await put(arena, 1)
    reserved = arena.reserve(ANNA, BLOCK_BYTES)
    assert reserved.extent == slot.extent
    with mapped(arena, reserved) as engine:
        await arena.close()
        again, found = await reopened(home)

        fresh = [await put(again, n) for n in range(2, 12)]
        engine[reserved.offset : reserved.offset + BLOCK_BYTES] = b"\xee" * BLOCK_BYTES
        assert slot.extent not in {s.extent for s, _ in fresh}
        assert [await get(again, *f) for f in fresh] == [content(n) for n in range(2, 12)]
        assert await get(again, *found[1]) == content(1)
        assert again.compact() == {slot.extent}

        again.drop(slot)
        again._worker.submit(lambda: None).result()
        assert not any(engine[:])
        assert f"ext-{slot.extent:08x}.data" not in files(home)
    assert made == found[1][1]
    await again.close()


async def test_an_extent_whose_files_cannot_be_removed_is_let_go(
    home: PersistenceRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    arena = open_at(home)
    slot, _ = await put(arena, 1)
    arena.close_extent(slot.extent)
    with mapped(arena, slot) as engine, monkeypatch.context() as patched:
        patched.setattr(lasting, "erase_file", refuse)
        arena.drop(slot)
        arena._worker.submit(lambda: None).result()

        assert not any(engine[:])
    await arena.close()
    again, found = await reopened(home)
    assert (found, files(home)) == ({}, [])
    await again.close()


async def test_a_tier_whose_files_cannot_be_removed_can_be_opened_again(
    home: PersistenceRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    arena = open_at(home)
    await put(arena, 1)
    with monkeypatch.context() as patched:
        patched.setattr(lasting, "erase_file", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            await arena.discard()

    again, found = await reopened(home)

    assert found == {}
    await again.close()


async def test_where_no_writer_is_left_every_slot_serves_again(home: PersistenceRoot) -> None:
    arena = open_at(home)
    slot, _ = await put(arena, 1)
    reserved = arena.reserve(ANNA, BLOCK_BYTES)
    await arena.close()

    again, found = await reopened(home)
    taken = again.reserve(ANNA, BLOCK_BYTES)

    assert (taken.extent, taken.offset) == (reserved.extent, reserved.offset)
    assert taken.stamp > reserved.stamp
    assert found[1][0] == slot
    assert again.compact() == frozenset()
    await again.close()


async def test_a_slot_that_was_given_up_lately_counts_as_being_written(home: PersistenceRoot) -> None:
    for age_ms, is_closed in ((0, True), (3_600_001, False)):
        arena = open_at(home)
        slot, _ = await put(arena, 1)
        reserved = arena.reserve(ANNA, BLOCK_BYTES)
        with mapped(arena, reserved):
            arena.drop(reserved)
            await arena.close()
            again = open_at(home)
            again._store._clock_ms = lambda a=age_ms: lasting.monotonic_ms() + a  # type: ignore[attr-defined]
            assert [s async for s, _ in again.recover()] == [slot]
            assert again.compact() == (frozenset({slot.extent}) if is_closed else frozenset())
            await again.discard()


def test_the_kernel_knows_who_may_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    assert not has_writers(path)
    with path.open("r+b") as file:
        kept = mmap.mmap(file.fileno(), 4096)
    assert has_writers(path)
    kept.close()
    with path.open("rb") as reading, mmap.mmap(reading.fileno(), 4096, prot=mmap.PROT_READ):
        assert not has_writers(path)


async def test_memory_of_another_boot_is_not_there_any_more(
    home: PersistenceRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = open_at(home)
    slot, _ = await put(arena, 1)
    with mapped(arena, slot) as engine:
        await arena.close()
        monkeypatch.setattr(homes, "boot_id", lambda: "another-boot")
        again, found = await reopened(home)

        assert found == {}
        assert files(home) == []
        assert not any(engine[:])
    await again.close()


async def test_one_process_at_a_time_holds_the_memory_of_a_tier(home: PersistenceRoot) -> None:
    arena = open_at(home)
    with pytest.raises(InvalidInputError, match="another agent process holds it"):
        open_at(home)
    await arena.close()
    await open_at(home).close()


async def test_what_no_longer_fits_is_given_back_oldest_first(home: PersistenceRoot) -> None:
    arena = open_at(home)
    stored = {n: await put(arena, n, BOB if n % 2 else ANNA) for n in range(60)}
    newest = max(s.extent for s, _ in stored.values())
    await arena.close()

    again, found = await reopened(home, CAPACITY_BYTES // 4)

    assert 0 < len(found) < 60
    assert newest in {s.extent for s, _ in found.values()}
    assert again.used_bytes <= again.capacity_bytes
    assert {f.split(".")[0] for f in files(home)} == {f"ext-{s.extent:08x}" for s, _ in found.values()}
    await again.close()


async def test_nobody_else_can_open_the_files(home: PersistenceRoot) -> None:
    arena = open_at(home)
    await put(arena, 1)
    assert home.directory is not None
    own = home.directory / "pool-a" / "dram" / "node-a"

    modes = {p.suffix: stat.S_IMODE(p.stat().st_mode) for p in own.glob("ext-*")}
    assert modes == {".data": 0o400, ".ledger": 0o600}
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    await arena.close()


def _cut(path: Path) -> None:
    os.truncate(path, 4096)


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("ledger", lambda p: flip(p, 20, 1)),
        ("ledger", _cut),
        ("ledger", Path.unlink),
        ("data", Path.unlink),
        ("data", _cut),
    ],
)
async def test_a_damaged_extent_is_lost_and_no_other(
    home: PersistenceRoot, suffix: str, damage: Callable[[Path], None]
) -> None:
    arena = open_at(home)
    anna, bob = await put(arena, 1, ANNA), await put(arena, 2, BOB)
    await arena.close()
    assert home.directory is not None
    damage(home.directory / f"pool-a/dram/node-a/ext-{anna[0].extent:08x}.{suffix}")

    again, found = await reopened(home)

    assert list(found) == [2]
    assert await get(again, *found[2]) == content(2)
    assert {f.split(".")[0] for f in files(home)} == {f"ext-{bob[0].extent:08x}"}
    await again.close()


async def test_a_damaged_record_is_a_miss_and_its_neighbours_stay(home: PersistenceRoot) -> None:
    arena = open_at(home)
    for n in range(3):
        await put(arena, n)
    await arena.close()
    assert home.directory is not None
    (ledger,) = home.directory.rglob("*.ledger")
    flip(ledger, 1024 + 128 + 60, 4)

    again, found = await reopened(home)

    assert sorted(found) == [0, 2]
    await again.close()


async def test_a_tmpfs_that_is_too_small_is_said_with_numbers(home: PersistenceRoot) -> None:
    arena = open_at(home, 1 << 50)

    assert arena.capabilities.medium == "memfd-4Ki"
    assert f"{1 << 50} B wanted" in arena.capabilities.fallback
    assert not arena.capabilities.outlives_agent
    await arena.close()


async def test_where_files_cannot_be_made_memory_ends_with_the_agent_and_says_so(
    home: PersistenceRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cause in (OSError(13, "Permission denied", "/mnt/huge"), BackendFailedError("Operation not supported")):
        arena = open_at(home)
        await put(arena, 1)
        await arena.close()

        def refuse(*_: object, e: Exception = cause) -> None:
            raise e

        with monkeypatch.context() as patched:
            patched.setattr(homes, "give_name", refuse)
            fleeting = open_at(home)
            slot, made = await put(fleeting, 2)

            assert fleeting.capabilities.medium == "memfd-4Ki"
            assert not fleeting.capabilities.outlives_agent
            assert "memory ends with the agent: " in fleeting.capabilities.fallback
            assert await get(fleeting, slot, made) == content(2)
            await fleeting.close()
        again, found = await reopened(home)
        assert list(found) == [1]
        await again.discard()


async def test_memory_that_is_not_to_last_any_more_is_given_back(home: PersistenceRoot) -> None:
    arena = open_at(home)
    await put(arena, 1)
    await arena.close()

    fleeting = open_host_dram(replace_persistence("None"), CAPACITY_BYTES, (), home)

    assert fleeting.capabilities.medium == "memfd-4Ki"
    assert files(home) == []
    await fleeting.close()


def replace_persistence(value: str) -> HostDramTier:
    return HostDramTier.model_validate({"page_size": "4Ki", "persistence": value})


async def test_memory_of_tiers_that_are_gone_is_given_back_and_of_others_kept(home: PersistenceRoot) -> None:
    for tier in ("dram", "other", "held"):
        arena = open_at(replace(home, tier=tier))
        await put(arena, 1)
        if tier != "held":
            await arena.close()

    assert remove_abandoned(home, frozenset({"dram"})) == ["other"]

    assert home.directory is not None
    left = {p.parent.parent.name for p in home.directory.rglob("ext-*.data")}
    assert left == {"dram", "held"}
    await arena.close()


async def test_an_erased_scope_does_not_come_back(home: PersistenceRoot) -> None:
    async def make(tier: NodeTier) -> TierBackend:
        return open_at(home, tier.capacity_bytes)

    class Keyless(FakeAuthenticator):
        def secret(self, scope: ScopeId) -> None:  # noqa: ARG002
            return None

    arena = open_at(home)
    slot, _ = await put(arena, 1)
    with mapped(arena, slot) as engine:
        await arena.close()
        core = make_core([])
        provisioner = Provisioner(core.node, make, 1 << 40)
        spec = NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=CAPACITY_BYTES, host_dram=SETTINGS)
        await provisioner.apply([spec])
        assert core.node.tiers[0].recovered_blocks == 1
        sweeper = Sweeper(core.cache, Keyless())
        sweeper.expire()
        core.node.clock.now_s += ERASE_GRACE_S  # type: ignore[attr-defined]
        sweeper.expire()
        assert len(core.node.index) == 0
        await provisioner.close()

        again, found = await reopened(home)
        assert found == {}
        assert not any(engine[:])
        assert files(home) == []
    await again.close()


async def test_a_full_tier_is_full_after_a_restart_and_room_can_be_made(home: PersistenceRoot) -> None:
    arena = open_at(home)
    slots = fill(arena, ANNA)
    for n, slot in enumerate(slots):
        stored = content(n)
        arena.view(slot)[:BLOCK_BYTES] = stored
        arena.commit(slot, record(n, stored, slot))
    await arena.close()

    again, found = await reopened(home)

    assert len(found) == len(slots)
    assert again.used_bytes == sum(s.size_bytes for s in slots)
    again.drop(found[5][0])
    assert again.reserve(ANNA, BLOCK_BYTES).offset == found[5][0].offset
    await again.close()


async def test_a_recovery_that_fails_half_way_is_tried_again_and_loses_nothing(
    home: PersistenceRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make(tier: NodeTier) -> TierBackend:
        return open_at(home, tier.capacity_bytes)

    arena = open_at(home)
    for n in range(4):
        await put(arena, n, BOB if n % 2 else ANNA)
    await arena.close()
    core = make_core([])
    provisioner = Provisioner(core.node, make, 1 << 40)
    spec = NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=CAPACITY_BYTES, host_dram=SETTINGS)

    calls = 0

    def open_some(path: Path) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(24, "Too many open files", str(path))
        return ledger.open_ledger(path)

    with monkeypatch.context() as patched:
        patched.setattr(lasting, "open_ledger", open_some)
        await provisioner.apply([spec])
    assert "Too many open files" in provisioner.states["dram"].error
    assert core.node.tiers == []

    core.node.clock.now_s += 60.0  # type: ignore[attr-defined]
    await provisioner.apply([spec])

    assert core.node.tiers[0].recovered_blocks == 4
    await provisioner.close()
