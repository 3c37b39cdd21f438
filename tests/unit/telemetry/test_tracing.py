"""Laws of the spans; the exporter keeps them in memory."""

import argparse
import ast
import io
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from random import Random

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstrata_api.trace_context import TRACEPARENT_CHARS, traceparent
from kvstrata_telemetry import tracing
from kvstrata_telemetry.catalog import SPANS
from kvstrata_telemetry.logs import JsonFormatter
from kvstrata_telemetry.tracing import Sending

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


def test_a_span_of_another_process_is_a_parent(exporter: InMemorySpanExporter) -> None:
    with tracing.span("kvstrata.client.load"):
        named = traceparent()
    with tracing.span("kvstrata.acquire", parent=named), tracing.span("kvstrata.move"):
        pass

    load, move, acquire = exporter.get_finished_spans()
    assert len(named) == TRACEPARENT_CHARS
    assert acquire.parent is not None
    assert acquire.parent.is_remote
    assert acquire.parent.span_id == load.context.span_id
    assert {load.context.trace_id} == {move.context.trace_id, acquire.context.trace_id}


def test_nothing_is_named_where_no_span_is_open(exporter: InMemorySpanExporter) -> None:
    assert traceparent() == ""
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("parent", ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-é"])
def test_a_parent_that_makes_no_sense_begins_a_trace(exporter: InMemorySpanExporter, parent: str) -> None:
    with tracing.span("kvstrata.lookup", parent=parent):
        pass

    assert exporter.get_finished_spans()[0].parent is None


@pytest.fixture
def choosy() -> Iterator[InMemorySpanExporter]:
    """No trace is chosen, so what is sent is slow (5 s, by the times that tests give) or has an error."""
    memory = InMemorySpanExporter()
    tracing.install("test", SimpleSpanProcessor(memory), sending=Sending(ratio=0.0, slow_s=5.0))
    yield memory
    tracing.shutdown()


def names(exporter: InMemorySpanExporter) -> list[str]:
    return [s.name for s in exporter.get_finished_spans()]


def test_what_no_ratio_chooses_is_not_sent(choosy: InMemorySpanExporter) -> None:
    with tracing.span("kvstrata.acquire"), tracing.span("kvstrata.move"):
        pass

    assert names(choosy) == []


def test_an_error_keeps_all_that_this_process_did_in_the_trace(choosy: InMemorySpanExporter) -> None:
    with tracing.span("kvstrata.acquire"):
        with tracing.span("kvstrata.directory"):
            pass
        with suppress(OSError), tracing.span("kvstrata.move"):
            raise OSError("gone")
    with tracing.span("kvstrata.acquire"):
        pass

    assert names(choosy) == ["kvstrata.directory", "kvstrata.move", "kvstrata.acquire"]


def test_what_took_long_is_kept(choosy: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer("test", tracer_provider=tracing._state.provider)
    slow, quick = tracer.start_span("slow", start_time=0), tracer.start_span("quick", start_time=0)
    inner = tracer.start_span("inner", context=trace.set_span_in_context(slow), start_time=0)
    inner.end(10)
    slow.end(5_000_000_000)
    quick.end(4_999_999_999)

    assert names(choosy) == ["inner", "slow"]


def test_what_ends_after_its_trace_is_decided_over_by_itself(exporter: InMemorySpanExporter) -> None:
    def work() -> None:
        with tracing.span("kvstrata.acquire"):
            late = tracing.span("kvstrata.move")
            late.__enter__()
        late.__exit__(None, None, None)

    copy_context().run(work)  # In which the wrong span stays current.

    assert sorted(names(exporter)) == ["kvstrata.acquire", "kvstrata.move"]


def test_who_began_a_trace_without_sending_it_is_followed(exporter: InMemorySpanExporter) -> None:
    unsent = "00-" + "1" * 32 + "-" + "2" * 16 + "-00"
    with tracing.span("kvstrata.acquire", parent=unsent):
        pass
    with suppress(OSError), tracing.span("kvstrata.lookup", parent=unsent):
        raise OSError("gone")

    assert names(exporter) == ["kvstrata.lookup"]


def test_every_process_chooses_the_same_traces() -> None:
    chosen = [tracing.Kept(0.25, 9e9), tracing.Kept(0.25, 9e9)]
    ids = [Random(i).getrandbits(128) for i in range(400)]
    sent = [[i for i in ids if kept.end(ended(i))] for kept in chosen]

    assert sent[0] == sent[1]
    assert 60 < len(sent[0]) < 140


def ended(trace_id: int) -> ReadableSpan:
    context = trace.SpanContext(trace_id, 1, is_remote=False, trace_flags=trace.TraceFlags(1))
    return ReadableSpan("x", context, start_time=0, end_time=1)


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [
        ("--trace-ratio", "-0.1", "1"),
        ("--trace-ratio", "1.1", "1"),
        ("--trace-ratio", "much", "1"),
        ("--trace-ratio", "nan", "1"),
        ("--trace-slow-seconds", "-1", "1000000000"),
        ("--trace-slow-seconds", "nan", "1000000000"),
        ("--trace-slow-seconds", "inf", "1000000000"),
    ],
)
def test_numbers_out_of_bounds_are_refused(
    option: str, value: str, most: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    tracing.add_arguments(parser)

    with pytest.raises(SystemExit):
        parser.parse_args([option, value])

    assert f"{option}: '{value}': a number from 0 to {most} wanted" in capsys.readouterr().err


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
    return {k.arg for k in call.keywords if k.arg} - {"parent"}


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
