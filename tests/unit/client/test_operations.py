"""Laws of load and store, driven without sockets against a model of the agent in this process."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import wire
from kvstrata_api.errors import InvalidInputError, QuotaExceededError
from kvstrata_client.prompt import load as loading
from kvstrata_client.prompt import pipeline, routes
from kvstrata_client.prompt import store as storing
from kvstrata_client.prompt.load import load
from kvstrata_client.prompt.routes import Job, look_up, prompt_of
from kvstrata_client.prompt.store import store
from kvstrata_client.verbs.calls import Ahead, Done, Operation, Work, begin, resume
from kvstrata_client.verbs.results import Scope
from support.client.model import DOMAIN, EPOCH, LAYOUT, OTHER, OWN, SLOT_BYTES, SLOTS, TARGET, Attached, Bench, job, kv

pytestmark = pytest.mark.unit


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


@given(prompts, st.integers(0, 7), st.integers(0, 7))
def test_a_load_behind_blocks_at_hand_brings_the_others_alone(tokens: list[int], first: int, most: int) -> None:
    bench = Bench()
    bench.store(tokens[:4], DOMAIN, OWN)
    bench.store(tokens, OWN, DOMAIN)
    whole = bench.load(tokens, DOMAIN, OWN)
    rest = bench.drive(load(replace(job(tokens, DOMAIN, OWN), first_block=first, blocks_max=most), None))
    bench.close()

    wanted = range(first, max(first, min(most, whole.blocks)))
    assert rest.blocks == len(wanted)
    assert np.array_equal(rest.data, whole.data[wanted.start : wanted.stop])
    assert rest.shared_blocks == len(range(first, max(first, min(whole.shared_blocks, wanted.stop))))
    assert not bench.model.leased


@given(prompts)
def test_a_variant_finds_its_own_blocks_alone(tokens: list[int]) -> None:
    bench = Bench()
    bench.store(tokens, OWN)
    plain = job(tokens, OWN)
    other = replace(plain, prompt=prompt_of(TARGET, plain.prompt.tokens, "adapter a"))
    before = bench.drive(load(other, None)).blocks
    bench.drive(store(other, kv(tokens), 0))
    found = [bench.drive(load(replace(other, prompt=prompt_of(TARGET, plain.prompt.tokens, v)), None)).blocks
             for v in ("adapter a", "adapter b")]  # fmt: skip
    bench.close()

    assert (before, found) == (0, [len(tokens) // 2, 0])


@given(st.lists(st.tuples(prompts, st.sampled_from(["own", "joined"])), max_size=6), prompts)
def test_a_lookup_tells_what_a_load_would_bring(stored: list[tuple[list[int], str]], asked: list[int]) -> None:
    bench = Bench()
    for tokens, who in stored:
        bench.store(tokens, *((OWN,) if who == "own" else (DOMAIN, OWN)))
    found = bench.drive(look_up(job(asked, DOMAIN, OWN)))
    loaded = bench.load(asked, DOMAIN, OWN)
    bench.close()

    assert (found.blocks, found.shared_blocks) == (loaded.blocks, loaded.shared_blocks)


def test_a_lookup_says_whether_all_that_it_asked_was_answered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(12))
    bench.store(tokens[:4], DOMAIN)
    bench.model.looked_up.clear()
    answered = bench.drive(look_up(job(tokens, DOMAIN, OWN)))
    assert (answered.blocks, answered.is_answered) == (2, True)

    def late(request: wire.Lookup) -> wire.Found:
        if len(bench.model.looked_up) < answers:
            return find(request)
        raise QuotaExceededError("an error of any kind")

    find, asked = bench.model.lookup, len(bench.model.looked_up)
    monkeypatch.setattr(bench.model, "lookup", late)
    for answers in range(asked):  # noqa: B007  `late` reads it.
        bench.model.looked_up.clear()
        assert not bench.drive(look_up(job(tokens, DOMAIN, OWN))).is_answered
    assert bench.drive(look_up(replace(job(tokens, OWN), at=Attached(None)))).is_answered, "it is away"


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


@pytest.mark.parametrize(("empty", "wanted"), [(1, 6), (1_000, 0)], ids=["at first", "always"])
def test_a_first_batch_whose_room_the_others_had_is_asked_for_again_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, empty: int, wanted: int
) -> None:
    """Of several batches under way, those behind the first one may have come first, and hold what memory there is."""
    monkeypatch.setattr(pipeline, "BATCH_BLOCKS_MAX", 2)
    tokens, answers = list(range(12)), itertools.count()
    bench.store(tokens, OWN)
    acquire = bench.model.acquire

    def crowded(asked: wire.Acquire) -> wire.Acquired:
        is_first = bench.model.known(asked)[0] == first
        return wire.Acquired(asked.id, 1, (), (), EPOCH) if is_first and next(answers) < empty else acquire(asked)

    first = min(bench.model.index, key=lambda key: bench.model.index[key][0])[1]
    monkeypatch.setattr(bench.model, "acquire", crowded)

    assert bench.load(tokens, OWN).blocks == wanted
    assert not bench.model.leased


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


def steps(bench: Bench, operation: Operation[Any]) -> list[str]:
    """What an operation does behind its lookups: `Work`, `Collect`, names of calls, in brackets what was sent ahead."""
    made, step = [], begin(operation)
    while not isinstance(step, Done):
        asked = step.calls if isinstance(step, Ahead) else step if isinstance(step, tuple) else ()
        names = " ".join(type(call.request(1)).__name__ for call in asked) or type(step).__name__
        made.append(f"({names})" if isinstance(step, Ahead) else names)
        step = resume(operation, bench.perform(step))
    return [name for name in made if name not in {"Lookup", "Post"}]


def test_the_agent_works_on_the_next_batch_while_one_is_copied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH_BLOCKS_MAX", 2)
    monkeypatch.setattr(loading, "BATCHES_IN_FLIGHT", 2)
    monkeypatch.setattr(storing, "BATCHES_IN_FLIGHT", 2)
    tokens = list(range(16))

    stored = steps(bench, store(job(tokens, OWN), kv(tokens), 0))
    loaded = steps(bench, load(job(tokens, OWN), None))

    def pipelined(ask: str, end: str) -> list[str]:
        ahead = [f"({ask})", f"({ask})", "Collect"]
        middle = ["Work", f"({end} {ask})", "Collect", "Work", f"({end} {ask})", "Collect"]
        return [*ahead, *middle, "Work", f"({end})", "Collect", "Work", f"({end})", "Collect", "Collect"]

    assert stored == pipelined("Reserve", "Publish")
    assert loaded == pipelined("Acquire", "Release")


def test_on_a_crowded_connection_one_batch_at_a_time_is_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "BATCH_BLOCKS_MAX", 2)
    tokens = list(range(16))
    crowded = job(tokens, OWN)
    at = crowded.at
    assert isinstance(at, Attached)
    at.is_crowded = True

    stored = steps(bench, store(crowded, kv(tokens), 0))
    loaded = steps(bench, load(crowded, None))

    def one_by_one(ask: str, end: str) -> list[str]:
        return [f"({ask})", "Collect", *["Work", f"({end} {ask})", "Collect"] * 3, "Work", f"({end})", "Collect"]

    assert stored == one_by_one("Reserve", "Publish")
    assert loaded == one_by_one("Acquire", "Release")
    assert np.array_equal(bench.load(tokens, OWN).data, kv(tokens))


def test_slots_behind_a_block_that_was_refused_are_given_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH_BLOCKS_MAX", 2)
    tokens = list(range(12))
    operation = store(job(tokens, OWN), kv(tokens), 0)
    step = begin(operation)
    while not isinstance(step, Done):
        outcome = bench.perform(step)
        if isinstance(step, Work):
            os.pwrite(bench.model.fd, b"\xff\x00\xff", 3 * SLOT_BYTES)  # Somebody spoils the fourth block.
        step = resume(operation, outcome)

    assert (step.value.published, step.value.refused) == (3, 3)
    assert not bench.model.reserved
    assert bench.load(tokens, OWN).blocks == 3


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


@pytest.mark.parametrize("batch_blocks", [1, 2, 64])
@pytest.mark.parametrize("fail_at", range(1, 20))
def test_an_interrupted_operation_gives_everything_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fail_at: int, batch_blocks: int
) -> None:
    monkeypatch.setattr(pipeline, "BATCH_BLOCKS_MAX", batch_blocks)
    tokens = list(range(12))
    bench.store(tokens[:8], OWN)
    for operation in (bench.store, bench.load):
        with contextlib.suppress(KeyboardInterrupt):
            operation(tokens, DOMAIN, OWN, fail_at=fail_at)
    assert not bench.model.leased
    assert not bench.model.reserved


@pytest.mark.parametrize("slots", range(7))
def test_room_for_part_of_what_is_asked_for_ahead_is_used(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    monkeypatch.setattr(pipeline, "BATCH_BLOCKS_MAX", 2)
    bench = Bench(slots=slots)
    tokens = list(range(12))
    stored = bench.store(tokens, OWN)
    bench.model.leases_max = 1

    assert (stored.published, stored.refused) == (slots, 6 - slots)
    assert np.array_equal(bench.load(tokens, OWN).data, kv(tokens)[:slots])
    assert not bench.model.reserved
    assert not bench.model.leased
    bench.close()


@pytest.mark.parametrize("batch_blocks", [1, 2, 3])
def test_leases_that_ended_while_the_next_were_asked_for_void_their_copies(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, batch_blocks: int
) -> None:
    monkeypatch.setattr(pipeline, "BATCH_BLOCKS_MAX", batch_blocks)
    tokens = list(range(12))
    bench.store(tokens, OWN)
    operation, copied = load(job(tokens, OWN), None), 0
    step = begin(operation)
    while not isinstance(step, Done):
        outcome = bench.perform(step)
        copied += isinstance(step, Work)
        if isinstance(step, Work) and copied == 2:
            bench.model.leased.clear()  # The agent takes all of them back.
        step = resume(operation, outcome)

    assert (step.value.blocks, step.value.lost_blocks) == (batch_blocks, batch_blocks)
    assert not bench.model.leased


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
