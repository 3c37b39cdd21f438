"""A small client of the API server: JSON over TLS with a client certificate. The only HTTP in this package."""

import http.client
import json
import ssl
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from controlplane.errors import ApiError, ApiUnreachableError
from controlplane.layout import Layout

_TIMEOUT_S = 10.0  # The API server answers in milliseconds, or is paused.


class ApiClient:
    """Requests under one identity. Holds no connection, so threads may share it."""

    def __init__(self, server: str, context: ssl.SSLContext, token: str | None = None) -> None:
        """Talk to `server` (https URL); `token` authenticates when `context` holds no client certificate."""
        self._address = urlsplit(server)
        self._context = context
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    @classmethod
    def admin(cls, server: str, at: Layout) -> "ApiClient":
        """Return a client that acts as the administrator."""
        context = trusting(at)
        context.load_cert_chain(at.pki("admin.crt"), at.pki("admin.key"))
        return cls(server, context)

    def acting_as(self, user: str) -> "ApiClient":
        """Return a client whose requests are those of another user, in whose place the administrator may act.

        Of a service account the API server adds the groups itself.
        """
        made = ApiClient(self._address.geturl(), self._context)
        made._headers = {**self._headers, "Impersonate-User": user}
        return made

    def get(self, path: str) -> Any:
        """Return the JSON, or the text where it is none, at `path`."""
        return self.request("GET", path)

    def get_all(self, paths: Iterable[str]) -> list[Any]:
        """Return what is at each path, over one connection, which saves a handshake for each; raises like `request`."""
        connection = self._connection()
        try:
            return [self._exchange(connection, "GET", path, None, "application/json") for path in paths]
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Create an object; return it as stored."""
        return self.request("POST", path, body)

    def post_all(self, path: str, bodies: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Post many objects over one connection, which saves a handshake for each; raises like `request`."""
        connection = self._connection()
        try:
            return [self._exchange(connection, "POST", path, body, "application/json") for body in bodies]
        finally:
            connection.close()

    def refusals(self, requests: Iterable[tuple[str, str, Mapping[str, Any], str]]) -> list[ApiError | None]:
        """Send requests (method, path, body, content type) over one connection; the error of each, None without one."""
        connection = self._connection()
        try:
            return [self._refusal(connection, *request) for request in requests]
        finally:
            connection.close()

    def _refusal(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: Mapping[str, Any],
        content_type: str,
    ) -> ApiError | None:
        try:
            self._exchange(connection, method, path, body, content_type)
        except ApiError as e:
            return e
        return None

    def delete(self, path: str) -> Any:
        """Delete an object."""
        return self.request("DELETE", path)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        """Replace an object; return it as stored."""
        return self.request("PUT", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """Change an object by a merge patch; return it as stored."""
        return self.request("PATCH", path, body, "application/merge-patch+json")

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content_type: str = "application/json"
    ) -> Any:
        """Send one request and return the decoded answer.

        Raises `ApiError` for an answer of status 400 or more and `ApiUnreachableError` when there is none.
        """
        connection = self._connection()
        try:
            return self._exchange(connection, method, path, body, content_type)
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPSConnection:
        assert self._address.hostname is not None
        host, port = self._address.hostname, self._address.port
        return http.client.HTTPSConnection(host, port, context=self._context, timeout=_TIMEOUT_S)

    def _exchange(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        content_type: str,
    ) -> Any:
        headers = {"Content-Type": content_type, "Accept": "application/json", **self._headers}
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
            return _decoded(f"{method} {path}", answer.status, answer.read())
        except (OSError, http.client.HTTPException) as e:
            raise ApiUnreachableError(f"{method} {self._address.geturl()}{path}: {e}") from e


def trusting(at: Layout) -> ssl.SSLContext:
    """Return a TLS context that trusts the control plane's authority and nothing else."""
    return ssl.create_default_context(cafile=str(at.pki("ca.crt")))


def _decoded(what: str, status: int, body: bytes) -> Any:
    """Return JSON or text; raise `ApiError` for an error status."""
    try:
        content = json.loads(body)
    except ValueError:
        content = body.decode(errors="replace")
    if status >= http.HTTPStatus.BAD_REQUEST:
        said = content if isinstance(content, dict) else {"message": content}
        message = f"{what}: {status} {said.get('message', '')}"
        raise ApiError(message, status=status, reason=said.get("reason", ""))
    return content
