"""What all benchmarks share: facts of the machine, samples and their ratios, the table and the last line.

Ratios say how much better we are: ours / other for rates, other / ours for times; 1.0 is level. They are medians of
ratios of pairs that were measured one right after the other, because shared machines drift by tens of percent.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

REPEATS_MIN: Final = 5
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One quantity, measured several times; the i-th values of two samples of one run make a pair."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.values) >= REPEATS_MIN, f"{len(self.values)} repeats, {REPEATS_MIN} wanted"

    @property
    def spread(self) -> tuple[float, float, float]:
        """Least, median and greatest value."""
        return min(self.values), median(self.values), max(self.values)


def rate_ratio(ours: Sample, other: Sample | None) -> float | None:
    """How many times our rate is the other's; None when the other is absent."""
    if other is None:
        return None
    return median(o / p for o, p in zip(ours.values, other.values, strict=True))


def time_ratio(ours: Sample, other: Sample | None) -> float | None:
    """How many times the other's time is ours; None when the other is absent."""
    if other is None:
        return None
    return median(p / o for o, p in zip(ours.values, other.values, strict=True))


def beyond(ours: Sample, limit: Sample) -> float:
    """Median of how much longer ours takes than the limit, in the unit of the samples."""
    return median(o - p for o, p in zip(ours.values, limit.values, strict=True))


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one benchmark."""

    bench: str
    quick: bool
    versions: Mapping[str, str]
    """What was measured; a peer that could not be had says `absent: why`."""
    ratios: Mapping[str, float | None]
    """More is better, 1.0 is level; None when the peer was absent."""
    values: Mapping[str, float]

    def line(self, machine: Mapping[str, Any]) -> str:
        """Return the last line of the output: one JSON object."""
        return json.dumps(
            {
                "bench": self.bench,
                "quick": self.quick,
                "machine": dict(machine),
                "versions": dict(self.versions),
                "ratios": {k: None if v is None else round(v, 4) for k, v in self.ratios.items()},
                "values": {k: float(f"{v:.6g}") for k, v in self.values.items()},
            }
        )


def parser(doc: str | None, *, has_tiny: bool = False) -> argparse.ArgumentParser:
    """Command line of every benchmark; with `has_tiny` it knows sets that only show whether it works."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small sets and few repeats; well under a minute")
    if has_tiny:
        made.add_argument("--tiny", action="store_true", help="does it work at all? the figures mean nothing")
    made.add_argument("--json", type=Path, metavar="PATH", help="write the last line to PATH as well")
    return made


def publish(result: Result, path: Path | None) -> None:
    """Print the last line, and write it to `path` when there is one."""
    line = result.line(machine())
    if path is not None:
        path.write_text(line + "\n")
    print(line, flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain text in columns; the first column to the left, the others to the right."""
    lines = [tuple(header), *(tuple(r) for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def fit(line: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return "  ".join((line[0].ljust(widths[0]), *rest)).rstrip()

    return "\n".join((fit(lines[0]), "  ".join("-" * w for w in widths), *map(fit, lines[1:])))


def own_bytes() -> int:
    """Memory of this process alone, without what it shares with others, as the arenas of tiers."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024


def machine() -> dict[str, str | int | float]:
    """Facts of this machine that figures depend on."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field(Path("/proc/meminfo"), "MemTotal").split()[0]) * 1024 / GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _field(path: Path, name: str) -> str:
    lines = path.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "0 unknown")
