"""`kvstrata ui` in a real browser, over a real Prometheus that scrapes a real agent under load."""

import http.client
import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from drawing import page, prometheus_server
from kvstrata import PrefixCache
from kvstrata_ui.server import has_charts
from support.agent.standalone import POOL, Up, content, pool, tokens, until

browser = pytest.importorskip("drawing.browser", reason="playwright is not installed: make tools")

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not has_charts(), reason="the chart library was not fetched: npm is missing (make setup)"),
]

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "dashboards"
RANGE = "from=now-30s&to=now&refresh="
TOKEN = "correct-horse-battery-staple"
PROMPT = 64
"""Blocks, 512 KiB: memory is full after 64 of them."""
BLOCKED = "http://evil.example/x"


@dataclass(frozen=True, slots=True)
class Fleet:
    """An agent that engines use, and the Prometheus that scrapes it."""

    prometheus: str
    """`host:port`."""
    socket: Path
    """Of the agent."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home, stop = tmp_path_factory.mktemp("up"), threading.Event()
    with Up(home) as up:
        up.declare(pool(home / "nvme"))
        up.start()
        metrics = str(json.loads(up.ready_file.read_text())["metrics"])
        worker = threading.Thread(target=work, args=(up, stop))
        worker.start()
        try:
            folder = tmp_path_factory.mktemp("prometheus")
            with prometheus_server.start(folder, {"kvstrata": [metrics]}, DASHBOARDS / "alerts.yaml") as server:
                rate = "rate(kvstrata_load_tokens_total[4s] offset 2s) > 0"
                assert server.wait(lambda: bool(server.query(rate)), 60.0), "nothing is loaded"
                yield Fleet(server.address, up.socket)
        finally:
            stop.set()
            worker.join(30.0)


def work(up: Up, stop: threading.Event) -> None:
    """Store and load prompts that together are more than memory holds, until told to stop."""
    with up.client() as client:
        seed = 0
        while not stop.wait(0.1):
            seed = seed % 200 + 1
            cache = PrefixCache(client)
            client.open_session(f"s{seed}")
            cache.store(tokens(seed, PROMPT), content(seed, PROMPT), session=f"s{seed}")
            cache.lookup(tokens(seed, PROMPT), session=f"s{seed}")
            cache.load(tokens(seed, PROMPT), session=f"s{seed}")


@pytest.fixture(scope="module")
def ui(fleet: Fleet) -> Iterator[str]:
    with page.serving(fleet.prometheus, ("--scrape-interval-s", "1")) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    try:
        browser.find()
    except browser.NoBrowserError as e:
        pytest.skip(str(e))
    with browser.start() as started:
        yield started


@pytest.fixture
def tab(chromium: Any) -> Iterator[Any]:
    with browser.tab(chromium) as opened:
        opened.set_default_timeout(60_000)  # Of a busy machine.
        opened.set_viewport_size({"width": browser.WIDTH_PX, "height": 1_000})
        yield opened


def titles(path: Path) -> list[str]:
    return [panel["title"] for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def test_every_panel_is_drawn_and_nothing_is_asked_of_another_origin(ui: str, tab: Any) -> None:
    asked: list[str] = []
    complaints: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))

    panels = browser.show(tab, f"{ui}d/kvstrata-fleet?{RANGE}")

    assert [panel.title for panel in panels] == titles(DASHBOARDS / "kvstrata-fleet.json")
    unlike = {panel.title: panel.state for panel in panels if panel.state != "drawn"}
    assert unlike == {"Directory reachable": "empty"}, "an agent alone has no directory; everything else is drawn"
    assert browser.problems(tab, panels) == []
    assert complaints == []
    assert {f"{urlsplit(url).scheme}://{urlsplit(url).netloc}/" for url in asked} == {ui}
    tab.evaluate(f"fetch('{BLOCKED}').catch(() => 0)")
    assert "Content Security Policy" in " ".join(complaints), "the browser itself would not let it"
    graphs = tab.locator(".timeseries").count()
    assert tab.locator(".timeseries canvas").count() == graphs > 0
    assert tab.locator("[data-panel='Agents'] .stat").inner_text() == "1"


@pytest.mark.parametrize("uid", sorted(path.stem for path in DASHBOARDS.glob("*.json")))
def test_no_dashboard_has_anything_that_the_page_does_not_know(ui: str, tab: Any, uid: str) -> None:
    panels = browser.show(tab, f"{ui}d/{uid}?{RANGE}")

    assert [panel.title for panel in panels] == titles(DASHBOARDS / f"{uid}.json")
    assert browser.problems(tab, panels) == []
    assert any(panel.state == "drawn" for panel in panels)


def test_what_fails_or_is_not_known_is_an_error_on_its_panel(fleet: Fleet, tab: Any, tmp_path: Path) -> None:
    board = json.loads((DASHBOARDS / "kvstrata-fleet.json").read_text())
    stat, unknown_type, option, unit, named, *rest = [panel for panel in board["panels"] if panel["type"] == "stat"]
    stat["targets"][0]["expr"] = "sum by (pool (up)"
    unknown_type["type"] = "piechart"
    option["options"]["graphMode"] = "area"
    unit["fieldConfig"]["defaults"]["unit"] = "furlongs"
    named["title"] = "<img src=x onerror=alert(1)>"
    rest[0]["targets"][0]["expr"] = "kvstrata_no_such_metric"
    (tmp_path / "broken.json").write_text(json.dumps(board))

    with page.serving(fleet.prometheus, ("--dashboards", str(tmp_path), "--scrape-interval-s", "1")) as address:
        panels = browser.show(tab, f"{address}d/kvstrata-fleet?{RANGE}")
        found = {panel.title: panel for panel in panels}

        assert "parse error" in found[stat["title"]].reason
        assert found[unknown_type["title"]].reason == "panels of type piechart are not known here"
        assert found[option["title"]].reason == 'option options.graphMode: "area" is not known here'
        assert "furlongs" in found[unit["title"]].reason
        assert found[named["title"]].state == "drawn"
        assert tab.locator("main img").count() == 0
        assert found[rest[0]["title"]].state == "empty"
        assert len(browser.problems(tab, panels)) == 4


def test_without_prometheus_the_page_says_so(tab: Any) -> None:
    with page.serving("127.0.0.1:9") as address:
        panels = browser.show(tab, f"{address}d/kvstrata-fleet?{RANGE}")
        assert {panel.state for panel in panels} == {"error"}
        assert "Prometheus cannot be reached" in panels[0].reason
        tab.goto(f"{address}map")
        tab.wait_for_selector("body[data-state=failed]")


def test_what_is_chosen_stands_in_the_address_and_goes_along(ui: str, tab: Any) -> None:
    browser.show(tab, f"{ui}d/kvstrata-fleet?{RANGE}")
    tab.locator("details.choice", has_text="Pool").locator("summary").click()
    tab.locator("details[open] label", has_text=POOL).click()
    tab.wait_for_url(f"**var-pool={POOL}**")
    assert (
        tab.locator("[data-panel='Agents'] .deeper").get_attribute("href").startswith("/d/kvstrata-nodes?var-pool=one&")
    )

    panels = browser.show(tab, f"{ui}d/kvstrata-fleet?{RANGE}&var-pool=another")
    states = {panel.title: panel.state for panel in panels}
    assert (states["Agents"], states["Used and capacity"]) == ("empty", "empty")

    tab.get_by_role("link", name="Tiers and paths", exact=True).click()
    tab.wait_for_url("**/d/kvstrata-tiers?**var-pool=another**")


def test_a_range_is_chosen_by_drawing_over_a_graph(ui: str, tab: Any) -> None:
    browser.show(tab, f"{ui}d/kvstrata-fleet?{RANGE}")
    box = tab.locator("[data-panel='Used and capacity'] .u-over").bounding_box()
    tab.mouse.move(box["x"] + 20, box["y"] + 20)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 120, box["y"] + 20, steps=4)
    tab.mouse.up()
    tab.wait_for_url("**from=1**to=1**")


def test_the_map_shows_each_node_with_its_tiers_and_what_moves(ui: str, tab: Any) -> None:
    tab.goto(f"{ui}map")
    node = tab.locator("[data-node=local]")
    node.locator(".tier").first.wait_for()

    assert node.locator(".tier .name").all_inner_texts() == ["dram", "nvme"]
    assert "of 32 MiB" in node.locator(".tier .label").first.inner_text()
    tab.wait_for_selector("[data-node=local] [data-flow=dram-nvme]", state="attached", timeout=60_000)


def test_the_tree_of_a_tenants_prefixes_and_the_life_of_a_session_are_shown(fleet: Fleet, tab: Any) -> None:
    options = ("--agent", str(fleet.socket), "--pool", POOL, "--model", "m", "--revision", "r", "--tenant", "me")
    with page.serving(fleet.prometheus, options) as address:
        tree = tab.locator("[data-tenant=me]")

        def has_branches() -> bool:
            """Engines have only begun where this test is the first of its process."""
            assert browser.problems(tab, browser.show(tab, f"{address}prefixes")) == []
            return bool(tree.locator(f"[data-run='{PROMPT}'] rect").count() > 3)

        until(has_branches)
        assert tree.get_attribute("data-agent") == f"{POOL}.local"
        assert tree.locator("text.length", has_text=f"{PROMPT * 16} tokens").count() > 3
        name = tree.locator(".session").first.text_content().strip()
        tree.locator(".session").first.click()
        tab.locator(".life tbody tr").first.wait_for()
        assert f"Session {name}" in tab.locator(".life h2").inner_text()
        assert "store" in tab.locator(".life table").inner_text()

        told = answer_text(address, f"/api/prefixes/0/session?name={name}") + answer_text(address, "/api/prefixes")
        assert "digest" not in told
        for path in ("/api/prefixes/1/session?name=x", "/api/prefixes/0/session"):
            assert answer(address, path).status == HTTPStatus.BAD_REQUEST


def test_an_agent_that_is_away_and_no_agent_at_all_are_said(fleet: Fleet, ui: str, tab: Any, tmp_path: Path) -> None:
    browser.show(tab, f"{ui}prefixes")
    assert "kvstrata ui --agent SOCKET" in tab.locator(".hint code").inner_text()

    options = ("--agent", str(tmp_path / "none"), "--pool", POOL, "--tenant", "me")
    with page.serving(fleet.prometheus, options) as address:
        (problem,) = browser.problems(tab, browser.show(tab, f"{address}prefixes"))
        assert str(tmp_path / "none") in problem


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0, "bytes", "0 B"),
        (1536, "bytes", "1.5 KiB"),
        (256 * 2**20, "bytes", "256 MiB"),
        (3 * 2**40, "binBps", "3 TiB/s"),
        (0.0000014, "s", "1.4 µs"),
        (0.012, "s", "12 ms"),
        (75, "s", "75 s"),
        (7_200, "s", "2 h"),
        (0.9234, "percentunit", "92.3 %"),
        (1_234_567, "short", "1.23M"),
        (12, "short", "12"),
        (1_000, "short", "1K"),
        (0.5, "cps", "0.5/s"),
    ],
)
def test_a_value_is_written_with_its_unit(shown: str, value: float, unit: str, numbers: dict[str, str]) -> None:
    assert numbers[f"{value:g} {unit}"] == shown


@pytest.fixture(scope="module")
def numbers(ui: str, chromium: Any) -> dict[str, str]:
    """What the page writes for each of the values above."""
    (mark,) = [m for m in test_a_value_is_written_with_its_unit.pytestmark if m.name == "parametrize"]  # type: ignore[attr-defined]
    with browser.tab(chromium) as opened:
        opened.goto(ui)
        ask = "async all => { const { text } = await import('/format.js'); return all.map(([v, u]) => text(v, u)); }"
        written = opened.evaluate(ask, mark.args[1])
    return {f"{value:g} {unit}": text for (value, unit, _), text in zip(mark.args[1], written, strict=True)}


def answer(address: str, path: str, method: str = "GET", body: str = "", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
    try:
        connection.request(method, path, body or None, headers={k.replace("_", "-"): v for k, v in headers.items()})
        found = connection.getresponse()
        found.read()
        return found
    finally:
        connection.close()


def answer_text(address: str, path: str) -> str:
    with urllib.request.urlopen(f"{address.rstrip('/')}{path}", timeout=20) as found:  # noqa: S310  Our own.
        return str(found.read().decode())


FORM = "application/x-www-form-urlencoded"


def test_with_a_token_nothing_is_shown_without_it(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with page.serving(fleet.prometheus, ("--token-file", str(tmp_path / "token"))) as link:
        for path in ("/", "/map", "/d/kvstrata-fleet", "/page.js", "/api/dashboards", "/api/fleet", "/nothing"):
            assert answer(link, path).status == HTTPStatus.UNAUTHORIZED, path
            assert answer(link, path, Authorization="Bearer wrong").status == HTTPStatus.UNAUTHORIZED, path
        assert answer(link, "/api/dashboards", Authorization=f"Bearer {TOKEN}").status == HTTPStatus.OK
        assert answer(link, "/healthz").status == HTTPStatus.OK

        parts = urlsplit(link)
        opened = answer(link, f"{parts.path}?{parts.query}")
        cookie = str(opened.headers["Set-Cookie"])
        assert (opened.status, TOKEN in cookie) == (HTTPStatus.SEE_OTHER, False)
        assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        assert answer(link, "/api/dashboards", Cookie=cookie.partition(";")[0]).status == HTTPStatus.OK
        again = answer(link, f"{parts.path}?{parts.query}")
        assert (again.status, again.headers["Set-Cookie"]) == (HTTPStatus.UNAUTHORIZED, None)

        assert answer(link, "/login", "POST", "token=wrong", Content_Type=FORM).status == HTTPStatus.UNAUTHORIZED
        given = answer(link, "/login", "POST", f"token={TOKEN}", Content_Type=FORM)
        assert (given.status, given.headers["Location"]) == (HTTPStatus.SEE_OTHER, "/")


def test_a_browser_logs_in_by_the_form(fleet: Fleet, tab: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with page.serving(fleet.prometheus, ("--token-file", str(tmp_path / "token"))) as link:
        tab.goto(link.partition("login")[0])
        tab.get_by_label("Token").fill(TOKEN)
        tab.get_by_role("button", name="Show").click()
        tab.get_by_role("link", name="Fleet", exact=True).wait_for()


def test_a_foreign_name_is_refused_and_no_origin_is_let_in(ui: str) -> None:
    assert answer(ui, "/api/dashboards", Host="evil.example").status == HTTPStatus.MISDIRECTED_REQUEST
    allowed = answer(ui, "/api/dashboards", Origin="http://evil.example")
    assert allowed.headers["Access-Control-Allow-Origin"] is None
    assert "frame-ancestors 'none'" in allowed.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/query?query=up", 404),
        ("/api/v1/admin/tsdb/snapshot", 404),
        ("/vendor/../../main.py", 404),
        ("/%2e%2e/main.py", 404),
        ("/api/dashboards/kvstrata-none", 404),
        ("/api/dashboards/kvstrata-fleet/panels/9999", 400),
        ("/api/dashboards/kvstrata-fleet/panels/1;x", 404),
        ("/api/dashboards/kvstrata-fleet/panels/2?from=x", 400),
        ("/api/dashboards/kvstrata-fleet/panels/2?points=100000", 400),
        ("/api/dashboards/kvstrata-fleet/panels/2?var-gpu_hour_price=up", 400),
    ],
)
def test_nothing_else_is_passed_on(ui: str, path: str, status: int) -> None:
    assert answer(ui, path).status == status
    assert answer(ui, path, "POST", "x=1", Content_Type=FORM).status in {404, 405}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--listen", "0.0.0.0:0"), "--listen 0.0.0.0: others can reach it, so --token-file is needed"),
        (("--listen", "9108"), "argument --listen: '9108': HOST:PORT wanted"),
        (("--prometheus", "ftp://x"), "--prometheus 'ftp://x': a URL is wanted"),
        (("--dashboards", "/nonexistent"), "--dashboards /nonexistent: no dashboard is there"),
        (("--token-file", "/nonexistent"), "--token-file /nonexistent"),
        (("--agent", "/x"), "--agent, --tenant and --pool belong together"),
        (("--scrape-interval-s", "0"), "seconds from 0.1 to 3600 wanted"),
    ],
)
def test_wrong_usage_says_what_is_wanted(
    options: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(page.PageError, match="ended with 2"), page.serving("127.0.0.1:9", options):
        pass
    assert said in capfd.readouterr().err
