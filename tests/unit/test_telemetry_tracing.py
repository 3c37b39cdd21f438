"""Laws of the spans; the exporter keeps them in memory."""

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstrata_telemetry import tracing
from kvstrata_telemetry.docs import SPANS
from kvstrata_telemetry.logs import JsonFormatter

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("agent", "metadata", "operator")


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    tracing.install("test", SimpleSpanProcessor(memory))
    yield memory
    tracing.shutdown()


def test_tracing_is_off_until_an_endpoint_is_given() -> None:
    tracing.configure("agent")

    with tracing.span("kvstrata.lookup", session_id="s") as active:
        active.set(hit_blocks=3)

    assert tracing.current_ids() == {}


def test_a_span_that_is_off_makes_no_object() -> None:
    assert tracing.span("kvstrata.lookup", session_id="a") is tracing.span("kvstrata.move", tier="dram")


def test_attributes_are_ours_but_session_and_model_have_shared_names(exporter: InMemorySpanExporter) -> None:
    with tracing.span("kvstrata.lookup", session_id="s1", model="llama", requested_blocks=9) as active:
        active.set(hit_blocks=7)

    (span,) = exporter.get_finished_spans()
    assert span.name == "kvstrata.lookup"
    assert dict(span.attributes or {}) == {
        "session.id": "s1",
        "gen_ai.request.model": "llama",
        "kvcache.requested_blocks": 9,
        "kvcache.hit_blocks": 7,
    }


def test_a_span_inside_another_is_its_child(exporter: InMemorySpanExporter) -> None:
    with tracing.span("kvstrata.acquire"), tracing.span("kvstrata.move"):
        pass

    move, acquire = exporter.get_finished_spans()
    assert move.parent is not None
    assert move.parent.span_id == acquire.context.span_id


def test_an_error_is_recorded_and_goes_on(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(OSError, match="gone"), tracing.span("kvstrata.move"):
        raise OSError("gone")

    assert exporter.get_finished_spans()[0].status.description == "OSError: gone"


def test_log_lines_inside_a_span_name_it(exporter: InMemorySpanExporter) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("agent"))
    log = logging.getLogger("kvstrata.test")
    log.setLevel("INFO")
    log.addHandler(handler)

    with tracing.span("kvstrata.move"):
        log.info("moving")
    log.removeHandler(handler)

    (span,) = exporter.get_finished_spans()
    assert json.loads(stream.getvalue())["trace_id"] == f"{span.context.trace_id:032x}"


def span_calls() -> Iterator[tuple[str, str, set[str]]]:
    """File, span name and keywords of every `span(...)` in the product."""
    for path in sorted(p for folder in PRODUCT for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("span", "tracing.span") and node.args:
                (name, *_) = node.args
                yield path.name, ast.literal_eval(name), {k.arg for k in node.keywords if k.arg} - {"parent"}


def test_every_span_and_its_attributes_are_in_the_catalogue() -> None:
    known = {span.name: set(span.attributes) for span in SPANS}
    calls = list(span_calls())

    assert calls
    assert [(f, n) for f, n, _ in calls if n not in known] == []
    assert [(f, n, extra) for f, n, keywords in calls if (extra := keywords - known[n])] == []
