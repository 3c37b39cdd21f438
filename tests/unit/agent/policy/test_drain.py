"""Laws of the drain of one tier: it ends when nothing more will happen by itself, and not before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy.operations import IDLE_POLLS, DrainProgress, TierReading, Watch

pytestmark = pytest.mark.unit

looks = st.builds(TierReading, st.integers(0, 3), st.booleans(), st.booleans(), st.booleans())


def watched(seen: list[TierReading]) -> Watch:
    watch = Watch()
    for look in seen:
        watch = watch.after(look)
    return watch


@given(st.lists(looks, min_size=1))
def test_it_is_over_when_the_tier_is_empty_or_what_is_left_has_no_place(seen: list[TierReading]) -> None:
    last, watch = seen[-1], watched(seen)

    assert (watch.progress is DrainProgress.EMPTY) == (last.blocks == 0 and not last.is_held)
    if watch.progress is DrainProgress.NO_PLACE:
        assert not any(look.is_held or look.are_others_away or not look.is_stuck for look in seen[-IDLE_POLLS:])


@given(st.lists(looks))
def test_nothing_is_given_up_while_somebody_holds_a_block_or_a_tier_is_away(seen: list[TierReading]) -> None:
    held = watched([*seen, *[TierReading(1, is_stuck=True, is_held=True, are_others_away=False)] * 2])
    away = watched([*seen, *[TierReading(1, is_stuck=True, is_held=False, are_others_away=True)] * 2])

    assert (held.progress, away.progress) == (DrainProgress.HELD, DrainProgress.WAITING)
    assert not held.progress.is_over
    assert not away.progress.is_over


@given(st.lists(looks))
def test_what_is_stuck_for_long_enough_is_over(seen: list[TierReading]) -> None:
    stuck = TierReading(1, is_stuck=True, is_held=False, are_others_away=False)

    assert watched([*seen, *[stuck] * (IDLE_POLLS + 1)]).progress.is_over
