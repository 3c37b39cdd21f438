"""OpenTelemetry spans: off until `configure` names an endpoint, and then sent by OTLP over HTTP.

While off, `span` yields one shared object that does nothing, and the SDK, a tenth of what the operator would load, is
left out. Attributes are ours, `kvcache.*`, except for the one that has a name in the semantic conventions:
`session.id`. Spans of different processes are not joined: no message carries a trace context.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, Protocol

from opentelemetry import trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span, Tracer

Attribute = str | bool | int | float
"""What OpenTelemetry takes as a single attribute."""

SHARED_ATTRIBUTES: Final = {"session_id": "session.id"}
"""Keywords whose attribute has a name in the semantic conventions; every other one becomes `kvcache.<keyword>`."""

_QUEUE_SPANS_MAX: Final = 2_048
"""Spans that wait for export; more are dropped, so a slow collector costs memory of a known size and no time."""
_EXPORT_S: Final = 5.0
"""Deadline of one export, retries included."""
_FLUSH_S: Final = 2.0
"""What a stopping process may spend on its last spans; pods get 30 s in all."""


class Active(Protocol):
    """The span that is open now."""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes, by the keywords of `span`."""


class _Off:
    def set(self, **attributes: Attribute) -> None:
        """Do nothing."""


class _On:
    def __init__(self, opened: Span) -> None:
        self._span = opened

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))


class _State:
    provider: TracerProvider | None = None
    tracer: Tracer | None = None
    interrupt: Callable[[], None] = staticmethod(lambda: None)


_OFF: Final = nullcontext[Active](_Off())
_state: Final = _State()


def configure(component: str, otlp_endpoint: str | None = None) -> None:
    """Start sending spans to `otlp_endpoint` (`http://host:4318/v1/traces`); without one, tracing stays off.

    The exporter runs in a thread of its own; an endpoint that does not answer loses spans and delays nobody.
    """
    if not otlp_endpoint:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=otlp_endpoint, timeout=_EXPORT_S)
    install(component, BatchSpanProcessor(exporter, max_queue_size=_QUEUE_SPANS_MAX), exporter.shutdown)


def install(component: str, processor: SpanProcessor, interrupt: Callable[[], None] = lambda: None) -> None:
    """Switch tracing on with a processor of the caller's choice, in place of an earlier one.

    `interrupt` ends an export that is under way; `shutdown` calls it when the last export takes too long.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    shutdown()
    _state.interrupt = interrupt
    _state.provider = TracerProvider(resource=Resource.create({"service.name": f"kvstrata-{component}"}))
    _state.provider.add_span_processor(processor)
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


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Active]:
    """Open the span `name` around a block of code; an error that leaves the block is recorded on it.

    The current span is its parent. Names are those of `catalog.SPANS`; attributes are keywords such as `session_id`.
    """
    tracer = _state.tracer
    return _OFF if tracer is None else _recorded(tracer, name, attributes)


@contextmanager
def _recorded(tracer: Tracer, name: str, attributes: Mapping[str, Attribute]) -> Iterator[Active]:
    with tracer.start_as_current_span(name, attributes=_named(attributes)) as opened:
        yield _On(opened)


def current_ids() -> dict[str, str]:
    """`trace_id` and `span_id` of the current span in hexadecimal; empty when there is none."""
    if _state.tracer is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {SHARED_ATTRIBUTES.get(key, f"kvcache.{key}"): value for key, value in attributes.items()}
