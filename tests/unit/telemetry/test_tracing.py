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
from kvstrata_telemetry.catalog import SPANS
from kvstrata_telemetry.logs import JsonFormatter

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
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


def test_attributes_are_ours_but_the_session_has_a_shared_name(exporter: InMemorySpanExporter) -> None:
    with tracing.span("kvstrata.lookup", session_id="s1", requested_blocks=9) as active:
        active.set(hit_blocks=7)

    (span,) = exporter.get_finished_spans()
    assert span.name == "kvstrata.lookup"
    assert dict(span.attributes or {}) == {
        "session.id": "s1",
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


def keywords_of(call: ast.Call) -> set[str]:
    return {k.arg for k in call.keywords if k.arg}


def span_of(item: ast.withitem) -> ast.Call | None:
    call = item.context_expr
    is_span = isinstance(call, ast.Call) and ast.unparse(call.func) in ("span", "tracing.span")
    return call if is_span and isinstance(call, ast.Call) else None


def span_calls() -> Iterator[tuple[str, str, set[str]]]:
    """File, span name and attributes of every `with span(...) as active` in the product, `active.set(...)` included."""
    for path in sorted(p for folder in PRODUCT for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
                if call := span_of(item):
                    active = f"{ast.unparse(item.optional_vars)}.set" if item.optional_vars else ""
                    later = (n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == active)
                    keywords = keywords_of(call).union(*map(keywords_of, later))
                    yield path.name, ast.literal_eval(call.args[0]), keywords


def test_the_catalogue_has_every_span_with_its_attributes_and_nothing_that_no_code_opens() -> None:
    known = {span.name: set(span.attributes) for span in SPANS}
    opened: dict[str, set[str]] = {}
    for _, name, keywords in span_calls():
        opened[name] = opened.get(name, set()) | keywords

    assert opened == known
