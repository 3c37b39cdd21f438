"""Compiles the native kernels: for a wheel, and beside their sources for an editable install.

As a script it compiles them beside their sources when these are newer. Where there is no C compiler ($CC, default
cc), or no headers of Python, the kernels run in Python (`kvstrata_native.python`): that is said, and is no error.
For another machine, $CC is a compiler for it, $KVSTRATA_PYTHON_HEADERS has the folders of its Python's headers, and
$KVSTRATA_WHEEL_PLATFORM the platform in the wheel's name; then a wheel without kernels is an error.
"""

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

PACKAGE: Final = Path("agent/kvstrata_native")
LIBRARY: Final = "_kernels.abi3.so"
HEADERS: Final = "KVSTRATA_PYTHON_HEADERS"
PLATFORM: Final = "KVSTRATA_WHEEL_PLATFORM"
_OF_PYTHON: Final = "module"
"""What the sources begin with that include Python's headers."""
PYTHON_ABI: Final = (3, 11)
"""First Python whose stable ABI has buffers; one library serves all from it on."""

# Nothing here asks for the building machine's instructions: each file says what it is for, and the processor at hand
# is asked when the module is loaded. Results are the same to the bit everywhere, so no fused multiply-add either.
# Nobody asks for floating-point traps, and compilers that keep them exact make no vectors of choices.
_FLAGS: Final = (
    "-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math",
    "-Wall", "-Wextra", "-Werror=incompatible-pointer-types",
)  # fmt: skip


def wheel_tag() -> str:
    """Python, ABI and platform of what is compiled here, or for what $KVSTRATA_WHEEL_PLATFORM names."""
    platform = os.environ.get(PLATFORM) or sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"cp{PYTHON_ABI[0]}{PYTHON_ABI[1]}-abi3-{platform}"


def _headers() -> list[str]:
    return (os.environ.get(HEADERS) or sysconfig.get_path("include")).split(os.pathsep)


def compile_kernels(sources: Path, library: Path) -> str | None:
    """Make `library`; None, or why it could not be made."""
    limited = f"-DPy_LIMITED_API=0x{PYTHON_ABI[0]:02X}{PYTHON_ABI[1]:02X}0000"
    return _compile([limited, *(f"-I{folder}" for folder in _headers())], sorted(sources.glob("*.c")), library)


def compile_offload(sources: Path, library: Path, *options: str) -> str | None:
    """Make a library of the offload reference that needs no Python; None, or why it could not be made.

    `options` are the compiler's, such as -D for macros of `offload_reference.c`.
    """
    files = [path for path in sorted(sources.glob("*.c")) if not path.name.startswith(_OF_PYTHON)]
    return _compile([*options], files, library)


def _compile(options: list[str], sources: list[Path], library: Path) -> str | None:
    making = library.with_name(f".{library.name}.{os.getpid()}")
    command = (
        *shlex.split(os.environ.get("CC") or "cc"),
        *_FLAGS,
        *options,
        *map(str, sources),
        "-ldl",  # Of its own before glibc 2.34.
        "-o",
        str(making),
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as e:
        return f"{command[0]}: {e.strerror}"
    if done.returncode != 0:
        making.unlink(missing_ok=True)
        return next((line for line in done.stderr.splitlines() if "error" in line), f"{command[0]} failed")
    making.replace(library)  # In one go: a process that has the old one mapped keeps it.
    return None


def main(arguments: list[str] | None = None) -> int:
    """Compile beside the sources what is out of date there: 0. With --offload, the reference alone: 0, or 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--offload", type=Path, metavar="LIBRARY", help="make the offload reference a library of its own"
    )
    parser.add_argument("-D", dest="macros", action="append", default=[], metavar="MACRO", help="macro for it")
    given = parser.parse_args(arguments)
    sources = Path(__file__).resolve().parents[1] / PACKAGE
    if given.offload is not None:
        failure = compile_offload(sources, given.offload, *(f"-D{macro}" for macro in given.macros))
        if failure is not None:
            print(failure, file=sys.stderr)
        return int(failure is not None)
    library = sources / LIBRARY
    newest_s = max(path.stat().st_mtime for path in (Path(__file__), *sources.glob("*.[ch]")))
    if library.exists() and library.stat().st_mtime >= newest_s:
        return 0
    failure = compile_kernels(sources, library)
    if failure is not None:
        library.unlink(missing_ok=True)  # An old one may disagree with the Python beside it.
        print(f"native kernels are left out: {failure}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
