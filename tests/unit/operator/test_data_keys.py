"""Laws of data keys and of the KEKs that wrap them."""

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import names
from kvstrata_operator.decide.plan.actions import Delete, MintKek, MintKey, Rewrap
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.records import KeksSeen
from support.operator.fleet import SETTING, Fleet

pytestmark = pytest.mark.unit


def entries(fleet: Fleet, kind: str = "tenant", name: str = "a") -> dict[str, str]:
    """Wrapped data keys of a scope Secret, by entry."""
    found = fleet.of(kinds.SECRET)[names.scope_secret_name(kind, name)]["data"]
    return {e: base64.b64decode(text).decode() for e, text in found.items() if e.endswith(".data")}


def fleet_with(*keks: int, **more: Any) -> Fleet:
    fleet = Fleet(keks=KeksSeen(frozenset(keks), **more))
    fleet.tenant("a")
    fleet.settle()
    return fleet


def test_every_scope_gets_a_wrapped_data_key_and_keeps_it() -> None:
    fleet = fleet_with(1)
    made = entries(fleet)
    fleet.put(kinds.DOMAIN, "d", spec={})
    fleet.settle()

    assert made.keys() == {"v1.data"}
    assert made["v1.data"].startswith("k1:")
    assert entries(fleet) == made
    assert entries(fleet, "domain", "d")["v1.data"] != made["v1.data"]


def test_a_secret_of_before_gets_its_data_key_added_and_keeps_its_key() -> None:
    fleet = fleet_with()
    before = dict(fleet.of(kinds.SECRET)[names.scope_secret_name("tenant", "a")]["data"])
    assert before.keys() == {"v1"}

    fleet.keks = KeksSeen(frozenset({1}))
    fleet.settle()

    after = fleet.of(kinds.SECRET)[names.scope_secret_name("tenant", "a")]["data"]
    assert after.keys() == {"v1", "v1.data"}
    assert after["v1"] == before["v1"]


def test_an_absent_kek_secret_is_made_once() -> None:
    fleet = Fleet(keks=KeksSeen(is_absent=True))
    fleet.tenant("a")

    assert [a.entry for a in fleet.orders() if isinstance(a, MintKek)] == ["k1"]
    fleet.settle()
    assert fleet.keks == KeksSeen(frozenset({1}))
    assert entries(fleet)["v1.data"].startswith("k1:")


def test_a_lost_kek_gets_a_successor_of_another_number_and_what_it_wrapped_is_left_for_its_return() -> None:
    fleet = fleet_with(1, 4)
    before = entries(fleet)
    assert before["v1.data"].startswith("k4:")
    fleet.keks = KeksSeen(is_absent=True)
    fleet.settle()

    assert fleet.keks == KeksSeen(frozenset({5}))
    assert entries(fleet) == before
    fleet.keks = KeksSeen(frozenset({4, 5}))
    fleet.settle()
    assert entries(fleet) == {"v1.data": "k5:" + before["v1.data"].removeprefix("k4:")}


@given(st.lists(st.sets(st.integers(1, 6)), min_size=1, max_size=6))
def test_data_keys_never_change_whatever_becomes_of_keks(course: list[set[int]]) -> None:
    fleet = fleet_with(1)
    (inside,) = (text.partition(":")[2] for text in entries(fleet).values())
    wrapped_by = 1
    for numbers in course:
        fleet.keks = KeksSeen(frozenset(numbers))
        fleet.settle()
        if wrapped_by in numbers:
            wrapped_by = max(numbers)
        assert entries(fleet) == {"v1.data": f"k{wrapped_by}:{inside}"}
        assert fleet.orders() == ()


def test_a_foreign_secret_is_not_wrapped_anew() -> None:
    fleet = fleet_with(1, 2)
    name = names.scope_secret_name("tenant", "b")
    wrapped = base64.b64encode(b"k1:x").decode()
    fleet.put(kinds.SECRET, name, namespace=SETTING.namespace, data={"v1.data": wrapped})

    assert not [a for a in fleet.orders() if isinstance(a, Rewrap)]


def test_one_secret_is_written_once_in_a_plan() -> None:
    fleet = fleet_with(1)
    fleet.put(kinds.DOMAIN, "d", spec={"keyVersion": 1})
    fleet.settle()
    fleet.keks = KeksSeen(frozenset({1, 2}))
    fleet.put(kinds.DOMAIN, "d", spec={"keyVersion": 2})

    orders = fleet.orders()
    assert len({a.ref for a in orders}) == len(orders)
    fleet.settle()
    assert all(text.startswith("k2:") for text in entries(fleet, "domain", "d").values())


def test_a_shredded_scope_gets_other_keys() -> None:
    fleet = fleet_with(1)
    before = entries(fleet)
    fleet.apply(Delete(Ref(kinds.SECRET, names.scope_secret_name("tenant", "a"), SETTING.namespace), uid=_uid(fleet)))
    assert any(isinstance(a, MintKey) for a in fleet.orders())
    fleet.settle()

    assert entries(fleet)["v1.data"] != before["v1.data"]


def _uid(fleet: Fleet) -> str:
    return str(fleet.of(kinds.SECRET)[names.scope_secret_name("tenant", "a")]["metadata"]["uid"])
