"""`python -m release.emulated WHEEL`: runs the wheel for aarch64 on this x86-64 machine, in QEMU's user mode.

Debian's Python for aarch64 and the pinned wheels of the client are unpacked below a folder that is removed afterwards,
as in the image; nothing is installed and no kernel module is needed. It runs the command line, then the kernels' tests,
all of them: results are equal to the bit at every level. Speed means nothing there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from controlplane.cache import default_root
from images import contents, debian, unpack, wheels
from images.catalog import AMD64, ARM64, PYTHON
from images.errors import ImageError

ROOT: Final = Path(__file__).resolve().parents[2]
_TRY: Final = "opt/try"
"""Folder of the tests: below the emulator's root, whose folders hide those of this machine that have the same names."""
_TIMEOUT_S: Final = 3600.0
_TESTS: Final = (
    "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", f"/{_TRY}", "--noconftest", "-p", "no:cacheprovider",
    "--import-mode=importlib", "--hypothesis-profile=ci", "-W", "ignore", f"/{_TRY}/native",
)  # fmt: skip


class Emulated:
    """A root for aarch64 with one wheel in it, below `root`, which the caller removes."""

    def __init__(self, root: Path, wheel: Path) -> None:
        """Unpack everything; `ImageError` when it cannot be had."""
        self._root = root
        pins = debian.read_pins(ARM64)
        for group in ("system", "python"):
            contents.debian(root, group, debian.fetch(pins[group], machine=ARM64))
        for found in wheels.of_requirements(("client", "emulated"), ARM64):
            unpack.wheel(found.path, root)
        unpack.wheel(wheel, root)
        unpack.console_scripts(wheel, root)
        self._emulator = _emulator()
        self._again = root / _TRY / "python"
        self._make_tests(root / _TRY)

    def _make_tests(self, folder: Path) -> None:
        shutil.copytree(ROOT / "tests/unit/native", folder / "native")
        shutil.copytree(ROOT / "tests/support", folder / "support")
        # A test that starts another Python starts the emulator with it: this machine cannot run that Python by itself.
        command = f'{self._emulator} -L {self._root} {self._root}/usr/bin/{PYTHON} "$@"'
        self._again.write_text(f"#!/bin/sh\nexec {command}\n")
        self._again.chmod(0o755)
        (folder / "sitecustomize.py").write_text(f"import sys\n\nsys.executable = {str(self._again)!r}\n")

    def run(self, *arguments: str) -> int:
        """Run Python with these arguments; returns its exit status."""
        environment = {
            "PYTHONPATH": f"/{_TRY}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
            "PATH": "/usr/bin:/bin",
        }
        return subprocess.run(
            [str(self._again), *arguments], env=environment, cwd="/", check=False, timeout=_TIMEOUT_S
        ).returncode


def _emulator() -> Path:
    """Unpack QEMU into the cache."""
    pins = debian.read_pins(AMD64)["emulator"]
    root = default_root(os.environ) / "release" / f"emulator-{pins[0].sha256[:16]}"
    if not root.is_dir():
        making = root.with_name(f".{root.name}.{os.getpid()}")
        for path in debian.fetch(pins).values():
            unpack.debian(path, making)
        making.replace(root)
    return root / "usr/bin/qemu-aarch64-static"


def main() -> int:
    """Run all of it; 0 when everything passed."""
    parser = argparse.ArgumentParser(
        prog="python -m release.emulated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="the wheel for aarch64")
    given = parser.parse_args()
    if not given.wheel.name.endswith(f"_{ARM64.wheel}.whl") or not given.wheel.is_file():
        parser.error(f"{given.wheel} is no wheel for {ARM64.wheel}")
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="kvstrata-emulated-") as folder:
            emulated = Emulated(Path(folder), given.wheel)
            said = "import platform, kvstrata_native as n; print(platform.machine(), n.level)"
            failed = (
                emulated.run("-c", said) or emulated.run("/usr/local/bin/kvstrata", "version") or emulated.run(*_TESTS)
            )
    except ImageError as e:
        print(f"[release] {e}", file=sys.stderr)
        return 1
    print(f"[release] {'failed' if failed else 'passed'} after {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
