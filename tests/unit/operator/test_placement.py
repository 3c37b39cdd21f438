"""Laws of placement: shares, revisions, matching, one owner for each directory."""

from posixpath import normpath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import names, units
from kvstrata_api.models.pool import KVPoolSpec
from kvstrata_operator.decide.pools import placement
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.parse import parse_declared
from kvstrata_operator.observe.records import Declared, NodeSeen
from support.operator.fleet import pool_spec, tier

pytestmark = pytest.mark.unit

TEXT = st.text("abc", min_size=1, max_size=2)
LABELS = st.dictionaries(TEXT, TEXT, max_size=3)
PATHS = st.sampled_from(["/a", "/a/b", "/a/b/../b", "/b", "/b//c", "/ab"])


def nodes(**labels: dict[str, str]) -> dict[str, NodeSeen]:
    return {name: NodeSeen(name, f"uid-{name}", 1, given) for name, given in labels.items()}


def declared(name: str, created: str = "", **spec: Any) -> Declared[Any]:
    meta = {"name": name, "uid": f"uid-{name}", "creationTimestamp": created}
    return parse_declared(kinds.POOL, {"metadata": meta, "spec": pool_spec(**spec)})


@given(st.integers(1, 1 << 60), st.integers(0, 60_000))
def test_shares_never_add_up_to_more_than_the_capacity(capacity_bytes: int, count: int) -> None:
    share = placement.share_bytes(capacity_bytes, count)

    assert share >= 1
    assert share * count <= max(capacity_bytes, count)


@given(st.integers(1, 60_000))
def test_a_divisor_wastes_less_than_a_third_and_is_exact_for_a_few(count: int) -> None:
    divisor = placement.divisor_of(count)

    assert count <= divisor < count * 3 / 2 + 1
    assert count > 4 or divisor == count


@given(st.integers(5, 60_000))
def test_most_joins_and_leaves_rewrite_nobody(count: int) -> None:
    steps = {placement.divisor_of(n) for n in range(5, count + 1)}

    assert len(steps) <= 2 * count.bit_length()


@given(LABELS, st.dictionaries(TEXT, LABELS, max_size=5))
def test_exactly_the_nodes_with_every_label_match(selector: dict[str, str], labels: dict[str, dict[str, str]]) -> None:
    found = placement.matching(selector, nodes(**labels))

    assert found == {name for name, given in labels.items() if selector.items() <= given.items()}


@given(paused=st.booleans(), policy=st.sampled_from(["Retain", "Destroy"]), selector=LABELS, at_once=st.integers(1, 9))
def test_moving_pausing_and_rollout_change_no_revision(
    *, paused: bool, policy: str, selector: Any, at_once: int
) -> None:
    plain = KVPoolSpec.model_validate(pool_spec())
    other = pool_spec(
        selector=selector, paused=paused, deletionPolicy=policy, updateStrategy={"maxUnavailable": at_once}
    )

    assert placement.revision_of(KVPoolSpec.model_validate(other)) == placement.revision_of(plain)


@pytest.mark.parametrize(
    "change",
    [
        {"tiers": [tier(size="2Gi")]},
        {"policy": {"admission": {"type": "Never"}}},
        {"compatibility": {"model": "m", "revision": "other", "dtype": "bf16"}},
    ],
)
def test_what_agents_act_upon_changes_the_revision(change: dict[str, Any]) -> None:
    before = placement.revision_of(KVPoolSpec.model_validate(pool_spec()))

    assert placement.revision_of(KVPoolSpec.model_validate({**pool_spec(), **change})) != before


@given(st.lists(st.tuples(PATHS, LABELS), min_size=1, max_size=5), st.dictionaries(TEXT, LABELS, max_size=4))
def test_no_directory_of_a_node_has_two_pools(wants: list[tuple[str, Any]], labels: dict[str, dict[str, str]]) -> None:
    pools = [
        declared(f"p{i}", f"2026-01-0{i + 1}T00:00:00Z", tiers=[tier(type_="NVMe", nvme={"path": path})], selector=s)
        for i, (path, s) in enumerate(wants)
    ]
    placed = placement.place(pools, nodes(**labels))

    for node in labels:
        paths = [p for i, (p, _) in enumerate(wants) if node in placed[f"p{i}"].nodes]
        clean = [f"{normpath(p)}/" for p in paths]
        assert not any(a.startswith(b) for i, a in enumerate(clean) for j, b in enumerate(clean) if i != j)
    for i, (_, selector) in enumerate(wants):
        matched = placement.matching(selector, nodes(**labels))
        assert placed[f"p{i}"].nodes | placed[f"p{i}"].excluded.keys() == matched


def test_each_of_several_directories_of_a_tier_belongs_to_the_older_pool() -> None:
    many = [tier(type_="NVMe", nvme={"paths": ["/mnt/a", "/mnt/b"]})]
    old = declared("old", "2026-01-01T00:00:00Z", tiers=many, selector={})
    young = declared(
        "young", "2026-01-02T00:00:00Z", tiers=[tier(type_="NVMe", nvme={"path": "/mnt/b/x"})], selector={}
    )

    placed = placement.place([old, young], nodes(n={}))

    assert placed["old"].nodes == {"n"}
    assert placed["young"].excluded["n"].reason is placement.Exclusion.PATH_CONFLICT


