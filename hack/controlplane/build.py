"""Builds one tool from its pinned Go module. The only place that runs the Go toolchain."""

import os
import shutil
import subprocess
from pathlib import Path

from controlplane.errors import BuildError
from controlplane.pins import BUILD_FLAGS, MODULES, Tool, linker_flags, pinned_version

BUILD_LIMIT_S = 1800.0
"""Far more than any build takes on one slow core; a download that stands still would last for ever."""
_TAIL_LINES = 15  # Enough for the first compile error and the reason of a failed download.


def go_build(tool: Tool, output: Path, modules: Path = MODULES) -> None:
    """Build `tool` at `output`; nothing is left there when it fails.

    Needs Go on PATH and, unless Go's caches are warm, a Go module proxy. Raises `BuildError`.
    """
    if shutil.which("go") is None:
        raise BuildError(f"{tool.name} is not cached and cannot be built: no `go` on PATH")
    flags = ("-ldflags", linker_flags(tool, pinned_version(tool, modules)))
    command = ("go", "build", *BUILD_FLAGS, *flags, "-o", str(output), tool.package)
    where = modules / tool.module
    try:
        done = subprocess.run(
            command,
            cwd=where,
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=BUILD_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        output.unlink(missing_ok=True)
        raise BuildError(
            f"`{' '.join(command)}` in {where} had not ended after {BUILD_LIMIT_S:.0f} s: is the Go module proxy slow?"
        ) from error
    if done.returncode != 0:
        output.unlink(missing_ok=True)
        tail = "\n".join(done.stderr.splitlines()[-_TAIL_LINES:])
        raise BuildError(f"`{' '.join(command)}` ended with {done.returncode}:\n{tail}")


def _environment() -> dict[str, str]:
    """Return an environment in which only the pinned modules and the installed toolchain count."""
    fixed = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    return {**os.environ, **fixed}
