"""Laws of prefix shares in the operator: who grants, who reads, when it ends, and what is left of it."""

from typing import Any

import pytest

from kvstrata_api import names, shares
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import SETTING, Fleet, condition

pytestmark = pytest.mark.unit

SHARE = Ref(kinds.SHARE, "s", "a")
SECRET = names.scope_secret_name("share", "a.s")


def share(fleet: Fleet, **spec: Any) -> dict[str, Any]:
    prefixes = [{"digest": "0" * 64, "tokenCount": 16}]
    body = {"poolRef": "p", "prefixes": prefixes, "to": [{"tenant": "b"}], **spec}
    fleet.put(kinds.SHARE, "s", namespace="a", spec=body)
    return settled(fleet)


def settled(fleet: Fleet) -> dict[str, Any]:
    fleet.settle()
    found: dict[str, Any] = fleet.of(kinds.SHARE)["s"]
    return found


def message(body: dict[str, Any], type_: str) -> str:
    return next(str(c["message"]) for c in body["status"]["conditions"] if c["type"] == type_)


def sharing() -> Fleet:
    """Tenant a of namespace a, tenant b that accepts its shares, tenant c that does not, pool p."""
    fleet = Fleet()
    fleet.pool()
    fleet.tenant("a")
    fleet.tenant("b", acceptSharesFrom=["a"])
    fleet.tenant("c")
    return fleet


def test_a_share_gets_a_key_of_its_own_that_no_owner_reference_could_hold() -> None:
    fleet = sharing()
    body = share(fleet)
    secret = fleet.of(kinds.SECRET)[SECRET]

    assert condition(body, "Active") == ("True", "Granted")
    assert condition(body, "Expired") == ("False", "NotExpired")
    assert condition(body, "ReadersAgreed") == ("True", "Agreed")
    assert body["status"]["consumers"] == 1
    assert secret["data"].keys() == {"v1"}
    assert secret["metadata"]["labels"][names.LABEL_SCOPE] == "share"
    assert secret["metadata"]["annotations"][names.ANNOTATION_OWNER_UID] == body["metadata"]["uid"]
    assert "ownerReferences" not in secret["metadata"], "an owner of another namespace counts as absent"


def test_a_share_expires_and_its_key_is_shredded() -> None:
    fleet = sharing()
    body = share(fleet, expiresAt="2026-01-01T01:00:00Z")
    assert condition(body, "Active")[0] == "True"

    fleet.pass_time(3600)
    body = settled(fleet)
    assert condition(body, "Active") == ("False", "Expired")
    assert condition(body, "Expired") == ("True", "Expired")
    assert body["status"]["consumers"] == 0
    assert SECRET not in fleet.of(kinds.SECRET)


@pytest.mark.parametrize(
    ("end", "active"),
    [
        ("9999-12-31T23:59:59-05:00", ("True", "Granted")),
        ("9999-12-31T23:59:59Z", ("True", "Granted")),
        ("0001-01-01T00:00:00+01:00", ("False", "Expired")),
    ],
)
def test_an_end_outside_the_years_of_utc_is_the_first_or_the_last_moment(end: str, active: tuple[str, str]) -> None:
    fleet = sharing()

    assert condition(share(fleet, expiresAt=end), "Active") == active


@pytest.mark.parametrize("text", ["", "soon", "9999-12-31T23:59:59-05:00"])
def test_a_stored_time_that_is_none_of_utc_counts_as_absent(text: str) -> None:
    assert kinds.parse_time(text) is None


def test_shares_behind_the_64th_say_that_nobody_gets_them() -> None:
    fleet = sharing()
    fleet.tenant("d", acceptSharesFrom=["a"], serviceAccounts=[{"namespace": "d", "name": "engine"}])
    prefixes = [{"digest": "0" * 64, "tokenCount": 16}]
    for i in range(shares.SHARES_MAX):
        fleet.put(
            kinds.SHARE, f"d{i:02}", namespace="d", spec={"poolRef": "p", "prefixes": prefixes, "to": [{"tenant": "a"}]}
        )
    read = share(fleet, to=[{"tenant": "b"}, {"tenant": "d"}])
    assert condition(read, "Active") == ("True", "Granted")
    assert condition(read, "ReadersAgreed") == ("False", "TooManyShares")
    assert message(read, "ReadersAgreed") == "tenant d: d gets 64 shares of the pool, which come before this one"
    assert read["status"]["consumers"] == 1

    fleet.put(kinds.SHARE, "d64", namespace="d", spec={"poolRef": "p", "prefixes": prefixes, "to": [{"tenant": "a"}]})
    fleet.settle()
    last = fleet.of(kinds.SHARE)["d64"]
    assert condition(last, "Active") == ("False", "TooManyShares")


