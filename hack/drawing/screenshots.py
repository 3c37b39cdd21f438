"""Lets the scripted hour happen and takes pictures of every dashboard, the map, the prefixes and the command line.

`make screenshots`.

Fails when a page cannot be drawn, a panel shows an error or has no data, or a picture is too large for the tree. Needs
`tests` on PYTHONPATH, where the hour is.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from hour.script import told

from demo.world import NODES, POOL
from drawing import browser, page, sample_run, terminal
from drawing.dashboard_queries import read_all
from drawing.prometheus_server import Server
from kvstrata import PrefixCache

ROOT: Final = Path(__file__).resolve().parents[2]
OUT: Final = ROOT / "docs" / "img"
PICTURE_BYTES_MAX: Final = 150_000
ALL_BYTES_MAX: Final = 1_500_000
_MARGIN_S: Final = 5.0
"""Drawn before the run, and waited for behind it."""
_PROMPTS: Final = 16
"""Of a picture: 344 MiB, more than memory holds."""
_STEM_BLOCKS: Final = 24
"""What the prompts of a picture share, of 64."""


def pages(run: sample_run.Run) -> dict[str, str]:
    """Path of each page by the name of its picture; dashboards show all of the time until now."""
    start_ms, end_ms = (round(1000 * s) for s in (run.started_s - _MARGIN_S, time.time()))
    boards = {uid.removeprefix("kvstrata-"): f"d/{uid}" for uid in read_all(ROOT / "dashboards")}
    times = f"?from={start_ms}&to={end_ms}&refresh="
    return {"map": "map", "prefixes": "prefixes"} | {name: path + times for name, path in boards.items()}


def take(address: str, paths: dict[str, str], terminals: dict[str, str], out: Path) -> list[str]:
    """Take the pictures, of pages and of terminals as SVG; what is wrong with them."""
    wrong: list[str] = []
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.png"):
        old.unlink()
    with browser.start() as chromium, browser.tab(chromium) as tab:
        for name, path in paths.items():
            panels = browser.show(tab, address + path)
            found = browser.problems(tab, panels)
            empty = [panel.title for panel in panels if panel.state == "empty"]
            wrong += [f"{name}: {problem}" for problem in [*found, *(f"{title}: no data" for title in empty)]]
            browser.save(tab, out / f"{name}.png")
        with browser.tab(chromium) as plain:  # The other one obeys the page's policy, and would leave styles out.
            for name, svg in terminals.items():
                terminal.save(plain, svg, out / f"{name}.png")
    return wrong + too_large(out)


def too_large(out: Path) -> list[str]:
    """Pictures that are too large, and all of them together."""
    sizes = {path.name: path.stat().st_size for path in sorted(out.glob("*.png"))}
    wrong = [
        f"{name} has {size} bytes, limit {PICTURE_BYTES_MAX}"
        for name, size in sizes.items()
        if size > PICTURE_BYTES_MAX
    ]
    total = sum(sizes.values())
    print(f"{len(sizes)} pictures, {total} bytes")
    return wrong + ([f"all pictures have {total} bytes, limit {ALL_BYTES_MAX}"] if total > ALL_BYTES_MAX else [])


def metadata_of(server: Server) -> str:
    """`host:port` of the metadata service, whose metrics Prometheus scrapes from there; empty without one."""
    found = server.query("kvstrata_metadata_info")
    return found[0].labels["instance"] if found else ""


def go_on(run: sample_run.Run) -> None:
    """Engines of one tenant go on behind the hour, with prompts that branch."""
    world = run.world
    content = np.random.default_rng(7).integers(0, 256, (sample_run.HELPING, sample_run.LAYOUT.block_bytes), np.uint8)
    prompts = {f"agent-{n}": prompt(n) for n in range(_PROMPTS)}
    with world.client("alpha", NODES[0], sample_run.LAYOUT) as client:
        for name, tokens in prompts.items():
            client.open_session(name)
            PrefixCache(client).store(tokens, content, session=name)
    with world.client("alpha", NODES[1], sample_run.LAYOUT) as client:
        for tokens in list(prompts.values())[-2:]:
            PrefixCache(client).load(tokens)
    time.sleep(_MARGIN_S)


def prompt(number: int) -> "npt.NDArray[np.uint32]":
    """Tokens of 64 blocks: a stem that every second one shares, and what is its own."""
    block, stem = sample_run.LAYOUT.block_tokens, 1_000_000 * (1 + number % 2)
    own = 10_000_000 + 100_000 * number
    return np.concatenate(
        [
            np.arange(stem, stem + _STEM_BLOCKS * block, dtype=np.uint32),
            np.arange(own, own + (sample_run.HELPING - _STEM_BLOCKS) * block, dtype=np.uint32),
        ]
    )


def options_of(run: sample_run.Run) -> tuple[str, ...]:
    """How the page finds the metadata service, and the agents with tokens of both tenants."""
    layout = sample_run.LAYOUT
    options = ["--scrape-interval-s", f"{sample_run.SCRAPE_S:g}", "--metadata", metadata_of(run.server)]
    options += ["--pool", POOL, "--model", layout.model, "--revision", layout.revision]
    options += [f"--agent={run.world.runner.socket(node)}" for node in NODES]
    return (*options, *(f"--tenant={tenant}={run.world.token(tenant)}" for tenant in ("alpha", "beta")))


def main() -> int:
    """Run and take the pictures; 1 when something is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder, whose pictures are replaced; default: %(default)s"
    )
    given = parser.parse_args()
    try:
        browser.find()
    except browser.NoBrowserError as e:
        print(e, file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory() as folder,
        told(Path(folder), print) as hour,
        page.serving(hour.run.server.address, options_of(hour.run)) as address,
    ):
        go_on(hour.run)
        terminals = terminal.pictures(hour.run.world.cluster.kubectl_command, f"http://{hour.run.server.address}")
        wrong = take(address, pages(hour.run), dict(terminals), given.out)
    for problem in wrong:
        print(f"wrong: {problem}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
