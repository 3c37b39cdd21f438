"""The agent while the API server is away, frozen or has forgotten."""

import asyncio
import signal
import time

import pytest

from controlplane import ControlPlane
from kvstrata_agent.kube.authenticator import AgentIdentity
from kvstrata_agent.kube.kubernetes import KubeWorld
from kvstrata_api.errors import (
    ApiServerAwayError,
    ForbiddenError,
    UnauthenticatedError,
)
from kvstrata_api.models.conditions import Status
from kvstrata_api.trust import Identity
from support.kube.objects import (
    GROUP,
    WAIT_S,
    engine_token,
    eventually,
    granted,
    make_namespace,
    make_scope_secret,
    make_team_tenant,
    make_tenant,
    make_unknown_token,
    patch,
    raising,
    report,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


async def test_everything_goes_on_after_the_api_server_was_killed_and_restarted(
    plane: ControlPlane, world: KubeWorld, place: AgentIdentity
) -> None:
    team = make_namespace(plane)
    make_scope_secret(
        plane, "tenant", make_tenant(plane, team, serviceAccounts=[{"namespace": team, "name": "engine"}])
    )
    await granted(world, team)
    token = engine_token(plane, team)
    assert world.desired.pool.metadata.name
    world.start_heartbeat(1)
    await world.authenticator.authenticate(token)
    plane.stop_component("kube-apiserver", signum=signal.SIGKILL)
    await asyncio.sleep(2.0)

    unknown = make_unknown_token(token)
    with pytest.raises(ApiServerAwayError):
        await world.authenticator.authenticate(unknown)
    assert (await world.authenticator.authenticate(token)).grants.tenant == team, "believed while nobody can be asked"
    world.status.report(report(10, AgentConnected=Status.TRUE))
    plane.restart_apiserver()
    started_s = time.monotonic()

    assert await world.status.flush(WAIT_S)
    patch(plane, f"kvp/{place.pool}", '{"spec":{"paused":true}}')
    await asyncio.wait_for(world.desired.changed(), WAIT_S)
    assert world.desired.pool.spec.paused
    plane.api.delete(f"{GROUP}/kvtenants/{team}")
    await eventually(raising(lambda: world.authenticator.authorize(Identity(team, "engine")), ForbiddenError))
    beat = world.heartbeat
    assert beat is not None
    await eventually(lambda: (beat.silent_s or 99.0) < time.monotonic() - started_s)
    with pytest.raises(UnauthenticatedError):
        await world.authenticator.authenticate(unknown)


async def test_what_vanished_while_the_watch_was_too_old_is_swept(
    plane: ControlPlane, world: KubeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version to go on from is made unusable, as compaction does; the list must find what was deleted."""
    team = make_namespace(plane)
    make_team_tenant(plane, team)
    await eventually(lambda: world._trust.tenants.get(team))
    (watch,) = (w for w in world._watches if w._store is world._trust.tenants)
    lists = 0
    real_list = watch._list

    async def counted() -> None:
        nonlocal lists
        lists += 1
        await real_list()

    monkeypatch.setattr(watch, "_list", counted)
    monkeypatch.setattr(watch, "_apply", lambda _: None)  # Events are lost from here on.
    before = watch._version
    plane.api.delete(f"{GROUP}/kvtenants/{team}")
    await eventually(lambda: watch._version != before)
    assert world._trust.tenants.get(team)
    watch._version = "1"
    plane.restart_apiserver(signum=signal.SIGKILL)

    await eventually(lambda: lists > 0)
    await eventually(lambda: world._trust.tenants.get(team) is None)


async def test_a_frozen_api_server_costs_callers_a_bounded_wait(plane: ControlPlane, world: KubeWorld) -> None:
    token = engine_token(plane, make_namespace(plane))
    plane.pause_apiserver(120.0)
    try:
        began_s = time.monotonic()
        with pytest.raises(ApiServerAwayError):
            await world.authenticator.authenticate(token)
        assert time.monotonic() - began_s < 30
    finally:
        plane.resume_apiserver()
