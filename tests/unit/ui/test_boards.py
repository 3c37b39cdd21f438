"""Laws of what a request can make of a dashboard's expressions."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.errors import InvalidInputError
from kvstrata_ui import boards
from kvstrata_ui.boards import Span

pytestmark = pytest.mark.unit

DASHBOARDS = boards.read_all(Path(__file__).resolve().parents[3] / "dashboards")
FLEET = DASHBOARDS["kvstrata-fleet"]
HOUR = Span(0.0, 3_600.0, 15.0, 200)
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
"""A string of PromQL between its quotes."""


def unquoted(literal: str) -> str:
    """What PromQL reads in a string of which backslashes are the only escapes."""
    return re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), literal)


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=5))
def test_values_stay_inside_their_string_and_match_themselves_alone(values: list[str]) -> None:
    filled = boards.filled('up{pool=~"$pool"}', boards.chosen(FLEET, {"pool": values}), 60, 60)
    if boards.ALL in values:
        return

    inside = STRING.fullmatch(filled.removeprefix("up{pool=~").removesuffix("}"))
    assert inside is not None
    regex = re.compile(unquoted(inside[1]), re.DOTALL)
    assert all(regex.fullmatch(value) for value in values)
    assert not regex.fullmatch("".join(values) + "!")


def test_all_and_nothing_chosen_are_everything() -> None:
    assert boards.chosen(FLEET, {})["pool"] == ".*"
    assert boards.chosen(FLEET, {"pool": ["$__all"]})["pool"] == ".*"
    assert boards.chosen(FLEET, {"unknown": ["x"]}) == boards.chosen(FLEET, {})


@pytest.mark.parametrize("price", ["1) or vector(1", "", "-1", "1e9", "up", "1.", "\u0661"])
def test_a_price_is_a_number_or_refused(price: str) -> None:
    with pytest.raises(InvalidInputError, match="gpu_hour_price"):
        boards.chosen(FLEET, {"gpu_hour_price": [price]})
    assert boards.chosen(FLEET, {"gpu_hour_price": ["2.50"]})["gpu_hour_price"] == "2.50"


def test_too_many_or_too_long_values_are_refused() -> None:
    for values in (["x"] * (boards.VALUES_MAX + 1), ["x" * (boards.VALUE_CHARS_MAX + 1)]):
        with pytest.raises(InvalidInputError, match="pool"):
            boards.chosen(FLEET, {"pool": values})


def test_a_kind_of_variable_that_is_not_known_is_refused() -> None:
    board = {"templating": {"list": [{"name": "x", "type": "interval"}]}}

    with pytest.raises(InvalidInputError, match="variable x: type interval"):
        boards.chosen(board, {})


@pytest.mark.parametrize("uid", sorted(DASHBOARDS))
def test_every_expression_of_every_dashboard_is_filled_as_a_whole(uid: str) -> None:
    board = DASHBOARDS[uid]
    values = boards.chosen(board, {})
    panels = [panel["id"] for panel in board["panels"] if panel["type"] != "row"]
    asks = [ask for panel in panels for ask in boards.panel_asks(board, panel, values, HOUR)]

    assert len(asks) >= len(panels)
    for ask in [*asks, *boards.marks_asked(board, values, HOUR)]:
        assert "$" not in ask.expr
    for asked in boards.variable_queries(board).values():
        assert "$" not in boards.filled(asked.series, values, 60, 60)


def test_a_panel_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="panel 9999"):
        boards.panel_asks(FLEET, 9999, {}, HOUR)
    with pytest.raises(InvalidInputError, match="panel 1:"):  # A row.
        boards.panel_asks(FLEET, 1, {}, HOUR)


@pytest.mark.parametrize(
    ("start", "end", "points", "field"),
    [
        ("now", "now", 10, "from now to now"),
        ("now-1h", "now-2h", 10, "from now-1h"),
        ("now-400d", "now", 10, "days can be shown"),
        ("yesterday", "now", 10, "from 'yesterday'"),
        ("now-1h", "1e9", 10, "to '1e9'"),
        ("now-1h", "now", 0, "points 0"),
        ("now-1h", "now", 1_001, "points 1001"),
    ],
)
def test_a_time_that_cannot_be_shown_is_refused(start: str, end: str, points: int, field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        boards.span(start, end, 1e9, 15.0, points)


@given(st.floats(1, boards.RANGE_MAX_S), st.integers(1, boards.POINTS_MAX), st.floats(0.1, 300))
def test_no_span_asks_for_more_points_than_it_may_nor_finer_than_scrapes(
    range_s: float, points: int, scrape_s: float
) -> None:
    over = Span(1e9, 1e9 + range_s, scrape_s, points)
    start_s, end_s = over.aligned()

    assert over.step_s >= scrape_s
    assert over.rate_interval_s >= 4 * scrape_s
    assert (end_s - start_s) / over.step_s <= points + 1
    assert over.start_s - over.step_s < start_s <= over.start_s


def test_milliseconds_and_relative_times_are_read_as_grafana_writes_them() -> None:
    over = boards.span("999996400000", "now", 1e9, 15.0, 200)

    assert (over.start_s, over.end_s) == (999_996_400.0, 1e9)
    assert boards.span("now-90m", "now-30m", 1e9, 15.0, 200).start_s == 1e9 - 5_400


def test_a_legend_names_labels_or_all_of_them() -> None:
    labels = {"__name__": "up", "tier": "dram", "node": "n1"}

    assert boards.legend_of("{{node}} in {{ tier }}{{absent}}", labels) == "n1 in dram"
    assert boards.legend_of("", labels) == "node=n1, tier=dram"


def test_marks_are_unbroken_runs_above_zero() -> None:
    samples = [(0.0, 1.0), (10.0, 2.0), (20.0, 0.0), (30.0, 1.0), (60.0, 1.0), (70.0, 1.0)]

    assert list(boards.marks(samples, 10.0)) == [(0.0, 10.0), (30.0, 30.0), (60.0, 70.0)]
    assert list(boards.marks([], 10.0)) == []
