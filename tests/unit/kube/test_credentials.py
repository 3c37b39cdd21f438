"""Laws of credentials: who we are is read once, whole or not at all, and nothing secret is left behind."""

import asyncio
import base64
import datetime as dt
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.config import incluster_config
from kubernetes.aio.config.exec_provider import ExecProvider

from controlplane.pki import Authority
from kvstrata_api.errors import ApiServerAwayError, UnsupportedError
from kvstrata_kube import api as kube_api
from kvstrata_kube import connection as kube_connection
from kvstrata_kube.api import Call, KubeApi
from kvstrata_kube.connection import open_connection

pytestmark = pytest.mark.unit

GET = Call("GET", "/api/v1/pods", {"labelSelector": "a in (b,c)", "continue": "x+/="})


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a pod nor a person's own configuration."""
    for variable in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    config = {
        "current-context": "c",
        "contexts": [{"name": "other"}, {"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://10.0.0.1:6443/"} | cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


class Server:
    """What an API server, or a proxy, was asked."""

    def __init__(self) -> None:
        self.asked: list[web.BaseRequest] = []
        self.status = 200
        self.url = ""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        self.asked.append(request)
        return web.json_response({}, status=self.status)

    def header(self, name: str) -> list[str]:
        """All values of a header of the last request."""
        return self.asked[-1].headers.getall(name, [])


@asynccontextmanager
async def served(made: Server, authority: Authority | None = None, name: str = "") -> AsyncIterator[None]:
    """Listen, with a certificate for `name` where there is an authority."""
    context = None
    if authority:
        pair = authority.issue_server("server", (name,))
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(pair.key_pem + pair.public_pem)
            file.flush()
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(file.name)
    runner = web.ServerRunner(web.Server(made.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    made.url = f"{'https' if context else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    async with served(made):
        yield made


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Its certificate lies beside the kubeconfig."""
    made = Authority.create("test")
    (tmp_path / "ca.pem").write_bytes(made.pair.public_pem)
    return made


def coded(pem: bytes) -> str:
    """As a kubeconfig holds it inside."""
    return base64.b64encode(pem).decode()


async def asked_as(path: Path, call: Call = GET) -> None:
    """Send one request under a kubeconfig."""
    api = await KubeApi.connect("me", path)
    try:
        (await api.call(call)).content()
    finally:
        await api.close()


async def token_of(path: Path | None) -> str | None:
    connection = await open_connection(path)
    await connection.close()
    return connection.authorization


async def test_a_request_says_who_asks_and_keeps_its_selectors(tmp_path: Path, server: Server) -> None:
    (tmp_path / "token").write_text("secret-1\n")
    await asked_as(kubeconfig(tmp_path, {"tokenFile": "token", "token": "older"}, server=server.url))

    assert server.header("Authorization") == ["Bearer secret-1"]
    assert server.header("User-Agent")[0].startswith("me/")
    assert dict(server.asked[-1].query) == GET.query


async def test_whoever_acts_as_another_says_so_in_every_request(tmp_path: Path, server: Server) -> None:
    user = {
        "token": "t",
        "as": "jane",
        "as-uid": "7",
        "as-groups": ["a", "b"],
        "as-user-extra": {"example.org/Scopes": ["x", "y"]},
    }
    await asked_as(kubeconfig(tmp_path, user, server=server.url))

    assert server.header("Impersonate-User") == ["jane"]
    assert server.header("Impersonate-Uid") == ["7"]
    assert server.header("Impersonate-Group") == ["a", "b"]
    assert server.header("Impersonate-Extra-example.org%2FScopes") == ["x", "y"]


async def test_another_librarys_session_has_the_same_identity(tmp_path: Path, server: Server) -> None:
    connection = await open_connection(kubeconfig(tmp_path, {"token": "t", "as": "jane"}, server=server.url))
    async with connection.session() as session, session.get(f"{server.url}/x") as response:
        assert response.status == 200
    await connection.close()

    assert (server.header("Authorization"), server.header("Impersonate-User")) == (["Bearer t"], ["jane"])


async def test_a_proxy_of_the_cluster_is_asked_instead(tmp_path: Path, server: Server) -> None:
    path = kubeconfig(tmp_path, {"token": "t"}, server="http://nowhere.invalid", **{"proxy-url": server.url})
    await asked_as(path)

    assert server.asked[-1].host == "nowhere.invalid"


async def test_a_server_may_be_known_by_another_name_and_files_lie_beside_the_kubeconfig(
    tmp_path: Path, authority: Authority
) -> None:
    """Without `tls-server-name` its certificate would not do for an address."""
    made = Server()
    async with served(made, authority, "kubernetes.default"):
        cluster = {"server": made.url, "certificate-authority": "ca.pem"}
        named = kubeconfig(tmp_path, {"token": "t"}, **cluster, **{"tls-server-name": "kubernetes.default"})
        await asked_as(named)
        connection = await open_connection(named)
        async with connection.session() as session, session.get(made.url) as response:
            assert response.status == 200
        await connection.close()
        assert len(made.asked) == 2
        with pytest.raises(ApiServerAwayError, match="certificate"):
            await asked_as(kubeconfig(tmp_path, {"token": "t"}, **cluster))


async def test_content_goes_before_names_and_is_left_in_no_file(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    pair = authority.issue_client("me")
    user = {"client-certificate-data": coded(pair.public_pem), "client-key-data": coded(pair.key_pem)}
    cluster = {"certificate-authority-data": coded(authority.pair.public_pem), "certificate-authority": "absent"}
    made = Server()
    async with served(made, authority, "127.0.0.1"):
        await asked_as(kubeconfig(tmp_path, user, server=made.url, **cluster))

    assert made.asked
    assert not list((tmp_path / "temporary").iterdir())


async def test_connections_that_open_in_several_threads_take_no_file_from_each_other_and_leave_none(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has one file for equal content, whoever asked for it."""
    path = kubeconfig(tmp_path, {"token": "t"}, **{"certificate-authority-data": coded(authority.pair.public_pem)})
    refuse, others = kube_connection._refuse_half, list[Future[None]]()

    def late(*read: Any) -> None:
        """Between reading the files' names and reading the files."""
        monkeypatch.setattr(kube_connection, "_refuse_half", refuse)
        others.append(pool.submit(lambda: asyncio.run(opened())))
        wait(others, 0.3)  # Long enough to open where nothing keeps it from it.
        refuse(*read)

    async def opened() -> None:
        await (await open_connection(path)).close()

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(kube_connection, "_refuse_half", late)

    with ThreadPoolExecutor(1) as pool:
        await opened()
        await asyncio.wrap_future(others[0])

    assert not list((tmp_path / "temporary").iterdir())


async def test_a_token_that_is_replaced_in_its_file_is_taken_in_and_the_old_one_kept_without_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text("old")
    read = await open_connection(kubeconfig(tmp_path, {"tokenFile": "token"}))
    (tmp_path / "token").write_text("new\n")

    assert read.authorization == "Bearer old"
    await read.renew()
    assert read.authorization == "Bearer new"
    (tmp_path / "token").unlink()
    with pytest.raises(UnsupportedError):
        await read.renew()
    assert read.authorization == "Bearer new"
    await read.close()


class Later(dt.datetime):
    """A clock that is a minute ahead."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Self:
        return super().now(tz) + dt.timedelta(minutes=1)


async def test_a_pod_uses_its_own_token_and_a_named_file_goes_before_it(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of the pod")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    pod = await open_connection(None)

    assert (pod.configuration.host, pod.authorization) == ("https://[fd00::1]:443", "bearer of the pod")
    (tmp_path / "token").write_text("the next")
    await pod.renew()
    assert pod.authorization == "bearer of the pod", "not read for every request"
    with monkeypatch.context() as later:
        later.setattr(incluster_config.datetime, "datetime", Later)
        await pod.renew()
    assert pod.authorization == "bearer the next"
    await pod.close()
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, {"token": "named"})))
    assert await token_of(None) == "Bearer named"


def plugin(folder: Path, *statements: str) -> dict[str, Any]:
    """A credential plugin as clouds have them."""
    program = folder / "plugin.py"
    program.write_text("\n".join(("import json, pathlib, sys, time", *statements)))
    run = {"apiVersion": EXEC_VERSION, "command": sys.executable, "args": [str(program)], "interactiveMode": "Never"}
    return {"exec": run}


EXEC_VERSION = "client.authentication.k8s.io/v1"
GIVE = (
    "count = pathlib.Path(__file__).with_name('count')",
    "number = int(count.read_text()) + 1 if count.exists() else 1",
    "count.write_text(str(number))",
    "status = {'token': f'token-{number}', 'expirationTimestamp': ENDS}",
    f"print(json.dumps({{'apiVersion': {EXEC_VERSION!r}, 'kind': 'ExecCredential', 'status': status}}))",
)


@pytest.mark.parametrize(("ends", "second"), [("2099-01-01T00:00:00Z", "token-1"), ("2020-01-01T00:00:00Z", "token-2")])
async def test_a_plugin_is_run_again_when_its_token_ends_soon(tmp_path: Path, ends: str, second: str) -> None:
    read = await open_connection(kubeconfig(tmp_path, plugin(tmp_path, f"ENDS = {ends!r}", *GIVE)))
    assert read.authorization == "Bearer token-1"
    await read.renew()
    assert read.authorization == f"Bearer {second}"
    await read.close()


async def test_a_request_does_not_wait_for_a_slow_plugin_but_a_later_one_has_its_token(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_api, "TOKEN_S", 0.0)
    monkeypatch.setattr(kube_api, "RENEWAL_S", 0.01)
    ended = ("ENDS = '2020-01-01T00:00:00Z'", "time.sleep(0.3)", *GIVE)
    api = await KubeApi.connect("me", kubeconfig(tmp_path, plugin(tmp_path, *ended), server=server.url))
    try:
        await api.call(GET)
        assert server.header("Authorization") == ["Bearer token-1"]
        monkeypatch.setattr(kube_api, "TOKEN_S", 60.0)
        while server.header("Authorization") == ["Bearer token-1"]:
            await asyncio.sleep(0.02)
            await api.call(GET)
        assert server.header("Authorization") == ["Bearer token-2"]
    finally:
        await api.close()


async def test_an_ended_openid_token_is_renewed_at_a_provider_whose_certificate_is_verified(
    tmp_path: Path, authority: Authority
) -> None:
    class Provider(Server):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            self.asked.append(request)
            if request.method == "GET":
                return web.json_response({"token_endpoint": f"{self.url}/token"})
            return web.json_response({"id_token": "a.b.c", "refresh_token": "next"})

    made = Provider()
    async with served(made, authority, "127.0.0.1"):
        config = {"client-id": "i", "client-secret": "s", "idp-issuer-url": made.url, "refresh-token": "first"}
        trusting = config | {"idp-certificate-authority-data": coded(authority.pair.public_pem)}
        user = {"auth-provider": {"name": "oidc", "config": trusting}}
        assert await token_of(kubeconfig(tmp_path, user)) == "Bearer a.b.c"
        asked = len(made.asked)
        with pytest.raises(UnsupportedError, match="certificate"):
            await open_connection(kubeconfig(tmp_path, {"auth-provider": {"name": "oidc", "config": config}}))
        assert len(made.asked) == asked, "its secrets are shown to nobody else"


@pytest.mark.parametrize(
    ("user", "cluster", "words"),
    [
        ({"token": "t", "as-groups": ["system:masters"]}, {}, "need as"),
        ({"token": "t"}, {"proxy-url": "socks5://p"}, "a proxy is reached by"),
        ({"token": "t"}, {"server": ""}, "no server"),
        ({"tokenFile": "missing"}, {}, "missing"),
        ({"token": "t"}, {"certificate-authority": "missing"}, "missing"),
        ({"token": "t"}, {"certificate-authority-data": "%"}, "Error"),
        ({"exec": {"apiVersion": EXEC_VERSION, "command": "/bin/false"}}, {}, "gave no credentials"),
    ],
)
async def test_what_cannot_be_kept_whole_is_refused(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        await open_connection(kubeconfig(tmp_path, user, **cluster))


async def test_a_plugin_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(kube_connection, "PLUGIN_S", 0.05)
    monkeypatch.setattr(ExecProvider, "run", hang)

    with pytest.raises(UnsupportedError):
        await open_connection(kubeconfig(tmp_path, plugin(tmp_path)))


@pytest.mark.parametrize("text", ["", "[]", "{}", "current-context: c", "\t", "contexts: [{}]\ncurrent-context: c"])
async def test_what_is_no_kubeconfig_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)

    with pytest.raises(UnsupportedError, match="give --kubeconfig or run in a pod"):
        await open_connection(path)
    with pytest.raises(UnsupportedError):
        await open_connection(tmp_path / "absent")
    with pytest.raises(UnsupportedError):
        await open_connection(None)
