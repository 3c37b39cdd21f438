"""OpenTelemetry spans: off until `configure` names an endpoint, and then sent by OTLP over HTTP.

While off, `span` yields one shared object that does nothing, and the SDK, a tenth of what the operator would load, is
left out. Messages between processes carry `traceparent`, which joins their spans. Every span is recorded, and what is
worth sending is decided when a process is done with its part of a trace (`Kept`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from opentelemetry import trace

from kvstrata_api import arguments
from kvstrata_api.trace_context import OFF, recorded, trace_id_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace import Span as SdkSpan
    from opentelemetry.trace import Tracer

    from kvstrata_api.trace_context import Active, Attribute

_QUEUE_SPANS_MAX: Final = 2_048
"""Spans that wait for export; more are dropped, so a slow collector costs memory of a known size and no time."""
_EXPORT_S: Final = 5.0
"""Deadline of one export, retries included."""
_FLUSH_S: Final = 2.0
"""What a stopping process may spend on its last spans; pods get 30 s in all."""
_OPEN_MAX: Final = 4_096
"""Spans that are open, or wait for the end of the one that decides over them; more are decided over by themselves."""
_FULL: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class Sending:
    """Where spans go, and which."""

    endpoint: str | None = None
    """`http://host:4318/v1/traces`; without one, tracing is off."""
    ratio: float = 1.0
    """Of all traces, chosen by their id: every process chooses the same ones."""
    slow_s: float = 1.0
    """A process's part of a trace that took so long is sent in any case, as one with an error in it is."""

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> Sending:
        """By the command line."""
        return cls(arguments.otlp_endpoint, arguments.trace_ratio, arguments.trace_slow_seconds)


SLOW_S_MAX: Final = 1e9
SENDING: Final = Sending()
"""Where a process says nothing of it, nothing is sent."""


def add_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Let a command line say where spans go."""
    parser.add_argument("--otlp-endpoint", help="send traces to http://HOST:4318/v1/traces; default: none")
    parser.add_argument(
        "--trace-ratio",
        type=arguments.number(0, 1.0),
        default=SENDING.ratio,
        metavar="RATIO",
        help="send so many of all traces, 0 to 1; default: %(default)s",
    )
    parser.add_argument(
        "--trace-slow-seconds",
        type=arguments.number(0, SLOW_S_MAX),
        default=SENDING.slow_s,
        metavar="SECONDS",
        help="what took so long is sent whatever the ratio, and errors are; default: %(default)s",
    )


class _State:
    provider: TracerProvider | None = None
    tracer: Tracer | None = None
    interrupt: Callable[[], None] = staticmethod(lambda: None)


_state: Final = _State()


def configure(component: str, sending: Sending = SENDING) -> None:
    """Start sending spans, where there is an endpoint.

    The exporter runs in a thread of its own; an endpoint that does not answer loses spans and delays nobody.
    """
    if not sending.endpoint:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=sending.endpoint, timeout=_EXPORT_S)
    batches = BatchSpanProcessor(exporter, max_queue_size=_QUEUE_SPANS_MAX)
    install(component, batches, exporter.shutdown, sending)


def install(
    component: str,
    processor: SpanProcessor,
    interrupt: Callable[[], None] = lambda: None,
    sending: Sending = SENDING,
) -> None:
    """Switch tracing on with a processor of the caller's choice, in place of an earlier one.

    `interrupt` ends an export that is under way; `shutdown` calls it when the last export takes too long.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    shutdown()
    _state.interrupt = interrupt
    resource = Resource.create({"service.name": f"kvstrata-{component}"})
    _state.provider = TracerProvider(ALWAYS_ON, resource)
    _state.provider.add_span_processor(_processor(Kept(sending.ratio, sending.slow_s), processor))
    _state.tracer = _state.provider.get_tracer("kvstrata")


