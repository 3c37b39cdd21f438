"""Measure on your hardware what could not be measured where kvstrata is written, and make a report to send back.

It finds out what this machine has (GPUs, NVMe, RDMA, CXL, NUMA nodes, cores), runs what docs/unmeasured.md asks for on
such a machine, one after the other, and writes `report.md`, `report.json` and a log of each step into a folder. Nothing
is sent anywhere. What this machine lacks is told and left out. Give `--directory` on the disk that is to be measured.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
SYS: Final = Path("/sys")
CORES_WANTED: Final = 4


@dataclass(frozen=True, slots=True)
class Machine:
    """What measurements depend on."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    memory_gib: float
    numa_nodes: int
    memory_only_nodes: int
    """NUMA nodes without a processor: CXL memory, as the kernel shows it."""
    gpus: tuple[str, ...]
    nvme: tuple[str, ...]
    rdma: tuple[str, ...]
    dax: tuple[str, ...]
    kernel: str
    python: str
    commit: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of all steps."""

    directory: Path | None = None
    """On the disk that is to be measured."""
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement, and what it needs."""

    name: str
    shows: str
    lacks: Callable[[Machine, Asked], str]
    """What the machine lacks for it; empty when nothing."""
    command: Callable[[Asked], Sequence[str]]
    limit_s: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step."""

    name: str
    shows: str
    state: str
    """`passed`, `failed`, or `left out`."""
    why: str = ""
    took_s: float = 0.0
    figures: Any = None
    """The one JSON object of its last line, where there is one."""
    log: str = ""


def machine(sys_root: Path = SYS) -> Machine:
    """Look at this machine."""
    cpu = _lines(Path("/proc/cpuinfo"))
    flags = next((line.partition(":")[2].split() for line in cpu if line.startswith(("flags", "Features"))), [])
    nodes = sorted((sys_root / "devices/system/node").glob("node[0-9]*"))
    memory_kib = next((line.split()[1] for line in _lines(Path("/proc/meminfo")) if line.startswith("MemTotal")), "0")
    return Machine(
        cpu=next((line.partition(":")[2].strip() for line in cpu if line.startswith("model name")), platform.machine()),
        flags=tuple(sorted(flag for flag in flags if flag.startswith(("avx", "amx", "asimd", "sve")))),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(int(memory_kib) / (1 << 20), 1),
        numa_nodes=len(nodes),
        memory_only_nodes=sum(not "".join(_lines(node / "cpulist")).strip() for node in nodes),
        gpus=tuple(line for line in _said("nvidia-smi", "-L").splitlines() if line.startswith("GPU")),
        nvme=_names(sys_root / "class/nvme"),
        rdma=_names(sys_root / "class/infiniband"),
        dax=_names(sys_root / "bus/dax/devices"),
        kernel=platform.release(),
        python=platform.python_version(),
        commit=_said("git", "rev-parse", "--short", "HEAD").strip() or "unknown",
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _gpu(found: Machine, _: Asked) -> str:
    return "" if found.gpus else "no GPU: nvidia-smi shows none"


def _disk(_: Machine, asked: Asked) -> str:
    return "" if asked.directory else "no --directory on the disk that is to be measured"


def _rdma(found: Machine, _: Asked) -> str:
    return "" if found.rdma else "no RDMA device in /sys/class/infiniband"


def _cxl(found: Machine, _: Asked) -> str:
    return "" if found.memory_only_nodes or found.dax else "no NUMA node without a processor and no dax device"


def _nodes(found: Machine, _: Asked) -> str:
    return "" if found.numa_nodes - found.memory_only_nodes > 1 else "one NUMA node with processors"


def _cores(found: Machine, _: Asked) -> str:
    return "" if found.cores >= CORES_WANTED else f"{found.cores} cores, {CORES_WANTED} wanted"


def _nothing(_: Machine, __: Asked) -> str:
    return ""


def bench(name: str, *more: str, at_directory: bool = False) -> Callable[[Asked], Sequence[str]]:
    """The command of a benchmark."""

    def command(asked: Asked) -> Sequence[str]:
        where = ("--directory", str(asked.directory)) if at_directory else ()
        return (sys.executable, "-m", f"bench.{name}", *more, *where, *(("--quick",) if asked.is_quick else ()))

    return command


def tests(*paths: str) -> Callable[[Asked], Sequence[str]]:
    """The command of some tests."""
    return lambda _: (sys.executable, "-m", "pytest", "-q", *paths)


STEPS: Final = (
    Step("gpu-tests", "HBM tier, paged KV, Triton kernels, connectors on the device", _gpu,
         lambda _: ("make", "test-gpu"), 1800),
    Step("gpu-rates", "HBM tier, pages and packing against copies", _gpu, bench("hbm"), 1800),
    Step("gpu-first-token", "time to first token with a cached prefix", _gpu, bench("first_token"), 1800),
    Step("local", "the data path of one node on more than two cores", _cores, bench("local", "--peers", "none"), 1800),
    Step("layers", "a prefix read layer by layer", _cores, bench("layers"), 900),
    Step("remote", "blocks from node to node on more than two cores", _cores, bench("remote"), 1800),
    Step("handover", "prefill on one node, decode on another", _cores, bench("handover"), 900),
    Step("rdma", "node to node by RDMA", _rdma, tests("tests/system/test_remote.py"), 900),
    Step("cxl", "tiers of memory on nodes without a processor and on dax devices", _cxl,
         tests("tests/contract", "tests/unit/node", "tests/unit/agent/backends"), 1800),
    Step("numa", "memory on several NUMA nodes", _nodes,
         tests("tests/contract", "tests/unit/node", "tests/unit/agent/backends"), 1800),
    Step("nvme", "the NVMe tier against fio", _disk, bench("nvme", at_directory=True), 3600),
    Step("encryption", "what encryption costs the disk", _disk, bench("encryption", at_directory=True), 1800),
    Step("kernels", "all kernels of this processor against NumPy", _nothing, tests("tests/unit/native"), 900),
    Step("codec", "copies, digests and codecs of one core", _nothing, bench("codec"), 1800),
)  # fmt: skip


def carry_out(step: Step, found: Machine, asked: Asked, folder: Path) -> Outcome:
    """Run one step, or say what it lacks. Its output goes to a log in `folder`."""
    if lacking := step.lacks(found, asked):
        return Outcome(step.name, step.shows, "left out", lacking)
    log, begin_s = folder / f"{step.name}.log", time.monotonic()
    command = step.command(asked)
    with log.open("w") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=step.limit_s, check=False
            )
            why = f"exit status {done.returncode}" if done.returncode else ""
        except OSError as e:
            why = str(e)
        except subprocess.TimeoutExpired:
            why = f"ended after {step.limit_s} s"
    took_s = round(time.monotonic() - begin_s, 1)
    return Outcome(step.name, step.shows, "failed" if why else "passed", why, took_s, _figures(log), log.name)


def _figures(log: Path) -> Any:
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    try:
        return json.loads(last) if last.startswith("{") else None
    except ValueError:
        return None


def report(found: Machine, outcomes: Iterable[Outcome], when: str) -> str:
    """The report as text: the machine, what ran, what was left out and why, and the figures."""
    facts = "\n".join(f"| {name} | {_text(value)} |" for name, value in asdict(found).items())
    rows = "\n".join(f"| {o.name} | {o.shows} | {o.state} | {o.why} | {o.took_s:.0f} |" for o in outcomes)
    figures = "\n".join(
        f"\n### {o.name}\n\n```json\n{json.dumps(o.figures, indent=1)}\n```" for o in outcomes if o.figures is not None
    )
    return (
        f"# kvstrata on this hardware, {when}\n\n| machine | |\n|---|---|\n{facts}\n\n"
        f"| step | what it shows | outcome | why | seconds |\n|---|---|---|---|---|\n{rows}\n\n## Figures\n{figures}\n"
    )


def _text(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 when a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=f"of: {', '.join(names)}")
    parser.add_argument("--directory", type=Path, help="an empty folder on the disk that is to be measured")
    parser.add_argument("--quick", action="store_true", help="small sets: does everything work here?")
    parser.add_argument("--out", type=Path, help="folder for the report; default build/hardware/TIME")
    parser.add_argument("--list", action="store_true", help="say what would run here, and run nothing")
    given = parser.parse_args(arguments)
    if given.directory is not None and not given.directory.is_dir():
        parser.error(f"--directory {given.directory}: no such folder")
    asked = Asked(given.directory, given.quick)
    found, when = machine(), datetime.now(UTC).strftime("%Y-%m-%dT%H%MZ")
    steps = [step for step in STEPS if not given.only or step.name in given.only]
    if given.list:
        for step in steps:
            print(f"{step.name:16} {step.lacks(found, asked) or 'would run'}: {step.shows}")
        return 0
    folder = given.out or ROOT / "build" / "hardware" / when
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for number, step in enumerate(steps, 1):
        print(f"[{number} of {len(steps)}] {step.name}: {step.shows}", flush=True)
        outcome = carry_out(step, found, asked, folder)
        print(f"    {outcome.state} {outcome.why} {outcome.took_s:.0f} s", flush=True)
        outcomes.append(outcome)
        # After each: a machine that is taken away, or hangs, leaves what was measured so far.
        (folder / "report.json").write_text(
            json.dumps({"machine": asdict(found), "steps": [asdict(o) for o in outcomes]}, indent=1) + "\n"
        )
        (folder / "report.md").write_text(report(found, outcomes, when))
    print(f"{folder / 'report.md'}: read it, and attach the folder to an issue if you want to share it")
    return int(any(outcome.state == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
