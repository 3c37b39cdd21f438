"""Laws of the key versions of trust domains, and of what a domain says of one-sided wishes."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_api import names
from kvstrata_operator.decide.plan.actions import Merge, MintKey
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import SETTING, Fleet, condition

pytestmark = pytest.mark.unit

SECRET = names.scope_secret_name("domain", "d")


def domain(fleet: Fleet, **spec: Any) -> None:
    fleet.put(kinds.DOMAIN, "d", spec=spec)


def status(fleet: Fleet) -> dict[str, Any]:
    found: dict[str, Any] = fleet.of(kinds.DOMAIN)["d"]["status"]
    return found


def keys(fleet: Fleet) -> dict[str, str]:
    found: dict[str, str] = fleet.of(kinds.SECRET)[SECRET]["data"]
    return found


def two_members() -> Fleet:
    """Tenants a and b, both members of domain d, at rest."""
    fleet = Fleet()
    for name in "ab":
        fleet.tenant(name, trustDomain="d")
    domain(fleet, tenants=["a", "b"], sharing="All")
    fleet.settle()
    assert status(fleet)["members"] == ["a", "b"]
    assert status(fleet)["keyVersion"] == 1
    return fleet


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_no_key_is_ever_written_twice_and_versions_never_go_down(versions: list[int]) -> None:
    fleet = Fleet()
    seen: dict[str, str] = {}
    for number, version in enumerate(versions):
        domain(fleet, keyVersion=version)
        fleet.settle()
        highest = max(versions[: number + 1])
        assert status(fleet)["keyVersion"] == highest
        assert keys(fleet).keys() == {f"v{highest}"}, "older keys are shredded"
        assert all(keys(fleet)[k] == v for k, v in seen.items() if k in keys(fleet))
        seen |= keys(fleet)
    assert len(set(seen.values())) == len(seen)


LEAVES: dict[str, Callable[[Fleet], None]] = {
    "is not admitted any more": lambda fleet: domain(fleet, tenants=["a"], sharing="All"),
    "does not join any more": lambda fleet: fleet.tenant("b"),
    "joins another domain": lambda fleet: fleet.tenant("b", trustDomain="e"),
    "is deleted": lambda fleet: fleet.delete(Ref(kinds.TENANT, "b")),
}


@pytest.mark.parametrize("how", LEAVES)
def test_when_a_member_leaves_the_key_moves_on_by_itself_and_the_old_one_is_shredded(how: str) -> None:
    fleet = two_members()
    old = keys(fleet)["v1"]
    LEAVES[how](fleet)
    fleet.settle()

    assert status(fleet)["members"] == ["a"]
    assert status(fleet)["keyVersion"] == 2
    assert keys(fleet).keys() == {"v2"}
    assert old not in keys(fleet).values()


def test_a_member_that_joins_moves_nothing() -> None:
    fleet = two_members()
    fleet.tenant("c", trustDomain="d")
    domain(fleet, tenants=["a", "b", "c"], sharing="All")
    fleet.settle()

    assert status(fleet)["members"] == ["a", "b", "c"]
    assert status(fleet)["keyVersion"] == 1


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["admit", "expel", "join", "leave"]), max_size=6))
def test_nobody_who_left_ever_held_the_key_that_is_current(steps: list[str]) -> None:
    fleet = two_members()
    admitted, joined, holders = True, True, {"v1": {"a", "b"}}
    for step in steps:
        admitted = {"admit": True, "expel": False}.get(step, admitted)
        joined = {"join": True, "leave": False}.get(step, joined)
        domain(fleet, tenants=["a", "b"] if admitted else ["a"], sharing="All")
        fleet.tenant("b", **({"trustDomain": "d"} if joined else {}))
        fleet.settle()
        (current,) = keys(fleet)
        members = set(status(fleet)["members"])
        assert members == ({"a", "b"} if admitted and joined else {"a"})
        holders.setdefault(current, set()).update(members)
        assert holders[current] == members


@given(crash_after=st.integers(0, 6))
def test_a_departure_is_not_forgotten_wherever_the_operator_stops(crash_after: int) -> None:
    fleet = two_members()
    domain(fleet, tenants=["a"], sharing="All")
    for _ in range(crash_after):
        actions = fleet.orders()
        if not actions:
            break
        fleet.apply(actions[0])
    told = status(fleet)
    assert told["keyVersion"] == 2 or "b" in told["members"], "until the next key is told of, b may hold the current"
    fleet.settle()

    assert (status(fleet)["members"], status(fleet)["keyVersion"]) == (["a"], 2)
    assert keys(fleet).keys() == {"v2"}


def test_a_key_is_retired_only_after_its_successor_was_told() -> None:
    fleet = two_members()
    domain(fleet, tenants=["a", "b"], sharing="All", keyVersion=4)
    (mint,) = fleet.orders()
    assert isinstance(mint, MintKey)
    fleet.apply(mint)

    assert not fleet.orders(), "the status speaks of v1 still"
    fleet.settle()
    assert keys(fleet).keys() == {"v4"}


def test_what_belongs_to_a_retired_version_goes_with_it_and_foreign_entries_stay() -> None:
    fleet = two_members()
    keys(fleet).update({"v1.data": "wrapped", "note": "of somebody else"})
    domain(fleet, tenants=["a", "b"], sharing="All", keyVersion=2)
    fleet.settle()

    assert keys(fleet).keys() - {"v2", "v2.data"} == {"note"}


def test_the_secret_of_another_owner_is_not_cleaned_up() -> None:
    fleet = two_members()
    secret = fleet.objects[Ref(kinds.SECRET, SECRET, SETTING.namespace)]
    secret["metadata"]["annotations"][names.ANNOTATION_OWNER_UID] = "somebody"
    domain(fleet, tenants=["a", "b"], sharing="All", keyVersion=2)

    assert not [a for a in fleet.orders() if isinstance(a, Merge) and a.ref.kind == kinds.SECRET]


@pytest.mark.parametrize(
    ("tenants", "joins", "words"),
    [
        (["a", "b"], "ab", None),
        (["a"], "ab", "tenant b joins and is not admitted"),
        (["a", "b"], "a", "tenant b is admitted and does not join"),
        (["a", "b", "z"], "ab", "tenant z is admitted and there is no such KVTenant"),
    ],
)
def test_a_domain_names_the_tenants_that_only_one_side_wants(tenants: list[str], joins: str, words: str | None) -> None:
    fleet = Fleet()
    for name in "ab":
        fleet.tenant(name, **({"trustDomain": "d"} if name in joins else {}))
    domain(fleet, tenants=tenants, sharing="All")
    fleet.settle()
    body = fleet.of(kinds.DOMAIN)["d"]

    agreed = ("True", "Agreed") if words is None else ("False", "OneSided")
    assert condition(body, "MembersAgreed") == agreed
    told = next(c["message"] for c in body["status"]["conditions"] if c["type"] == "MembersAgreed")
    assert words is None or words in told
    assert condition(body, "Ready") == ("True", "Ready"), "the others share all the same"
