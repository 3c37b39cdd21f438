"""Tokens become callers, under the agent's own identity and the chart's rights."""

import asyncio
import base64
import json
import secrets
import time
from typing import Any

import pytest

from controlplane import ControlPlane
from kvstrata_agent.kube import authenticator
from kvstrata_agent.kube.kubernetes import KubeWorld
from kvstrata_api import names
from kvstrata_api.errors import (
    ApiServerAwayError,
    ForbiddenError,
    RetryableError,
    UnauthenticatedError,
)
from kvstrata_api.trust import Identity
from support.kube.objects import (
    GROUP,
    SYSTEM,
    asked_in_vain,
    custom,
    engine_token,
    eventually,
    granted,
    make_namespace,
    make_scope_secret,
    make_team_tenant,
    make_tenant,
    patch,
    raising,
    refused,
    says,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


async def test_a_good_token_becomes_a_caller_with_the_secret_of_its_tenant(
    plane: ControlPlane, world: KubeWorld
) -> None:
    team = make_namespace(plane)
    tenant = make_team_tenant(plane, team)
    key = make_scope_secret(plane, "tenant", tenant)
    await granted(world, team)

    caller = await world.authenticator.authenticate(engine_token(plane, team))

    assert caller.identity == Identity(team, "engine")
    assert caller.grants.tenant == team
    assert [s.secret for s in caller.secrets] == [key]
    assert caller.secrets[0].scope == caller.grants.write_scope == f"tenant/{team}/{tenant['metadata']['uid']}/v1"
    assert 0 < caller.expires_s <= authenticator.FRESH_S


async def test_a_pod_bound_token_names_its_pod_and_dies_with_it(
    plane: ControlPlane, world: KubeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = make_namespace(plane)
    make_scope_secret(
        plane, "tenant", make_tenant(plane, team, serviceAccounts=[{"namespace": team, "name": "engine"}])
    )
    pod_path = f"/api/v1/namespaces/{team}/pods"
    spec = {"serviceAccountName": "engine", "containers": [{"name": "c", "image": "i"}]}
    pod = plane.api.post(pod_path, {"metadata": {"name": "p"}, "spec": spec})
    bound = {"kind": "Pod", "apiVersion": "v1", "name": "p", "uid": pod["metadata"]["uid"]}
    request = {"spec": {"audiences": [names.AUDIENCE], "expirationSeconds": 600, "boundObjectRef": bound}}
    token = plane.api.post(f"/api/v1/namespaces/{team}/serviceaccounts/engine/token", request)["status"]["token"]
    await granted(world, team)
    assert (await world.authenticator.authenticate(token)).identity.pod_uid == pod["metadata"]["uid"]

    plane.kubectl("delete", "pod", "p", "-n", team, "--grace-period=0", "--force")
    monkeypatch.setattr(authenticator, "REVIEW_AGAIN_S", 0.0)
    await refused(world, token)


@pytest.mark.parametrize("audience", [None, "https://other.example", "kvstrata2"])
async def test_a_token_of_another_audience_is_refused(
    plane: ControlPlane, world: KubeWorld, audience: str | None
) -> None:
    team = make_namespace(plane)

    with pytest.raises(UnauthenticatedError):
        await world.authenticator.authenticate(engine_token(plane, team, audience))


@pytest.mark.parametrize("token", ["", "x", "a.b.c", "x" * 20_000, "\x00", "é" * 40])
async def test_what_is_no_token_is_refused(world: KubeWorld, token: str) -> None:
    with pytest.raises(UnauthenticatedError):
        await world.authenticator.authenticate(token)


async def test_a_tampered_token_is_refused(plane: ControlPlane, world: KubeWorld) -> None:
    token = engine_token(plane, make_namespace(plane))
    header, payload, signature = token.split(".")
    flipped = ("A" if signature[10] != "A" else "B").join((signature[:10], signature[11:]))

    for forged in (f"{header}.{payload}.{flipped}", f"{header}.{payload}.", f"{header}.{payload[:-4]}.{signature}"):
        with pytest.raises(UnauthenticatedError):
            await world.authenticator.authenticate(forged)


async def test_a_token_of_a_deleted_account_is_refused_once_reviewed_again(
    plane: ControlPlane, world: KubeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = make_namespace(plane)
    make_scope_secret(
        plane, "tenant", make_tenant(plane, team, serviceAccounts=[{"namespace": team, "name": "engine"}])
    )
    await granted(world, team)
    token = engine_token(plane, team)
    await world.authenticator.authenticate(token)
    plane.api.delete(f"/api/v1/namespaces/{team}/serviceaccounts/engine")

    assert (await world.authenticator.authenticate(token)).grants.tenant == team, "believed from memory"
    monkeypatch.setattr(authenticator, "REVIEW_AGAIN_S", 0.0)
    await refused(world, token)


async def test_an_expired_token_is_not_believed_from_memory(plane: ControlPlane, world: KubeWorld) -> None:
    team = make_namespace(plane)
    make_scope_secret(
        plane, "tenant", make_tenant(plane, team, serviceAccounts=[{"namespace": team, "name": "engine"}])
    )
    await granted(world, team)
    token = plane.service_account_token(team, "engine", names.AUDIENCE, expiration_s=600)
    caller = await world.authenticator.authenticate(token)
    review = world.authenticator._cache.review(authenticator.token_digest(token))
    assert review is not None
    assert 500 < review.expires_at_s - time.monotonic() < 660, "the token's own end is known"
    assert caller.expires_s <= authenticator.FRESH_S

    # 600 s are the shortest life the API server grants, so the clock moves instead of the test waiting.
    world.authenticator._clock = lambda: time.monotonic() + 700
    with pytest.raises(ApiServerAwayError):
        await asked_in_vain(world, token)


async def test_an_identity_that_nobody_or_two_tenants_claim_is_forbidden_by_name(
    plane: ControlPlane, world: KubeWorld
) -> None:
    team = make_namespace(plane)
    token = engine_token(plane, team)
    with pytest.raises(ForbiddenError, match=f"{team}/engine is claimed by no KVTenant"):
        await world.authenticator.authenticate(token)

    for name in (f"{team}-1", f"{team}-2"):
        tenant = make_tenant(plane, name, serviceAccounts=[{"namespace": team, "name": "engine"}])
        make_scope_secret(plane, "tenant", tenant)
    await eventually(lambda: world._trust.tenants.get(f"{team}-2"))
    with pytest.raises(ForbiddenError, match="claimed by 2 KVTenants"):
        await world.authenticator.authenticate(token)


async def test_a_tenant_may_claim_namespaces_by_label(plane: ControlPlane, world: KubeWorld) -> None:
    label = f"l{secrets.token_hex(3)}"
    team = make_namespace(plane, {"team": label})
    tenant = make_tenant(plane, f"t-{label}", namespaceSelector={"matchLabels": {"team": label}})
    make_scope_secret(plane, "tenant", tenant)
    await granted(world, team)

    plane.kubectl("label", "namespace", team, "team-")
    await eventually(raising(lambda: world.authenticator.authorize(Identity(team, "engine")), ForbiddenError))


async def test_a_missing_or_foreign_secret_is_named_and_waited_for(plane: ControlPlane, world: KubeWorld) -> None:
    team = make_namespace(plane)
    tenant = make_team_tenant(plane, team)
    secret = f"{SYSTEM}/{names.scope_secret_name('tenant', team)}"
    await eventually(lambda: world._trust.tenants.get(team))
    with pytest.raises(RetryableError, match=f"Secret {secret} is missing"):
        await world.authenticator.authenticate(engine_token(plane, team))

    earlier = {"metadata": {"name": team, "uid": "of-a-deleted-tenant"}}
    make_scope_secret(plane, "tenant", earlier)
    await eventually(lambda: says(world, team, "of an earlier tenant"))
    plane.api.delete(f"/api/v1/namespaces/{SYSTEM}/secrets/{names.scope_secret_name('tenant', team)}")
    make_scope_secret(plane, "tenant", tenant)
    await granted(world, team)


async def test_two_tenants_share_once_both_sides_want_it_and_stop_with_a_new_key(
    plane: ControlPlane, world: KubeWorld
) -> None:
    teams = [make_namespace(plane), make_namespace(plane)]
    for team in teams:
        tenant = make_team_tenant(plane, team)
        make_scope_secret(plane, "tenant", tenant)
        await granted(world, team)
    name = f"d-{secrets.token_hex(3)}"
    spec = {"tenants": teams, "sharing": "All"}
    domain = plane.api.post(f"{GROUP}/kvtrustdomains", custom("KVTrustDomain", name, spec))
    key = make_scope_secret(plane, "domain", domain)
    before = world.authenticator.grants_version
    patch(plane, f"kvt/{teams[0]}", f'{{"spec":{{"trustDomain":"{name}"}}}}')

    def tell(key_version: int, *members: str) -> None:
        status = {"keyVersion": key_version, "members": members}
        patch(plane, f"kvtd/{name}", json.dumps({"status": status}), "--subresource=status")

    def scopes(team: str) -> list[str]:
        try:
            return [str(s.scope) for s in world.authenticator.authorize(Identity(team, "engine")).secrets]
        except RetryableError:
            return []

    tell(1, teams[0])
    await eventually(lambda: len(scopes(teams[0])) == 2)
    assert world.authenticator.grants_version > before
    assert len(scopes(teams[1])) == 1, "the second tenant has not joined"

    patch(plane, f"kvt/{teams[1]}", f'{{"spec":{{"trustDomain":"{name}"}}}}')
    await eventually(lambda: (t := world._trust.tenants.get(teams[1])) is not None and t.spec.trust_domain)
    assert len(scopes(teams[1])) == 1, "the status does not name it yet"
    tell(1, *teams)
    await eventually(lambda: len(scopes(teams[1])) == 2)
    shared = [world.authenticator.authorize(Identity(t, "engine")).secrets[0] for t in teams]
    assert shared[0] == shared[1]
    assert shared[0].secret == key

    patch(plane, f"kvtd/{name}", '{"spec":{"keyVersion":2}}')
    await eventually(lambda: len(scopes(teams[0])) == 1)
    tell(2, *teams)
    await eventually(raising(lambda: world.authenticator.authorize(Identity(teams[0], "engine")), RetryableError))
    assert scopes(teams[0]) == [], "no half of a domain while the new key is missing"
    new = base64.b64encode(secrets.token_bytes(32)).decode()
    patch(plane, f"secret/{names.scope_secret_name('domain', name)}", f'{{"data":{{"v2":"{new}"}}}}', "-n", SYSTEM)
    await eventually(lambda: len(scopes(teams[0])) == 2)
    assert world.authenticator.authorize(Identity(teams[0], "engine")).secrets[0].secret == base64.b64decode(new)


async def test_status_and_usage_of_trust_objects_leave_the_grants_alone(plane: ControlPlane, world: KubeWorld) -> None:
    team = make_namespace(plane)
    make_team_tenant(plane, team)
    await eventually(lambda: world._trust.tenants.get(team) and world._trust.namespaces.get(team))
    before = world.authenticator.grants_version
    patch(plane, f"kvt/{team}", '{"status":{"keyVersion":1}}', "--subresource=status")
    plane.kubectl("label", "kvt", team, "note=x")
    other = make_namespace(plane)
    await eventually(lambda: world._trust.namespaces.get(other))

    assert world.authenticator.grants_version == before + 1, "only the namespace counts"


async def test_only_an_agent_of_this_fleet_is_a_peer(plane: ControlPlane, world: KubeWorld) -> None:
    def token(namespace: str, name: str, audience: str | None = names.AUDIENCE) -> str:
        return plane.service_account_token(namespace, name, audience)

    peer = await world.authenticator.verify_peer(token(SYSTEM, names.AGENT_SERVICE_ACCOUNT), "p.other")
    assert peer == Identity(SYSTEM, names.AGENT_SERVICE_ACCOUNT)

    team = make_namespace(plane)
    plane.api.post(f"/api/v1/namespaces/{team}/serviceaccounts", {"metadata": {"name": names.AGENT_SERVICE_ACCOUNT}})
    for namespace, name in ((team, "engine"), (team, names.AGENT_SERVICE_ACCOUNT), (SYSTEM, "kvstrata-operator")):
        with pytest.raises(ForbiddenError):
            await world.authenticator.verify_peer(token(namespace, name), "p.other")
    with pytest.raises(UnauthenticatedError):
        await world.authenticator.verify_peer(token(SYSTEM, names.AGENT_SERVICE_ACCOUNT, None), "p.other")


async def test_many_callers_of_one_token_cost_one_review(plane: ControlPlane, world: KubeWorld) -> None:
    team = make_namespace(plane)
    make_scope_secret(
        plane, "tenant", make_tenant(plane, team, serviceAccounts=[{"namespace": team, "name": "engine"}])
    )
    await granted(world, team)
    token = engine_token(plane, team)
    sent = 0
    real_call = world.api.call

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        return await real_call(*args, **kwargs)

    world.api.call = counted  # type: ignore[method-assign]
    callers = await asyncio.gather(*(world.authenticator.authenticate(token) for _ in range(50)))
    await world.authenticator.authenticate(token)

    assert sent == 1
    assert {c.grants.tenant for c in callers} == {team}
