"""The metrics and probe server, and the OTLP exporter, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import ClientSession, web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry, Counter

from kvstrata_telemetry import tracing
from kvstrata_telemetry.http import Endpoint, serve
from kvstrata_telemetry.tracing import Sending

pytestmark = pytest.mark.system


@dataclass
class Process:
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    healthy: bool = True
    ready: bool = True


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
async def endpoint(process: Process) -> AsyncIterator[Endpoint]:
    server = await serve("127.0.0.1", 0, process.registry, lambda: process.healthy, lambda: process.ready)
    yield server
    await server.close()


async def get(endpoint: Endpoint, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    async with (
        ClientSession() as http,
        http.get(f"http://{endpoint.address}{path}", headers={"Accept": accept}) as answer,
    ):
        return answer.status, answer.headers["Content-Type"], await answer.text()


async def test_port_zero_is_replaced_by_the_chosen_port(endpoint: Endpoint) -> None:
    host, port = endpoint.address.rsplit(":", 1)

    assert host == "127.0.0.1"
    assert int(port) > 0


async def test_metrics_come_in_the_format_that_is_asked_for(endpoint: Endpoint, process: Process) -> None:
    Counter("kvstrata_test_total", "Test.", registry=process.registry).inc(3)

    status, content_type, text = await get(endpoint, "/metrics")
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    assert "kvstrata_test_total 3.0" in text

    _, content_type, text = await get(endpoint, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize(("path", "flag"), [("/healthz", "healthy"), ("/readyz", "ready")])
async def test_a_probe_follows_its_check(endpoint: Endpoint, process: Process, path: str, flag: str) -> None:
    assert (await get(endpoint, path))[0] == 200

    setattr(process, flag, False)

    assert (await get(endpoint, path))[0] == 503


async def test_a_port_that_is_taken_is_an_error(endpoint: Endpoint, process: Process) -> None:
    port = int(endpoint.address.rsplit(":", 1)[1])

    with pytest.raises(OSError, match="address already in use"):
        await serve("127.0.0.1", port, process.registry, lambda: True, lambda: True)


async def test_closing_twice_is_harmless(process: Process) -> None:
    server = await serve("127.0.0.1", 0, process.registry, lambda: True, lambda: True)

    await server.close()
    await server.close()


async def test_spans_reach_an_otlp_endpoint() -> None:
    received: list[ExportTraceServiceRequest] = []

    async def collect(request: web.Request) -> web.Response:
        received.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/traces", collect)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]

    tracing.configure("agent", Sending(f"http://127.0.0.1:{port}/v1/traces"))
    with tracing.span("kvstrata.acquire", session_id="s1"), tracing.span("kvstrata.move", source="nvme"):
        pass
    await asyncio.to_thread(tracing.shutdown)
    await runner.cleanup()

    (resource,) = received[0].resource_spans
    assert {a.value.string_value for a in resource.resource.attributes} >= {"kvstrata-agent"}
    assert {s.name for s in resource.scope_spans[0].spans} == {"kvstrata.acquire", "kvstrata.move"}


async def test_an_absent_otlp_endpoint_delays_neither_span_nor_stop() -> None:
    tracing.configure("agent", Sending("http://127.0.0.1:9/v1/traces"))
    loop = asyncio.get_running_loop()

    started_s = loop.time()
    for _ in range(10_000):
        with tracing.span("kvstrata.lookup"):
            pass
    spans_s = loop.time() - started_s
    await asyncio.to_thread(tracing.shutdown)
    shutdown_s = loop.time() - started_s - spans_s

    assert spans_s < 30
    assert shutdown_s < 30
