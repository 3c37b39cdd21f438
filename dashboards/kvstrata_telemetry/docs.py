"""Writes docs/metrics.md from the catalogues: `python -m kvstrata_telemetry.docs --write | --check`."""

import sys
from collections.abc import Iterator
from typing import Final

from kvstrata_telemetry import generated
from kvstrata_telemetry.catalog import Metric
from kvstrata_telemetry.catalog_all import BY_PROCESS
from kvstrata_telemetry.spans import SPANS
from kvstrata_telemetry.tracing import SHARED_ATTRIBUTES

_HEAD: Final = """\
# Metrics and spans

Made from the catalogues in `dashboards/kvstrata_telemetry/` by `make generate`. Base units everywhere: seconds, bytes,
ratios from 0 to 1. Every process serves its metrics at `/metrics`, beside `/healthz` and `/readyz`; the address is in
its first log lines and in its ready file.
"""

_SPANS_HEAD: Final = """
## Spans

Off until a process gets `--otlp-endpoint` (OTLP over HTTP). Attributes are `kvcache.<name>`; the session is
`session.id` and the model `gen_ai.request.model`.

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
