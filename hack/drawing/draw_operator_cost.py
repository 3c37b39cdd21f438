"""Draws what one changed node costs, by the number of nodes: `draw_operator_cost.py NAME=LINE.json ... OUT.svg`.

Each LINE.json is the last line of a run of `python -m bench.operator`; NAME stands in the legend.
"""

import html
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

WIDTH, HEIGHT = 640, 300
COLORS: Final = ("#5794f2", "#73bf69", "#ff780a")
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 46, 40
_STYLE: Final = "font-family:sans-serif;font-size:12px;fill:#444"
Points = Sequence[tuple[int, float]]
"""Number of nodes, seconds of processor time."""


def points_of(line: Mapping[str, Mapping[str, float]]) -> list[tuple[int, float]]:
    """Orders and statuses together, by the number of nodes."""
    values, prefix = line["values"], "plan_cpu_s_"
    sizes = sorted(int(key.removeprefix(prefix)) for key in values if key.startswith(prefix))
    return [(n, values[f"plan_cpu_s_{n}"] + values[f"status_cpu_s_{n}"]) for n in sizes]


def drawing(lines: Mapping[str, Points]) -> str:
    """One line for each name; the number of nodes runs logarithmically."""
    sizes = sorted({n for points in lines.values() for n, _ in points})
    marks = ticks(max(value for points in lines.values() for _, value in points))
    span = math.log(sizes[-1] / sizes[0]) or 1.0

    def x(nodes: int) -> float:
        return _LEFT + math.log(nodes / sizes[0]) / span * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / marks[-1] * (HEIGHT - _TOP - _BOTTOM)

    out = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    out.append(f'<text x="{_LEFT}" y="18" style="{_STYLE}">CPU of the planner for one changed node</text>')
    for mark in marks:
        out.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#ddd"/>')
        out.append(
            f'<text x="{_LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end" style="{_STYLE}">{seconds(mark)}</text>'
        )
    for nodes in sizes:
        anchor = "start" if nodes == sizes[0] else "end" if nodes == sizes[-1] else "middle"
        label = f"{nodes:,} nodes"
        out.append(f'<text x="{x(nodes):.1f}" y="{HEIGHT - 16}" text-anchor="{anchor}" style="{_STYLE}">{label}</text>')
    for number, (name, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{x(n):.1f}" cy="{y(value):.1f}" r="3" fill="{color}"/>' for n, value in points]
        last = f"{html.escape(name)}: {seconds(points[-1][1])} at {points[-1][0]:,}"
        at = _LEFT + 280 * number
        out.append(f'<circle cx="{at + 5}" cy="33" r="4" fill="{color}"/>')
        out.append(f'<text x="{at + 14}" y="37" style="{_STYLE}">{last}</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(out) + "\n</svg>\n"


def seconds(value_s: float) -> str:
    """A time in three digits."""
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms")) if value_s * f >= 1), (1e6, "µs"))
    return f"{value_s * factor:.3g} {unit}" if value_s else "0 s"


def ticks(highest: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to at least `highest`."""
    rough = highest / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (1, 2, 2.5, 5, 10) if step * magnitude >= rough * 0.999) * magnitude
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def main() -> None:
    """Draw."""
    *named, path = sys.argv[1:]
    lines = {}
    for one in named:
        name, _, line = one.partition("=")
        lines[name] = points_of(json.loads(Path(line).read_text(encoding="utf-8")))
    Path(path).write_text(drawing(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
