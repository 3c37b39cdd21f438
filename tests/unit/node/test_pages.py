"""Laws of the plan for huge pages, over a made-up kernel, with crashes between the kernel and the book."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.errors import InvalidInputError
from kvstrata_node.books import open_book
from kvstrata_node.discovery import HugePages, NodeFacts, NumaNode
from kvstrata_node.pages_plan import MEMORY_PERCENT_MAX, PageDemand, PagePool, SetPages, foreign, plan, wanted
from support.node.huge_pages import BOOT, GIB, PAGE, Kernel, tier

pytestmark = pytest.mark.unit

COUNT = st.integers(0, 40)
NODES = (0, 1)


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    total = {n: draw(COUNT) for n in NODES}
    used = {n: draw(st.integers(0, total[n])) for n in NODES}
    free = sum(total[n] - used[n] for n in NODES)
    found = {n: draw(COUNT) for n in NODES if draw(st.booleans())}
    return Kernel(total, used, draw(st.integers(0, free)), found, draw(st.sampled_from([GIB // 8, 64 * GIB])))


@st.composite
def demands(draw: st.DrawFn) -> PageDemand:
    own = {PagePool(n, PAGE): draw(COUNT) for n in NODES}
    return PageDemand({p: n for p, n in own.items() if n}, {PAGE: draw(st.integers(0, 5))})


def apply(steps: tuple[SetPages, ...], kernel: Kernel, added: dict[PagePool, int]) -> None:
    """In the order of `Machine`: struck before they go back, entered after they came."""
    for step in steps:
        before = kernel.total[step.pool.node]
        assert before == step.before
        if not step.is_growth:
            added[step.pool] += step.target - before
        kernel.set(step.pool, step.target)
        if step.is_growth:
            added[step.pool] = added.get(step.pool, 0) + kernel.total[step.pool.node] - before


@given(kernels(), st.lists(demands(), min_size=1, max_size=6), st.data())
def test_what_others_reserved_and_what_is_in_use_is_never_taken_back(
    kernel: Kernel, wished: list[PageDemand], data: st.DataObject
) -> None:
    """The kernel finds fewer pages, others reserve more, tiers come and go, and any step may be the last of a life."""
    theirs, added = dict(kernel.total), dict[PagePool, int]()
    for demand in wished:
        steps = plan(demand, kernel.facts(), added, {PAGE: kernel.promised})
        assert all(s.target >= min(s.before, kernel.used[s.pool.node] + kernel.promised) for s in steps)
        apply(steps[: data.draw(st.integers(0, len(steps)), "crashes after")], kernel, added)
        for node in NODES:
            assert kernel.total[node] >= theirs[node]
            more = data.draw(st.integers(0, 3), "others reserve")
            kernel.total[node] += more
            theirs[node] += more
            kernel.used[node] = data.draw(st.integers(0, kernel.total[node]), "in use")
        kernel.promised = data.draw(st.integers(0, sum(p.free for p in kernel.facts().hugepages)), "promised")
    for pool in kernel.facts().hugepages:
        assert foreign(pool, added) == theirs[pool.node]


@given(kernels(), demands(), demands())
def test_carried_out_a_plan_leaves_nothing_to_do(kernel: Kernel, first: PageDemand, second: PageDemand) -> None:
    kernel.found.clear()
    added: dict[PagePool, int] = {}
    for demand in (first, second):
        apply(plan(demand, kernel.facts(), added, {PAGE: kernel.promised}), kernel, added)

        assert plan(demand, kernel.facts(), added, {PAGE: kernel.promised}) == ()


@given(kernels(), demands())
def test_every_wish_is_met_where_there_is_memory_and_everything_goes_back_unused(
    kernel: Kernel, demand: PageDemand
) -> None:
    kernel.found.clear()
    kernel.memory_bytes, kernel.used, kernel.promised = 64 * GIB, {}, 0
    before, added = dict(kernel.total), dict[PagePool, int]()

    apply(plan(demand, kernel.facts(), added, {}), kernel, added)

    assert all(kernel.total[p.node] >= demand.at(p) for p in demand.pages)
    assert all(kernel.total[n] == max(before[n], demand.at(PagePool(n, PAGE))) for n in NODES)
    apply(plan(PageDemand(), kernel.facts(), added, {}), kernel, added)
    assert kernel.total == before


@given(kernels(), demands(), demands())
def test_nothing_goes_back_while_somebody_s_wish_cannot_be_read(
    kernel: Kernel, first: PageDemand, second: PageDemand
) -> None:
    added: dict[PagePool, int] = {}
    apply(plan(first, kernel.facts(), added, {PAGE: kernel.promised}), kernel, added)

    steps = plan(replace(second, is_complete=False), kernel.facts(), added, {PAGE: kernel.promised})

    assert all(step.is_growth for step in steps)


@given(kernels(), demands())
def test_huge_pages_leave_the_rest_of_the_memory_alone(kernel: Kernel, demand: PageDemand) -> None:
    most = kernel.memory_bytes * MEMORY_PERCENT_MAX // 100 // PAGE
    before = dict(kernel.total)

    steps = plan(demand, kernel.facts(), {}, {})

    assert all(step.target <= max(most, before[step.pool.node]) for step in steps)


@given(
    st.lists(
        st.tuples(st.integers(1, 99), st.sampled_from(["2Mi", "1Gi", "4Ki"]), st.sampled_from(["Spread", "Local"]))
    )
)
def test_pages_of_all_pools_add_up_and_none_is_missing(tiers: list[tuple[int, str, str]]) -> None:
    found = wanted([tier(*one) for one in tiers], (0, 3))

    for size, page_bytes in (("2Mi", PAGE), ("1Gi", GIB)):
        asked = [(count, numa) for count, name, numa in tiers if name == size]
        there = {node: found.get(PagePool(node, page_bytes), 0) for node in (0, 3)}
        assert there[0] - there[3] == sum(count for count, numa in asked if numa == "Local")
        assert sum(there.values()) == sum(count + (count % 2 if numa == "Spread" else 0) for count, numa in asked)
    assert all(place.page_bytes != 4096 for place in found)


def test_larger_pages_are_looked_for_first_and_what_is_not_needed_goes_before() -> None:
    pools = (HugePages(0, PAGE, 100, 100), HugePages(0, GIB, 0, 0), HugePages(1, PAGE, 0, 0))
    facts = NodeFacts(16 * GIB, tuple(NumaNode(n, (n,), 8 * GIB) for n in NODES), pools)
    demand = PageDemand({PagePool(0, GIB): 2, PagePool(1, PAGE): 8})

    steps = plan(demand, facts, {PagePool(0, PAGE): 100}, {})

    assert steps == (
        SetPages(PagePool(0, PAGE), 100, 0),
        SetPages(PagePool(0, GIB), 0, 2),
        SetPages(PagePool(1, PAGE), 0, 8),
    )


def test_the_book_is_of_one_boot_and_of_one_process(tmp_path: Path) -> None:
    place = PagePool(1, PAGE)
    book = open_book(tmp_path, BOOT)
    book.enter(place, 7)
    book.enter(place, -3)
    with pytest.raises(InvalidInputError, match="another process prepares this node"):
        open_book(tmp_path, BOOT)
    book.close()

    again = open_book(tmp_path, BOOT)
    assert again.added == {place: 4}
    again.close()
    later = open_book(tmp_path, "another boot")
    assert later.added == {}
    later.close()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 2}', f'{{"format": 1, "boot": "{BOOT}", "pages": [{{}}]}}']
)
def test_a_book_that_cannot_be_read_says_that_nothing_was_added(tmp_path: Path, content: str) -> None:
    (tmp_path / "pages.json").write_text(content)

    book = open_book(tmp_path, BOOT)

    assert book.added == {}
    book.close()
