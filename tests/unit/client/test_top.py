"""`kvstrata top`: tables of what was observed, and a screen that keeps what it saw last."""

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from textual.widgets import DataTable, Static, TabbedContent

from kvstrata_api import names
from kvstrata_api.errors import ApiServerAwayError
from kvstrata_client.commands import doctor, status, top
from kvstrata_client.commands.doctor import Seen
from kvstrata_client.commands.screen import Row, Top
from kvstrata_client.commands.top import Samples, View, order

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)
GIB = 1 << 30


def node(name: str, used: int, blocks: int = 3) -> dict[str, Any]:
    tier = {"name": "dram", "phase": "Ready", "capacityBytes": 2 * GIB, "usedBytes": used, "blocks": blocks}
    stated = {"conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}], "tiers": [tier]}
    spec = {"poolRef": "demo", "nodeName": name}
    return {"kind": "KVPoolNode", "metadata": {"name": name}, "spec": spec, "status": stated}


def pool() -> dict[str, Any]:
    spec = {"compatibility": {"model": "m"}, "tiers": [{"name": "dram", "type": "HostDRAM"}]}
    stated = {"conditions": [{"type": "Ready", "status": "False", "reason": "NoNodes", "message": "none"}]}
    return {"kind": "KVPool", "metadata": {"name": "demo"}, "spec": spec, "status": stated}


def seen(*nodes: dict[str, Any]) -> Seen:
    every = [{**one, "apiVersion": names.API_VERSION} for one in (pool(), *nodes)]
    for one in every:
        one["metadata"] = {**one["metadata"], "creationTimestamp": NOW.isoformat()}
    return Seen(NOW, every, None)


def view_of(at: Seen, answers: dict[str, Samples] | None = None, trouble: str = "") -> View:
    return top.view(status.overview(at), doctor.findings(at), answers or {}, trouble)


def test_rates_and_sessions_are_prometheus_s_and_the_rest_is_the_overview() -> None:
    answers: dict[str, Samples] = {
        "moved": [({"pool": "demo", "source": "engine", "target": "dram"}, 3.0 * (1 << 20)),
                  ({"pool": "demo", "source": "dram", "target": "nvme"}, 1024.0),
                  ({"pool": "other", "source": "dram", "target": "nvme"}, 9.0)],
        "sessions": [({"pool": "demo", "node": "n0", "state": "decoding"}, 4.0),
                     ({"pool": "demo", "node": "n0", "state": "archived"}, 1.0)],
    }  # fmt: skip
    shown = view_of(seen(node("n0", GIB)), answers)

    tabs = {tab.name: tab for tab in shown.tabs}
    assert tabs["Tiers"].rows == [("demo", "dram", "HostDRAM", "-", "2Gi", "1Gi (50 %)", "0", "3Mi/s", "1Ki/s")]
    assert tabs["Sessions"].head == ("POOL", "NODE", "ARCHIVED", "DECODING", "ALL")
    assert tabs["Sessions"].rows == [("demo", "n0", "1", "4", "5")]
    assert tabs["Nodes"].rows[0][:3] == ("demo", "n0", "yes")
    assert shown.summary.startswith("1/1 nodes Ready, 1Gi of 2Gi (50 %), 0 tenants")


def test_weights_are_counted_by_model_and_by_tier() -> None:
    nodes = [node("n0", GIB), node("n1", GIB)]
    for one, staged in zip(nodes, (3 << 20, 1 << 20), strict=True):
        one["status"]["models"] = [{"name": "m", "uid": "u", "revision": "r", "state": "Staged", "stagedBytes": staged}]
    cache = {
        "kind": "KVModelCache",
        "metadata": {"name": "m", "uid": "u"},
        "spec": {"poolRef": "demo", "revision": "r", "source": {"url": "s3://m"}},
        "status": {"tier": "dram", "sizeBytes": 3 << 20, "summary": "1/2 nodes"},
    }
    tabs = {tab.name: tab for tab in view_of(seen(*nodes, cache)).tabs}

    assert dict(zip(tabs["Tiers"].head, tabs["Tiers"].rows[0], strict=True))["WEIGHTS"] == "4Mi"
    (row,) = tabs["Models"].rows
    found = dict(zip(tabs["Models"].head, row, strict=True))
    assert (found["MODEL"], found["TIER"], found["STAGED"], found["NODES"]) == ("m", "dram", "4Mi", "1/2 nodes")


def test_without_prometheus_the_screen_says_what_brings_sessions() -> None:
    (sessions,) = (tab for tab in view_of(seen(), trouble="--prometheus URL has them").tabs if tab.name == "Sessions")

    assert (sessions.rows, sessions.note) == ([], "--prometheus URL has them")


@pytest.mark.parametrize(
    ("cells", "ordered"),
    [
        (["1Gi (2 %)", "300Mi (90 %)", "-", "2Gi"], ["2Gi", "1Gi (2 %)", "300Mi (90 %)", "-"]),
        (["9", "1,200", "30"], ["1,200", "30", "9"]),
        (["no report", "yes", "7 %"], ["7 %", "no report", "yes"]),
    ],
)
def test_a_column_is_sorted_by_what_its_cells_mean(cells: list[str], ordered: list[str]) -> None:
    assert sorted(cells, key=order) == ordered


def run(look: Callable[[], View], steps: Callable[[Any, Top], Any]) -> None:
    """Draw a screen without a terminal, and press keys."""

    async def whole() -> None:
        app = Top(look, 3_600.0)
        async with app.run_test(size=(140, 40)) as pilot:
            await until(pilot, lambda: app.has_looked)
            await steps(pilot, app)

    asyncio.run(whole())


async def until(pilot: Any, fact: Callable[[], bool]) -> None:
    """Let the screen work until something is so: a look comes back from its thread in its own time."""
    for _ in range(6_000):
        if fact():
            return
        await pilot.pause(0.01)
    raise AssertionError("not within a minute")


def told(app: Top) -> str:
    return str(app.query_one("#summary", Static).render())


def rows_of(app: Top, name: str) -> list[list[str]]:
    table = app.query_one(f"#table-{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(i)] for i in range(table.row_count)]


@pytest.mark.slow
def test_keys_choose_sort_filter_and_show_in_full() -> None:
    async def steps(pilot: Any, app: Top) -> None:
        assert [row[1] for row in rows_of(app, "Nodes")] == ["n0", "n1"]
        await pilot.press("s", "s", "s", "s")  # By blocks: the most first.
        assert [row[1] for row in rows_of(app, "Nodes")] == ["n1", "n0"]
        await pilot.press("slash", *"n1", "enter")
        assert [row[1] for row in rows_of(app, "Nodes")] == ["n1"]
        await pilot.press("enter")
        assert isinstance(app.screen, Row)
        await pilot.press("escape", "7")
        assert app.query_one(TabbedContent).active == "Findings"
        assert rows_of(app, "Findings") == [], "the filter holds for every table"

    run(lambda: view_of(seen(node("n0", GIB), node("n1", GIB // 2, 30))), steps)


def test_what_was_seen_last_stays_when_the_cluster_is_away() -> None:
    looks = [view_of(seen(node("n0", GIB)))]
    threads = set[str]()

    def look() -> View:
        threads.add(threading.current_thread().name)
        if not looks:
            raise ApiServerAwayError("kubectl: connection refused")
        return looks.pop()

    async def steps(pilot: Any, app: Top) -> None:
        await pilot.press("r")
        await until(pilot, lambda: "connection refused; below is what was seen last" in told(app))
        assert [row[1] for row in rows_of(app, "Nodes")] == ["n0"]

    run(look, steps)
    assert threading.main_thread().name not in threads, "a slow API server must not stop the screen"


@pytest.mark.slow
def test_keys_after_a_filter_that_nothing_has_break_nothing() -> None:
    async def steps(pilot: Any, app: Top) -> None:
        await pilot.press("slash", *"zzz", "enter", "enter", "s", "2", "s", "r", "4", "enter")
        assert rows_of(app, "Nodes") == []

    run(lambda: view_of(seen(node("n0", GIB))), steps)