CLAIMING = [
    ("nvme.path", lambda path: tier("a", "NVMe", nvme={"path": path})),
    ("remoteFlash.path", lambda path: tier("a", "RemoteFlash", remoteFlash={"path": path})),
]
SHARING = [
    ("cxl.emulated.path", lambda path: tier("a", "CXL", cxl={"mode": "Emulated", "emulated": {"path": path}})),
    ("object.url", lambda path: tier("a", "Object", object={"url": f"file://{path}"})),
]


def placed_together(older: Any, younger: Any) -> placement.Placement:
    """The younger of two pools with these tiers, behind one in memory, on the same node."""
    pools = [
        declared("old", "2026-01-01T00:00:00Z", tiers=[tier(), older], selector={}),
        declared("young", "2026-01-02T00:00:00Z", tiers=[tier(), younger], selector={}),
    ]
    return placement.place(pools, nodes(n={}))["young"]


@pytest.mark.parametrize(("older_field", "older"), [*CLAIMING, *SHARING])
@pytest.mark.parametrize(("field", "younger"), [*CLAIMING, *SHARING])
def test_a_directory_that_one_pool_claims_is_no_other_pools_on_any_medium(
    older_field: str, older: Any, field: str, younger: Any
) -> None:
    placed = placed_together(older("/mnt/x/../flash/"), younger("/mnt/flash"))

    if {older_field, field} <= {name for name, _ in SHARING}:
        assert placed.nodes == {"n"}, "both keep a directory of each pool's own in it"
        return
    assert placed.nodes == frozenset()
    assert placed.excluded["n"].reason is placement.Exclusion.PATH_CONFLICT
    for said in (f"tiers[1].{field} /mnt/flash of pool young", f"{older_field} /mnt/flash of the older pool old"):
        assert said in placed.excluded["n"].message


@pytest.mark.parametrize("claiming", [make for _, make in CLAIMING])
@pytest.mark.parametrize("sharing", [make for _, make in SHARING])
def test_a_shared_directory_may_hold_a_claimed_one_and_never_lie_in_it(claiming: Any, sharing: Any) -> None:
    assert placed_together(sharing("/mnt"), claiming("/mnt/a")).nodes == {"n"}
    assert placed_together(claiming("/mnt/a"), sharing("/mnt")).nodes == {"n"}
    assert placed_together(claiming("/mnt"), sharing("/mnt/a")).nodes == frozenset()
    assert placed_together(sharing("/mnt/a"), claiming("/mnt")).nodes == frozenset()


@pytest.mark.parametrize("make", [make for _, make in CLAIMING])
def test_pools_share_a_mount_where_each_has_a_directory_in_it(make: Any) -> None:
    assert placed_together(make("/mnt/flash/a"), make("/mnt/flash/b")).nodes == {"n"}
    assert placed_together(make("/mnt/flash"), make("/mnt/flash/b")).nodes == frozenset()
    assert placed_together(make("/mnt/flash/b"), make("/mnt/flash")).nodes == frozenset()


def test_the_older_pool_keeps_the_directory_even_while_it_is_deleted() -> None:
    nvme = [tier(type_="NVMe")]
    young = declared("a", "2026-01-02T00:00:00Z", tiers=nvme, selector={})
    old = declared("z", "2026-01-01T00:00:00Z", tiers=nvme, selector={})
    leaving = Declared(
        old.kind, old.meta.model_copy(update={"deletion_timestamp": "2026-02-01T00:00:00Z"}), old.model, {}
    )
    placed = placement.place([young, leaving], nodes(n={}))

    assert placed.keys() == {"a"}
    assert placed["a"].nodes == frozenset()
    assert "older pool z" in placed["a"].excluded["n"].message


def test_a_node_whose_lease_could_not_be_named_is_left_out() -> None:
    fits = "n" * (names.NAME_CHARS_MAX - len(names.agent_lease_name("p", "")))
    long_name = f"{fits}n"
    placed = placement.place([declared("p", selector={})], nodes(**{long_name: {}, fits: {}}))["p"]

    assert placed.nodes == {fits}
    assert placed.excluded[long_name].reason is placement.Exclusion.NAME_TOO_LONG


@pytest.mark.parametrize(("page", "bytes_"), [("4Ki", 4096), ("2Mi", 2 << 20), ("1Gi", 1 << 30)])
@pytest.mark.parametrize(("low", "high"), [("10G", "200G"), ("2500Mi", "32Gi"), ("2500Mi", "2600Mi"), ("1", "2")])
def test_sizes_of_a_tier_that_scales_are_whole_pages(page: str, bytes_: int, low: str, high: str) -> None:
    scaling: Any = {"autoscale": {"minPerNode": low, "maxPerNode": high}, "hostDRAM": {"pageSize": page}}
    (made,) = KVPoolSpec.model_validate(pool_spec([tier("dram", size="8Gi", **scaling)])).tiers
    policy = placement.policy_of(made)

    assert policy is not None
    assert policy.min_per_node % bytes_ == policy.max_per_node % bytes_ == 0
    assert 0 < policy.min_per_node <= policy.max_per_node <= max(bytes_, units.parse_quantity(high))
    for stored in (1, 9 << 30, (1 << 50) + 1):
        size = placement.size_of(made, {"dram": stored})
        assert size is not None
        assert size % bytes_ == 0
        assert policy.min_per_node <= size <= policy.max_per_node
