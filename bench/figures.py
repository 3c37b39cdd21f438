"""README's figures: tables of what benchmarks wrote into `bench/results`, rounded, with commit and machine of each.

`--write` puts them into README.md, `--check` fails where they differ; both are part of hack/generate.py. A benchmark
without a kept result has no table, so no figure stands there that no file has.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = ROOT / "README.md"
RESULTS: Final = ROOT / "bench/results"
BEGIN: Final = "<!-- made by bench/figures.py: do not edit -->"
END: Final = "<!-- end of what is made -->"
ABSENT: Final = "-"
"""A peer that could not be had in that run."""
WAYS: Final = ("write", "read")
_MEDIA: Final = ("", "nvme_")
"""Begin of a key for memory that lasts, and for NVMe."""
_NODES: Final = (100, 1_000, 5_000)
"""Sizes of fleets that the operator is measured with."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of a result."""

    key: str
    scale: float = 1.0
    """From the unit of the file to that of the column."""
    digits: int = 2

    def text(self, result: Mapping[str, Any]) -> str:
        """The figure as it is written. Raises `KeyError` for one that the file has not."""
        found = {**result["ratios"], **result["values"]}[self.key]
        return ABSENT if found is None else f"{found * self.scale:,.{self.digits}f}"


@dataclass(frozen=True, slots=True)
class Table:
    """Figures of one benchmark."""

    bench: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def _rate(work: str) -> tuple[Cell, ...]:
    peers = ("memcpy", "lmcache", "mooncake", "redis")
    return (Cell(f"{work}_bytes_per_s", 1e-9, 1), *(Cell(f"{work}_vs_{peer}") for peer in peers))


def _disk(way: str, size: str) -> tuple[Cell, ...]:
    peers = ("fio_dsync" if way == "write" else "fio", "nixl", "lmcache", "vllm")
    return (
        Cell(f"kvstrata_{way}_{size}_bytes_per_s", 1e-9),
        *(Cell(f"{way}_{size}_vs_{peer}") for peer in peers),
    )


def _net(size: str) -> tuple[Cell, ...]:
    return (Cell(f"kvstrata_{size}_bytes_per_s", 1e-9), *(Cell(f"read_{size}_vs_{p}") for p in ("nixl", "mooncake")))


def _codec(name: str) -> tuple[Cell, ...]:
    return (Cell(f"{name}_encode_vs_memcpy"), Cell(f"{name}_decode_vs_memcpy"), Cell(f"{name}_ratio"))


def _l2(way: str, size: str) -> tuple[Cell, ...]:
    end = "" if size == "2MiB" else f"_{size}"
    return (
        Cell(f"l2_{way}{end}_per_s", 1e-9),
        *(Cell(f"l2_{way}_vs_{peer}{end}") for peer in ("fs_native", "resp", "memcpy")),
    )


def _mb(key: str) -> Cell:
    return Cell(f"{key}_bytes_per_second", 1e-6, 0)


def _ms(*keys: str) -> tuple[Cell, ...]:
    return tuple(Cell(f"{key}_s", 1e3, 0) for key in keys)


