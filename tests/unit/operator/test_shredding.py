"""A key is shredded only when the API server itself says that nobody needs it: what was followed may be older."""

from dataclasses import replace
from typing import Any

import pytest

from kvstrata_api import names
from kvstrata_api.errors import RetryableError
from kvstrata_kube.api import Call
from kvstrata_operator.apply.executor import Executor, Outcome
from kvstrata_operator.decide.plan.actions import Shred
from kvstrata_operator.decide.planner import plan_orders
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.world import View
from support.kube.doubles import ScriptedApi, ok
from support.operator.fleet import SETTING, ConflictError, Fleet, Json, facts_of, pool_spec

pytestmark = pytest.mark.unit

TENANT = Ref(kinds.TENANT, "a")
SHARE = Ref(kinds.SHARE, "s", "team-1")
OF_TENANT = Ref(kinds.SECRET, names.scope_secret_name("tenant", "a"), SETTING.namespace)
OF_SHARE = Ref(kinds.SECRET, names.scope_secret_name("share", "team-1.s"), SETTING.namespace)
_PREFIX = {"digest": "0" * 64, "tokenCount": 16}


def tenant(uid: str) -> Json:
    spec = {"serviceAccounts": [{"namespace": "team-1", "name": "engine"}]}
    return {"metadata": {"name": "a", "uid": uid, "generation": 1, "resourceVersion": "7"}, "spec": spec}


def share(uid: str, **more: Any) -> Json:
    spec = {"poolRef": "p", "prefixes": [_PREFIX], "to": [{"tenant": "b"}], **more}
    meta = {"name": "s", "namespace": "team-1", "uid": uid, "generation": 1, "resourceVersion": "7"}
    return {"metadata": meta, "spec": spec}


async def shred(owner: Ref, live: list[Json]) -> tuple[Outcome, ScriptedApi]:
    """Let the executor shred the key of `owner` with uid `old`, where the API server lists `live`."""

    def answer(call: Call) -> Any:
        return ok({"items": live}) if call.method == "GET" else ok()

    api = ScriptedApi(answer)
    executor = Executor(api, lambda _kind, _raw: None, lambda: True, "operator-0")  # type: ignore[arg-type]
    secret = OF_TENANT if owner.kind == kinds.TENANT else OF_SHARE
    (outcome,) = await executor.apply([Shred(secret, uid="secret-uid", owner=owner, owner_uid="old")])
    return outcome, api


@pytest.mark.parametrize(
    ("owner", "live"),
    [
        (TENANT, []),
        (TENANT, [tenant("new")]),
        (SHARE, []),
        (SHARE, [share("new")]),
        (SHARE, [share("old", expiresAt="2026-01-01T00:00:00Z")]),
    ],
)
async def test_the_key_of_an_owner_that_is_gone_or_over_is_shredded(owner: Ref, live: list[Json]) -> None:
    outcome, api = await shred(owner, live)

    assert outcome.error is None
    (asked, deleted) = (call for _, call in api.calls)
    assert asked.path == owner.kind.path(owner.namespace)
    assert asked.query == {"fieldSelector": f"metadata.name={owner.name}"}, "as new as the last write, of one object"
    assert deleted.method == "DELETE"
    assert deleted.body == {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "secret-uid"}}


@pytest.mark.parametrize(("owner", "live"), [(TENANT, tenant("old")), (SHARE, share("old"))])
async def test_the_key_of_an_owner_that_lives_is_never_shredded(owner: Ref, live: Json) -> None:
    outcome, api = await shred(owner, [live])

    assert isinstance(outcome.error, RetryableError), "so that the world is listed anew"
    assert api.paths("DELETE") == []


def fleet_with_keys() -> Fleet:
    fleet = Fleet()
    fleet.pool(spec=pool_spec())
    fleet.put(kinds.NAMESPACE, "team-1", labels={})
    fleet.tenant("a", serviceAccounts=[{"namespace": "team-1", "name": "engine"}], acceptSharesFrom=["b"])
    fleet.tenant("b", acceptSharesFrom=["a"])
    fleet.settle()
    return fleet


def with_trust(view: View, **parts: Any) -> View:
    """A view of which some kinds are not as new as the others."""
    return replace(view, trust=replace(view.trust, **parts))


def carried_out(fleet: Fleet, view: View) -> list[Ref]:
    """Carry out what is planned from a view that may be old; return what was refused."""
    refused = []
    for action in plan_orders(view, facts_of(view), SETTING, fleet.now).actions:
        try:
            fleet.apply(action)
        except ConflictError:
            refused.append(action.ref)
    return refused


def test_a_picture_of_tenants_that_lags_behind_that_of_secrets_costs_no_key() -> None:
    fleet = fleet_with_keys()
    before = fleet.view()
    fleet.delete(TENANT)
    fleet.tenant("a", serviceAccounts=[{"namespace": "team-1", "name": "engine"}])
    fleet.settle()  # As another replica, which has seen all of it, does.
    key = fleet.objects[OF_TENANT]["data"]

    assert carried_out(fleet, with_trust(fleet.view(), tenants=before.trust.tenants)) == [OF_TENANT]

    assert fleet.objects[OF_TENANT]["data"] == key


def test_a_picture_of_shares_that_lags_behind_that_of_secrets_costs_no_key() -> None:
    fleet = fleet_with_keys()
    before = fleet.view()
    fleet.put(kinds.SHARE, "s", namespace="team-1", spec=share("x", to=[{"tenant": "b"}])["spec"])
    fleet.settle()
    key = fleet.objects[OF_SHARE]["data"]

    assert carried_out(fleet, with_trust(fleet.view(), shares=before.trust.shares)) == [OF_SHARE]

    assert fleet.objects[OF_SHARE]["data"] == key


def test_keys_of_owners_that_are_seen_to_have_gone_are_shredded() -> None:
    fleet = fleet_with_keys()
    fleet.put(kinds.SHARE, "s", namespace="team-1", spec=share("x")["spec"])
    fleet.settle()
    assert OF_SHARE in fleet.objects

    fleet.delete(SHARE)
    fleet.settle()

    assert OF_SHARE not in fleet.objects
