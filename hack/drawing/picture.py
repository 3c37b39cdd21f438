"""Runs the fleet for a minute or two and draws its dashboard: `python -m drawing.picture --html P [--png P]`."""

import argparse
import json
import tempfile
from pathlib import Path

from drawing import sample_run
from drawing.dashboard_queries import first_rows
from drawing.draw_dashboard import ROOT, Drawing, Span, page_height_px, screenshot


def main() -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dashboard", type=Path, default=ROOT / "dashboards" / "kv-fleet.json")
    parser.add_argument("--html", type=Path, required=True)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--sessions", type=int, default=16, help="prefixes of 32 MiB; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="times that they are read; default: %(default)s")
    parser.add_argument("--rows", type=int, default=99, help="only the first rows of the dashboard")
    given = parser.parse_args()
    dashboard = first_rows(json.loads(given.dashboard.read_text(encoding="utf-8")), given.rows)
    with (
        tempfile.TemporaryDirectory() as folder,
        sample_run.started(Path(folder), print, given.sessions, given.rounds) as run,
    ):
        span = Span(run.started_s, run.ended_s, sample_run.SCRAPE_S)
        given.html.write_text(Drawing(dashboard, run.server, span).page(), encoding="utf-8")
        print(f"{given.html}: {run.ended_s - run.started_s:.0f} s")
    if given.png and not screenshot(given.html, given.png, page_height_px(dashboard)):
        print("no picture: chromium is not installed")


if __name__ == "__main__":
    main()