TABLES: Final = (
    Table(
        "local",
        "Data path of one node, every load verified; GB/s, and how many times that of others (medians of pairs)",
        ("", "GB/s", "memcpy", "LMCache LocalCPU", "Mooncake", "Redis values"),
        tuple(
            (f"{work} {size}", _rate(f"{work}_{size.replace(' ', '')}"))
            for size in ("256 KiB", "2 MiB", "16 MiB")
            for work in ("put", "get")
        ),
    ),
    Table(
        "nvme",
        "The NVMe tier, every write durable and every read verified; GB/s, and how many times that of others",
        ("", "GB/s", "fio (writes: synced)", "NIXL", "LMCache's files", "vLLM's files"),
        tuple((f"{way} {size}", _disk(way, size.replace(" ", ""))) for size in ("256 KiB", "2 MiB") for way in WAYS),
    ),
    Table(
        "remote",
        "From one node's memory to another's, TCP on one machine, verified; GB/s, and how many times that of others",
        ("", "GB/s", "raw NIXL", "Mooncake"),
        tuple((size, _net(size.replace(" ", ""))) for size in ("256 KiB", "2 MiB")),
    ),
    Table(
        "codec",
        "Codecs on one core",
        ("times memcpy", "in", "out", "times smaller"),
        (
            ("lossless", _codec("lossless")),
            ("Auto, 20 permille of error", _codec("auto_20")),
            ("Auto, 100 permille", _codec("auto_100")),
            ("archives, 100 permille", _codec("archive_100")),
            ("fp8", _codec("fp8")),
            ("int8", _codec("int8")),
            ("zstd", _codec("zstd")),
        ),
    ),
    Table(
        "policy",
        "Hits on recorded workloads: part of the way from leaf-LRU (0) to who knows the future (1), in the mean",
        ("", "closed"),
        (
            ("kvstrata without hints", (Cell("gap_closed_nohints_mean"),)),
            ("kvstrata with hints that the recordings carry", (Cell("gap_closed_tracehints_mean"),)),
            ("kvstrata with hints of engines that know their sessions", (Cell("gap_closed_enginehints_mean"),)),
            *(
                (peer, (Cell(f"gap_closed_{peer}_mean"),))
                for peer in ("token-type-aware", "workload-aware", "T-LRU", "ARC", "GDSF", "W-TinyLFU")
            ),
        ),
    ),
    Table(
        "policy.live",
        "Recordings through a real agent with one memory tier of 1 or 5 % of their blocks, at 100 times their pace or "
        "as fast as it can: hits beside those of the replay by the same times",
        ("points", "below the replay at most", "above it at most"),
        tuple(
            (eviction, (Cell(f"{eviction}_points_below_at_most"), Cell(f"{eviction}_points_above_at_most")))
            for eviction in ("ReuseAware", "LeafLRU")
        ),
    ),
    Table(
        "tiering",
        "First tokens of simulated engines on recorded workloads, six loads each: times the best of no tiers, "
        "write-through, an LRU cascade and fixed times to live",
        ("less is better", "kvstrata", "everything in HBM"),
        (
            (
                "99th percentile, mean of loads",
                (Cell("p99_ttft_vs_best_peer"), Cell("limit_p99_ttft_vs_best_peer")),
            ),
            ("mean time, mean of loads", (Cell("mean_ttft_vs_best_peer"), Cell("limit_mean_ttft_vs_best_peer"))),
        ),
    ),
    Table(
        "first_token",
        "Time to first token on a GPU, Llama 3.1 8B's shape in transformers, the prefix in the agent's host memory",
        ("ms", "computed", "from kvstrata", "one pinned copy of the KV"),
        tuple(
            (f"behind {n:,} tokens", _ms(f"{n}_computed", f"{n}_whole", f"{n}_limit")) for n in (4_096, 16_384, 32_768)
        ),
    ),
    Table(
        "weights",
        "Weights of a model, staged (verified, synced) and read by a second pod",
        ("MB/s", "kvstrata", "compared with"),
        (
            ("staged from behind an emulated link; the source alone", (_mb("first_pod_link"), _mb("source_link"))),
            (
                "staged from S3 on the same cores; pulled and synced, not verified",
                (_mb("first_pod_s3"), _mb("pull_s3")),
            ),
            ("staged from memory; copied and synced, not verified", (_mb("first_pod_file"), _mb("pull_file"))),
            ("read by a second pod; fio", (_mb("second_pod_read"), _mb("fio"))),
            ("mapped by a second pod; safetensors' own load", (_mb("second_pod_mmap"), _mb("safetensors"))),
        ),
    ),
    Table(
        "startup",
        "An agent's start over a million blocks of its last run, which was killed",
        ("", "in memory that lasts", "on NVMe"),
        (
            ("until all are entered, s", tuple(Cell(f"{at}agent_restart_s_per_million", 1, 1) for at in _MEDIA)),
            ("processor, s", tuple(Cell(f"{at}restart_cpu_s_per_million", 1, 1) for at in _MEDIA)),
            (
                "memory for a block, the interpreter's included, B",
                tuple(Cell(f"{at}agent_bytes_per_block", 1, 0) for at in _MEDIA),
            ),
        ),
    ),
    Table(
        "directory",
        "The directory on one redis-server: locations in a second, times the least script that stores or finds them, "
        "and llm-d's layout, both by redis-benchmark",
        ("", "least script", "llm-d's layout"),
        tuple((work, (Cell(f"{work}_vs_evalsha"), Cell(f"{work}_vs_llmd"))) for work in ("publish", "lookup")),
    ),
    Table(
        "isolation",
        "What isolation and traces cost: the rate with them, times that without, blocks of 2 MiB",
        ("", "put", "get", "lookup"),
        tuple(
            (label, tuple(Cell(f"{work}_2MiB_{side}_vs_none") for work in ("put", "get", "lookup")))
            for label, side in (
                ("quotas of 65 tenants", "tenant"),
                ("a trust domain, with its audit", "domain"),
                ("every request traced", "traced"),
                ("one in a hundred traced", "sampled"),
            )
        ),
    ),
    Table(
        "l2",
        "LMCache's own benchmark of L2 adapters on ours, every byte verified; GB/s, and how many times that of others",
        ("", "GB/s", "fs_native in memory", "resp (Redis)", "memcpy"),
        tuple(
            (f"{way} {size}", _l2(way, size.replace(" ", "")))
            for size in ("256 KiB", "2 MiB")
            for way in ("store", "load")
        ),
    ),
    Table(
        "operator",
        "The operator on an API server of its own, from the pool that is posted to all nodes that are ready, and later",
        ("", *(f"{nodes:,} nodes" for nodes in _NODES)),
        tuple(
            (label, tuple(Cell(f"{key}_{nodes}", scale, digits) for nodes in _NODES))
            for label, key, scale, digits in (
                ("all nodes ready, s", "all_ready_s", 1.0, 1),
                ("the same writes alone, 16 at a time, s", "raw_s", 1.0, 1),
                ("a changed label until its KVPoolNode is seen, p99, ms", "change_p99_s", 1e3, 0),
                ("restart to synced, s", "restart_s", 1.0, 1),
                ("failover with a Lease of 5 s, s", "failover_s", 1.0, 1),
                ("memory, MB", "rss_bytes", 1e-6, 0),
            )
        ),
    ),
    Table(
        "pressure",
        "Three engines over 120 % of what two tiers hold, both squeezed again and again; every block compared",
        ("", "in all"),
        (
            ("minutes", (Cell("seconds", 1 / 60, 0),)),
            ("blocks compared, million", (Cell("compared_blocks", 1e-6, 1),)),
            ("of them wrong", (Cell("wrong_blocks", 1, 0),)),
            ("`acquire`, p50, ms", (Cell("acquire_p50_ms", 1, 1),)),
            ("`acquire`, p99, ms", (Cell("acquire_p99_ms", 1, 0),)),
            ("agent's loop held at most, ms", (Cell("loop_held_ms_at_most", 1, 0),)),
            ("growth of its memory, MiB an hour", (Cell("growth_mib_per_hour", 1, 1),)),
        ),
    ),
    Table(
        "plan",
        "What plans are off by, beside agents and engines that ran, and queues as theory has them",
        ("", "off by"),
        (
            ("hits of pools on recorded workloads, points, at most", (Cell("hit_ratio_error_points"),)),
            ("the same in the mean", (Cell("hit_ratio_error_points_mean"),)),
            ("first tokens of a transformer, %, mean and nine quantiles", (Cell("ttft_mape", 100, 1),)),
            ("the same by the rates of another trace", (Cell("ttft_mape_rates_of_before", 100, 1),)),
            ("mean wait of M/D/1, %, at most", (Cell("md1_error", 100, 1),)),
        ),
    ),
    Table(
        "offload",
        "What a block's work costs more through the offload interface",
        ("%", "2 MiB", "512 KiB"),
        (("reference, of the kernels alone", (Cell("reference_cost", 100, 1), Cell("reference_cost_512Ki", 100, 1))),),
    ),
)


