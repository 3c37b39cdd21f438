"""Laws of migrations between pools: which are refused, by field, value and limit, and which node gets whose blocks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.models.poolnode import MIGRATE_TARGETS_MAX
from kvstrata_operator.decide.operations.operations import targets
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import Fleet, condition, pool_node, pool_spec
from support.operator.operations_fleet import answer, operate, running, state

pytestmark = pytest.mark.unit

nodes = st.lists(st.sampled_from([f"n{i}" for i in range(12)]), unique=True, min_size=1)


@given(nodes, nodes)
def test_every_source_has_targets_its_own_node_first_and_all_get_about_as_many(
    sources: list[str], ready: list[str]
) -> None:
    found = {node: targets(node, sources, ready) for node in sources}

    assert all(len(t) == len(set(t)) == min(len(ready), MIGRATE_TARGETS_MAX) for t in found.values())
    assert all(set(t) <= set(ready) for t in found.values())
    assert all(found[n][0] == n for n in sources if n in ready)
    apart = [t[0] for n, t in found.items() if n not in ready]
    if not set(sources) & set(ready):
        assert max(map(apart.count, apart)) - min(map(apart.count, ready)) <= 1
    assert targets(sources[0], sources, []) == ()


def two_pools(**change: Any) -> Fleet:
    """Pool `p` on three nodes, and pool `q` with another spec on the same."""
    fleet = running()
    spec = pool_spec()
    fleet.pool("q", spec | change)
    fleet.settle()
    for key in fleet.of(kinds.POOL_NODE):
        fleet.report(key)
    fleet.settle()
    return fleet


def migrate(fleet: Fleet, **block: Any) -> Ref:
    ref = operate(fleet, "op", "Migrate", **({"to": "q"} | block))
    fleet.settle()
    return ref


def test_each_source_node_is_told_where_its_blocks_go_and_the_end_is_theirs() -> None:
    fleet = two_pools()
    fleet.tenant("a")
    ref = migrate(fleet, tenant="a", tier="dram", keepSource=True, nodes={"names": ["n0", "n1"]})
    uid = fleet.objects[ref]["metadata"]["uid"]

    (order,) = fleet.objects[pool_node("p", "n1")]["spec"]["orders"]
    wanted = {"to": "q", "nodes": ["n1", "n2", "n0"], "tenant": "a", "tier": "dram", "keepSource": True}
    assert (order["type"], order["migrate"]) == ("Migrate", wanted)
    assert not fleet.objects[pool_node("p", "n2")]["spec"].get("orders")
    assert not fleet.objects[pool_node("q", "n1")]["spec"].get("orders")
    for node in ("n0", "n1"):
        answer(fleet, node, uid, blocksDone=8, blocksTotal=8)
        fleet.settle()
    assert state(fleet, ref) == "Complete"


def with_dtype(dtype: str) -> dict[str, Any]:
    return {"compatibility": pool_spec()["compatibility"] | {"dtype": dtype}}


@pytest.mark.parametrize(
    ("change", "block", "reason", "told"),
    [
        (with_dtype("fp32"), {}, "LayoutMismatch", ("spec.compatibility.dtype", "fp32", "bf16")),
        ({}, {"to": "nowhere"}, "PoolNotFound", ("spec.migrate.to", "nowhere")),
        ({}, {"tier": "cold"}, "TierNotFound", ("spec.migrate.tier", "cold")),
        ({}, {"tenant": "nobody"}, "TenantNotFound", ("nobody",)),
        ({"paused": True}, {}, "PoolPaused", ("spec.migrate.to", "q")),
        ({"nodeSelector": {"no": "node"}}, {}, "NoTargets", ("spec.migrate.to", "q")),
    ],
)
def test_what_cannot_go_there_is_refused_by_name(
    change: dict[str, Any], block: dict[str, Any], reason: str, told: tuple[str, ...]
) -> None:
    fleet = two_pools(**change)
    ref = migrate(fleet, **block)

    assert condition(fleet.objects[ref], "Accepted") == ("False", reason)
    message = next(c["message"] for c in fleet.objects[ref]["status"]["conditions"] if c["type"] == "Accepted")
    assert all(part in message for part in told), message
    assert not any(fleet.objects[pool_node("p", f"n{i}")]["spec"].get("orders") for i in range(3))


NVME = {"name": "nvme", "type": "NVMe", "capacityPerNode": "1Gi", "nvme": {"path": "/data/q"}}


@pytest.mark.parametrize(
    ("ours", "theirs", "block", "reason"),
    [
        ([NVME], [], {}, "NotDurable"),
        ([NVME], [], {"keepSource": True}, ""),
        ([], [], {}, ""),
        ([NVME | {"encryption": {"type": "AESGCM"}}], [NVME], {}, "NotEncrypted"),
        ([NVME], [NVME | {"encryption": {"type": "AESGCM"}}], {}, ""),
    ],
)
def test_blocks_do_not_come_to_lesser_media(
    ours: list[Any], theirs: list[Any], block: dict[str, Any], reason: str
) -> None:
    fleet = two_pools(tiers=[pool_spec()["tiers"][0], *theirs])
    dram = pool_spec()["tiers"][0]
    fleet.pool("p", (pool_spec() | {"tiers": [dram, *[t | {"nvme": {"path": "/data/p"}} for t in ours]]}))
    fleet.settle()
    ref = migrate(fleet, **block)

    found = condition(fleet.objects[ref], "Accepted")
    assert found == (("False", reason) if reason else ("True", "Accepted"))
