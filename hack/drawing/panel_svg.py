"""Draws one panel as HTML with inline SVG: numbers, bars, lines, stacks, tables. Pure."""

import html
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from drawing.panel_text import text, ticks

COLORS: Final = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#8ab8ff", "#ff9830", "#e02f44", "#56a64b")
_NAMED: Final = {"green": "#73bf69", "yellow": "#f2cc0c", "orange": "#ff9830", "red": "#f2495c"}
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 8, 20
_WIDE_PX: Final = 280
"""Narrower panels have room for one time only."""
_LEGEND_MAX: Final = 8
"""Series in a legend; a picture has no scroll bar."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series with the name that the legend gives it."""

    name: str
    points: tuple[tuple[float, float], ...]
    """Second of the epoch, value."""

    @property
    def last(self) -> float:
        """Newest value."""
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a drawing may use."""

    width: int
    height: int
    start_s: float
    end_s: float
    unit: str
    limits: tuple[tuple[float | None, str], ...]
    """Thresholds from low to high: value (None: from the bottom), colour."""


def color_at(value: float, limits: Sequence[tuple[float | None, str]]) -> str:
    """Colour of the highest threshold that the value reaches."""
    reached = [name for limit, name in limits if limit is None or value >= limit]
    return _NAMED.get(reached[-1], reached[-1]) if reached else "#ccccdc"


def stat(lines: Sequence[Line], frame: Frame) -> str:
    """One big number."""
    if not lines:
        return '<div class="empty">no data</div>'
    value = lines[0].last
    return (
        f'<div class="stat" style="color:{color_at(value, frame.limits)}">{html.escape(text(value, frame.unit))}</div>'
    )


def bars(lines: Sequence[Line], frame: Frame) -> str:
    """One horizontal bar for each series."""
    if not lines:
        return '<div class="empty">no data</div>'
    longest = 1.0 if frame.unit == "percentunit" else max(line.last for line in lines) or 1.0
    return "".join(_bar(line, line.last / longest, frame) for line in lines)


def _bar(line: Line, share: float, frame: Frame) -> str:
    color = color_at(line.last, frame.limits)
    filled = f'<span class="fill" style="width:{min(100.0, share * 100):.1f}%;background:{color}"></span>'
    shown = f'<span class="value" style="color:{color}">{html.escape(text(line.last, frame.unit))}</span>'
    name = html.escape(line.name)
    return f'<div class="bar"><span class="name">{name}</span><span class="track">{filled}</span>{shown}</div>'


def graph(lines: Sequence[Line], frame: Frame, *, is_stacked: bool) -> str:
    """Lines over time, or areas on top of each other, with axes, thresholds and a legend."""
    if not lines:
        return '<div class="empty">no data</div>'
    rows = math.ceil(min(len(lines), _LEGEND_MAX) / _legend_columns(len(lines), frame))
    height = frame.height - 17 * rows - 4
    highest = _highest(lines, is_stacked=is_stacked)
    marks = ticks(highest, base=1024 if frame.unit in {"bytes", "binBps"} else 10)
    axes = _Axes(frame, height, marks[-1])
    drawn = _stacked(lines, axes) if is_stacked else "".join(_path(ln, axes, i) for i, ln in enumerate(lines))
    body = _grid(axes, marks) + _thresholds(axes) + drawn
    svg = f'<svg width="{frame.width}" height="{height}" viewBox="0 0 {frame.width} {height}">{body}</svg>'
    return svg + _legend(lines, frame)


@dataclass(frozen=True, slots=True)
class _Axes:
    frame: Frame
    height: int
    highest: float

    def x(self, at_s: float) -> float:
        span_s = max(1e-9, self.frame.end_s - self.frame.start_s)
        return _LEFT + (at_s - self.frame.start_s) / span_s * (self.frame.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        inner = self.height - _TOP - _BOTTOM
        return _TOP + inner * (1 - min(1.0, value / self.highest))


def _highest(lines: Sequence[Line], *, is_stacked: bool) -> float:
    if not is_stacked:
        return max(value for line in lines for _, value in line.points)
    sums: dict[float, float] = {}
    for line in lines:
        for at_s, value in line.points:
            sums[at_s] = sums.get(at_s, 0.0) + value
    return max(sums.values())


def _grid(axes: _Axes, marks: Sequence[float]) -> str:
    frame, out = axes.frame, []
    for mark in marks:
        y = axes.y(mark)
        out.append(f'<line x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="tick end">{html.escape(text(mark, frame.unit))}</text>'
        )
    for part in (0.0, 1 / 3, 2 / 3, 1.0) if frame.width >= _WIDE_PX else (1.0,):
        at_s = frame.start_s + part * (frame.end_s - frame.start_s)
        anchor = "start" if part == 0 else "end" if part == 1 else "middle"
        label = time.strftime("%H:%M:%S", time.gmtime(at_s))
        out.append(f'<text x="{axes.x(at_s):.1f}" y="{axes.height - 5}" class="tick {anchor}">{label}</text>')
    return "".join(out)


def _thresholds(axes: _Axes) -> str:
    out = []
    for value, name in axes.frame.limits:
        if value is not None and value <= axes.highest:
            y, color = axes.y(value), _NAMED.get(name, name)
            x = axes.frame.width - _RIGHT
            out.append(f'<line x1="{_LEFT}" x2="{x}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" class="limit"/>')
    return "".join(out)


def _path(line: Line, axes: _Axes, number: int) -> str:
    color = COLORS[number % len(COLORS)]
    if len(line.points) == 1:
        ((at_s, value),) = line.points
        return f'<circle cx="{axes.x(at_s):.1f}" cy="{axes.y(value):.1f}" r="2" fill="{color}"/>'
    points = " ".join(f"{axes.x(at_s):.1f},{axes.y(value):.1f}" for at_s, value in line.points)
    return f'<polyline points="{points}" stroke="{color}" class="line"/>'


def _stacked(lines: Sequence[Line], axes: _Axes) -> str:
    """Areas from the bottom up; a series without a value at a moment counts as 0 there."""
    moments = sorted({at_s for line in lines for at_s, _ in line.points})
    floor = dict.fromkeys(moments, 0.0)
    out = []
    for number, line in enumerate(lines):
        values = dict(line.points)
        ceiling = {at_s: floor[at_s] + values.get(at_s, 0.0) for at_s in moments}
        upper = [f"{axes.x(t):.1f},{axes.y(ceiling[t]):.1f}" for t in moments]
        lower = [f"{axes.x(t):.1f},{axes.y(floor[t]):.1f}" for t in reversed(moments)]
        color = COLORS[number % len(COLORS)]
        out.append(f'<polygon points="{" ".join(upper + lower)}" fill="{color}" stroke="{color}" class="area"/>')
        floor = ceiling
    return "".join(out)


def _legend(lines: Sequence[Line], frame: Frame) -> str:
    rows = []
    for number, line in enumerate(lines[:_LEGEND_MAX]):
        mark = f'<span class="mark" style="background:{COLORS[number % len(COLORS)]}"></span>'
        more = f" and {len(lines) - _LEGEND_MAX} more" if number == _LEGEND_MAX - 1 and len(lines) > _LEGEND_MAX else ""
        last = text(line.last, frame.unit)
        most = f"max {text(max(v for _, v in line.points), frame.unit)}" if frame.width >= _WIDE_PX else ""
        name = html.escape(line.name + more)
        rows.append(
            f'<div class="key">{mark}<span class="name">{name}</span><span>{last}</span><span>{most}</span></div>'
        )
    columns = _legend_columns(len(lines), frame)
    return f'<div class="legend" style="grid-template-columns:repeat({columns},1fr)">{"".join(rows)}</div>'


def _legend_columns(count: int, frame: Frame) -> int:
    """Long legends stand in two columns, so that the lines keep most of the panel."""
    return 2 if count > 3 and frame.width >= _WIDE_PX else 1


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows of cells that are texts already."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
