"""A receiver of spans: OTLP over HTTP, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Receiver:
    """Keeps the spans that were sent, by the service that sent them."""

    spans: dict[str, list[Span]] = field(default_factory=dict)
    url: str = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (name,) = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            for scope in resource.scope_spans:
                self.spans.setdefault(name, []).extend(scope.spans)

    def named(self, service: str, name: str) -> list[Span]:
        return [s for s in self.spans.get(service, []) if s.name == name]

    def seen(self) -> dict[str, set[str]]:
        """Attributes of all spans by their names."""
        found: dict[str, set[str]] = {}
        for span in [s for spans in self.spans.values() for s in spans]:
            found.setdefault(span.name, set()).update(a.key for a in span.attributes)
        return found


@contextmanager
def receiving() -> Iterator[Receiver]:
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002  The base class's name.
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Span) -> dict[str, str | int]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
