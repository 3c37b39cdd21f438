"""The hour itself, and what is counted of it."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from demo.world import POOL, Say
from drawing import sample_run
from drawing.dashboard_queries import PanelQuery, defaults_of, filled, metrics_of, panel_queries, read_all
from drawing.sample_run import SCRAPE_S, Run
from hour import beside
from kvstrata_api.trace_context import SHARED_ATTRIBUTES
from kvstrata_telemetry.catalog import BY_NAME, SPANS
from kvstrata_telemetry.metrics import Kind
from support.client import traced_engine
from support.runner.otlp import Receiver, receiving

ROOT: Final = Path(__file__).resolve().parents[2]
DASHBOARDS: Final = read_all(ROOT / "dashboards")
RATE_INTERVAL_S: Final = 4.0
"""Four scrapes, as Grafana would choose."""
COUNTERS: Final = frozenset(name for name, metric in BY_NAME.items() if metric.kind is Kind.COUNTER)
UNSEEN: Final = {"kvstrata.send": "blocks of other nodes are read by NIXL, not sent (test_peer_listener)"}
"""Spans that are not sent here, each with the reason."""
SESSIONS, ROUNDS = 12, 3
"""Prefixes of 32 MiB: more than DRAM (256 MiB) and CXL (64 MiB) hold, and more than the quotas."""


@dataclass(frozen=True, slots=True)
class Hour:
    """What there is to look at when it is over."""

    run: Run
    receiver: Receiver

    def answers(self, query: PanelQuery, values: dict[str, str]) -> int:
        """How many series with a number in them a query returns."""
        run = self.run
        expr = filled(query.expr, values, RATE_INTERVAL_S, run.ended_s - run.started_s)
        series = run.server.query_range(expr, run.started_s, run.ended_s, SCRAPE_S)
        return sum(any(math.isfinite(value) for _, value in s.points) for s in series)

    def names(self) -> set[str]:
        """Our metrics that had a sample."""
        selector = f'last_over_time({{__name__=~"kvstrata_.+"}}[{self._whole_s}s])'
        series = self.run.server.query(selector, self.run.ended_s)
        return {name for s in series for name in metrics_of(s.labels["__name__"])}

    def moved(self) -> set[str]:
        """Our counters that counted something."""
        found = set[str]()
        for name in COUNTERS:
            series = self.run.server.query(f"max_over_time({name}[{self._whole_s}s]) > 0", self.run.ended_s)
            found |= {name} if series else set()
        return found

    def seen_spans(self) -> dict[str, set[str]]:
        """Attributes of our spans that were sent so far, by their names."""
        return {name: found for name, found in self.receiver.seen().items() if name.startswith("kvstrata.")}

    def differing_spans(self) -> set[str]:
        """Spans that were not sent as they are documented, or are sent and not documented."""
        seen = self.seen_spans()
        wanted = {name: attributes for name, attributes in documented().items() if name not in UNSEEN}
        return {name for name in seen | wanted if seen.get(name) != wanted.get(name)}

    def delivered_tokens(self) -> dict[str, float]:
        """What the agents of the fleet say that they gave to engines, by tenant."""
        given = f'kvstrata_load_tokens_total{{pool="{POOL}",stage="delivered"}}'
        expr = f"sum by (tenant) (max_over_time({given}[{self._whole_s}s]))"
        series = self.run.server.query(expr, self.run.ended_s)
        return {s.labels["tenant"]: s.points[-1][1] for s in series}

    def accounting_error(self) -> float:
        """Largest part by which that differs from what a tenant's engines counted.

        Their places may differ: a block that came nearer while it was asked for twice was fetched from afar.
        """
        told, counted = self.delivered_tokens(), Counter[str]()
        for (tenant, _), tokens in self.run.loaded_tokens.items():
            counted[tenant] += tokens
        whole = {key: max(counted.get(key, 0), told.get(key, 0.0)) for key in counted.keys() | told.keys()}
        return max(
            (abs(counted.get(key, 0) - told.get(key, 0.0)) / most for key, most in whole.items() if most), default=1.0
        )

    @property
    def _whole_s(self) -> int:
        return round(self.run.ended_s - self.run.started_s) + 60


def documented() -> dict[str, set[str]]:
    """Attributes of every span of the catalogue."""
    return {s.name: {SHARED_ATTRIBUTES.get(a, f"kvcache.{a}") for a in s.attributes} for s in SPANS}


def panels() -> Iterator[tuple[str, dict[str, Any], list[PanelQuery], dict[str, str]]]:
    """Every panel that asks Prometheus: its dashboard, itself, its queries and the variables' values."""
    for uid, dashboard in DASHBOARDS.items():
        values = defaults_of(dashboard)
        for panel in dashboard["panels"]:
            queries = list(panel_queries({"panels": [panel]}))
            if queries:
                yield uid, panel, queries, values


@contextmanager
def told(folder: Path, say: Say) -> Iterator[Hour]:
    """Let it happen. Prometheus answers until the end of the block."""
    with receiving() as receiver:
        options = ("--otlp-endpoint", receiver.url)
        (folder / "beside").mkdir()
        with (
            beside.started(folder / "beside", options) as others,
            sample_run.started(folder, say, SESSIONS, ROUNDS, options, others) as run,
        ):
            traced_engine.run(others.machine.memory, receiver.url, "traced")
            yield Hour(run, receiver)
