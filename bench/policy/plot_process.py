"""Draws figures of bench.policy with matplotlib: `plot_process.py CELLS.json DIRECTORY`, PNG and SVG of each picture.

Runs in the environment `simulators` with that environment's packages only. `CELLS.json` is a list of objects: trace,
size_percent, peers (percent of hits by policy), ours (by hints), limit and base (the name of leaf-LRU among peers).
"""

import json
import re
import sys
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

GAP_POINTS_MIN: Final = 1.0
"""As in bench.policy: nearer than this to the limit no part of the way means anything."""
OURS: Final = {"none": "#1b7837", "trace": "#5aae61", "engine": "#a6dba0"}
LABELS: Final = {"none": "ours, no hints", "trace": "ours, hints of the trace", "engine": "ours, hints of engines"}
OTHERS: Final = (
    "#1f77b4",
    "#ff7f0e",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#17becf",
    "#bcbd22",
    "#d6a5a5",
    "#7f7f7f",
    "#aec7e8",
)
"""Colours of others; a policy of libcachesim has that of the one that was made from its description."""
DOTS_PER_INCH: Final = 130
LOW: Final = -0.6
"""Where the axis of the gap ends: what loses more is cut off there, with its figure."""
FORMATS: Final = ("png", "svg")


def hits_over_size(trace: str, cells: list[dict[str, Any]]) -> Figure:
    """Lines of all policies over the size of the cache."""
    figure, axes = plt.subplots(figsize=(8.5, 5.2), layout="constrained")
    sizes = [cell["size_percent"] for cell in cells]
    names = list(dict.fromkeys(peer for cell in cells for peer in cell["peers"]))
    colors = dict(zip(dict.fromkeys(map(_described, names)), cycle(OTHERS), strict=False))
    for name in names:
        known = [(cell["size_percent"], cell["peers"][name]) for cell in cells if name in cell["peers"]]
        is_base = name == cells[0]["base"]
        axes.plot(
            *zip(*known, strict=True), color="black" if is_base else colors[_described(name)],
            linewidth=1.8 if is_base else 0.9, linestyle=":" if name.startswith("libcachesim") else "-", label=name,
        )  # fmt: skip
    for hints, color in OURS.items():
        hits = [cell["ours"][hints] for cell in cells]
        axes.plot(sizes, hits, color=color, linewidth=2.4, marker="o", markersize=4, label=LABELS[hints])
    axes.plot(sizes, [cell["limit"] for cell in cells], color="#b2182b", linestyle="--", label="limit (Belady, bypass)")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size} %" for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set(xlabel="cache, of the different blocks of the trace", ylabel="blocks of unbroken prefixes found, %")
    axes.set_title(trace)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


def _described(name: str) -> str:
    return name.removeprefix("libcachesim ")


def gap_closed(cells: list[dict[str, Any]]) -> Figure:
    """Bars for each trace and size: the part of the way from leaf-LRU to the limit."""
    wide = [cell for cell in cells if cell["limit"] - cell["peers"][cell["base"]] >= GAP_POINTS_MIN]
    figure, axes = plt.subplots(figsize=(max(6.0, 1.25 * len(wide) + 2), 4.8), layout="constrained")
    shown = {"best of the others": "#878787"} | {LABELS[hints]: color for hints, color in OURS.items()}
    for place, (label, color) in enumerate(shown.items()):
        for at, cell in enumerate(wide):
            hits = {LABELS[hints]: percent for hints, percent in cell["ours"].items()}
            hits["best of the others"] = max(v for k, v in cell["peers"].items() if k != cell["base"])
            base = cell["peers"][cell["base"]]
            part = (hits[label] - base) / (cell["limit"] - base)
            x = at + 0.2 * (place - 1.5)
            axes.bar(x, max(part, LOW), 0.19, color=color, label=label if at == 0 else None)
            axes.text(x, max(part, LOW) + 0.015 if part > 0 else 0.015, f"{part:.2f}", ha="center", fontsize=6)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(1, color="#b2182b", linestyle="--", linewidth=0.8)
    names = [f"{re.split('[_.]', Path(cell['trace']).name)[0]}\n{cell['size_percent']} %" for cell in wide]
    axes.set_xticks(range(len(wide)), names, fontsize=8)
    axes.set_ylabel("part of the way from leaf-LRU (0) to the limit (1)")
    axes.set_title("Share of the gap closed")
    if wide:
        figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Print the path of each picture."""
    cells_path, directory = map(Path, sys.argv[1:])
    cells = json.loads(cells_path.read_text())
    directory.mkdir(parents=True, exist_ok=True)
    pictures = {"gap-closed": gap_closed(cells)}
    for trace in dict.fromkeys(cell["trace"] for cell in cells):
        name = re.sub(r"[^A-Za-z0-9]+", "-", trace.partition(".")[0]).strip("-").lower()
        pictures[f"hits-{name}"] = hits_over_size(trace, [cell for cell in cells if cell["trace"] == trace])
    for name, figure in pictures.items():
        for form in FORMATS:
            path = directory / f"{name}.{form}"
            figure.savefig(path, dpi=DOTS_PER_INCH)
            print(path)


if __name__ == "__main__":
    main()
