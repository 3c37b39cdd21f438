"""Spans of the client, in the process of an engine: its own tracer sends them, and without one there are none.

The agent's spans become children of them, or of the span that the engine had open, by what the requests carry.
"""

from contextlib import AbstractContextManager

from kvstrata_api.trace_context import OFF, Active, Attribute, process_tracer, recorded


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Active]:
    """Open the span `name`, one of `catalog.SPANS`, below the current span or what `passed_on` has in its place."""
    tracer = process_tracer()
    return OFF if tracer is None else recorded(tracer, name, "", attributes)
