"""The Kubernetes client against a real API server: every kind of credentials, their rotation, and watches."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane import ControlPlane
from controlplane.testing import scratch_namespace
from kvstrata_api.errors import InvalidInputError, UnauthenticatedError
from kvstrata_kube import api as kube_api
from kvstrata_kube.api import Call, KubeApi
from kvstrata_kube.secrets import read_secret, write_secret
from kvstrata_kube.store import Store, version_of
from kvstrata_kube.watch import Source, Watch, list_objects

pytestmark = pytest.mark.system

WHO_AM_I = Call(
    "POST",
    "/apis/authentication.k8s.io/v1/selfsubjectreviews",
    body={"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"},
)
WAIT_S = 90.0


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    with scratch_namespace(control_plane) as name:
        for account in ("one", "two"):
            path = f"/api/v1/namespaces/{name}/serviceaccounts"
            control_plane.api.post(path, {"metadata": {"name": account}})
        yield name


def kubeconfig_of(control_plane: ControlPlane, folder: Path, user: dict[str, Any]) -> Path:
    """The administrator's kubeconfig under another identity."""
    config = json.loads(control_plane.kubeconfig.read_text())
    config["users"][0]["user"] = user
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


async def name_of(api: KubeApi) -> str:
    name: str = (await api.call(WHO_AM_I)).content()["status"]["userInfo"]["username"]
    return name


