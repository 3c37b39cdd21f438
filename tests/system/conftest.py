"""Servers that several system tests share."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controlplane import ControlPlane, start
from controlplane.testing import session_plane
from kvstrata_agent.kube.authenticator import AgentIdentity
from kvstrata_agent.kube.kubernetes import KubeWorld
from kvstrata_api import names
from support.kube.chart_rights import install_kinds, render_rights
from support.kube.objects import SYSTEM, WAIT_S, make_node, make_pool
from support.metadata.replicas import Redis, Replica, launch, until
from support.runner import leftovers

_numbers = itertools.count()


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One control plane for the session. Do not restart it; use `scratch_namespace` for objects of your own."""
    leftovers.share()
    with contextmanager(session_plane)(tmp_path_factory.mktemp("control-plane")) as plane:
        leftovers.unshare()
        yield plane


@pytest.fixture(scope="session")
def rights() -> str:
    return render_rights()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, rights: str) -> Iterator[ControlPlane]:
    """A plane of a module's own, with CRDs and rights: such tests stop and pause its API server."""
    with start(tmp_path_factory.mktemp("plane"), kwok=False) as plane:
        install_kinds(plane, rights)
        yield plane


@pytest.fixture(scope="module")
def kubeconfig(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "kubeconfig"
    return plane.service_account_kubeconfig(SYSTEM, names.AGENT_SERVICE_ACCOUNT, path)


@pytest.fixture(scope="module")
def operator_config(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    return plane.service_account_kubeconfig(SYSTEM, names.FIELD_MANAGER_OPERATOR, path)


@pytest.fixture
def place() -> AgentIdentity:
    return AgentIdentity(f"pool-{next(_numbers)}", "node-a")


@pytest.fixture
async def world(plane: ControlPlane, kubeconfig: Path, place: AgentIdentity) -> AsyncIterator[KubeWorld]:
    """A connected agent whose pool and pool node exist."""
    make_pool(plane, place)
    make_node(plane, place)
    async with await KubeWorld.connect(place, kubeconfig) as world:
        await asyncio.wait_for(world.ready(), WAIT_S)
        yield world


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Redis]:
    """A server that a metadata service does not start itself."""
    made = Redis(tmp_path)
    await made.start()
    yield made
    await made.server.stop()


@pytest.fixture
async def service(plane: ControlPlane, redis: Redis, tmp_path: Path) -> AsyncIterator[Replica]:
    """One metadata service that leads."""
    path = plane.service_account_kubeconfig(SYSTEM, "kvstrata-metadata", tmp_path / "metadata.kubeconfig")
    plane.kubectl("delete", "lease", "kvstrata-metadata", "-n", SYSTEM, "--ignore-not-found")
    made = launch("a", path, redis, tmp_path)
    try:
        await until(lambda: made.is_up and made.leads, "the service does not lead")
        yield made
    finally:
        made.end()
