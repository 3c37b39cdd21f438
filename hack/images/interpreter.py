"""The images' own Python, run from where its packages were unpacked: no root, no chroot, on any x86-64 Linux.

It compiles the bytecode, so that what an image holds does not depend on the Python of this machine. Bytecode is the
same on every kind of machine, so the one for x86-64 compiles for all.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from images.catalog import AMD64, PYTHON
from images.errors import ImageError

_NOT_COMPILED: Final = "/dist-packages/kubernetes/(aio/)?client/(models|api)/(?!__init__)"
"""1,800 modules, 100 MB of bytecode: models and calls of single kinds, which the library loads on demand and kvstrata
never asks for. Without bytecode of the rest each process would start 0.3 s later."""
_TIMEOUT_S: Final = 900.0
_UMASK: Final = 0o022
"""Files of bytecode get it beside the modes of their sources; images would depend on whoever makes them."""


def compile_bytecode(python: Sequence[Path], root: Path, folders: Sequence[str]) -> None:
    """Compile what lies in `folders` of `root` with the interpreter of the layers `python`.

    It writes nothing else (-B): what it imports itself would be left with times and this machine's paths.
    The files never ask for the time of their sources: layers have no times, and a read-only root takes no newer ones.
    """
    where = [str(root / folder) for folder in folders if (root / folder).is_dir()]
    if not where:
        return
    options = ("-q", "-j1", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/", "-x", _NOT_COMPILED)
    done = _run(python, "-S", "-B", "-m", "compileall", *options, *where)
    # Packages carry templates and samples that are no Python of this version; a module of use that is broken shows
    # when it is imported, which the tests of images do.
    refused = [line for line in done.stdout.splitlines() if line.startswith("***")]
    if done.returncode and not refused:
        raise ImageError(f"bytecode was not compiled: {done.stderr.strip()[-400:]}")


def _run(layers: Sequence[Path], *arguments: str) -> "subprocess.CompletedProcess[str]":
    home = next(layer / "usr" for layer in layers if (layer / "usr" / "bin" / PYTHON).exists())
    loader = next(path for layer in layers if (path := layer / AMD64.libraries / AMD64.loader).exists())
    libraries = ":".join(str(layer / AMD64.libraries) for layer in layers)
    command = [str(loader), "--library-path", libraries, str(home / "bin" / PYTHON), *arguments]
    environment = {"PYTHONHOME": str(home), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        command, env=environment, umask=_UMASK, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
