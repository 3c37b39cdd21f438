"""Laws of the keys that an agent holds: as long as Secret, entry and KEK are there, and not a moment longer."""

import base64
import os
from pathlib import Path

import pytest
from sim.volume import MemoryVolume

from kvstrata_agent.backends.file.record_store import open_store
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.movement.path import Priority
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.units import MIB
from kvstrata_api.wrapping import Keks
from kvstrata_kube.keks import KekSource, parse_kek_secret
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    OTHER_SCOPE,
    SCOPE,
    digest,
    dram_tier,
    make_core,
    secret,
    store_chain,
)
from support.agent.scope_keys import KeyRing
from support.kube.doubles import ScriptedApi, ok
from support.kube.scope_secrets import ScopeSecrets

pytestmark = pytest.mark.unit


@pytest.fixture
def fleet() -> ScopeSecrets:
    made = ScopeSecrets()
    made.make(SCOPE, OTHER_SCOPE)
    return made


def test_a_scope_has_its_own_data_key_and_a_tag_that_leads_back(fleet: ScopeSecrets) -> None:
    for scope in (SCOPE, OTHER_SCOPE):
        tag = fleet.keyring.tag(scope)
        assert bytes(fleet.keyring.data_key(scope) or b"") == fleet.data_keys[scope]
        assert tag is not None
        assert fleet.keyring.scope(tag) == scope
    assert fleet.keyring.scope(bytes(8)) is None


def test_a_key_is_overwritten_the_moment_its_secret_goes(fleet: ScopeSecrets) -> None:
    held, other = fleet.keyring.data_key(SCOPE) or b"", fleet.keyring.data_key(OTHER_SCOPE)
    tag = fleet.keyring.tag(SCOPE)
    fleet.delete(SCOPE)

    assert bytes(held) == bytes(32)
    assert bytes(other or b"") == fleet.data_keys[OTHER_SCOPE]
    assert fleet.keyring.data_key(SCOPE) is None
    assert fleet.keyring.tag(SCOPE) is None
    assert fleet.keyring.scope(tag or b"") is None


def test_without_its_entry_a_scope_is_known_and_has_no_data_key(fleet: ScopeSecrets) -> None:
    held = fleet.keyring.data_key(SCOPE) or b""
    fleet.write(SCOPE, {"v1": fleet.entries(SCOPE)["v1"]})

    assert bytes(held) == bytes(32)
    assert fleet.keyring.data_key(SCOPE) is None
    assert fleet.keyring.tag(SCOPE) is not None


def test_a_key_that_is_wrapped_anew_is_the_same_key(fleet: ScopeSecrets) -> None:
    keks = Keks({**fleet.keks.keys, 2: os.urandom(32)})
    fleet.turn_keks(keks)
    fleet.write(SCOPE, {**fleet.entries(SCOPE), "v1.data": keks.wrap(fleet.data_keys[SCOPE]).encode()})
    fleet.turn_keks(Keks({2: keks.keys[2]}))

    assert bytes(fleet.keyring.data_key(SCOPE) or b"") == fleet.data_keys[SCOPE]
    assert fleet.keyring.data_key(OTHER_SCOPE) is None, "its KEK is gone"


@pytest.mark.parametrize("keks", [Keks(), Keks({1: bytes(32)}), Keks({2: bytes(32)})])
def test_no_key_outlives_its_kek_and_each_comes_back_with_it(fleet: ScopeSecrets, keks: Keks) -> None:
    held, kept = fleet.keyring.data_key(SCOPE) or b"", fleet.keks
    fleet.turn_keks(keks)

    assert bytes(held) == bytes(32)
    assert fleet.keyring.data_key(SCOPE) is None
    assert fleet.keyring.tag(SCOPE) is not None
    fleet.turn_keks(kept)
    assert bytes(fleet.keyring.data_key(SCOPE) or b"") == fleet.data_keys[SCOPE]


@pytest.mark.parametrize("said", [b"", b"k1:", b"k1:!!", b"x", b"\xff\xfe", b"k1:" + base64.b64encode(bytes(40))])
def test_what_is_no_wrapped_key_is_no_key(fleet: ScopeSecrets, said: bytes) -> None:
    fleet.write(SCOPE, {**fleet.entries(SCOPE), "v1.data": said})

    assert fleet.keyring.data_key(SCOPE) is None


def test_a_successor_of_the_same_name_has_not_its_predecessors_key(fleet: ScopeSecrets) -> None:
    successor = type(SCOPE)(SCOPE.replace("uid-a", "uid-b"))

    assert successor != SCOPE
    assert fleet.keyring.data_key(successor) is None


def source(path: Path, changes: list[Keks]) -> KekSource:
    api = ScriptedApi(lambda _call: ok({}))
    made = KekSource(api, "kvstrata-system", path, lambda: changes.append(made.keks))  # type: ignore[arg-type]
    return made


def test_a_kek_file_is_followed_and_one_that_rots_leaves_no_kek(tmp_path: Path) -> None:
    path, changes = tmp_path / "keks", list[Keks]()
    made = source(path, changes)
    line = f"k1:{base64.b64encode(b'1' * 32).decode()}\n"
    for text in (None, line, line, line + line.replace("k1", "k7"), "k1:rotten"):
        if text is not None:
            path.write_text(text)
        made.look()

    assert [sorted(c.keys) for c in changes] == [[], [1], [1, 7], []]
    assert made.is_known
    assert not made.is_absent, "a file that is away is no reason to make a Secret"


def test_a_kek_secret_with_a_foreign_entry_counts_as_empty() -> None:
    good = base64.b64encode(bytes(32)).decode()

    assert parse_kek_secret(_raw(k1=good)).keks == Keks({1: bytes(32)})
    assert parse_kek_secret(_raw(k1=good, note=good)).keks == Keks()
    assert parse_kek_secret(_raw(k1="!")).keks == Keks()


def _raw(**data: str) -> bytes:
    said = ",".join(f'"{k}":"{v}"' for k, v in data.items())
    return f'{{"metadata":{{"name":"kvstrata-kek","uid":"u","resourceVersion":"5"}},"data":{{{said}}}}}'.encode()


async def test_a_missing_key_neither_drops_blocks_nor_pauses_their_tier() -> None:
    keys = KeyRing(SCOPE)
    spec = NodeTier.model_validate({"name": "below", "type": "NVMe", "capacityBytes": MIB})
    below = Tier(spec, 1, await open_store(MemoryVolume(), MIB, keys=keys), 2)
    core = make_core([dram_tier(MIB), below])
    at = RequestContext(1, "a", secret(SCOPE), LAYOUT_ID, BLOCK_BYTES)
    await store_chain(core, at, [1, 2])
    first, second = (core.node.index.find(SCOPE, digest(n)) for n in (1, 2))
    assert first is not None
    assert second is not None
    memory = core.node.tiers[0]
    assert await core.cache.demoter.demote_to(first, memory, below, Priority.DEMOTE)
    core.node.drop_copy(first, memory)
    kept = keys.lose(SCOPE)
    kept = type(kept)(kept.tag, None)
    keys.known[SCOPE] = kept

    assert not await core.cache.demoter.demote_to(second, memory, below, Priority.DEMOTE)
    assert (await core.cache.reader.acquire(AcquireCall(at, [digest(1)], 30.0, 5.0))).reads == []
    assert first.residence(below) is not None, "what cannot be read now is not lost"
    assert below.phase(core.node.clock()) == "Ready"
    assert below.backend.used_bytes == first.residences[0].slot.size_bytes
    await core.close()
    await below.backend.close()
