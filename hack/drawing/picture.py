"""Runs the fleet for a minute or two and draws its dashboards: `python -m drawing.picture --out FOLDER`."""

import argparse
import tempfile
from pathlib import Path

from drawing import sample_run
from drawing.draw_dashboard import Span, draw_all


def main() -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of a page, and a picture, for each dashboard")
    parser.add_argument("--sessions", type=int, default=16, help="prefixes of 32 MiB; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="times that they are read; default: %(default)s")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        sample_run.started(Path(folder), print, given.sessions, given.rounds) as run,
    ):
        draw_all(run.server, Span(run.started_s, run.ended_s, sample_run.SCRAPE_S), given.out)
    print(f"{given.out}: {run.ended_s - run.started_s:.0f} s")


if __name__ == "__main__":
    main()
