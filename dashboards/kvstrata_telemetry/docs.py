"""Writes docs/metrics.md from the catalogues: `python -m kvstrata_telemetry.docs --write | --check`.

The catalogue of every metric of every process. Pure.

A process adds its metrics in `catalog_<process>.py` as the constant `<PROCESS>`; nothing needs to be written here.

The catalogue of spans: every name that `tracing.span` may be given, and its attributes. Pure.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

import kvstrata_telemetry
from kvstrata_telemetry import generated
from kvstrata_telemetry.catalog import Metric, index
from kvstrata_telemetry.tracing import SHARED_ATTRIBUTES


@dataclass(frozen=True, slots=True)
class SpanType:
    """One kind of span."""

    name: str
    help: str
    attributes: tuple[str, ...] = ()
    """Keywords that its callers set."""


SPANS: Final = (
    SpanType("kvstrata.lookup", "One lookup in an agent.", ("session_id", "pool", "requested_blocks", "remote")),
    SpanType(
        "kvstrata.acquire", "Leasing a prefix; the moves that it waits for are its children.",
        ("session_id", "pool", "requested_blocks", "hit_blocks"),
    ),
    SpanType("kvstrata.move", "One batch between two tiers or nodes.", ("source", "target", "blocks")),
    SpanType("kvstrata.reserve", "Giving out slots.", ("session_id", "pool", "requested_blocks")),
    SpanType("kvstrata.publish", "Committing filled slots.", ("pool", "blocks")),
    SpanType("kvstrata.fetch", "Reading blocks from another node.", ("source", "blocks", "bytes")),
    SpanType(
        "kvstrata.follow", "Waiting for parts of blocks that another node still writes.",
        ("session_id", "pool", "requested_blocks"),
    ),
    SpanType("kvstrata.order", "An agent's part of one KVOperation.", ("order",)),
)  # fmt: skip


_PREFIX: Final = "catalog_"


def _load() -> dict[str, tuple[Metric, ...]]:
    modules = sorted(m.name for m in iter_modules(kvstrata_telemetry.__path__) if m.name.startswith(_PREFIX))
    processes = [name.removeprefix(_PREFIX) for name in modules if name != "catalog_all"]
    return {p: getattr(import_module(f"kvstrata_telemetry.{_PREFIX}{p}"), p.upper()) for p in processes}


BY_PROCESS: Final = _load()
"""Metrics by the process that exports them."""

BY_NAME: Final = index(metric for metrics in BY_PROCESS.values() for metric in metrics)
"""Every metric by its name; no two processes share one."""


_HEAD: Final = """\
# Metrics and spans

Made from the catalogues in `dashboards/kvstrata_telemetry/` by `make generate`. Base units everywhere: seconds, bytes,
ratios from 0 to 1. Every process serves its metrics at `/metrics`, beside `/healthz` and `/readyz`; the address is in
its first log lines and in its ready file.
"""

_SPANS_HEAD: Final = """
## Spans

Off until a process gets `--otlp-endpoint` (OTLP over HTTP); agents alone open any. Attributes are `kvcache.<name>`; the
session is `session.id`.

| span | what | attributes |
|---|---|---|
"""


def text() -> str:
    """The whole page."""
    return "".join([_HEAD, *map(_section, BY_PROCESS), _SPANS_HEAD, *_span_rows()])


def _section(process: str) -> str:
    head = f"\n## kvstrata-{process}\n\n| metric | type | labels | what |\n|---|---|---|---|\n"
    return head + "".join(map(_row, BY_PROCESS[process]))


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |\n"


def _span_rows() -> Iterator[str]:
    for span in SPANS:
        attributes = ", ".join(f"`{SHARED_ATTRIBUTES.get(a, f'kvcache.{a}')}`" for a in span.attributes)
        yield f"| `{span.name}` | {span.help} | {attributes} |\n"


def files() -> generated.Files:
    """The page by its path."""
    return {generated.ROOT / "docs" / "metrics.md": text()}


if __name__ == "__main__":
    sys.exit(generated.run(files, __doc__))
