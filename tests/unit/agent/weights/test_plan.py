"""Laws of what is decided about weights."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.movement.scheduler import PIECE_BYTES_MAX
from kvstrata_agent.weights.listing import Chunk, ModelFile
from kvstrata_agent.weights.plan import (
    Resident,
    kv_share_bytes,
    models_bytes_max,
    plan_for_kv,
    plan_room,
    runs_of,
)

pytestmark = pytest.mark.unit

GIB = 1 << 30
residents = st.lists(
    st.builds(
        Resident,
        name=st.sampled_from("abcdef"),
        revision=st.sampled_from(["r1", "r2"]),
        size_bytes=st.integers(0, 40 * GIB),
        weight=st.integers(1, 10_000),
        idle_seconds=st.sampled_from([0.0, 60.0, 86_400.0]),
        idle_s=st.none() | st.floats(0, 1e6),
        is_wanted=st.booleans(),
    ),
    unique_by=lambda m: (m.name, m.revision),
)
capacities = st.integers(64 << 20, 200 * GIB)


@given(capacities, residents, st.booleans())
def test_what_is_open_or_was_used_lately_never_leaves_for_kv(
    capacity_bytes: int,
    models: list[Resident],
    kv_wants_room: bool,  # noqa: FBT001
) -> None:
    leaves = plan_for_kv(capacity_bytes, models, kv_wants_room=kv_wants_room)
    assert all(m.idle_s is not None and m.idle_s >= m.idle_seconds for m in leaves)
    assert len(set(leaves)) == len(leaves)
    if not kv_wants_room:
        assert all(not m.is_wanted for m in leaves)


@given(capacities, residents)
def test_kv_has_its_share_or_nothing_more_may_leave(capacity_bytes: int, models: list[Resident]) -> None:
    leaves = plan_for_kv(capacity_bytes, models, kv_wants_room=True)
    stays = [m for m in models if m not in leaves]
    may_go = [m for m in stays if m.may_go]
    contested_bytes = max(0, capacity_bytes - sum(m.size_bytes for m in stays if not m.may_go))
    free_bytes = contested_bytes - sum(m.size_bytes for m in may_go)
    assert not may_go or free_bytes >= kv_share_bytes(contested_bytes, may_go)


@given(capacities, residents)
def test_nobody_leaves_whom_kv_could_have_spared(capacity_bytes: int, models: list[Resident]) -> None:
    leaves = [m for m in plan_for_kv(capacity_bytes, models, kv_wants_room=True) if m.is_wanted]
    if leaves:
        last = leaves[-1]
        before = [m for m in models if m not in plan_for_kv(capacity_bytes, models, kv_wants_room=True)] + [last]
        may_go = [m for m in before if m.may_go]
        contested_bytes = max(0, capacity_bytes - sum(m.size_bytes for m in models if not m.may_go))
        assert sum(m.size_bytes for m in may_go) > contested_bytes - kv_share_bytes(contested_bytes, may_go)
    assert sorted((m.strength for m in leaves), key=float) == [m.strength for m in leaves]


def test_a_model_idle_for_long_has_less_of_a_claim() -> None:
    """Of 100 GiB, KV of weight 100 and one idle model of 100 have half each; the model's part falls with time."""
    fresh = Resident("a", "r", 50 * GIB, 100, 3600.0, 3600.0)
    assert plan_for_kv(100 * GIB, [fresh], kv_wants_room=True) == ()
    old = Resident("a", "r", 50 * GIB, 100, 3600.0, 7200.0)
    assert math.isclose(old.strength, 50.0)
    assert plan_for_kv(100 * GIB, [old], kv_wants_room=True) == (old,)
    assert plan_for_kv(100 * GIB, [old], kv_wants_room=False) == ()
    heavy = Resident("a", "r", 50 * GIB, 400, 3600.0, 7200.0)
    assert plan_for_kv(100 * GIB, [heavy], kv_wants_room=True) == ()


@given(capacities, residents, st.integers(0, 300 * GIB))
def test_room_for_a_model_is_there_or_nobody_left_for_it(
    capacity_bytes: int, models: list[Resident], need_bytes: int
) -> None:
    room = plan_room(capacity_bytes, models, need_bytes)
    assert all(m.may_go for m in room.leaves)
    assert room.is_too_large == (need_bytes > models_bytes_max(capacity_bytes))
    if room.short_bytes:
        assert room.leaves == ()
        assert room.is_too_large or need_bytes + sum(m.size_bytes for m in models if not m.may_go) > (
            models_bytes_max(capacity_bytes)
        )
    else:
        stay_bytes = sum(m.size_bytes for m in models if m not in room.leaves)
        assert stay_bytes + need_bytes <= models_bytes_max(capacity_bytes)
        if room.leaves:
            spared_bytes = sum(m.size_bytes for m in models if m not in room.leaves[:-1])
            assert spared_bytes + need_bytes > models_bytes_max(capacity_bytes)


def test_kv_keeps_a_part_of_every_tier() -> None:
    assert models_bytes_max(16 * GIB) == 15 * GIB
    assert models_bytes_max(16 << 20) == 12 << 20
    assert models_bytes_max(1 << 20) == 0


sizes = st.lists(st.integers(1, PIECE_BYTES_MAX), max_size=30)


@given(sizes, st.sets(st.integers(0, 29)))
def test_runs_are_a_file_in_order_and_none_mixes_what_is_here_with_what_is_not(
    chunk_bytes: list[int], held: set[int]
) -> None:
    chunks = tuple(Chunk(size, f"{i:032x}") for i, size in enumerate(chunk_bytes))
    here = {f"{i:032x}" for i in held}
    runs = runs_of(ModelFile("f", sum(chunk_bytes), "", chunks), here)

    assert [c for run in runs for c in run.chunks] == list(chunks)
    at = 0
    for run in runs:
        assert run.offset == at
        assert 0 < run.size_bytes <= PIECE_BYTES_MAX
        assert {chunk.name in here for chunk in run.chunks} == {run.is_here}
        at += run.size_bytes
