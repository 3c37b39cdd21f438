"""Laws of orders that an agent cannot read, as a newer operator sends them: refused one by one, nothing else stops."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.kube import declared
from kvstrata_agent.policy.operations import UNKNOWN_ORDER
from kvstrata_api.models.poolnode import ORDERS_MAX, FlushOrder, NodeOrder, OrderAnswer
from support.agent.doubles import orders_of
from support.agent.engine import Engine, close, steps_until

pytestmark = pytest.mark.unit

KNOWN: list[dict[str, Any]] = [
    {"type": "Flush", "flush": {"mode": "Drop"}},
    {"type": "Warm", "warm": {"tenant": "a", "archivedSessions": True}},
]
UNKNOWN: list[Any] = [
    {"type": "Defragment", "defragment": {"tier": "dram"}},
    {"type": "Flush", "flush": {"mode": "Shuffle"}},
    {"type": "Warm"},
    {"type": 7},
    {},
]


def pool_node(orders: list[Any]) -> declared.SeenNode:
    tier = {"name": "dram", "type": "HostDRAM", "capacityBytes": 1 << 20, "hostDRAM": {}}
    spec = {"poolRef": "p", "nodeName": "n", "tiers": [tier], "revision": "r", "orders": orders}
    return declared.pool_node({"metadata": {"name": "p.n", "uid": "u"}, "spec": spec})


@given(st.lists(st.sampled_from([*KNOWN, *UNKNOWN]), max_size=ORDERS_MAX))
def test_each_order_is_either_read_or_refused_and_all_else_of_the_node_is_read(drawn: list[Any]) -> None:
    orders = [order | {"uid": f"u{i}"} for i, order in enumerate(drawn)]
    seen = pool_node(orders)

    assert [o.uid for o in seen.declared.spec.orders] == [f"u{i}" for i, o in enumerate(drawn) if o in KNOWN]
    assert [a.uid for a in seen.refused] == [f"u{i}" for i, o in enumerate(drawn) if o in UNKNOWN]
    assert {(a.phase, a.reason) for a in seen.refused} <= {("Failed", UNKNOWN_ORDER)}
    assert [t.name for t in seen.declared.spec.tiers] == ["dram"]


def test_a_refusal_names_the_field_its_value_and_what_is_known() -> None:
    (answer,) = pool_node([{"uid": "u", **UNKNOWN[0]}]).refused

    for part in ("type", "Defragment", "Flush", "Warm", "agent "):
        assert part in answer.message


@pytest.mark.parametrize("order", [{"type": "Defragment"}, "text", None, {"uid": "", "type": "Defragment"}])
def test_what_has_no_uid_is_left_out_and_stops_nothing(order: Any) -> None:
    seen = pool_node([order, {"uid": "u", **KNOWN[0]}])

    assert ([o.uid for o in seen.declared.spec.orders], seen.refused) == (["u"], ())


async def test_a_refused_order_is_answered_beside_one_that_is_carried_out() -> None:
    engine = await Engine().attach()
    await engine.store(1, 2)
    orders = orders_of(engine.core)
    flush = NodeOrder(uid="known", type="Flush", flush=FlushOrder())
    refused = pool_node([{"uid": "unknown", "type": "Defragment"}]).refused
    for _ in range(2):
        orders.follow([flush], [], refused)
    await steps_until(lambda: orders.answers()[0].phase == "Done")

    assert [(a.uid, a.phase, a.reason) for a in orders.answers()] == [
        ("known", "Done", ""),
        ("unknown", "Failed", UNKNOWN_ORDER),
    ]
    orders.follow([], [])
    assert orders.answers() == ()
    await close(engine)


async def test_the_next_version_of_an_agent_carries_out_what_this_one_refused() -> None:
    engine = await Engine().attach()
    await engine.store(1, 2)
    orders = orders_of(engine.core)
    stored = OrderAnswer(uid="u", phase="Failed", reason=UNKNOWN_ORDER)
    orders.follow([NodeOrder(uid="u", type="Flush", flush=FlushOrder())], [stored])
    await steps_until(lambda: orders.answers()[0].phase == "Done")

    assert orders.answers()[0].blocks_done == 2
    await close(engine)
