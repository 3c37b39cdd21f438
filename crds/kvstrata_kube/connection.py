"""Connections to the API server under one identity, by `kubernetes.aio`: its configuration, its credentials, its REST.

Loaded by the first connection alone: the library costs 22 MB and 0.15 s of processor time, 0.45 s where its bytecode is
not kept (2 cores AMD EPYC). What it leaves out is added here: impersonation, tokens of files that are replaced, the end
of a plugin that hangs or fails, and the certificate of an OpenID provider, which version 37 does not verify.
"""

import asyncio
import os
import socket
import ssl
import threading
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import yaml
from aiohttp.connector import AddrInfoType
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, kube_config, load_incluster_config
from kubernetes.aio.config.openid import OpenIDRequestor
from multidict import CIMultiDict
from yarl import URL

from kvstrata_api.errors import UnsupportedError

PLUGIN_S: Final = 60.0
"""Bound of a credential plugin and of an OpenID provider; some of them ask a cloud several times."""

_READING_POLL_S: Final = 0.01

BUFFER_BYTES: Final = 1 << 16
"""Of one stream, as is aiohttp's own; the library takes 2 MiB, to read lines, which `api` does itself."""

_TOKEN: Final = "BearerToken"  # noqa: S105  The library's name of the entry; its value has a scheme of any kind.
_PROXIES: Final = ("http", "https")
_HEADER_CHARS: Final = "!#$&'*+-.^_`|~"
"""Allowed in the name of a header beside letters and digits (RFC 9110, `tchar`), without the escape itself."""

_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A vanished peer is noticed after 15 + 3 * 5 s, also by a watch with nothing to send; man 7 tcp."""

_UNREADABLE: Final = (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError, ConfigException)
"""What the library raises for files that are missing, no kubeconfig, or half of one."""


_READING: Final = threading.Lock()
"""Held while a configuration is read: the library keeps files of inlined certificates and keys by their content for the
whole process, so threads would make one twice, or remove what another one is about to read."""


@asynccontextmanager
async def _inlined_files() -> AsyncIterator[None]:
    """Have the library's files of inlined certificates and keys to oneself; they are gone at the end.

    OpenSSL has read them by then, and the library would remove them at exit alone, which a kill does not wait for.
    """
    while not _READING.acquire(blocking=False):  # noqa: ASYNC110  Of threads, and its holder may be a task of this loop.
        await asyncio.sleep(_READING_POLL_S)
    try:
        yield
    finally:
        kube_config._cleanup_temp_files()  # noqa: SLF001
        _READING.release()


async def open_connection(kubeconfig: Path | None) -> "Connection":
    """Read `kubeconfig`, else `$KUBECONFIG`, else the pod's own token, else `~/.kube/config`.

    Sends nothing to the API server. Raises `UnsupportedError` when there are no credentials that can be used.
    """
    named = str(kubeconfig or os.environ.get("KUBECONFIG") or "")
    try:
        if not named and os.environ.get("KUBERNETES_SERVICE_HOST"):
            return _of_pod()
        return await _of_kubeconfig(named or str(Path.home() / ".kube" / "config"))
    except _UNREADABLE as e:
        why = f"{type(e).__name__} {e}"
        raise UnsupportedError(f"no Kubernetes credentials: {why}; give --kubeconfig or run in a pod") from e


class Connection:
    """An `ApiClient` with a pool of its own, and in whose name it speaks."""

    def __init__(
        self,
        configuration: Configuration,
        renew: Callable[[], Awaitable[object]],
        impersonated: CIMultiDict[str] | None = None,
        *,
        uses_proxy_of_environment: bool,
    ) -> None:
        """Raises `OSError` for certificates that cannot be used."""
        self.configuration = configuration
        self._renew = renew
        self._impersonated = impersonated or CIMultiDict()
        self._client = ApiClient(configuration)
        self._pool = aiohttp.TCPConnector(
            limit=0, ssl=self._client.rest_client.ssl_context, socket_factory=_keepalive_socket
        )
        self._uses_proxy_of_environment = uses_proxy_of_environment
        configuration.client_session_kwargs = {
            "connector": self._pool,
            "trust_env": uses_proxy_of_environment,
            "read_bufsize": BUFFER_BYTES,
        }

    @property
    def authorization(self) -> str | None:
        """Value of that header as of the last renewal, scheme included."""
        token: str | None = self.configuration.api_key.get(_TOKEN)
        return token.strip() if token else None

    async def renew(self) -> None:
        """Take in a token that was replaced or ends soon; the old one stays when there is none.

        Raises `UnsupportedError` when it could not be had.
        """
        try:
            async with _inlined_files():
                await self._renew()
        except _UNREADABLE as e:
            raise UnsupportedError(f"{type(e).__name__} {e}") from e

    async def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Any,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send one request with a JSON body or None, and return the open response. Raises what aiohttp raises."""
        url = self.configuration.host + path
        if query:
            url += "?" + urlencode(query, quote_via=quote)
        answer = await self._client.call_api(
            method, url, header_params=self._identified(headers), body=body, _request_timeout=limits
        )
        response: aiohttp.ClientResponse = answer.response
        return response

    def session(self) -> aiohttp.ClientSession:
        """Make a session for a library that sends for itself: with our identity, and connections of its own.

        It belongs to the caller and to the event loop that it is made in.
        """
        home = URL(self.configuration.host).origin()

        async def identify(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            if request.url.origin() == home:  # Not where an answer redirects to.
                request.headers.update(self._identified({}))
                request.server_hostname = self.configuration.tls_server_name
            return await handler(request)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=self._client.rest_client.ssl_context, socket_factory=_keepalive_socket
            ),
            proxy=self.configuration.proxy,
            trust_env=self._uses_proxy_of_environment,
            middlewares=(identify,),
        )

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._client.close()
        await self._pool.close()

    def _identified(self, headers: Mapping[str, str]) -> CIMultiDict[str]:
        """Add who we are."""
        given = CIMultiDict(headers)
        given.extend(self._impersonated)
        if self.authorization:
            given["Authorization"] = self.authorization
        return given


