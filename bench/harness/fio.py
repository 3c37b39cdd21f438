"""The limit of `bench.nvme`: fio on the same file system, O_DIRECT, 16 transfers of one block at a time.

It writes over a file that it laid out before: no allocation, no names, nothing is synced. `dsync` is the same with each
write durable when it returns, which is what our records promise.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DEPTH: Final = 16
TIMEOUT_S: Final = 120.0


class FioError(Exception):
    """fio is not there or failed; says why."""


@dataclass(frozen=True, slots=True)
class Fio:
    """fio in one directory."""

    directory: Path
    program: str

    @classmethod
    def found(cls, directory: Path) -> "Fio":
        """Look for the program. Raises `FioError`."""
        program = shutil.which("fio")
        if program is None:
            raise FioError("fio is not installed; sudo apt-get install -y fio")
        return cls(directory, program)

    def version(self) -> str:
        """What it calls itself."""
        done = subprocess.run((self.program, "--version"), capture_output=True, text=True, check=True)
        return done.stdout.strip().removeprefix("fio-")

    def rates(self, block_bytes: int, size_bytes: int) -> tuple[float, float, float]:
        """Bytes per second of one pass over `size_bytes` each: write, durable write, read. Raises `FioError`.

        One run for all three: starting fio takes longer than a pass.
        """
        command = [
            self.program, f"--filename={self.directory / 'fio'}", f"--bs={block_bytes}", f"--size={size_bytes}",
            "--direct=1", f"--iodepth={DEPTH}", "--ioengine=io_uring", "--fallocate=none", "--output-format=json",
            "--thread", "--name=write", "--rw=write",
            "--name=durable", "--stonewall", "--rw=write", "--sync=dsync",
            "--name=read", "--stonewall", "--rw=read",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise FioError(" ".join(done.stderr.split())[-400:])
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        write, durable, read = (job[way] for job, way in zip(jobs, ("write", "write", "read"), strict=True))
        return _rate(write, size_bytes), _rate(durable, size_bytes), _rate(read, size_bytes)


def _rate(told: dict[str, Any], size_bytes: int) -> float:
    if told["io_bytes"] != size_bytes:
        raise FioError(f"{told['io_bytes']} of {size_bytes} B moved")
    return float(told["bw_bytes"])
