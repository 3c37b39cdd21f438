"""Whoever is gone holds nothing any more: attached engines of deleted pods, accounts and namespaces, idle and busy."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from controlplane import ControlPlane
from kvstrata_agent.kube.kubernetes import KubeWorld
from kvstrata_api import names
from support.agent.guarded import TokenEngine, guarded
from support.kube.objects import granted, make_namespace, make_scope_secret, make_team_tenant
from support.operator.issuer import make_pod, pod_token

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

REVOKED_S = 60.0
"""The bound of the design."""


def delete_pod(plane: ControlPlane, team: str) -> None:
    plane.kubectl("delete", "pod", "engine", "-n", team, "--grace-period=0", "--force")


def delete_account(plane: ControlPlane, team: str) -> None:
    plane.kubectl("delete", "serviceaccount", "engine", "-n", team)


def replace_account(plane: ControlPlane, team: str) -> None:
    """Another account of that name, with another uid."""
    delete_account(plane, team)
    plane.kubectl("create", "serviceaccount", "engine", "-n", team)


def replace_pod(plane: ControlPlane, team: str) -> None:
    """Another pod of that name, with another uid."""
    make_pod(plane, team, "engine", "engine", "node-a")


def delete_namespace(plane: ControlPlane, team: str) -> None:
    delete_pod(plane, team)
    plane.kubectl("delete", "namespace", team, "--wait=false")


def delete_tenant(plane: ControlPlane, team: str) -> None:
    plane.kubectl("delete", "kvtenant", team)


CAUSES = (delete_pod, replace_pod, delete_account, replace_account, delete_namespace, delete_tenant)


async def cut_off(plane: ControlPlane, path: Path, number: int, cause: Any, team: str, token: str) -> list[str]:
    """Attach two engines, let the cause happen, and say what was wrong with how they ended."""
    idle, busy = (TokenEngine(path, 2 * number + i, token) for i in range(2))
    for engine in (idle, busy):
        await asyncio.to_thread(engine.hold)
    await asyncio.to_thread(cause, plane, team)
    began_s = time.monotonic()
    limit_s = REVOKED_S + 30.0
    ended = await asyncio.gather(
        asyncio.to_thread(idle.closed_after_s, limit_s), asyncio.to_thread(busy.served_for_s, limit_s)
    )
    wrong = []
    for name, took_s in zip(("idle", "busy"), ended, strict=True):
        if took_s is None or took_s > REVOKED_S:
            wrong.append(f"{cause.__name__}: the {name} engine was cut off after {took_s} s, limit {REVOKED_S} s")
    # A busy one may be refused before it is closed, and is closed in the same time.
    left_s = REVOKED_S - (time.monotonic() - began_s)
    if await asyncio.to_thread(busy.closed_after_s, max(left_s, 0.1)) is None:
        wrong.append(f"{cause.__name__}: the busy engine's connection stays open")
    for engine in (idle, busy):
        engine.close()
    return wrong


async def test_an_attached_engine_is_cut_off_within_a_minute(
    plane: ControlPlane, world: KubeWorld, tmp_path: Path
) -> None:
    """One more engine is the control: nothing happens to it, and it is served all the time."""
    path = tmp_path / "run" / "agent.sock"
    # All engines wait at once, each in a thread.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * len(CAUSES) + 8))
    async with guarded(world.authenticator, path) as core:
        runs = []
        for number, cause in enumerate(CAUSES):
            team, token = await made_team(plane, world)
            runs.append(cut_off(plane, path, number, cause, team, token))
        _, token = await made_team(plane, world)
        control = TokenEngine(path, 2 * len(CAUSES), token)
        await asyncio.to_thread(control.hold)
        staying = asyncio.create_task(asyncio.to_thread(control.served_for_s, REVOKED_S + 10.0))
        wrong = [one for some in await asyncio.gather(*runs) for one in some]

        assert wrong == []
        assert await staying is None, "an engine to which nothing happened was cut off"
        assert (len(core.node.leases), len(core.node.pins)) == (2, 2), "of the control alone"
        control.close()


async def made_team(plane: ControlPlane, world: KubeWorld) -> tuple[str, str]:
    """A tenant with one engine in a pod: its namespace and token."""
    team = make_namespace(plane)
    make_scope_secret(plane, "tenant", make_team_tenant(plane, team))
    pod = make_pod(plane, team, "engine", "engine", "node-a")
    await granted(world, team)
    return team, pod_token(plane, pod, names.AUDIENCE)
