"""A calibration that no longer fits is said, once it is sure, and a codec works on without it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.codec.base import Encoded, Planes, Shape, room_bytes
from kvstrata_agent.codec.lossy import Drift, DriftWatch
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_api.models.pool import CompressionPolicy
from support.backends.generated_kv import kv_block

pytestmark = pytest.mark.unit

PLANES = Planes(8, 16, 64)
LAYOUT = b"0123456789abcdef"


def policy(permille: int, forms: str, made_for: int | None = None) -> CompressionPolicy:
    entry = {"layoutId": LAYOUT.hex(), "maxRelativeErrorPermille": made_for or permille, "forms": forms}
    return CompressionPolicy.model_validate(
        {"mode": "Auto", "maxRelativeErrorPermille": permille, "calibration": [entry]}
    )


def stored(registry: CodecRegistry, wanted: CompressionPolicy, seed: int = 4) -> Encoded:
    raw = kv_block(seed, heads=2, dim=64, layers=2)
    codec = registry.for_policy(wanted, is_worn=False)
    return codec.encode(memoryview(raw), Shape(2, PLANES, LAYOUT), memoryview(bytearray(room_bytes(len(raw)))))


def test_the_first_block_starts_where_the_calibration_says() -> None:
    made = stored(CodecRegistry(), policy(30, "44444444"))

    assert {s.form for s in made.settled} == {"int8_column"}
    assert made.drifted == 0


def test_planes_that_need_a_safer_form_are_counted_and_stay_within_the_error() -> None:
    registry, wanted = CodecRegistry(), policy(30, "00000000")
    made = [stored(registry, wanted) for _ in range(3)]

    assert made[0].drifted == sum(s.missed for s in made[0].settled) == 8
    assert [m.drifted for m in made] == [8, 8, 8]
    assert max(s.worst_error for m in made for s in m.settled) <= 0.03


def test_drift_is_over_the_bound_after_enough_blocks() -> None:
    registry, wanted = CodecRegistry(), policy(30, "00000000")
    assert registry.drift(wanted) == Drift(0, 0.0, is_over=False)
    for _ in range(63):
        stored(registry, wanted)
    assert registry.drift(wanted) == Drift(63, 1.0, is_over=False)
    stored(registry, wanted)
    assert registry.drift(wanted) == Drift(64, 1.0, is_over=True)


def test_a_calibration_for_another_error_counts_for_nothing() -> None:
    registry, wanted = CodecRegistry(), policy(60, "44444444", made_for=30)

    assert {s.form for s in stored(registry, wanted).settled} != {"int8_column"}
    assert registry.drift(wanted) is None


def test_what_was_learned_outlives_a_policy_that_says_the_same() -> None:
    registry = CodecRegistry()
    stored(registry, policy(30, "00000000"))

    assert registry.drift(policy(30, "00000000")) == Drift(1, 1.0, is_over=False)
    assert sum(s.missed for s in stored(registry, policy(30, "00000000")).settled) == 0


def test_another_calibration_starts_anew() -> None:
    registry = CodecRegistry()
    stored(registry, policy(30, "00000000"))
    stored(registry, policy(30, "44444444"))

    assert registry.drift(policy(30, "44444444")) == Drift(1, 0.0, is_over=False)


@given(above=st.lists(st.integers(0, 100), min_size=64, max_size=400))
def test_the_share_is_of_planes_and_needs_half_the_bound_to_end(above: list[int]) -> None:
    watch, was_over = DriftWatch({LAYOUT: bytes(100)}), False
    for many in above:
        assert watch.note(LAYOUT, bytes([1] * many + [0] * (100 - many))) == many
        seen = watch.seen
        assert 0.0 <= seen.ratio <= 1.0
        assert seen.is_over == (seen.blocks >= 64 and seen.ratio > (0.025 if was_over else 0.05))
        was_over = seen.is_over


@pytest.mark.parametrize(("layout_id", "places"), [(b"other", bytes(100)), (LAYOUT, b"\5" * 99)])
def test_other_layouts_and_shapes_are_none_of_its_business(layout_id: bytes, places: bytes) -> None:
    watch = DriftWatch({LAYOUT: bytes(100)})

    assert watch.note(layout_id, places) == 0
    assert watch.seen == Drift(0, 0.0, is_over=False)
