"""Draws what was printed in a terminal: `draw_terminal.py CAPTURE.txt ... --out FOLDER` makes an SVG of each.

Every line of a picture is a line of its file, in full and in order; what begins with `$ ` is drawn as a command.
"""

import argparse
import html
from pathlib import Path
from typing import Final

_CHARACTER_PX: Final = 7.8
"""Width of a monospaced character of 13 px; `textLength` holds other fonts to it, so that columns stay columns."""
_LINE_PX: Final = 18
_MARGIN_PX: Final = 14
_COMMAND, _ANSWER, _GROUND = "#7ee787", "#e6edf3", "#0d1117"
_STYLE: Final = "font-family:DejaVu Sans Mono,Menlo,Consolas,monospace;font-size:13px;white-space:pre"


def drawing(printed: str) -> str:
    """Draw all lines."""
    lines = [line.rstrip() for line in printed.expandtabs().rstrip().splitlines()]
    width = round(max(map(len, lines), default=0) * _CHARACTER_PX + 2 * _MARGIN_PX)
    height = len(lines) * _LINE_PX + 2 * _MARGIN_PX
    rows = (_row(number, line) for number, line in enumerate(lines, start=1) if line)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    ground = f'<rect width="{width}" height="{height}" rx="6" fill="{_GROUND}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{ground}\n' + "\n".join(rows) + "\n</svg>\n"


def _row(number: int, line: str) -> str:
    color = _COMMAND if line.startswith("$ ") else _ANSWER
    at = f'x="{_MARGIN_PX}" y="{_MARGIN_PX + number * _LINE_PX - 5}" textLength="{len(line) * _CHARACTER_PX:.1f}"'
    return f'<text {at} fill="{color}" xml:space="preserve" style="{_STYLE}">{html.escape(line)}</text>'


def main() -> None:
    """Draw each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("captures", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for capture in given.captures:
        path = given.out / f"{capture.stem}.svg"
        path.write_text(drawing(capture.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
