"""Laws of who makes room for whom, and of how long blocks stay."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.policy.quota import AccountUsage, accounts_over_share, over_hard_bytes, surplus_to_evict
from kvstrata_agent.policy.retention import Due, Retention, due, horizon, plan_drops

pytestmark = pytest.mark.unit

sizes = st.integers(0, 1000)
usages = st.lists(
    st.builds(AccountUsage, st.sampled_from("abcdef"), st.integers(1, 1000), sizes, st.integers(1, 50)),
    unique_by=lambda s: s.tenant,
    max_size=6,
)


@given(sizes, sizes, st.none() | sizes)
def test_what_is_over_the_hard_quota_is_exactly_what_does_not_fit(used: int, want: int, hard: int | None) -> None:
    over = over_hard_bytes(used, want, hard)

    assert (over == 0) == (hard is None or used + want <= hard)
    assert hard is None or used + want - over <= max(hard, 0) or over == 0


@given(usages, st.sampled_from("abcdefg"), st.integers(1, 100))
def test_nobody_else_pays_from_within_its_guarantee(all_: list[AccountUsage], writer: str, want: int) -> None:
    assert all(s.tenant == writer or s.used_bytes > s.guaranteed_bytes for s in accounts_over_share(all_, writer, want))


@given(usages, st.sampled_from("abcdefg"), st.integers(1, 5000))
def test_the_writer_takes_from_nobody_who_holds_less_for_its_weight(
    all_: list[AccountUsage], writer: str, want: int
) -> None:
    own = next((s for s in all_ if s.tenant == writer), AccountUsage(writer, 0))
    ratio = max(0, own.used_bytes + want - own.guaranteed_bytes) / own.weight

    assert all(
        s.surplus_bytes / s.weight >= ratio for s in accounts_over_share(all_, writer, want) if s.tenant != writer
    )


@given(usages, st.sampled_from("abcdefg"), st.integers(1, 100))
def test_who_is_furthest_over_its_share_pays_first_and_the_writer_is_the_last_resort(
    all_: list[AccountUsage], writer: str, want: int
) -> None:
    asked = accounts_over_share(all_, writer, want)
    ratios = [s.surplus_bytes / s.weight for s in asked if s.tenant != writer]

    assert ratios == sorted(ratios, reverse=True)
    assert all(s.tenant != writer for s in asked[:-1])


@given(usages, st.sampled_from("abcdef"), st.integers(1, 100))
def test_a_writer_within_its_guarantee_finds_every_spare_byte(all_: list[AccountUsage], writer: str, want: int) -> None:
    own = next((s for s in all_ if s.tenant == writer), AccountUsage(writer, 0))
    asked = {s.tenant for s in accounts_over_share(all_, writer, want)}

    if own.used_bytes + want <= own.guaranteed_bytes:
        assert asked >= {s.tenant for s in all_ if s.surplus_bytes and s.tenant != writer}


@given(usages, st.integers(0, 5000))
def test_payments_make_the_room_that_guarantees_leave(all_: list[AccountUsage], need: int) -> None:
    paid = surplus_to_evict(all_, need)
    spare = {s.tenant: s.surplus_bytes for s in all_}

    assert sum(paid.values()) >= min(need, sum(spare.values()))
    assert sum(paid.values()) <= need + len(all_)
    assert all(0 < size <= spare[tenant] for tenant, size in paid.items())


@given(usages, st.integers(0, 5000))
def test_payments_leave_those_who_paid_with_no_less_for_their_weight_than_anybody(
    all_: list[AccountUsage], need: int
) -> None:
    paid = surplus_to_evict(all_, need)
    left = {s.tenant: (s.surplus_bytes - paid.get(s.tenant, 0)) / s.weight for s in all_}
    slack = {s.tenant: 1 / s.weight for s in all_}

    for payer in paid:
        assert all(left[payer] + slack[payer] >= left[t] for t in left if t not in paid)
        assert all(left[payer] + slack[payer] >= left[t] - slack[t] for t in paid)


@given(st.none() | sizes, st.none() | sizes, sizes, sizes)
def test_a_block_is_due_exactly_when_a_bound_is_reached(
    idle: int | None, most: int | None, idle_s: int, age_s: int
) -> None:
    why = due(Retention(idle, most), idle_s=idle_s, age_s=age_s)

    assert (why is Due.OLD) == (most is not None and age_s >= most)
    assert (why is None) == ((most is None or age_s < most) and (idle is None or idle_s < idle))


@dataclass(eq=False)
class Block:
    """One node of a forest."""

    is_held: bool
    why: Due | None
    parent: "Block | None" = None
    children: list["Block"] = field(default_factory=list)


@st.composite
def forests(draw: st.DrawFn) -> list[Block]:
    blocks: list[Block] = []
    reasons = st.sampled_from([None, None, *Due])
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from([None, *blocks]))
        block = Block(draw(st.booleans()) and draw(st.booleans()), draw(reasons), parent)
        if parent is not None:
            parent.children.append(block)
        blocks.append(block)
    return blocks


def planned(blocks: list[Block]) -> tuple[Block, ...]:
    wanted = {b: b.why for b in blocks if b.why is not None}
    return plan_drops(wanted, lambda b: b.children, lambda b: b.is_held)


@given(forests())
def test_no_held_block_goes_and_no_parent_before_its_children(blocks: list[Block]) -> None:
    gone: set[Block] = set()
    for victim in planned(blocks):
        assert not victim.is_held
        assert victim not in gone
        assert gone.issuperset(victim.children)
        gone.add(victim)


@given(forests())
def test_what_is_old_goes_with_all_that_continues_it_unless_that_is_held(blocks: list[Block]) -> None:
    def is_needed(block: Block) -> bool:
        return block.is_held or any(is_needed(c) for c in block.children)

    gone = set(planned(blocks))

    assert gone >= {b for b in blocks if b.why is Due.OLD and not is_needed(b)}


@given(forests())
def test_what_is_neither_due_nor_behind_something_old_stays(blocks: list[Block]) -> None:
    def is_behind_old(block: Block | None) -> bool:
        return block is not None and (block.why is Due.OLD or is_behind_old(block.parent))

    assert all(b.why is not None or is_behind_old(b) for b in planned(blocks))


bounds = st.none() | st.integers(0, 100).map(float)


@given(st.lists(st.builds(Retention, bounds, bounds), max_size=4), st.integers(0, 200), st.integers(0, 200))
def test_no_block_is_due_after_the_horizon(rules: list[Retention], used_s: int, born_s: int) -> None:
    used_by_s, born_by_s = horizon(rules, 200.0)
    is_due = any(due(r, idle_s=200.0 - used_s, age_s=200.0 - born_s) is not None for r in rules)

    assert is_due == (used_s <= used_by_s or born_s <= born_by_s)
