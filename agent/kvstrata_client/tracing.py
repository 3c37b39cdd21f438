"""Spans of the client, in the process of an engine: its own tracer sends them, and without one there are none.

The agent's spans become children of them, or of the span that the engine had open, by what the requests carry.
"""

from contextlib import AbstractContextManager

from kvstrata_api.trace_context import OFF, Active, Attribute, passed_on, process_tracer, recorded


def span(name: str, *, parent: str = "", **attributes: Attribute) -> AbstractContextManager[Active]:
    """Open the span `name`; its parent is `parent`, a `traceparent` that came with a request, else the current span.

    Where nothing traces this process, `parent` alone is passed on. Names are those of `catalog.SPANS`.
    """
    tracer = process_tracer()
    if tracer is not None:
        return recorded(tracer, name, parent, attributes)
    return passed_on(parent) if parent else OFF
