"""Files that are made from code, written by `--write` and compared by `--check`: how that is done, and some of them.

`python -m kvstrata_telemetry.generated --write | --check` makes docs/metrics.md, docs/logs.md and docs/conditions.md;
the other generators use `run`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from kvstrata_api.reasons import COMMANDS, REASONS, Reason, stated
from kvstrata_api.trace_context import SHARED_ATTRIBUTES
from kvstrata_telemetry.catalog import BY_PROCESS, PEERS, SPANS
from kvstrata_telemetry.log_events import EVENTS
from kvstrata_telemetry.metrics import Metric

ROOT: Final = Path(__file__).resolve().parents[2]
"""The source tree. Generators run in it; an installed wheel has none."""

Files = Mapping[Path, str]
"""Wanted content by path."""

_HEAD: Final = """\
# Metrics and spans

Made from `dashboards/kvstrata_telemetry/catalog.py` by `make generate`. Base units everywhere: seconds, bytes,
ratios from 0 to 1. Every process serves its metrics at `/metrics`, beside `/healthz` and `/readyz`; the address is in
its first log lines and in its ready file.

An agent with 4 tiers and 10 tenants has some 2,100 series once everything has happened to it, 5,000 of them 10 million.
At most 200 tenants of an agent are named, those that it met first; what is counted for others stands under `(others)`,
and their gauges are left out: 21,000 series with 8 tiers (`tests/unit/telemetry/test_cardinality.py`).
"""

_SPANS_HEAD: Final = """
## Spans

Off until a process gets `--otlp-endpoint` (OTLP over HTTP). Attributes are `kvcache.<name>`, the session `session.id`.
Messages of engines to agents and between agents carry `traceparent`, so that one request is one trace from the engine
to the node that its blocks come from. Those of the client (`kvstrata.client.*`) go where the engine's own tracer sends
them, and its current span is their parent. `--trace-ratio` of the traces is sent, by their ids, and whatever the ratio
those in which a span of the process failed, or took `--trace-slow-seconds`.

| span | what | attributes |
|---|---|---|
"""


_PEERS_HEAD: Final = """
## Names of other systems

Read in vLLM 0.32, LMCache 0.5.7rc2 and SGLang 0.5.23.

| there | here | what is different |
|---|---|---|
"""

_LOADS: Final = """
## What a load is accounted as

`kvstrata_load_tokens_total` has the tokens of each load's unbroken prefix once for each `stage` that they reach.
*held*: some node of the fleet has them. *captured*: the node that was asked has them, or asked the one that has.
*delivered*: the reader has them, verified. So held >= captured >= delivered, for every `tier` (where the block was
when it was asked for; `remote` is another node). Held and not captured: the request went to the wrong node, and
bringing them would have taken longer than computing. Captured and not delivered: too slow, refused by a full path, or
left to the engine. Objects of LMCache and SGLang count when they are loaded, and at the lookup where they are absent;
`unknown` is the tier of what loads and lookups that overlap on one connection took from each other. Shards of one
engine count their part of a token each; of multi-head latent attention over several tensor ranks, where every rank
loads all of it, each counts it whole.

`kvstrata_load_saved_prefill_seconds_total` takes the rate that engines report (`ReportEngine`), or else
`policy.recompute.prefillTokensPerSecond` of the pool; with neither it counts nothing, for what an agent sees of prompts
is a lower bound. It leaves out what attention to earlier blocks costs. Time to first token saved is that less
`kvstrata_load_seconds_total`, which is counted of the same loads alone; of loads that wait beside other work of the
engine, less is saved.
"""


_LOGS_HEAD: Final = """\
# Warnings and errors

Made from `dashboards/kvstrata_telemetry/log_events.py` by `make generate`; a test holds it to the code. Every line is
JSON with `ts`, `level`, `component`, `event` and `logger`, inside a span with `trace_id` and `span_id`, and with the
fields below. An error with a traceback is a defect of ours, unless it says otherwise. Audit lines are apart
([audit](audit.md)). The client logs through its engine's logging, in sentences that say what to do.