async def test_a_client_certificate_is_an_identity(control_plane: ControlPlane, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    path = control_plane.client_kubeconfig("alice", [], tmp_path / "alice")
    api = await KubeApi.connect("test", path, lambda verb, result, _s: seen.append((verb, result)))
    try:
        assert await name_of(api) == "alice"
        assert seen == [("POST", "201")]
    finally:
        await api.close()


async def test_a_token_that_a_kubelet_replaces_is_used_before_the_old_one_is_refused(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(control_plane.service_account_token(namespace, "one"))
    api = await KubeApi.connect("test", kubeconfig_of(control_plane, tmp_path, {"tokenFile": str(token)}))
    try:
        assert await name_of(api) == f"system:serviceaccount:{namespace}:one"
        token.write_text(control_plane.service_account_token(namespace, "two"))
        assert await name_of(api) == f"system:serviceaccount:{namespace}:one", "not read for every request"
        monkeypatch.setattr(kube_api, "TOKEN_S", 0.0)
        assert await name_of(api) == f"system:serviceaccount:{namespace}:two"
        token.unlink()
        assert await name_of(api) == f"system:serviceaccount:{namespace}:two"
    finally:
        await api.close()


def by_file(folder: Path) -> dict[str, Any]:
    return {"tokenFile": str(folder / "token")}


def by_program(folder: Path) -> dict[str, Any]:
    """A credential plugin as clouds have them; it hands out what lies in the file."""
    program = folder / "plugin.py"
    program.write_text(
        "import json, pathlib\n"
        f"token = pathlib.Path({str(folder / 'token')!r}).read_text()\n"
        "api = 'client.authentication.k8s.io/v1'\n"
        "print(json.dumps({'apiVersion': api, 'kind': 'ExecCredential', 'status': {'token': token}}))\n"
    )
    version = "client.authentication.k8s.io/v1"
    run = {"apiVersion": version, "command": sys.executable, "args": [str(program)], "interactiveMode": "Never"}
    return {"exec": run}


@pytest.mark.parametrize("user", [by_file, by_program])
async def test_credentials_that_are_refused_are_read_again_and_the_request_sent_again(
    control_plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: Callable[[Path], dict[str, Any]],
) -> None:
    monkeypatch.setattr(kube_api, "RELOAD_S", 0.0)
    (tmp_path / "token").write_text("no token")
    api = await KubeApi.connect("test", kubeconfig_of(control_plane, tmp_path, user(tmp_path)))
    try:
        with pytest.raises(UnauthenticatedError):
            await name_of(api)
        (tmp_path / "token").write_text(control_plane.service_account_token(namespace, "one"))
        names = await asyncio.gather(*(name_of(api) for _ in range(5)))
        assert names == [f"system:serviceaccount:{namespace}:one"] * 5
    finally:
        await api.close()


async def test_a_refused_watch_reads_credentials_for_the_next_one(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_api, "RELOAD_S", 0.0)
    (tmp_path / "token").write_text("no token")
    api = await KubeApi.connect("test", kubeconfig_of(control_plane, tmp_path, by_file(tmp_path)))
    try:
        (tmp_path / "token").write_text(control_plane.service_account_token(namespace, "one"))
        with pytest.raises(UnauthenticatedError):
            await anext(api.stream(Call("GET", "/api/v1/configmaps", {"watch": "1"})))
        assert await name_of(api) == f"system:serviceaccount:{namespace}:one"
    finally:
        await api.close()


@dataclass(frozen=True)
class Thing:
    key: str
    uid: str
    version: int
    fields: frozenset[str]


def parse(raw: bytes) -> Thing:
    read = msgspec.json.decode(raw)
    meta = read["metadata"]
    return Thing(meta["name"], meta["uid"], version_of(meta["resourceVersion"]), frozenset(read))


@pytest.mark.parametrize("is_metadata_only", [False, True])
async def test_a_watch_follows_a_real_server_page_by_page_and_ends_at_once(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch, *, is_metadata_only: bool
) -> None:
    monkeypatch.setattr("kvstrata_kube.watch.PAGE_OBJECTS", 2)
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    for name in "abcde":
        control_plane.api.post(path, {"metadata": {"name": name}, "data": {"k": "v"}})
    api = await KubeApi.connect("test", control_plane.kubeconfig)
    store: Store[Thing] = Store()
    watch = Watch(api, Source(path, parse, is_metadata_only=is_metadata_only), store)
    task = asyncio.create_task(watch.run())
    try:
        await until(lambda: store.items.keys() >= set("abcde"))
        control_plane.api.post(path, {"metadata": {"name": "f"}, "data": {"k": "x" * 900_000}})
        await asyncio.to_thread(control_plane.api.delete, f"{path}/a")
        await until(lambda: "f" in store.items and "a" not in store.items)
        assert all(("data" in thing.fields) != is_metadata_only for k, thing in store.items.items() if k in "bcdef")
    finally:
        began_s = time.monotonic()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert time.monotonic() - began_s < 20.0, "the farewell of TLS is not waited for"
        await api.close()


async def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)


async def test_a_secret_comes_out_as_it_went_in_and_is_replaced_whole(
    control_plane: ControlPlane, namespace: str
) -> None:
    api = await KubeApi.connect("test", control_plane.kubeconfig)
    try:
        assert await read_secret(api, namespace, "s") is None
        for content in ({"url": "redis://h", "old": "1"}, {"url": "redis://ü"}):
            await write_secret(api, namespace, "s", content, "test")
            assert await read_secret(api, namespace, "s") == {k: v.encode() for k, v in content.items()}
        with pytest.raises(InvalidInputError):
            await write_secret(api, namespace, "s", {"not a key": ""}, "test")
        things, version = await list_objects(api, Source(f"/api/v1/namespaces/{namespace}/secrets", parse))
        assert [t.key for t in things] == ["s"]
        assert version_of(version) >= things[0].version
    finally:
        await api.close()


@pytest.mark.parametrize("program", ["kvstrata_agent.app.main", "kvstrata_metadata.service.main"])
def test_the_kubernetes_library_is_loaded_by_the_first_connection_alone(program: str) -> None:
    """It costs 0.15 to 0.45 s and 22 MB, which processes without an API server need not pay."""
    code = f"import sys, {program}; sys.exit(sum(m.split('.')[0] == 'kubernetes' for m in sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
