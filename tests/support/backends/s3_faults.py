"""A proxy before an S3 server that refuses, cuts or delays requests as it is told, and remembers all of them."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    query: str
    size_bytes: int
    range: str
    at_s: float


Fault = int | Literal["cut", "hang"] | None
"""A status to answer with; an answer that breaks off (to a GET, else none at all); none until the end; or no fault."""


@dataclass
class FaultyS3:
    """The proxy's state; `decide` is asked for each request."""

    settings: dict[str, str]
    decide: Callable[[Request], Fault] = lambda _: None
    delay_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def of(self, method: str, query: str = "") -> list[Request]:
        """Requests with a method, whose query has a part."""
        return [r for r in self.requests if r.method == method and query in r.query]


def _handler(state: FaultyS3, backend: str) -> type[BaseHTTPRequestHandler]:  # noqa: C901  One class, whole.
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            told = self.headers.get("Range", "")
            request = Request(self.command, parts.path, parts.query, len(body), told, time.monotonic())
            with state.lock:
                state.requests.append(request)
                state.under_way += 1
                state.most_under_way = max(state.most_under_way, state.under_way)
                fault = state.decide(request)
            try:
                time.sleep(state.delay_s)
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._answer(body, fault)
            finally:
                with state.lock:
                    state.under_way -= 1

        def _answer(self, body: bytes, fault: Fault) -> None:
            if isinstance(fault, int):
                self._send(fault, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else SLOW_DOWN)
                return
            if fault == "hang":
                state.ended.wait(60)
            if fault == "hang" or (fault == "cut" and self.command != "GET"):
                self.close_connection = True
                return
            forward = http.client.HTTPConnection(backend, timeout=30)
            try:
                forward.request(self.command, self.path, body, dict(self.headers.items()))
                answer = forward.getresponse()
                content = answer.read()
            finally:
                forward.close()
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in {"transfer-encoding", "connection"}]
            kept = [(k, v) for k, v in kept if k.lower() != "content-length" or self.command == "HEAD"]
            self._send(answer.status, kept, content, cut=fault == "cut")

        def _send(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815  Names that the standard library calls.

    return Handler


@contextmanager
def faulty_s3(settings: dict[str, str]) -> Iterator[FaultyS3]:
    """Run the proxy before the server of `settings`; its own settings lead through it."""
    backend = urlsplit(settings["aws_endpoint"]).netloc
    state = FaultyS3({})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state, backend))
    server.daemon_threads = True
    state.settings = settings | {"aws_endpoint": f"http://127.0.0.1:{server.server_port}"}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