| event | level | process | fields | what it means, and what to do |
|---|---|---|---|---|
"""

_CONDITIONS_HEAD: Final = """\
# Conditions and reasons

Made from `crds/kvstrata_api/reasons.py` by `make generate`; a test holds it to the code. Every condition has a message
with names and numbers: `kubectl get KIND NAME -o yaml`. `kvstrata doctor` reads all of them, and prints those that are
bad news with what mends them ([operations](operations.md#what-is-wrong)).

*good*: as it should be. *passing*: healthy objects go through it, and it is bad news only when it lasts. *echo*:
another condition has the cause. *warning*: it works, otherwise than was asked for. *broken*: something does not. In
commands NAME and NAMESPACE are the object's, POOL and NODE those that it names, LABELS those of its spec.nodeSelector,
SYSTEM is the namespace of the release, and CHART what was installed.
"""


def drift(wanted: Files) -> tuple[Path, ...]:
    """Paths whose content differs from what is wanted, absent ones included."""
    return tuple(path for path, text in sorted(wanted.items()) if _read(path) != text)


def write(wanted: Files) -> None:
    """Bring every path up to date; what is equal is not touched."""
    for path in drift(wanted):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")


def run(make: Callable[[], Files], description: str | None) -> int:
    """Handle the command line of a generator; 1 when `--check` finds drift."""
    parser = argparse.ArgumentParser(description=description)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="fail when a file differs")
    mode.add_argument("--write", action="store_true", help="write the files")
    wanted = make()
    if parser.parse_args().write:
        write(wanted)
        return 0
    differing = drift(wanted)
    for path in differing:
        sys.stderr.write(f"{path.relative_to(ROOT)} differs from what its generator makes\n")
    return int(bool(differing))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def text() -> str:
    """The whole page."""
    return "".join([_HEAD, *map(_section, BY_PROCESS), _SPANS_HEAD, *_span_rows(), _LOADS, _PEERS_HEAD, *_peer_rows()])


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


def _peer_rows() -> Iterator[str]:
    for peer in PEERS:
        yield f"| {peer.theirs} | {peer.ours} | {peer.difference} |\n"


def logs_text() -> str:
    """The page of what is logged at level warning and above."""
    return "".join([_LOGS_HEAD, *_log_rows()])


def _log_rows() -> Iterator[str]:
    for event in EVENTS:
        level = f"{event.level}, traceback" if event.has_traceback else event.level
        fields = ", ".join(f"`{name}`" for name in event.fields)
        yield f"| {event.event} | {level} | {', '.join(event.processes)} | {fields} | {event.help} |\n"


def conditions_text() -> str:
    """The page of conditions, a table for each kind."""
    kinds = dict.fromkeys(reason.kind for reason in REASONS)
    return "".join([_CONDITIONS_HEAD, *(part for kind in kinds for part in _condition_rows(kind))])


def _condition_rows(kind: str) -> Iterator[str]:
    yield f"\n## {kind}\n\n| reason | conditions | weight | what it means | what to do |\n|---|---|---|---|---|\n"
    for reason in REASONS:
        if reason.kind == kind:
            where = ", ".join(f"{type_} {status}" for type_, status in stated(reason))
            yield f"| `{reason.reason}` | {where} | {reason.weight} | {reason.help} | {_mend(reason)} |\n"


def _mend(reason: Reason) -> str:
    return f"`{reason.mend}`" if reason.mend.startswith(COMMANDS) else reason.mend


def metric_files() -> Files:
    """The pages by their paths."""
    docs = ROOT / "docs"
    return {docs / "metrics.md": text(), docs / "logs.md": logs_text(), docs / "conditions.md": conditions_text()}


if __name__ == "__main__":
    sys.exit(run(metric_files, __doc__))
