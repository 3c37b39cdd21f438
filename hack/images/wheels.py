"""Wheels: those that hash-pinned requirement files name, and the one of this tree."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.cache import default_root, sha256_of
from images.catalog import AMD64, Machine
from images.errors import ImageError

ROOT: Final = Path(__file__).resolve().parents[2]
_GLIBC_MINOR: Final = 36
"""Debian 12 has glibc 2.36, so wheels of every manylinux up to 2.36 run."""
_OLDER: Final = ("manylinux2014", "manylinux2010", "manylinux1")
_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel and what a bill of materials says of it."""

    name: str
    version: str
    path: Path
    sha256: str


def of_requirements(names: Iterable[str], machine: Machine = AMD64) -> list[Wheel]:
    """Wheels of `requirements/NAME.txt` for each name, by name, for Debian 12's Python on `machine`; `ImageError`.

    pip compares every one with the hashes of its file, those in the cache too.
    """
    found: dict[str, Wheel] = {}
    for name in names:
        requirements = ROOT / "requirements" / f"{name}.txt"
        suffix = "" if machine == AMD64 else f"-{machine.name}"
        folder = default_root(os.environ) / "images" / "wheels" / (sha256_of(requirements)[:16] + suffix)
        folder.mkdir(parents=True, exist_ok=True)
        _pip_download(requirements, folder, machine)
        for wheel in map(described, sorted(folder.glob("*.whl"))):
            found[wheel.name] = wheel
    return sorted(found.values(), key=lambda wheel: wheel.name)


def _platforms(machine: Machine) -> list[str]:
    glibc = [f"manylinux_2_{minor}" for minor in range(_GLIBC_MINOR, 4, -1)]
    return [f"{platform}_{machine.wheel}" for platform in (*glibc, *_OLDER)] + ["any"]


def _pip_download(requirements: Path, folder: Path, machine: Machine) -> None:
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
    options += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
    options += [f"--platform={platform}" for platform in _platforms(machine)]
    where = ("--find-links", str(folder), "--dest", str(folder), "--requirement", str(requirements))
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", *options, *where])


def of_this_tree(out: Path) -> Wheel:
    """Build the wheel of this tree in `out`; `ImageError` when it has no native kernels."""
    uv = Path(sys.executable).with_name("uv")
    options = ("--wheel", "--quiet", "--no-build-isolation", "--python", sys.executable, "-o", str(out))
    _run([str(uv), "build", *options, str(ROOT)])
    (path,) = out.glob("*.whl")
    if path.stem.endswith("-none-any"):
        raise ImageError("the wheel has no native kernels: a C compiler and Python's headers are needed")
    return described(path)


def described(path: Path) -> Wheel:
    """Name and version by the file's name, as the format of wheels demands it."""
    name, version, *_ = path.stem.split("-")
    return Wheel(re.sub(r"[-_.]+", "-", name).lower(), version, path, sha256_of(path))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        raise ImageError(f"{' '.join(command[:4])}: {done.stderr.strip()[-600:]}")