def block(results: Path = RESULTS) -> str:
    """Every table that has a result, between the two marks."""
    parts = [BEGIN]
    for table in TABLES:
        path = results / f"{table.bench}.json"
        if path.exists():
            parts += ["", *_lines(table, json.loads(path.read_text()), path.name)]
    return "\n".join([*parts, "", END])


def _lines(table: Table, result: Mapping[str, Any], name: str) -> list[str]:
    found = result["machine"]
    where = f"{found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB, load {found['load_1min']}"
    rest = "---|" + "--:|" * (len(table.columns) - 1)
    return [
        f"{table.about} ({result['taken'][:10]}, {where}, [{result['commit']}](bench/results/{name})):",
        "",
        f"| {' | '.join(table.columns)} |",
        f"|{rest}",
        *(f"| {label} | {' | '.join(cell.text(result) for cell in cells)} |" for label, cells in table.rows),
    ]


def replaced(text: str, made: str) -> str:
    """`text` with what stands between the marks, marks included, as `made`."""
    return text[: text.index(BEGIN)] + made + text[text.index(END) + len(END) :]


def save(line: str, commit: str, results: Path = RESULTS) -> Path:
    """Keep the last line of a benchmark that ran on a commit just now. Raises `ValueError` for a short run."""
    result = json.loads(line)
    if result["quick"]:
        raise ValueError(f"{result['bench']}: figures of a quick run are not kept")
    path = results / f"{result['bench']}.json"
    kept = {"taken": f"{datetime.now(UTC):%FT%TZ}", "commit": commit, **result}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return path


def clean_commit() -> str:
    """The commit that this checkout is. Raises `ValueError` when it is none; kept results do not count as a change."""
    changed = [line[3:] for line in _git("status", "--porcelain").splitlines()]
    foreign = [path for path in changed if not path.startswith("bench/results/")]
    if foreign:
        raise ValueError(
            f"--save: {foreign[0]} and {len(foreign) - 1} more are not committed, so no commit has this code"
        )
    return _git("rev-parse", "--short=10", "HEAD").strip()


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check README.md."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="fail where README.md differs")
    mode.add_argument("--write", action="store_true", help="bring README.md up to date")
    given = parser.parse_args(argv)
    before = README.read_text()
    after = replaced(before, block())
    if given.write:
        README.write_text(after)
    elif after != before:
        sys.stderr.write("README.md: figures differ from bench/results\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
