"""Command that shows a cluster live: top. What it observes and the tables it makes; `screen` draws them.

Everything but sessions and rates is `status`'s own overview, so the two cannot differ.
"""

import argparse
import http.client
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from kvstrata_api.errors import KvStrataError, UnsupportedError
from kvstrata_api.units import FACTORS, format_rounded, percent
from kvstrata_client.commands import doctor, kubectl, status
from kvstrata_client.commands.kubectl import Kubectl
from kvstrata_client.commands.output import UsageError

Json = dict[str, Any]
Samples = Sequence[tuple[Mapping[str, str], float]]

QUERIES: Final = {
    "sessions": "sum by (pool, node, state) (kvstrata_sessions) > 0",
    "moved": "sum by (pool, source, target) (rate(kvstrata_moved_bytes_total[5m])) > 0",
    "asked": "sum by (tenant) (rate(kvstrata_lookup_blocks_total[5m]))",
}
"""Instant queries by what they are for. Rates are of five minutes, as Prometheus asks once a minute by default."""
TIMEOUT_S: Final = 10.0
_INTERVALS_S: Final = (1.0, 3_600.0)


@dataclass(frozen=True, slots=True)
class Tab:
    """One table."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """Why it is empty."""


@dataclass(frozen=True, slots=True)
class View:
    """What is shown at one moment."""

    summary: str
    is_well: bool
    tabs: tuple[Tab, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where it looks: the cluster, and Prometheus where there is one."""

    cluster: Kubectl
    namespace: str
    prometheus: str = ""

    def view(self) -> View:
        """Look once. Raises the `KvStrataError` of a cluster that does not answer; Prometheus may be away."""
        seen = doctor.observe(self.cluster, self.namespace)
        answers: dict[str, Samples] = {}
        trouble = "" if self.prometheus else "--prometheus URL has them"
        try:
            answers = {name: samples(self.prometheus, query) for name, query in QUERIES.items()} if not trouble else {}
        except KvStrataError as e:
            trouble = str(e)
        return view(status.overview(seen), doctor.findings(seen), answers, trouble)


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.description = (
        "Nodes, tiers, tenants, sessions, operations, weights of models and findings, looked at again every few "
        "seconds with kubectl. Keys: 1 to 7 choose a table, s sorts by the next column, / filters, enter shows a row "
        "in full, r looks now, q ends. "
        "`kvstrata status` prints the same once."
    )
    found.epilog = "example: kvstrata top --prometheus http://127.0.0.1:9090"
    kubectl.add_release_options(found)
    found.add_argument("--prometheus", default="", metavar="URL", help="for sessions and rates; default: without them")
    found.add_argument("--interval-s", type=float, default=5.0, metavar="S", help="between looks; default: %(default)g")
    found.set_defaults(run=_top)


def _top(given: argparse.Namespace) -> int:
    """Show until the user leaves."""
    low_s, high_s = _INTERVALS_S
    if not low_s <= given.interval_s <= high_s:
        raise UsageError(f"--interval-s {given.interval_s:g}: {low_s:g} to {high_s:g} wanted")
    if given.prometheus and not given.prometheus.startswith(("http://", "https://")):
        raise UsageError(f"--prometheus {given.prometheus!r}: a URL is wanted, as http://127.0.0.1:9090")
    source = Source(Kubectl.of(given, "it asks the cluster"), given.namespace, given.prometheus.rstrip("/"))
    try:
        from kvstrata_client.commands.screen import Top
    except ModuleNotFoundError as e:
        raise UnsupportedError(
            f"it needs the package {e.name}: pip install 'kvstrata[cli]'; `kvstrata status` prints the same once"
        ) from e
    Top(source.view, given.interval_s).run()
    return 0


def view(at: Json, findings: Sequence[doctor.Finding], answers: Mapping[str, Samples], trouble: str) -> View:
    """Tables of an overview and of Prometheus's answers. Pure."""
    used = sum(tier["usedBytes"] for pool in at["pools"] for tier in pool["tiers"])
    room = sum(tier["capacityBytes"] for pool in at["pools"] for tier in pool["tiers"])
    ready = sum(node["ready"] for node in at["nodes"])
    broken, warnings = at["findings"]["broken"], at["findings"]["warnings"]
    filled = percent(used, room)
    return View(
        f"{ready}/{len(at['nodes'])} nodes Ready, {format_rounded(used)} of {format_rounded(room)}"
        f"{'' if filled is None else f' ({filled} %)'}, {len(at['tenants'])} tenants, "
        f"{at['shares']['active']} shares active, {broken} broken, {warnings} warnings",
        not broken,
        (
            Tab("Nodes", *status.node_rows(at["nodes"]), note="no pool has a node"),
            Tab("Tiers", *_tiers(at["pools"], at["models"], answers), note="no pool is declared"),
            Tab("Tenants", *_tenants(at["tenants"], answers), note="no tenant is declared"),
            Tab("Sessions", *_sessions(answers), note=trouble or "no engine has one"),
            Tab("Operations", *status.operation_rows(at["operations"]), note="none was asked for"),
            Tab("Models", *_models(at["models"]), note="no KVModelCache is declared"),
            Tab("Findings", *_findings(findings), note="nothing is wrong"),
        ),
    )


