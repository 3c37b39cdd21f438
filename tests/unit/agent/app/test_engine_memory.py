"""Which files of dead engines may be reaped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.app.engine_memory import YOUNG_S, Left, old_ones

pytestmark = pytest.mark.unit

NOW_S = 1000.0
VLLMS = ("vllm_offload_a.mmap", "vllm_offload_b_dp1.mmap")
NAMES = st.sampled_from([*VLLMS, "vllm_offload_.mmap", "a.mmap", "vllm_offload_a"])


@given(st.lists(st.builds(Left, NAMES, st.floats(0, 2 * NOW_S)), max_size=20))
def test_only_vllms_old_files_are_tried_and_the_oldest_first(files: list[Left]) -> None:
    found = old_ones(files, NOW_S)
    assert [f.changed_s for f in found] == sorted(f.changed_s for f in found)
    wanted = [f for f in files if f.name in VLLMS]
    assert sorted(map(repr, found)) == sorted(repr(f) for f in wanted if f.changed_s <= NOW_S - YOUNG_S)
