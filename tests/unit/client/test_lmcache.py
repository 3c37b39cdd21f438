"""Laws of the LMCache adapter's names, options and transfers, without LMCache and without sockets."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import wire
from kvstrata_api.blocks import KEY_BYTES, Layout, chain_keys, unpack_digests
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.tiers import Lookup
from kvstrata_client.connectors import object_transfers
from kvstrata_client.connectors.lmcache_board import LOCK_S
from kvstrata_client.connectors.lmcache_names import ORDER, Fingerprint, Name, Namer, parse
from kvstrata_client.connectors.object_keys import BLOCKS_MAX
from kvstrata_client.connectors.object_transfers import Object, StoredObjects, TransferJob
from kvstrata_client.verbs.results import Grants, Scope
from support.client.model import DOMAIN, LAYOUT, OTHER, OWN, TARGET, Attached, Bench, Model
from support.client.opaque_objects import BLOCK, NAME, PRINT, named

pytestmark = pytest.mark.unit


class OpaqueModel(Model):
    """The model agent, with the verbs that opaque objects need."""

    def __init__(self, fd: int, slots: int = 64) -> None:
        super().__init__(fd, slots)
        self.pinned: list[set[bytes]] = []
        self.prefetched: list[bytes] = []
        self.touched: list[tuple[str, bytes]] = []
        self.entered: list[str] = []
        """What became of sessions."""
        self.held: set[bytes] = set()
        """Digests that a drop leaves where they are."""
        self.account = "{}"
        self.trips = 0

    def lookup(self, r: wire.Lookup) -> wire.Found:
        states = [Lookup.HIT if (r.scope, d) in self.index else Lookup.MISS for d in unpack_digests(r.digests)]
        return wire.Found(r.id, 1, bytes(states), 0, b"", ("dram",))

    def pin(self, r: wire.Pin) -> wire.Done:
        here = {d for d in unpack_digests(r.digests) if (r.scope, d) in self.index}
        self.pinned.append(here)
        return wire.Done(r.id, 1, len(here))

    def unpin(self, r: wire.Unpin) -> wire.Done:
        gone = set(unpack_digests(r.digests))
        self.pinned = [p - gone for p in self.pinned]
        return wire.Done(r.id, 1, len(gone))

    def touch(self, r: wire.Touch) -> wire.Done:
        self.touched += [(r.scope, d) for d in unpack_digests(r.digests)]
        return wire.Done(r.id, 1)

    def drop(self, r: wire.Drop) -> wire.Found:
        asked = unpack_digests(r.digests)
        for digest in asked:
            if digest not in self.held:
                self.index.pop((r.scope, digest), None)
        return wire.Found(r.id, 1, bytes([self.index.get((r.scope, d)) is not None for d in asked]), 0, b"", ())

    def opensession(self, r: wire.OpenSession) -> wire.Done:
        self.entered.append("open")
        return wire.Done(r.id, 1, 1)

    def touchsession(self, r: wire.TouchSession) -> wire.Done:
        is_known = "open" in self.entered
        self.entered += [r.state] if is_known else []
        return wire.Done(r.id, 1, int(is_known))

    def stats(self, r: wire.Stats) -> wire.Text:
        return wire.Text(r.id, 1, self.account)

    def prefetch(self, r: wire.Prefetch) -> wire.Done:
        self.prefetched += unpack_digests(r.digests)
        return wire.Done(r.id, 1)


class OpaqueBench(Bench):
    model: OpaqueModel

    def __init__(self, slots: int = 64) -> None:
        super().__init__(slots)
        self.model = OpaqueModel(self.model.fd, slots)

    def perform(self, step: Any) -> Any:
        self.model.trips += isinstance(step, tuple)
        return super().perform(step)


@pytest.fixture
def bench() -> Iterator[OpaqueBench]:
    made = OpaqueBench()
    yield made
    made.close()


def job(*scopes: Scope, clock: Any = lambda: 0.0, verbs: tuple[str, ...] = wire.LATER_VERBS) -> TransferJob:
    grants = Grants(1, "a", scopes, scopes[0].id, BLOCK, 600.0, verbs) if scopes else None
    return TransferJob(TARGET, Attached(grants), Namer(PRINT), clock, deadline_s=5.0)


def filled(number: int, blocks: int = 1) -> Object:
    data = np.random.default_rng((number, blocks)).integers(0, 256, blocks * BLOCK, dtype=np.uint8)
    return Object(named(number), len(data), (data.data,))


def empty(number: int, blocks: int = 1) -> Object:
    return Object(named(number), blocks * BLOCK, (np.zeros(blocks * BLOCK, np.uint8).data,))


# Names


def key(name: Name = NAME, size_bytes: int = BLOCK, secret: Scope = OWN, fingerprint: Fingerprint = PRINT) -> bytes:
    return Namer(fingerprint).keys(secret.secret, name, size_bytes)[0].digest


def test_whoever_disagrees_in_one_thing_finds_nothing() -> None:
    names = [replace(NAME, rank=2), replace(NAME, group=1), replace(NAME, salt="u"), replace(NAME, chunk=b"d" * 32)]
    layouts: list[dict[str, Any]] = [
        {"revision": "r2"}, {"dtype": "fp16"}, {"quantization": "fp8:abc"}, {"adapter": "lora"}, {"tp_size": 2},
        {"order": ORDER}, {"rope_theta": "1e6"}, {"kv_heads": 2, "head_dim": 4},
    ]  # fmt: skip
    prints = [replace(PRINT, layout=replace(LAYOUT, **change)) for change in layouts]
    prints += [
        replace(PRINT, **change) for change in ({"chunk_tokens": 4}, {"hash_algorithm": "x"}, {"hash_seed": "1"})
    ]

    keys = [key(), key(secret=OTHER), key(size_bytes=2 * BLOCK), *(key(n) for n in names)]
    keys += [key(fingerprint=p) for p in prints]

    assert len(set(keys)) == len(keys) == 7 + len(prints)


def test_a_name_cannot_be_shifted_from_one_field_into_the_next() -> None:
    assert key(replace(NAME, salt="ab", chunk=b"c")) != key(replace(NAME, salt="a", chunk=b"bc"))
    assert key(replace(NAME, rank=11, group=1)) != key(replace(NAME, rank=1, group=11))


def test_no_object_has_the_key_of_a_prompt() -> None:
    prompts = chain_keys(OWN.secret, LAYOUT.layout_id(), [1, 2, 3, 4], 2)

    assert {key(), key(size_bytes=2 * BLOCK)}.isdisjoint(k.digest for k in prompts)


@given(st.integers(1, 40), st.integers(1, 40))
def test_keys_of_one_object_are_many_and_of_two_sizes_apart(blocks: int, other: int) -> None:
    first, second = (Namer(PRINT).keys(OWN.secret, NAME, n * BLOCK) for n in (blocks, other))

    assert len({k.digest for k in first}) == blocks
    assert all(len(k.digest) == KEY_BYTES for k in first)
    assert (set(first) == set(second)) == (blocks == other)
    assert blocks == other or set(first).isdisjoint(second)


@pytest.mark.parametrize("size_bytes", [0, 1, BLOCK - 1, BLOCK + 1, (BLOCKS_MAX + 1) * BLOCK, -BLOCK])
def test_a_size_that_does_not_fit_is_refused_with_the_sizes_that_do(size_bytes: int) -> None:
    with pytest.raises(
        InvalidInputError, match=rf"object of {size_bytes} B: 1 to {BLOCKS_MAX} whole blocks of {BLOCK} B"
    ):
        key(size_bytes=size_bytes)


def test_an_object_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="object of model 'qwen': this adapter has 'llama'"):
        key(replace(NAME, model="qwen"))


def test_a_chunk_is_whole_blocks() -> None:
    with pytest.raises(InvalidInputError, match="chunk_tokens: 3, a multiple of block_tokens 2"):
        replace(PRINT, chunk_tokens=3)


# Options

PARAMS: dict[str, Any] = {
    "socket": "/run/agent.sock", "pool": "p", "token_file": "/token", "chunk_tokens": 4,
    "layout": {"model": "m", "revision": "r", "dtype": "bf16", "block_tokens": 2, "layers": 1, "kv_heads": 1,
               "head_dim": 8, "element_bytes": 2},
}  # fmt: skip


def test_options_default_to_what_lmcache_does() -> None:
    options = parse(PARAMS)

    assert options.fingerprint.layout == Layout("m", "r", "bf16", 2, 1, 1, 8, 2, order=ORDER)
    assert (options.fingerprint.model_name, options.fingerprint.hash_algorithm) == ("m", "blake3")
    assert options.fingerprint.object_bytes == 2 * options.fingerprint.layout.block_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"socket": ""}, "adapter_params.socket: is empty"),
        ({"pool": 3}, r"Expected `str`, got `int` - at `\$.pool`"),
        ({"worker": 3}, "unknown field `worker`"),
        ({"workers": 0}, "adapter_params.workers: 0, 1 to 16 wanted"),
        ({"load_deadline_s": 61}, "adapter_params.load_deadline_s: 61.0, more than 0 to 60.0 wanted"),
        ({"lookup_timeout_s": 0}, "adapter_params.lookup_timeout_s: 0.0, more than 0 to 60.0 wanted"),
        ({"chunk_tokens": 5}, "chunk_tokens: 5, a multiple of block_tokens 2"),
        ({"chunk_tokens": 2 * BLOCKS_MAX + 2}, f"1 to {BLOCKS_MAX} whole blocks"),
        ({"layout": {**PARAMS["layout"], "adaptor": "x"}}, "adapter_params.layout: no such fields: adaptor"),
        ({"layout": {**PARAMS["layout"], "layers": 0}}, "adapter_params.layout.layers: 0, at least 1 wanted"),
        ({"layout": {"model": "m"}}, "missing required field"),
        ({"layout": 3}, "Expected `object`"),
    ],
)
def test_bad_options_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse({**PARAMS, **change})


# Transfers


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=6, unique=True),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=6),
    st.integers(1, 64),
)
def test_what_is_loaded_is_what_was_stored_under_that_name_and_size(
    stored: list[tuple[int, int]], asked: list[tuple[int, int]], leases_max: int
) -> None:
    bench = OpaqueBench()
    bench.model.leases_max = leases_max
    outcome = bench.drive(object_transfers.store(job(OWN), [filled(*s) for s in stored]))
    objects = [empty(*a) for a in asked]
    found = bench.drive(object_transfers.look_up(job(OWN), objects))
    loaded = bench.drive(object_transfers.load(job(OWN), objects))
    bench.close()

    published, new = sum(blocks for _, blocks in stored), frozenset(range(len(stored)))
    assert outcome == StoredObjects(is_whole=True, published=published, new=new, leading=len(stored))
    assert loaded == [a in stored for a in asked] == [bool(keys) for keys in found]
    for one, is_there, a in zip(objects, loaded, asked, strict=True):
        assert not is_there or one.memory == filled(*a).memory
    assert not bench.model.leased
    assert not bench.model.reserved


def test_an_object_of_which_a_block_has_gone_is_a_miss_and_the_others_are_not(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(i, 2) for i in range(4)]))
    victim = Namer(PRINT).keys(OWN.secret, named(1), 2 * BLOCK)[1]
    del bench.model.index[victim.scope, victim.digest]

    assert bench.drive(object_transfers.load(job(OWN), [empty(i, 2) for i in range(4)])) == [True, False, True, True]
    found = bench.drive(object_transfers.look_up(job(OWN), [empty(i, 2) for i in range(4)]))
    assert [len(keys) for keys in found] == [2, 0, 2, 2]


def test_many_misses_cost_three_trips(bench: OpaqueBench) -> None:
    assert bench.drive(object_transfers.load(job(OWN), [empty(i) for i in range(200)])) == [False] * 200
    assert bench.model.trips <= 3


def test_a_wrong_byte_is_a_miss_and_the_agent_is_told(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(0), filled(1)]))
    os.pwrite(bench.model.fd, b"\xff" * BLOCK, 0)

    assert bench.drive(object_transfers.load(job(OWN), [empty(0), empty(1)])) == [False, True]


def test_nothing_is_believed_whose_lease_was_over(bench: OpaqueBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(0), filled(1)]))
    monkeypatch.setattr(bench.model, "release", lambda r: wire.Done(r.id, 1, 0))

    assert bench.drive(object_transfers.load(job(OWN), [empty(0), empty(1)])) == [False, False]


def test_a_full_pool_fails_the_store_and_keeps_no_slot() -> None:
    bench = OpaqueBench(slots=3)
    outcome = bench.drive(object_transfers.store(job(OWN), [filled(0, 2), filled(1, 2)]))
    loaded = bench.drive(object_transfers.load(job(OWN), [empty(0, 2), empty(1, 2)]))
    bench.close()

    assert (outcome.is_whole, outcome.leading) == (False, 1)
    assert loaded == [True, False]
    assert not bench.model.reserved


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_whoever_is_interrupted_holds_nothing(bench: OpaqueBench, fail_at: int) -> None:
    objects = [filled(i) for i in range(3)]
    for operation in (object_transfers.store(job(OWN), objects), object_transfers.load(job(OWN), objects)):
        with contextlib.suppress(KeyboardInterrupt):
            bench.drive(operation, fail_at)
    assert not bench.model.leased
    assert not bench.model.reserved


def test_the_agent_away_is_misses_and_a_failed_store(bench: OpaqueBench) -> None:
    away = job()

    assert bench.drive(object_transfers.look_up(away, [empty(0)], 1.0)) == [()]
    assert bench.drive(object_transfers.load(away, [empty(0)])) == [False]
    assert bench.drive(object_transfers.store(away, [filled(0)])) == StoredObjects()
    assert bench.model.trips == 0


def test_a_load_ends_with_its_deadline(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(0)]))
    times = iter([0.0, 6.0])

    assert bench.drive(object_transfers.load(job(OWN, clock=lambda: next(times)), [empty(0)])) == [False]


def test_objects_are_found_in_every_scope_that_may_be_read_and_written_to_one(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(0)]))
    bench.drive(object_transfers.store(job(DOMAIN, OWN), [filled(1)]))
    objects = [empty(0), empty(1), empty(2)]

    assert bench.drive(object_transfers.load(job(DOMAIN, OWN), objects)) == [True, True, False]
    assert bench.drive(object_transfers.load(job(OWN), objects)) == [True, False, False]
    assert bench.drive(object_transfers.load(job(OTHER), objects)) == [False, False, False]


def test_a_lookup_locks_in_one_trip_and_an_unlock_takes_it_back(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(0, 2)]))
    before = bench.model.trips
    found = bench.drive(object_transfers.look_up(job(OWN), [empty(0, 2), empty(1)], LOCK_S))

    assert bench.model.trips == before + 1
    assert bench.model.pinned == [{k.digest for k in found[0]}]
    bench.drive(object_transfers.unlock(job(OWN), found))
    assert bench.model.pinned == [set()]


def test_the_agent_hears_of_what_is_absent_at_the_lookup_and_of_the_rest_when_it_is_loaded(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(0, 2)]))
    objects = [empty(0, 2), empty(1)]
    found = bench.drive(object_transfers.look_up(job(OWN), objects))
    bench.drive(object_transfers.follow_up(job(OWN), objects, found))

    assert bench.model.counted == [(1, 0)]
    assert bench.model.prefetched == [k.digest for k in found[0]]
    assert bench.drive(object_transfers.load(job(OWN), objects)) == [True, False]
    assert bench.model.counted == [(1, 0), (3, 2)]
    assert bench.drive(object_transfers.load(job(OWN), objects[:1])) == [True]
    bench.drive(object_transfers.follow_up(job(OWN), objects[:1], found[:1]))
    assert bench.model.counted == [(1, 0), (3, 2), (2, 2)]


def test_what_a_store_found_there_already_is_not_new(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(0), filled(1, 2)]))
    again = bench.drive(object_transfers.store(job(OWN), [filled(0), filled(2), filled(1, 2)]))

    assert again == StoredObjects(is_whole=True, published=1, new=frozenset({1}), leading=3)


def test_what_the_engine_says_that_objects_continue_is_what_their_blocks_continue(
    bench: OpaqueBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bytes, list[bytes], str]] = []
    reserve = bench.model.reserve

    def noted(r: wire.Reserve) -> wire.Reserved:
        asked.append((r.parent, unpack_digests(r.digests), r.session))
        return reserve(r)

    monkeypatch.setattr(bench.model, "reserve", noted)
    first, second, third, other = (filled(n, 2) for n in (1, 2, 3, 9))
    given = [
        replace(first, parent=named(0)), replace(second, parent=named(1)), replace(third, parent=named(9)),
        replace(other, parent=b""), filled(10, 2),
    ]  # fmt: skip
    outcome = bench.drive(object_transfers.store(job(OWN), given, session="s"))

    digests = {n: [k.digest for k in Namer(PRINT).keys(OWN.secret, named(n), 2 * BLOCK)] for n in (0, 1, 2, 3, 9, 10)}
    chains = {(parent, tuple(keys)) for parent, keys, _ in asked}
    assert chains == {
        (digests[0][-1], (*digests[1], *digests[2])), (digests[9][-1], tuple(digests[3])),
        (b"", (*digests[9], *digests[10])),
    }  # fmt: skip
    assert {session for *_, session in asked} == {"s"}
    assert outcome == StoredObjects(is_whole=True, published=10, new=frozenset(range(5)), leading=5)


def test_a_session_that_decodes_is_opened_where_the_agent_does_not_know_it(bench: OpaqueBench) -> None:
    for state in ("idle", "decoding", "decoding", "idle"):
        bench.drive(object_transfers.enter(job(OWN), "s", state))

    assert bench.model.entered == ["open", "decoding", "decoding", "idle"]


def test_a_touch_goes_to_every_scope_that_may_have_the_objects(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.touch(job(DOMAIN, OWN), [empty(0, 2), empty(1)]))

    keys = [Namer(PRINT).keys(s.secret, named(n), b * BLOCK) for s in (DOMAIN, OWN) for n, b in ((0, 2), (1, 1))]
    assert bench.model.touched == [(k.scope, k.digest) for owned in keys for k in owned]


def test_a_drop_tells_which_objects_are_gone_and_leaves_shared_ones(bench: OpaqueBench) -> None:
    for scopes in ((OWN,), (DOMAIN, OWN)):
        bench.drive(object_transfers.store(job(*scopes), [filled(n, 2) for n in range(3)]))
    bench.model.held = {Namer(PRINT).keys(OWN.secret, named(1), 2 * BLOCK)[0].digest}
    objects = [empty(n, 2) for n in range(4)]

    assert bench.drive(object_transfers.drop(job(DOMAIN, OWN), objects)) == [True, False, True, True]
    assert bench.drive(object_transfers.load(job(OWN), objects)) == [False] * 4
    assert bench.drive(object_transfers.load(job(DOMAIN), objects)) == [True, True, True, False]


def test_an_agent_that_knows_neither_verb_is_not_sent_one(bench: OpaqueBench) -> None:
    bench.drive(object_transfers.store(job(OWN), [filled(0)]))
    trips = bench.model.trips
    earlier = job(OWN, verbs=())

    bench.drive(object_transfers.touch(earlier, [empty(0)]))
    assert bench.drive(object_transfers.drop(earlier, [empty(0)])) == [False]
    assert (bench.model.touched, bench.model.trips) == ([], trips)


@pytest.mark.parametrize(
    ("account", "usage"),
    [
        ('{"tenant": {"used_bytes": 5, "limit_bytes": 9}, "tiers": []}', (5, 9)),
        ('{"tiers": []}', (0, 0)),
        ("{}", (0, 0)),
        ('{"tenant": {"used_bytes": "5", "limit_bytes": 9}}', (0, 0)),
    ],
)
def test_usage_is_the_agents_account_of_the_tenant(bench: OpaqueBench, account: str, usage: tuple[int, int]) -> None:
    bench.model.account = account

    assert bench.drive(object_transfers.usage(job(OWN))) == usage