def shutdown() -> None:
    """Send what waits and switch tracing off; gives up after about 2 s. Harmless when it is off already.

    Blocks; call it in a thread where an event loop must go on.
    """
    provider, _state.provider, _state.tracer = _state.provider, None, None
    if provider is None:
        return
    timer = threading.Timer(_FLUSH_S, _state.interrupt)
    timer.start()
    provider.shutdown()
    timer.cancel()
    timer.join()


def span(name: str, *, parent: str = "", **attributes: Attribute) -> AbstractContextManager[Active]:
    """Open the span `name` around a block of code; an error that leaves the block is recorded on it.

    Its parent is `parent`, a `traceparent` of another process, else the current span. Names are those of
    `catalog.SPANS`; attributes are keywords such as `session_id`.
    """
    tracer = _state.tracer
    return OFF if tracer is None else recorded(tracer, name, parent, attributes)


def exemplar(parent: str = "") -> dict[str, str] | None:
    """The trace of `parent`, else the current one, to stand beside a value in a histogram; None while that is off."""
    if _state.tracer is None:
        return None
    if parent:
        found = trace_id_of(parent)
        return {"trace_id": found} if found else None
    return current_ids() or None


def current_ids() -> dict[str, str]:
    """`trace_id` and `span_id` of the current span in hexadecimal; empty when there is none."""
    if _state.tracer is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}


@dataclass(slots=True)
class _Part:
    """A process's part of a trace: what has ended of it, until its first span does."""

    ended: list[ReadableSpan] = field(default_factory=list)
    has_error: bool = False


class Kept:
    """Decides which spans are sent, when all that a process adds to a trace has ended. No I/O.

    Sent are the traces that the ratio chooses, unless whoever began one sends none of it, and in any case those with an
    error and the slow ones. A span that ends after the first one of its part (a move that nobody waits for any more) is
    decided over by itself.
    """

    def __init__(self, ratio: float, slow_s: float) -> None:
        self._below = round(ratio * _FULL)
        self._slow_ns = round(slow_s * 1e9)
        self._parts: dict[int, _Part] = {}
        """By the id of each open span."""

    def begin(self, span_id: int, parent_id: int | None) -> None:
        """A span begins; `parent_id` is None unless its parent is of this process."""
        part = self._parts.get(parent_id) if parent_id is not None else None
        if len(self._parts) < _OPEN_MAX:
            self._parts[span_id] = part or _Part()

    def end(self, span: ReadableSpan) -> list[ReadableSpan]:
        """A span has ended: those that are to be sent now."""
        context, parent = span.get_span_context(), span.parent
        if context is None:
            return []
        part = self._parts.pop(context.span_id, None) or _Part()
        part.has_error |= not span.status.is_ok and not span.status.is_unset
        is_inner = parent is not None and not parent.is_remote and self._parts.get(parent.span_id) is part
        if is_inner:
            if len(part.ended) < _OPEN_MAX:
                part.ended.append(span)
            return []
        took_ns = (span.end_time or 0) - (span.start_time or 0)
        is_chosen = (parent is None or parent.trace_flags.sampled) and context.trace_id % _FULL < self._below
        is_kept = is_chosen or part.has_error or took_ns >= self._slow_ns
        ended, part.ended = part.ended, []
        return [*ended, span] if is_kept else []


def _processor(kept: Kept, sender: SpanProcessor) -> SpanProcessor:
    """Put `kept` before what sends spans; the SDK's class is loaded where tracing is on."""
    from opentelemetry.sdk.trace import SpanProcessor

    class Keeping(SpanProcessor):
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:  # noqa: ARG002
            context, parent = span.get_span_context(), span.parent
            if context is not None:
                with self._lock:
                    kept.begin(context.span_id, parent.span_id if parent and not parent.is_remote else None)

        def on_end(self, span: ReadableSpan) -> None:
            with self._lock:
                sent = kept.end(span)
            for one in sent:
                sender.on_end(one)

        def shutdown(self) -> None:
            sender.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return sender.force_flush(timeout_millis)

    return Keeping()
