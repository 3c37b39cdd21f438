"""Spans and how messages name them to other processes (W3C Trace Context), by OpenTelemetry's API alone.

Attributes are ours, `kvcache.*`, except for the one that has a name in the semantic conventions: `session.id`.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.context import Context


def _has_api() -> bool:
    """Whether OpenTelemetry is installed; the client alone does without."""
    try:
        return find_spec("opentelemetry.trace") is not None
    except ModuleNotFoundError:
        return False


HAS_API: Final = _has_api()
if TYPE_CHECKING or HAS_API:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attribute = str | bool | int | float
"""What OpenTelemetry takes as a single attribute."""

SHARED_ATTRIBUTES: Final = {"session_id": "session.id"}
"""Keywords whose attribute has a name in the semantic conventions; every other one becomes `kvcache.<keyword>`."""

HEADER: Final = "traceparent"
TRACEPARENT_CHARS: Final = 55
"""Of version 00 (https://www.w3.org/TR/trace-context/#traceparent-header)."""


class Active(Protocol):
    """The span that is open now."""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes, by the keywords of `span`."""


class _Off:
    def set(self, **attributes: Attribute) -> None:
        """Do nothing."""


class _On:
    def __init__(self, opened: trace.Span) -> None:
        self._span = opened

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))


OFF: Final = nullcontext[Active](_Off())
"""What stands for a span where nothing is traced: one object, which does nothing."""


@contextmanager
def recorded(tracer: trace.Tracer, name: str, parent: str, attributes: Mapping[str, Attribute]) -> Iterator[Active]:
    """Open a span around a block of code; an error that leaves the block is recorded on it.

    Its parent is `parent`, a `traceparent` of another process, else the current span.
    """
    with tracer.start_as_current_span(name, context=_within(parent), attributes=_named(attributes)) as opened:
        yield _On(opened)


@contextmanager
def passed_on(parent: str) -> Iterator[Active]:
    """Record nothing, and have messages that are sent meanwhile name a span of another process, if one is given."""
    if not (parent and HAS_API):
        yield _Off()
        return
    with trace.use_span(trace.get_current_span(_within(parent))):
        yield _Off()


def process_tracer() -> trace.Tracer | None:
    """Tracer of what traces the process, which need not be ours; None where nothing does."""
    if not HAS_API:
        return None
    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider.get_tracer("kvstrata")


def traceparent() -> str:
    """The current span, be it this process's or one that it acts for; empty without one."""
    if not HAS_API:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_id_of(parent: str) -> str:
    """Trace of a `traceparent`, 32 hexadecimal digits; empty for what is none."""
    context = trace.get_current_span(_within(parent)).get_span_context() if parent else trace.INVALID_SPAN_CONTEXT
    return f"{context.trace_id:032x}" if context.is_valid else ""


def _within(parent: str) -> Context | None:
    """Where a span goes. What is malformed begins a trace of its own, as the standard has it."""
    return TraceContextTextMapPropagator().extract({HEADER: parent}) if parent else None


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {SHARED_ATTRIBUTES.get(key, f"kvcache.{key}"): value for key, value in attributes.items()}
