"""Laws of the drawn dashboard: numbers, axes, panels."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing.draw_terminal import drawing
from drawing.panel_svg import Frame, Line, bars, color_at, graph, stat, table
from drawing.panel_text import text, ticks

pytestmark = pytest.mark.unit

FRAME = Frame(width=400, height=220, start_s=0.0, end_s=60.0, unit="bytes", limits=((None, "green"), (1024.0, "red")))
values = st.floats(0, 1e15)
series = st.lists(values, min_size=1, max_size=20).map(
    lambda vs: Line("a", tuple(zip(range(len(vs)), vs, strict=True)))
)


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
        (0.9234, "percentunit", "92.3 %"),
        (1_234_567, "short", "1.23M"),
        (12, "short", "12"),
        (0.5, "cps", "0.5/s"),
        (math.nan, "bytes", "-"),
        (math.inf, "s", "-"),
    ],
)
def test_a_value_is_written_with_its_unit(value: float, unit: str, shown: str) -> None:
    assert text(value, unit) == shown


@given(values, st.sampled_from(["bytes", "binBps", "s", "percentunit", "short", "cps"]))
def test_a_written_value_is_short(value: float, unit: str) -> None:
    assert len(text(value, unit)) <= 22


@given(st.floats(1e-9, 1e18), st.sampled_from([10.0, 1024.0]))
def test_ticks_rise_from_zero_and_cover_the_highest_value(highest: float, base: float) -> None:
    marks = ticks(highest, base=base)

    assert marks[0] == 0
    assert marks == sorted(set(marks))
    assert marks[-1] >= highest * 0.999
    assert 2 <= len(marks) <= 8


def test_an_empty_axis_still_has_a_length() -> None:
    assert ticks(0) == [0.0, 1.0]


def numbers(svg: str) -> list[float]:
    points = re.findall(r'points="([^"]*)"', svg)
    return [float(number) for part in points for number in re.findall(r"-?[0-9.]+", part)]


@given(st.lists(series, min_size=1, max_size=9), st.booleans())
def test_a_graph_stays_inside_its_frame_and_is_well_formed(lines: list[Line], is_stacked: bool) -> None:  # noqa: FBT001
    drawn = graph(lines, FRAME, is_stacked=is_stacked)

    ET.fromstring(f"<div>{drawn}</div>")  # noqa: S314  Our own text.
    assert all(0 <= number <= 400 for number in numbers(drawn))


def test_names_cannot_break_the_page() -> None:
    drawn = graph([Line("<script>", ((0.0, 1.0), (1.0, 2.0)))], FRAME, is_stacked=False)

    assert "<script>" not in drawn
    assert "&lt;script&gt;" in drawn


@pytest.mark.parametrize(("value", "color"), [(0, "#73bf69"), (1023, "#73bf69"), (1024, "#f2495c"), (9e9, "#f2495c")])
def test_the_highest_threshold_that_is_reached_gives_the_colour(value: float, color: str) -> None:
    assert color_at(value, FRAME.limits) == color


def test_what_has_no_data_says_so() -> None:
    for drawn in (stat([], FRAME), bars([], FRAME), graph([], FRAME, is_stacked=True)):
        assert "no data" in drawn


def test_a_bar_never_leaves_its_track() -> None:
    frame = Frame(400, 200, 0, 1, "percentunit", ((None, "green"),))

    assert "width:100.0%" in bars([Line("full", ((0.0, 1.7),))], frame)


def test_more_series_than_a_legend_holds_are_counted() -> None:
    drawn = graph([Line(f"s{i}", ((0.0, 1.0),)) for i in range(11)], FRAME, is_stacked=False)

    assert "s7 and 3 more" in drawn


def test_a_table_has_its_columns_and_rows() -> None:
    assert table(["node", "used"], [["n1", "1 KiB"]]) == (
        "<table><tr><th>node</th><th>used</th></tr><tr><td>n1</td><td>1 KiB</td></tr></table>"
    )


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60), max_size=12))
def test_a_picture_of_a_terminal_has_every_line_that_was_printed_and_no_other(printed: list[str]) -> None:
    picture = ET.fromstring(drawing("\n".join(printed)))  # noqa: S314  Our own text.
    rows = [row for row in picture if row.tag.endswith("text")]

    assert [row.text for row in rows] == [line.rstrip() for line in printed if line.strip()]
    heights = [float(row.attrib["y"]) for row in rows]
    assert heights == sorted(set(heights))
    assert all(0 < y < float(picture.attrib["height"]) for y in heights)
