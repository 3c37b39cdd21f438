"""When NIXL's thread looks again: at once while bytes come for us, never in a loop for what others read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.fleet.peers.nixl import pause_of

pytestmark = pytest.mark.unit

idle_s = st.floats(0.0, 10.0)


@given(idle_s, st.booleans(), st.booleans())
def test_a_node_that_reads_nothing_always_sleeps(idle: float, is_lending: bool, is_later: bool) -> None:  # noqa: FBT001
    assert pause_of(idle + is_later, is_reading=False, is_lending=is_lending) > 0.0


@given(idle_s, idle_s, st.booleans())
def test_the_longer_nothing_comes_the_longer_a_reader_sleeps(a: float, b: float, is_lending: bool) -> None:  # noqa: FBT001
    short, long = sorted((a, b))

    paused = [pause_of(idle, is_reading=True, is_lending=is_lending) for idle in (short, long)]
    assert paused == sorted(paused)


def test_bytes_that_come_keep_the_thread_awake_and_a_stopped_owner_does_not() -> None:
    assert pause_of(20e-6, is_reading=True, is_lending=False) == 0.0
    assert pause_of(0.01, is_reading=True, is_lending=True) > 0.0


def test_whoever_lends_is_looked_after_more_often_than_nobody() -> None:
    lending, idle = (pause_of(1.0, is_reading=False, is_lending=is_lending) for is_lending in (True, False))

    assert 0.0 < lending < idle