class _Loader(kube_config.KubeConfigLoader):  # type: ignore[misc]  # The library has no types that mypy could read.
    """The library's, which asks an OpenID provider whose certificate is verified."""

    async def _refresh_oidc(self, provider: Any) -> None:
        config = provider["config"]
        if "refresh-token" not in config:
            raise ConfigException("oidc: the token has ended and there is no refresh-token")
        coded = config.safe_get("idp-certificate-authority-data")
        trusted = b64decode(coded).decode() if coded else None
        asked = _Provider(config["client-id"], config["client-secret"], config["idp-issuer-url"], trusted)
        answer = await asked.refresh_token(config["refresh-token"])
        config.value["id-token"] = answer["id_token"]
        config.value["refresh-token"] = answer.get("refresh_token", config["refresh-token"])


class _Provider(OpenIDRequestor):  # type: ignore[misc]
    def _get_connector(self) -> aiohttp.TCPConnector:
        """Trust what is given, else the system's authorities; the library's own trusts everybody in that case."""
        return aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=self._ssl_ca_cert))


def _of_pod() -> Connection:
    configuration = Configuration()
    load_incluster_config(configuration)

    async def renew() -> None:
        await configuration.get_api_key_with_prefix(_TOKEN)  # The library's hook reads the file again.

    return Connection(configuration, renew, uses_proxy_of_environment=False)


async def _of_kubeconfig(paths: str) -> Connection:
    """Read the current context of a kubeconfig, or of several that are joined by `:`."""
    merged = kube_config.KubeConfigMerger(paths).config
    if merged is None:
        raise FileNotFoundError(paths)
    loader, configuration = _Loader(merged, config_base_path=None), Configuration()
    name = loader.current_context["context"]["user"]
    user = merged["users"].get_with_name(name)["user"].value
    if user.get("tokenFile"):
        user.pop("token", None)  # The file goes before it, as in client-go; the library has it the other way round.

    async def renew() -> None:
        """Ask again for what ends: the library does so only when the last token ends soon."""
        if user.get("tokenFile") or "auth-provider" in user or hasattr(loader, "exec_plugin_expiry"):
            await _load(loader, configuration)

    async with _inlined_files():
        await _load(loader, configuration)
        _refuse_half(paths, loader, configuration, user)
        return Connection(configuration, renew, _impersonated(user), uses_proxy_of_environment=True)


async def _load(loader: _Loader, configuration: Configuration) -> None:
    """Read, and ask programs and providers."""
    try:
        async with asyncio.timeout(PLUGIN_S):
            await loader.load_and_set(configuration)
    except aiohttp.ClientError as e:
        raise ConfigException(f"{type(e).__name__} {e}") from e


def _refuse_half(paths: str, loader: _Loader, configuration: Configuration, user: Mapping[str, Any]) -> None:
    """Raise `ValueError` where the library goes on without what was asked for: as somebody else, or elsewhere."""
    if not getattr(loader, "host", ""):
        raise ValueError(f"{paths}: the cluster has no server")
    if "exec" in user and not (configuration.api_key or configuration.cert_file):
        raise ValueError(f"{paths}: {user['exec'].get('command')} gave no credentials")
    if configuration.proxy and urlsplit(configuration.proxy).scheme not in _PROXIES:
        raise ValueError(f"{paths}: a proxy is reached by http or https, not as {configuration.proxy}")


def _impersonated(user: Mapping[str, Any]) -> CIMultiDict[str]:
    """Headers of a user that acts as another one. Raises `ValueError` without that one's name, as client-go does."""
    headers: CIMultiDict[str] = CIMultiDict()
    if user.get("as"):
        headers.add("Impersonate-User", user["as"])
    if user.get("as-uid"):
        headers.add("Impersonate-Uid", user["as-uid"])
    for group in user.get("as-groups") or ():
        headers.add("Impersonate-Group", group)
    for key, values in (user.get("as-user-extra") or {}).items():
        for value in values:
            headers.add(f"Impersonate-Extra-{quote(key, safe=_HEADER_CHARS)}", value)
    if headers and "Impersonate-User" not in headers:
        raise ValueError("as-uid, as-groups and as-user-extra need as")
    return headers


def _keepalive_socket(address: AddrInfoType) -> socket.socket:
    """Open a socket as aiohttp would, with keepalive."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
