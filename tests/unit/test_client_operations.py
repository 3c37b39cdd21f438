"""Laws of load and store, driven without sockets against a model of the agent in this process."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet_api import wire
from kvfleet_api.blocks import KEY_BYTES, Layout, ScopeId, ScopeSecret, unpack_digests
from kvfleet_api.checksum import checksum
from kvfleet_api.errors import InvalidInputError, QuotaExceededError
from kvfleet_client import routes
from kvfleet_client.calls import Call, Done, Operation, Post, Reading, Work, begin, interrupt, resume
from kvfleet_client.extents import Extents
from kvfleet_client.loading import load
from kvfleet_client.results import Answer, Bytes2D, Grants, Scope
from kvfleet_client.routes import Job, look_up, prompt_of
from kvfleet_client.storing import store
from kvfleet_client.target import Target

pytestmark = pytest.mark.unit

LAYOUT = Layout("m", "r", "bf16", 2, layers=1, kv_heads=1, head_dim=8, element_bytes=2)
TARGET = Target(socket=None, pool="p", token="t", layout=LAYOUT)  # type: ignore[arg-type]
SLOTS = 64
SLOT_BYTES = 4096
EPOCH = 7
OWN = Scope(ScopeSecret(ScopeId("tenant/a/1/v1"), b"o" * 32), "tenant", "a", can_write=True)
OTHER = Scope(ScopeSecret(ScopeId("tenant/b/1/v1"), b"x" * 32), "tenant", "b", can_write=True)
DOMAIN = Scope(ScopeSecret(ScopeId("domain/d/1/v1"), b"d" * 32), "domain", "d", can_write=True)
T = TypeVar("T")


@dataclass
class Model:
    """An agent with one extent: slots are taken in order, blocks are indexed by scope and digest."""

    fd: int
    slots: int = SLOTS
    leases_max: int = SLOTS
    """Blocks that one acquire leases at most: what memory could hold at a time."""
    index: dict[tuple[str, bytes], tuple[int, bytes]] = field(default_factory=dict)
    reserved: dict[int, tuple[str, bytes, int]] = field(default_factory=dict)
    leased: set[int] = field(default_factory=set)
    used: int = 0
    refusal: QuotaExceededError | None = None
    """What whoever finds no slot is told, if anything."""
    serial: int = 0
    looked_up: list[int] = field(default_factory=list)
    """Keys of each lookup."""
    counted: list[tuple[int, int]] = field(default_factory=list)
    """Wanted and loaded blocks of each load, as told."""

    def answer(self, request: wire.AnyRequest) -> wire.AnyReply:
        verb: Any = getattr(self, type(request).__name__.lower())
        reply: wire.AnyReply = verb(request)
        return reply

    def known(self, request: Any) -> list[bytes]:
        digests = unpack_digests(request.digests)
        present = [(request.scope, d) in self.index for d in digests]
        return digests[: present.index(False) if False in present else len(digests)]

    def lookup(self, r: wire.Lookup) -> wire.Found:
        self.looked_up.append(len(r.digests) // KEY_BYTES)
        leading = len(self.known(r))
        return wire.Found(r.id, 1, bytes(len(r.digests) // KEY_BYTES), leading, bytes(leading), ("dram",))

    def acquire(self, r: wire.Acquire) -> wire.Acquired:
        blocks = []
        for digest in self.known(r)[: self.leases_max]:
            slot, check = self.index[r.scope, digest]
            self.serial += 1
            self.leased.add(self.serial)
            blocks.append(wire.Leased(self.serial, 0, slot * SLOT_BYTES, slot, check, "dram"))
        return wire.Acquired(r.id, 1, tuple(blocks), (), EPOCH)

    def release(self, r: wire.Release) -> wire.Done:
        lived = self.leased & set(r.leases)
        self.leased -= lived
        return wire.Done(r.id, 1, len(lived))

    def reserve(self, r: wire.Reserve) -> wire.Reserved:
        taken = []
        for digest in unpack_digests(r.digests):
            if (r.scope, digest) in self.index:
                taken.append(wire.Slot(0, 0, 0, 0))
                continue
            if self.used == self.slots:
                break
            self.serial += 1
            self.reserved[self.serial] = (r.scope, digest, self.used)
            taken.append(wire.Slot(self.serial, 0, self.used * SLOT_BYTES, self.used))
            self.used += 1
        if not taken and self.refusal is not None:
            raise self.refusal
        return wire.Reserved(r.id, 1, tuple(taken), (), EPOCH, 30.0)

    def publish(self, r: wire.Publish) -> wire.Published:
        results = []
        for reservation, check in zip(r.reservations, r.checksums, strict=True):
            scope, digest, slot = self.reserved.pop(reservation)
            stored = os.pread(self.fd, LAYOUT.block_bytes, slot * SLOT_BYTES)
            good = checksum(stored, digest, EPOCH, slot) == check
            if good:
                self.index[scope, digest] = (slot, check)
            results.append(1 if good else 0)
        return wire.Published(r.id, 1, bytes(results))

    def abandon(self, r: wire.Abandon) -> wire.Done:
        for reservation in r.reservations:
            del self.reserved[reservation]
        return wire.Done(r.id, 1)

    def countload(self, r: wire.CountLoad) -> wire.Done:
        self.counted.append((r.wanted_blocks, r.loaded_blocks))
        return wire.Done(r.id, 1)

    def scopes(self, r: wire.Scopes) -> wire.Done:
        return wire.Done(r.id, 2)


@dataclass
class Attached:
    grants: Grants | None
    is_stale: bool = False


class Bench:
    """A model agent and a driver of operations; `fail_at` interrupts the n-th step."""

    def __init__(self, slots: int = SLOTS) -> None:
        fd = os.memfd_create("model")
        os.ftruncate(fd, SLOTS * SLOT_BYTES)
        self.model = Model(fd, slots)
        self.extents = Extents()
        self.extents.install((wire.ExtentGrant(0, SLOTS * SLOT_BYTES, is_writable=True),), (os.dup(fd),))

    def close(self) -> None:
        self.extents.clear()
        os.close(self.model.fd)

    def drive(self, operation: Operation[T], fail_at: int = -1) -> T:
        step, n = begin(operation), 0
        while not isinstance(step, Done):
            n += not isinstance(step, Post)  # Posts do not wait, so nobody can be interrupted there.
            is_hit = n == fail_at and not isinstance(step, Post)
            step = interrupt(operation, KeyboardInterrupt()) if is_hit else resume(operation, self.perform(step))
        return step.value

    def perform(self, step: Any) -> list[Answer[Any]]:
        if isinstance(step, Work):
            step.run()
            return []
        return [self.execute(c) for c in (step.calls if isinstance(step, Post) else step)]

    def execute(self, call: Call[Any]) -> Answer[Any]:
        try:
            reply = self.model.answer(call.request(1))
        except QuotaExceededError as e:
            return Answer(call.absent, e)
        return Answer(call.read(reply, Reading(self.extents, LAYOUT.block_bytes, 1)))

    def load(self, tokens: list[int], *scopes: Scope, fail_at: int = -1) -> Any:
        return self.drive(load(job(tokens, *scopes), None), fail_at)

    def store(self, tokens: list[int], *scopes: Scope, first: int = 0, fail_at: int = -1) -> Any:
        return self.drive(store(job(tokens, *scopes), kv(tokens)[first:], first), fail_at)


@pytest.fixture(scope="module", autouse=True, params=["all keys at once", "first blocks first"])
def _order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prompts here are short; every law holds in both orders of asking."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "HEADS_FIRST_BLOCKS", 1 if request.param == "first blocks first" else 100)
        yield


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def job(tokens: list[int], *scopes: Scope) -> Job:
    grants = Grants(1, "a", scopes, scopes[0].id, LAYOUT.block_bytes, 600.0)
    return Job(TARGET, Attached(grants), prompt_of(TARGET, np.asarray(tokens, np.uint32)))


def kv(tokens: list[int]) -> Bytes2D:
    """Bytes that depend on the whole prefix, as KV does."""
    rows = [
        np.random.default_rng(tokens[: end + 1]).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)
        for end in range(1, len(tokens), 2)
    ]
    return np.array(rows, np.uint8).reshape(-1, LAYOUT.block_bytes)


prompts = st.lists(st.integers(0, 2), min_size=0, max_size=12)


@given(st.lists(st.tuples(prompts, st.sampled_from(["own", "joined"])), max_size=6), prompts)
def test_what_is_loaded_is_always_what_was_stored_for_these_tokens(
    stored: list[tuple[list[int], str]], asked: list[int]
) -> None:
    bench = Bench()
    for tokens, who in stored:
        bench.store(tokens, *((OWN,) if who == "own" else (DOMAIN, OWN)))
    loaded = bench.load(asked, DOMAIN, OWN)
    bench.close()

    assert np.array_equal(loaded.data, kv(asked)[: loaded.blocks])
    best = max((common(asked, tokens) for tokens, _ in stored), default=0)
    assert loaded.blocks == best // 2
    assert bench.model.counted == ([(len(asked) // 2, loaded.blocks)] if len(asked) // 2 else [])
    assert not bench.model.leased
    assert not bench.model.reserved


@given(st.lists(st.tuples(prompts, st.sampled_from(["own", "joined"])), max_size=6), prompts)
def test_a_lookup_tells_what_a_load_would_bring(stored: list[tuple[list[int], str]], asked: list[int]) -> None:
    bench = Bench()
    for tokens, who in stored:
        bench.store(tokens, *((OWN,) if who == "own" else (DOMAIN, OWN)))
    found = bench.drive(look_up(job(asked, DOMAIN, OWN)))
    loaded = bench.load(asked, DOMAIN, OWN)
    bench.close()

    assert (found.blocks, found.shared_blocks) == (loaded.blocks, loaded.shared_blocks)


def test_a_long_prompt_is_keyed_beyond_its_first_block_only_where_that_is_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "HEADS_FIRST_BLOCKS", 6)
    tokens = list(range(12))
    writes_domain, writes_own = (DOMAIN, OWN), (OWN, DOMAIN)  # The first one is the write scope here.
    assert bench.load(tokens, *writes_domain).blocks == 0
    assert bench.load(tokens, *writes_own).blocks == 0
    assert bench.model.looked_up == [6, 1, 1, 6], "domains are asked first"

    bench.store(tokens, OWN)
    bench.model.looked_up.clear()
    assert bench.load(tokens, *writes_own).blocks == 6
    assert bench.model.looked_up == [1, 6]

    bench.model.looked_up.clear()
    assert bench.load(tokens, *writes_domain).blocks == 6
    assert bench.model.looked_up == [6, 1, 6], "the first block was there"

    bench.model.looked_up.clear()
    assert bench.load(tokens[:10], *writes_own).blocks == 5
    assert bench.model.looked_up == [5, 5], "a short one is asked for at once"


def common(a: list[int], b: list[int]) -> int:
    same = [x == y for x, y in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)


@given(prompts)
def test_another_tenants_equal_prompt_finds_nothing(tokens: list[int]) -> None:
    bench = Bench()
    bench.store(tokens, OWN)
    loaded = bench.load(tokens, OTHER)
    bench.close()

    assert loaded.blocks == 0


@given(prompts)
def test_storing_twice_publishes_once(tokens: list[int]) -> None:
    bench = Bench()
    first, second = bench.store(tokens, OWN), bench.store(tokens, OWN)
    bench.close()

    assert first.published == len(tokens) // 2
    assert (second.published, second.refused) == (0, 0)


def test_a_member_that_joins_a_domain_brings_its_own_blocks_along(bench: Bench) -> None:
    tokens = list(range(12))
    bench.store(tokens[:8], OWN)
    stored = bench.store(tokens, DOMAIN, OWN, first=4)
    loaded = bench.load(tokens, DOMAIN, OTHER)

    assert (stored.published, stored.copied) == (6, 4)
    assert np.array_equal(loaded.data, kv(tokens))
    assert loaded.shared_blocks == 6


def test_a_reader_that_may_not_write_continues_the_shared_prefix_in_its_own_scope(bench: Bench) -> None:
    tokens = list(range(12))
    bench.store(tokens[:6], DOMAIN, OWN)
    reader = (OTHER, Scope(DOMAIN.secret, "domain", "d", can_write=False))  # Its write scope comes first here.
    stored = bench.store(tokens, *reader, first=3)
    loaded = bench.load(tokens, *reader)

    assert (stored.published, stored.copied) == (3, 0)
    assert (loaded.blocks, loaded.shared_blocks) == (6, 3)
    assert np.array_equal(loaded.data, kv(tokens))
    assert bench.load(tokens, OTHER).blocks == 0, "blocks behind a shared parent are not a chain of their own"


@pytest.mark.parametrize("at", range(4))
def test_changed_bytes_end_the_prefix_and_are_never_handed_out(bench: Bench, at: int) -> None:
    tokens = list(range(8))
    bench.store(tokens, OWN)
    os.pwrite(bench.model.fd, b"\xff\x00\xff", at * SLOT_BYTES)
    loaded = bench.load(tokens, OWN)

    assert (loaded.blocks, loaded.corrupt_blocks) == (at, 1)
    assert np.array_equal(loaded.data, kv(tokens)[:at])
    assert not bench.model.leased


def test_a_corrupt_block_is_not_carried_into_the_shared_scope(bench: Bench) -> None:
    tokens = list(range(8))
    bench.store(tokens, OWN)
    os.pwrite(bench.model.fd, b"\xff\x00\xff", 2 * SLOT_BYTES)
    stored = bench.store(tokens, DOMAIN, OWN, first=4)

    assert (stored.copied, stored.refused) == (2, 2)
    assert bench.load(tokens, DOMAIN, OTHER).blocks == 2
    assert not bench.model.reserved


def test_a_block_swapped_with_another_is_not_handed_out(bench: Bench) -> None:
    tokens = list(range(8))
    bench.store(tokens, OWN)
    keys = list(bench.model.index)
    one, two = (bench.model.index[k] for k in keys[:2])
    bench.model.index[keys[0]], bench.model.index[keys[1]] = two, one

    assert bench.load(tokens, OWN).blocks == 0


@pytest.mark.parametrize("leases_max", [1, 2, 4])
def test_memory_for_a_few_blocks_at_a_time_is_enough_to_load_and_copy_all(bench: Bench, leases_max: int) -> None:
    tokens = list(range(12))
    bench.store(tokens, OWN)
    bench.model.leases_max = leases_max

    assert np.array_equal(bench.load(tokens, OWN).data, kv(tokens))
    assert bench.store(tokens, DOMAIN, OWN, first=6).copied == 6
    assert np.array_equal(bench.load(tokens, DOMAIN, OTHER).data, kv(tokens))


def test_a_full_tier_takes_the_leading_blocks() -> None:
    bench = Bench(slots=3)
    tokens = list(range(12))
    stored = bench.store(tokens, OWN)

    assert (stored.published, stored.refused) == (3, 3)
    assert bench.load(tokens, OWN).blocks == 3
    bench.close()


def test_a_store_that_a_quota_ends_says_so() -> None:
    bench = Bench(slots=3)
    bench.model.refusal = QuotaExceededError("tenant a, tier dram: quota 3 B, used 3 B, want 1 B")
    stored = bench.store(list(range(12)), OWN)

    assert (stored.published, stored.refused, stored.error) == (3, 3, bench.model.refusal)
    assert bench.store(list(range(6)), OWN).error is None, "what is there already needs no room"
    bench.close()


@pytest.mark.parametrize("fail_at", range(1, 9))
def test_an_interrupted_operation_gives_everything_back(bench: Bench, fail_at: int) -> None:
    tokens = list(range(12))
    bench.store(tokens[:8], OWN)
    for operation in (bench.store, bench.load):
        with contextlib.suppress(KeyboardInterrupt):
            operation(tokens, DOMAIN, OWN, fail_at=fail_at)
    assert not bench.model.leased
    assert not bench.model.reserved


def test_grants_that_changed_meanwhile_are_asked_for_and_the_load_tried_again(bench: Bench) -> None:
    tokens = list(range(8))
    bench.store(tokens, DOMAIN, OTHER)
    stale = job(tokens, OWN)
    at = stale.at
    assert isinstance(at, Attached)
    at.is_stale = True
    asked: list[str] = []
    operation = load(stale, None)
    step = begin(operation)
    while not isinstance(step, Done):
        if isinstance(step, tuple) and isinstance(step[0].request(1), wire.Scopes):
            asked.append("scopes")
            at.grants, at.is_stale = job(tokens, DOMAIN, OWN).at.grants, False
            step = resume(operation, ())
        else:
            step = resume(operation, bench.perform(step))

    assert asked == ["scopes"]
    assert step.value.blocks == 4


def test_without_an_agent_nothing_is_loaded_or_stored(bench: Bench) -> None:
    away = Job(TARGET, Attached(None), prompt_of(TARGET, np.arange(8, dtype=np.uint32)))

    assert bench.drive(load(away, None)).blocks == 0
    assert bench.drive(store(away, kv(list(range(8))), 0)).published == 0


def test_a_slot_outside_its_extent_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidInputError, match="slot of 64 B"):
        bench.extents.view(0, SLOTS * SLOT_BYTES - 63, LAYOUT.block_bytes, is_writable=False)
    with pytest.raises(InvalidInputError, match="extent 1 is not granted"):
        bench.extents.view(1, 0, LAYOUT.block_bytes, is_writable=False)
