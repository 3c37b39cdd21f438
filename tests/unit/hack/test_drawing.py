"""Laws of drawn pictures: axes, and terminals."""

import struct
import xml.etree.ElementTree as ET
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing import draw_operator_cost
from drawing.draw_terminal import drawing

pytestmark = pytest.mark.unit


@given(st.floats(1e-9, 1e9))
def test_ticks_rise_from_zero_and_cover_the_highest_value(highest: float) -> None:
    marks = draw_operator_cost.ticks(highest)

    assert marks[0] == 0
    assert marks == sorted(set(marks))
    assert marks[-1] >= highest * 0.999
    assert 2 <= len(marks) <= 8


@pytest.mark.parametrize(("value_s", "shown"), [(0, "0 s"), (0.0000014, "1.4 µs"), (0.012, "12 ms"), (75, "75 s")])
def test_a_time_is_written_with_its_unit(value_s: float, shown: str) -> None:
    assert draw_operator_cost.seconds(value_s) == shown


def test_every_named_line_is_drawn_in_the_picture_of_the_operators_cost() -> None:
    drawn = ET.fromstring(draw_operator_cost.drawing({"a<b": [(10, 0.1), (100, 0.2)], "c": [(10, 0.3), (100, 0.4)]}))  # noqa: S314  Our own text.

    assert len([part for part in drawn if part.tag.endswith("polyline")]) == 2


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60), max_size=12))
def test_a_picture_of_a_terminal_has_every_line_that_was_printed_and_no_other(printed: list[str]) -> None:
    picture = ET.fromstring(drawing("\n".join(printed)))  # noqa: S314  Our own text.
    rows = [row for row in picture if row.tag.endswith("text")]

    assert [row.text for row in rows] == [line.rstrip() for line in printed if line.strip()]
    heights = [float(row.attrib["y"]) for row in rows]
    assert heights == sorted(set(heights))
    assert all(0 < y < float(picture.attrib["height"]) for y in heights)


def test_a_picture_keeps_its_size_and_its_common_colors() -> None:
    """Read by hand: signature, size, palette, and the pixels that zlib packed."""
    browser = pytest.importorskip("drawing.browser", reason="playwright is not installed")
    rgb = np.zeros((3, 5, 3), np.uint8)
    rgb[1, 2] = (250, 10, 30)

    png = browser.indexed_png(rgb)

    assert png[:16] == b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    assert struct.unpack(">II", png[16:24]) == (5, 3)
    palette = png[png.index(b"PLTE") + 4 :][:6]
    assert palette == bytes([0, 0, 0, 250, 10, 30])
    start = png.index(b"IDAT")
    rows = zlib.decompress(png[start + 4 : start + 4 + struct.unpack(">I", png[start - 4 : start])[0]])
    assert rows == bytes([0] * 6 + [0, 0, 0, 1, 0, 0] + [0] * 6)