def test_a_share_that_is_prolonged_after_its_end_starts_with_another_key() -> None:
    fleet = sharing()
    share(fleet, expiresAt="2026-01-01T01:00:00Z")
    old = fleet.of(kinds.SECRET)[SECRET]["data"]["v1"]
    fleet.pass_time(3600)
    fleet.settle()

    assert condition(share(fleet, expiresAt="2026-01-02T00:00:00Z"), "Active")[0] == "True"
    assert fleet.of(kinds.SECRET)[SECRET]["data"]["v1"] != old


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_key_of_a_deleted_share_is_deleted_and_never_its_successors(*, comes_back: bool) -> None:
    fleet = sharing()
    share(fleet)
    old = fleet.of(kinds.SECRET)[SECRET]["data"]["v1"]
    fleet.delete(SHARE)
    if comes_back:
        share(fleet)
        assert fleet.of(kinds.SECRET)[SECRET]["data"]["v1"] != old
    else:
        fleet.settle()
        assert SECRET not in fleet.of(kinds.SECRET)


def test_secrets_of_others_and_of_other_kinds_are_not_taken_for_orphans() -> None:
    fleet = sharing()
    foreign = names.scope_secret_name("share", "x.y")
    fleet.put(kinds.SECRET, foreign, namespace=SETTING.namespace, data={"v1": "theirs"})
    fleet.settle()

    assert foreign in fleet.of(kinds.SECRET)
    assert names.scope_secret_name("tenant", "a") in fleet.of(kinds.SECRET)


@pytest.mark.parametrize(
    ("to", "reason", "words"),
    [
        ([{"tenant": "nope"}], "UnknownReader", "tenant nope: nope does not exist"),
        ([{"domain": "nope"}], "UnknownReader", "domain nope: nope does not exist"),
        ([{"tenant": "c"}], "NotAccepted", "spec.acceptSharesFrom"),
        ([{"domain": "closed"}], "DomainPrivate", "has spec.sharing Private"),
    ],
)
def test_a_reader_that_does_not_agree_is_named_and_the_others_read(
    to: list[dict[str, str]], reason: str, words: str
) -> None:
    fleet = sharing()
    fleet.put(kinds.DOMAIN, "closed", spec={"tenants": ["b", "c"], "sharing": "Private"})
    alone = share(fleet, to=to)
    assert condition(alone, "Accepted")[0] == "True"
    assert condition(alone, "Active") == ("False", "NoReader")
    assert condition(alone, "ReadersAgreed") == ("False", reason)
    assert words in message(alone, "ReadersAgreed")

    both = share(fleet, to=[*to, {"tenant": "b"}])
    assert condition(both, "Active") == ("True", "Granted")
    assert condition(both, "ReadersAgreed") == ("False", reason)
    assert both["status"]["consumers"] == 1


def test_members_of_a_domain_read_what_its_publishers_share() -> None:
    fleet = sharing()
    for name in "abc":
        fleet.tenant(name, trustDomain="d")
    domain = {"tenants": ["a", "b", "c"], "sharing": "ListedPrefixes"}
    fleet.put(kinds.DOMAIN, "d", spec=domain)
    assert share(fleet, to=[{"domain": "d"}])["status"]["consumers"] == 2

    fleet.put(kinds.DOMAIN, "d", spec={**domain, "publishers": ["b"]})
    assert condition(settled(fleet), "Active") == ("False", "NoReader")


def test_nobody_shares_from_a_namespace_that_no_tenant_or_two_have() -> None:
    fleet = sharing()
    fleet.delete(Ref(kinds.TENANT, "a"))
    assert condition(share(fleet), "Accepted") == ("False", "NotGranted")
    assert SECRET not in fleet.of(kinds.SECRET)

    fleet.tenant("a")
    assert condition(settled(fleet), "Accepted")[0] == "True"
    fleet.tenant("a2", serviceAccounts=[{"namespace": "a", "name": "other"}])
    body = settled(fleet)
    assert condition(body, "Active") == ("False", "NotGranted")
    assert {c["type"] for c in body["status"]["conditions"]} == {"Accepted", "Active"}, "nothing is left of before"
    assert "exactly one tenant, the granting one: a, a2" in message(body, "Active")
    assert SECRET in fleet.of(kinds.SECRET), "a doubt that may pass shreds nothing"


def test_a_share_must_speak_of_a_pool_that_exists() -> None:
    assert condition(share(sharing(), poolRef="nope"), "Accepted") == ("False", "UnknownPool")


def test_hits_are_the_sum_of_what_agents_report_and_cost_ever_fewer_writes() -> None:
    fleet = sharing()
    for node in ("n1", "n2"):
        fleet.node(node)
    uid = share(fleet)["metadata"]["uid"]
    pool_nodes = [Ref(kinds.POOL_NODE, name) for name in fleet.of(kinds.POOL_NODE)]
    written = set()
    for hits in range(0, 4000, 160):
        for ref in pool_nodes:
            fleet.report(ref.name)
            others = [{"uid": "another", "hits": 9}]
            fleet.objects[ref]["status"]["shares"] = [{"uid": uid, "hits": hits}, *others]
        told = settled(fleet)["status"]["hits"]
        assert 2 * hits * 7 / 8 <= told <= 2 * hits
        written.add(told)

    assert len(written) < 25
