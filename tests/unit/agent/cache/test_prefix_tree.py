"""Laws of the tree of a tenant's prefixes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.cache import prefix_tree as tree
from kvstrata_agent.cache.prefix_tree import RUNS_MAX, prefix_tree
from kvstrata_api.blocks import LayoutId, ScopeId

pytestmark = pytest.mark.unit

SCOPE = ScopeId("tenant/a/u/v1")


def entry(digest: int, parent: int | None = None, used_at_s: float = 1.0) -> Entry:
    before = b"" if parent is None else bytes([parent % 256, parent // 256])
    return Entry(SCOPE, bytes([digest % 256, digest // 256]), before, LayoutId(bytes(16)), 0.0, used_at_s, "a")


def runs_of(entries: list[Entry]) -> list[tree.Run]:
    return prefix_tree(entries, "a", 10.0, lambda _: None)[0]


def test_a_chain_is_one_run_and_a_branch_begins_new_ones() -> None:
    stem, *branches = runs_of([entry(1), entry(2, 1), entry(3, 2, 5.0), entry(4, 2, 3.0), entry(5, 4)])

    assert (stem.parent, stem.is_beginning, stem.blocks) == (-1, True, 2)
    assert [(run.parent, run.blocks, run.idle_s) for run in branches] == [(0, 1, 5.0), (0, 2, 7.0)]


def test_a_session_ends_a_run_and_only_its_own_tenants_names_are_told() -> None:
    head = entry(2, 1)
    head.followers = {("a", "mine"), ("b", "theirs")}

    first, second = runs_of([entry(1), head, entry(3, 2)])

    assert (first.blocks, first.sessions) == (2, ("mine",))
    assert (second.parent, second.blocks, second.sessions) == (0, 1, ())


def test_what_was_made_the_first_to_go_has_no_time_of_use() -> None:
    (run,) = runs_of([entry(1, used_at_s=0.0)])

    assert run.idle_s is None


def test_what_is_behind_a_gap_or_a_windows_cut_is_no_beginning() -> None:
    cut = entry(3, 2)
    cut.is_cut = True

    runs = runs_of([entry(1), entry(2, 1), cut, entry(9, 8)])

    assert sorted((run.is_beginning, run.blocks) for run in runs) == [(False, 1), (False, 1), (True, 2)]


@given(st.lists(st.integers(-1, 400), max_size=300))
def test_every_block_is_in_one_run_and_parents_come_first(parents: list[int]) -> None:
    """Block `i` continues block `parents[i]` where that is an earlier one."""
    entries = [entry(i, p if 0 <= p < i else None) for i, p in enumerate(parents)]

    runs = runs_of(entries)

    assert sum(run.blocks for run in runs) == len(entries)
    assert all(run.parent < number for number, run in enumerate(runs))
    sharing = Counter(run.parent for run in runs if run.parent >= 0)
    assert all(count > 1 for count in sharing.values()), "a run ends where it branches"


def test_more_runs_than_an_answer_holds_leave_out_those_that_nobody_used_lately() -> None:
    entries = [entry(i, used_at_s=1.0 + i) for i in range(RUNS_MAX + 20)]

    runs, left_out = prefix_tree(entries, "a", 1_000.0, lambda _: None)

    assert (len(runs), left_out) == (RUNS_MAX, 20)
    assert max(run.idle_s or 0.0 for run in runs) == 1_000.0 - 21
