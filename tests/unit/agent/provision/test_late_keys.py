"""Laws of sealed blocks whose key is away when their tier comes up, in every kind of store at rest."""

import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

import pytest
from sim.volume import MemoryVolume

from kvstrata_agent.backends.base import KeyAwayError, Record, SealingBackend, SlotRef
from kvstrata_agent.backends.file.index_file import INDEX_FILE
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.striped import StripedStore, open_striped
from kvstrata_agent.backends.object.client import ObjectClient
from kvstrata_agent.backends.object.object_tier import open_object_tier
from kvstrata_agent.blocks.tenants import LOST_AFTER_S
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.provision.recovery import AwaitedKeys, enter
from kvstrata_api.errors import BackendFailedError, BlockCorruptError
from kvstrata_api.models.poolnode import NodeTier
from support.agent.doubles import Clock, make_node
from support.agent.scope_keys import KeyRing
from support.backends.contract import ANNA, BOB, CAPACITY_BYTES, content, fill, get, put

pytestmark = pytest.mark.unit

Held = dict[int, tuple[SlotRef, Record]]


class Medium:
    """One medium that stores come and go on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.volume = MemoryVolume()
        self.client = ObjectClient("memory://")

    async def open(self, keys: KeyRing | None) -> SealingBackend:
        if self.kind == "objects":
            return await open_object_tier(self.client, "p", "n", CAPACITY_BYTES, keys=keys)
        self.volume = self.volume.kill()
        if self.kind == "without index":
            await self.volume.unlink(INDEX_FILE)
        return await open_store(self.volume, CAPACITY_BYTES, keys=keys)


@pytest.fixture(params=["with index", "without index", "objects"])
def medium(request: pytest.FixtureRequest) -> Medium:
    return Medium(request.param)


async def filled(medium: Medium, keys: KeyRing | None) -> None:
    store = await medium.open(keys)
    for n in range(20):
        await put(store, n, BOB if n % 2 else ANNA)
    await store.close()


async def found(slots: AsyncIterator[tuple[SlotRef, Record]]) -> Held:
    return {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in slots}


Loss = Callable[[KeyRing], object]


@pytest.mark.parametrize("loss", [lambda k: k.lose(ANNA), lambda k: k.shred(ANNA)], ids=["data key", "Secret"])
async def test_blocks_wait_for_their_key_unserved_and_unharmed(medium: Medium, loss: Loss) -> None:
    keys = KeyRing(ANNA, BOB)
    await filled(medium, keys)
    tag, before = keys.tag(ANNA), keys.known[ANNA]
    before = type(before)(before.tag, before.data_key)
    loss(keys)

    store = await medium.open(keys)
    held = await found(store.recover())
    assert set(held) == set(range(1, 20, 2))
    assert store.waiting == {tag}
    assert [bytes(await get(store, *held[n])) for n in (1, 19)] == [bytes(content(n)) for n in (1, 19)]

    assert await found(store.recover_waiting(tag or b"")) == {}
    assert store.waiting == {tag}
    await store.close()

    keys.known[ANNA] = before
    store = await medium.open(keys)
    held = await found(store.recover())
    assert set(held) == set(range(20))
    assert bytes(await get(store, *held[4])) == content(4)
    await store.close()


async def test_a_key_that_comes_later_brings_its_blocks(medium: Medium) -> None:
    keys = KeyRing(ANNA, BOB)
    await filled(medium, keys)
    kept = keys.shred(ANNA)
    store = await medium.open(keys)
    await found(store.recover())
    keys.known[ANNA] = kept

    held = await found(store.recover_waiting(kept.tag))

    assert set(held) == set(range(0, 20, 2))
    assert store.waiting == frozenset()
    assert bytes(await get(store, *held[4])) == content(4)
    await put(store, 100)
    await store.close()


async def test_what_waits_takes_room_until_it_is_forgotten(medium: Medium) -> None:
    keys = KeyRing(ANNA, BOB)
    await filled(medium, keys)
    kept = keys.shred(ANNA)
    store = await medium.open(keys)
    await found(store.recover())

    taken = len(fill(store, BOB))
    await store.forget_waiting(kept.tag)
    assert min(taken, len(fill(store, BOB))) > 0
    await store.close()
    keys.known[ANNA] = kept
    store = await medium.open(keys)
    assert not any(n % 2 == 0 for n in await found(store.recover()))
    await store.close()


async def test_a_block_whose_key_has_gone_is_neither_read_nor_called_corrupt(medium: Medium) -> None:
    keys = KeyRing(ANNA, BOB)
    store = await medium.open(keys)
    slot, made = await put(store, 1)
    kept = keys.lose(ANNA)

    for _ in range(2):
        with pytest.raises(KeyAwayError):
            await get(store, slot, made)
    with pytest.raises(KeyAwayError):
        await put(store, 2)
    keys.known[ANNA] = kept
    keys.mint(ANNA)
    with pytest.raises(BlockCorruptError):
        await get(store, slot, made)
    await store.close()


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
async def test_neither_kind_of_store_finds_anything_of_the_other(medium: Medium, first: bool, then: bool) -> None:  # noqa: FBT001
    keys = KeyRing(ANNA, BOB)
    await filled(medium, keys if first else None)

    store = await medium.open(keys if then else None)
    assert await found(store.recover()) == {}
    assert store.waiting == frozenset()
    slot, made = await put(store, 3)
    assert bytes(await get(store, slot, made)) == content(3)
    await store.close()


async def test_latecomers_enter_blocks_when_their_key_comes_and_remove_them_when_it_never_will(
    medium: Medium,
) -> None:
    keys, clock = KeyRing(ANNA, BOB), Clock()
    await filled(medium, keys)
    kept = {scope: keys.shred(scope) for scope in (ANNA, BOB)}
    store = await medium.open(keys)
    node = make_node([], clock)
    tier = Tier(NodeTier.model_validate({"name": "t", "type": "NVMe", "capacityBytes": 1}), 0, store, 1)
    node.tiers.append(tier)
    assert await found(store.recover()) == {}
    latecomers = AwaitedKeys(node, keys)

    await latecomers.poll()
    keys.known[ANNA] = kept[ANNA]
    await latecomers.poll()
    assert len(node.index.blocks(ANNA)) == 10
    clock.now_s += LOST_AFTER_S - 1
    await latecomers.poll()
    assert store.waiting == {kept[BOB].tag}
    clock.now_s += 1.5
    await latecomers.poll()
    assert store.waiting == frozenset()
    assert tier.recovered_blocks == 10
    await store.close()


class Away:
    """A medium that fails for a moment."""

    def __init__(self, medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
        self._medium = medium
        self._monkeypatch = monkeypatch

    def fail(self, site: str, *, skip: int = 0) -> None:
        self._medium.volume.fail(site, errno.EMFILE, skip=skip)
        self._monkeypatch.setattr(ObjectClient, "get", self._refuse)

    @staticmethod
    async def _refuse(*_: object) -> bytes:
        raise BackendFailedError("the store is away")

    def come_back(self) -> None:
        self._monkeypatch.undo()


@pytest.fixture
def away(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> Away:
    return Away(medium, monkeypatch)


async def test_what_waits_for_its_key_waits_on_when_the_medium_fails_for_a_moment(medium: Medium, away: Away) -> None:
    keys, clock = KeyRing(ANNA, BOB), Clock()
    store = await medium.open(keys)
    for n in range(40):  # Several segments.
        await put(store, n)
    await store.close()
    kept = keys.shred(ANNA)
    store = await medium.open(keys)
    node = make_node([], clock)
    tier = Tier(NodeTier.model_validate({"name": "t", "type": "NVMe", "capacityBytes": 1}), 0, store, 1)
    node.tiers.append(tier)
    assert await found(store.recover()) == {}
    latecomers = AwaitedKeys(node, keys)
    keys.known[ANNA] = kept

    away.fail("open", skip=1)
    with suppress(BackendFailedError):
        await latecomers.poll()
    assert store.waiting == {kept.tag}
    away.come_back()
    await latecomers.poll()

    assert store.waiting == frozenset()
    assert len(node.index.blocks(ANNA)) == 40
    await store.close()


async def test_what_is_to_be_forgotten_is_forgotten_after_a_failure(medium: Medium, away: Away) -> None:
    keys = KeyRing(ANNA, BOB)
    await filled(medium, keys)
    kept = keys.shred(ANNA)
    store = await medium.open(keys)
    await found(store.recover())

    away.fail("unlink")
    with suppress(BackendFailedError):
        await store.forget_waiting(kept.tag)
        assert medium.kind == "objects", "its deletions are tried until they are done"
    away.come_back()
    await store.forget_waiting(kept.tag)
    await store.close()

    keys.known[ANNA] = kept
    store = await medium.open(keys)
    assert set(await found(store.recover())) == set(range(1, 20, 2))
    await store.close()


async def test_a_tier_that_was_taken_out_gets_no_blocks_any_more(medium: Medium) -> None:
    keys = KeyRing(ANNA, BOB)
    await filled(medium, keys)
    store = await medium.open(keys)
    node = make_node([], Clock())
    tier = Tier(NodeTier.model_validate({"name": "t", "type": "NVMe", "capacityBytes": 1}), 0, store, 1)
    node.tiers.append(tier)

    async def taken_out() -> AsyncIterator[tuple[SlotRef, Record]]:
        async for pair in store.recover():
            yield pair
        node.tiers.remove(tier)

    assert await enter(node, tier, taken_out()) == 0
    assert not len(node.index)
    await store.close()


async def test_a_tier_that_fails_keeps_the_keys_of_others_from_nobody(medium: Medium, away: Away) -> None:
    keys = KeyRing(ANNA, BOB)
    other = Medium("with index")
    for one in (medium, other):
        await filled(one, keys)
    kept = keys.shred(ANNA)
    stores = [await one.open(keys) for one in (medium, other)]
    node = make_node([], Clock())
    for number, store in enumerate(stores):
        spec = NodeTier.model_validate({"name": f"t{number}", "type": "NVMe", "capacityBytes": 1})
        node.tiers.append(Tier(spec, number, store, 1 + number))
        await found(store.recover())
    keys.known[ANNA] = kept

    away.fail("open")
    latecomers = AwaitedKeys(node, keys)
    await latecomers.poll()
    assert stores[0].waiting == {kept.tag} or medium.kind == "with index"
    assert stores[1].waiting == frozenset()
    away.come_back()
    await latecomers.poll()
    assert stores[0].waiting == frozenset()
    for store in stores:
        await store.close()


async def test_a_wait_that_the_medium_makes_longer_is_logged_once(
    medium: Medium, away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyRing(ANNA, BOB)
    await filled(medium, keys)
    kept = keys.shred(ANNA)
    store = await medium.open(keys)
    node = make_node([], Clock())
    spec = NodeTier.model_validate({"name": "t", "type": "NVMe", "capacityBytes": 1})
    node.tiers.append(Tier(spec, 0, store, 1))
    await found(store.recover())
    keys.known[ANNA] = kept
    caplog.set_level(logging.INFO)

    latecomers = AwaitedKeys(node, keys)
    for _ in range(3):
        away.fail("open")
        await latecomers.poll()
    assert store.waiting == {kept.tag}
    assert [r.getMessage() for r in caplog.records].count("sealed blocks wait for their key") == 1
    assert "sealed blocks found their key" not in caplog.text
    away.come_back()
    await latecomers.poll()
    assert store.waiting == frozenset()
    assert "sealed blocks found their key" in caplog.text
    await store.close()


@pytest.mark.parametrize("medium", ["with index", "without index"], indirect=True)
async def test_segments_that_were_removed_before_a_failure_keep_no_others_waiting(medium: Medium, away: Away) -> None:
    keys = KeyRing(ANNA, BOB)
    store = await medium.open(keys)
    for n in range(40):  # Several segments.
        await put(store, n)
    await store.close()
    kept = keys.shred(ANNA)
    store = await medium.open(keys)
    await found(store.recover())

    away.fail("unlink", skip=1)
    with pytest.raises(BackendFailedError):
        await store.forget_waiting(kept.tag)
    keys.known[ANNA] = kept

    assert len(await found(store.recover_waiting(kept.tag))) > 0
    assert store.waiting == frozenset()
    await store.close()


class Devices:
    """A tier over two devices in memory."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self.volumes = [MemoryVolume(), MemoryVolume()]

    async def _open(self, number: int, part_bytes: int) -> RecordStore:
        self.volumes[number] = self.volumes[number].kill()
        return await open_store(self.volumes[number], part_bytes, keys=self._keys)

    async def open(self) -> StripedStore:
        return await open_striped({f"/{n}": partial(self._open, n) for n in range(2)}, 2 * CAPACITY_BYTES)


@pytest.mark.parametrize("is_erased", [False, True])
async def test_a_device_that_fails_keeps_the_keys_of_others_from_nobody(is_erased: bool) -> None:  # noqa: FBT001
    keys = KeyRing(ANNA)
    devices = Devices(keys)
    tier = await devices.open()
    for n in range(20):
        await put(tier, n)
    await tier.close()
    kept = keys.shred(ANNA)
    tier = await devices.open()
    assert await found(tier.recover()) == {}

    first, second = (part.store for part in tier._parts)
    fault = devices.volumes[0].fail("unlink" if is_erased else "open", errno.EMFILE, times=-1)
    keys.known |= {} if is_erased else {ANNA: kept}
    with pytest.raises(BackendFailedError):
        await (tier.forget_waiting(kept.tag) if is_erased else found(tier.recover_waiting(kept.tag)))

    assert first is not None
    assert first.waiting == {kept.tag}
    assert second is not None
    assert second.waiting == frozenset()
    fault.times = 0
    await tier.close()