def _tiers(pools: Sequence[Json], models: Sequence[Json], answers: Mapping[str, Samples]) -> status.Table:
    head, rows = status.tier_rows(pools)
    staged: Counter[tuple[str, str]] = Counter()
    for model in models:
        staged[model["pool"], model["tier"]] += _staged_bytes(model)
    moved = answers.get("moved", ())
    rates = [
        tuple(
            _rate(sum(v for labels, v in moved if labels["pool"] == row[0] and labels[side] == row[1]))
            for side in ("target", "source")
        )
        for row in rows
    ]
    cells = [(*row, format_rounded(staged[row[0], row[1]])) for row in rows]
    return (*head, "WEIGHTS", "IN/S", "OUT/S"), [(*row, *rate) for row, rate in zip(cells, rates, strict=True)]


def _models(models: Sequence[Json]) -> status.Table:
    head, rows = status.model_rows(models)
    more = [(model["tier"] or "-", format_rounded(_staged_bytes(model))) for model in models]
    return (*head, "TIER", "STAGED"), [(*row, *cells) for row, cells in zip(rows, more, strict=True)]


def _staged_bytes(model: Json) -> int:
    """Bytes of a KVModelCache over all nodes, those on their way included."""
    return sum(node["stagedBytes"] for node in model["nodes"])


def _tenants(tenants: Sequence[Json], answers: Mapping[str, Samples]) -> status.Table:
    head, rows = status.tenant_rows(tenants)
    asked = {labels.get("tenant", ""): value for labels, value in answers.get("asked", ())}
    return (*head, "BLOCKS ASKED/S"), [(*row, f"{asked[row[0]]:.1f}" if row[0] in asked else "-") for row in rows]


def _sessions(answers: Mapping[str, Samples]) -> status.Table:
    """A row for each node; states that some session is in are columns."""
    by_node: dict[tuple[str, str], Counter[str]] = {}
    for labels, value in answers.get("sessions", ()):
        by_node.setdefault((labels["pool"], labels["node"]), Counter())[labels["state"]] += int(value)
    states = sorted({state for counts in by_node.values() for state in counts})
    rows = [
        (pool, node, *(f"{counts[state]:,}" for state in states), f"{counts.total():,}")
        for (pool, node), counts in sorted(by_node.items())
    ]
    return ("POOL", "NODE", *map(str.upper, states), "ALL"), rows


def _findings(findings: Sequence[doctor.Finding]) -> status.Table:
    rows = [(one.weight.upper(), one.subject, one.reason, one.message, one.mend) for one in findings]
    return ("WEIGHT", "SUBJECT", "REASON", "MESSAGE", "MEND"), rows


def _rate(bytes_per_second: float) -> str:
    return f"{format_rounded(round(bytes_per_second))}/s" if bytes_per_second else "-"


def samples(prometheus: str, query: str) -> Samples:
    """Ask for the newest samples. Raises `UnsupportedError` when there are none to be had."""
    url = f"{prometheus}/api/v1/query?{urlencode({'query': query, 'time': f'{time.time():.3f}'})}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310  `_top` has checked it.
            found = json.load(answer)["data"]["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in found]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as e:
        raise UnsupportedError(f"{prometheus}: {e}: is it a Prometheus?") from e


def order(cell: str) -> tuple[bool, float, str]:
    """Where a cell stands in a sorted column: numbers and sizes first, the largest on top, then words. Pure."""
    match = re.match(r"([0-9][0-9,]*(?:\.[0-9]+)?) ?(Ki|Mi|Gi|Ti|Pi)?", cell)
    if match is None:
        return True, 0.0, cell
    return False, -float(match[1].replace(",", "")) * FACTORS.get(match[2] or "", 1), cell


def clock() -> str:
    """The time of day, as shown."""
    return datetime.now(UTC).astimezone().strftime("%H:%M:%S")
