"""What of a package goes where in an image. Pure."""

import re
from pathlib import PurePosixPath
from typing import Final

from images.catalog import PYTHON, SITE
from images.errors import ImageError

MERGED: Final = ("bin", "lib", "lib64", "sbin")
"""Folders that are links into /usr in every image, as Debian has them since bookworm."""

_LEFT_OUT: Final = re.compile(
    r"""
    usr/share/doc/(?!.*/copyright$)          # Licences stay.
    |usr/share/(man|info|locale|lintian|bug|doc-base|menu|bash-completion|zsh|gdb|gcc|apport|pixmaps)/
    |usr/share/base-files/
    |(usr/)?lib/systemd/
    |etc/(init\.d|default|logrotate\.d|cron\.d|binfmt\.d|update-motd\.d)/
    |var/log/
    # Modules of Python that need terminals, databases and services of old networks; nothing here imports them.
    |usr/lib/python3\.11/lib-dynload/(readline|_curses|_curses_panel|_dbm|_gdbm|nis|_sqlite3|ossaudiodev)\.
    """,
    re.VERBOSE,
)

_LEFT_OUT_OF_WHEELS: Final = re.compile(
    r"""
    nixl_ep_cu12/                            # Kernels of expert parallelism, for torch: 108 MB that nothing here calls.
    # Plugins for libraries that no wheel brings (GPUDirect Storage, DOCA, Infinia, libfabric, EFA), and benchmarks.
    |.*/libplugin_(GDS|GDS_MT|GPUNETIO|INFINIA|LIBFABRIC)\.so
    |.*/(libtelemetry_exporter_doca|libucx_perftest_\w+|libuct_ib_efa|libuct_ib_mlx5_gdp)\.so
    |numpy/(.*/)?tests/
    |.*\.pyi$
    """,
    re.VERBOSE,
)


def of_debian(name: str) -> str | None:
    """Path in the image of a package's file, relative to its root; None when it is left out."""
    path = _clean(name)
    first, _, rest = path.partition("/")
    if first in MERGED:
        path = f"usr/{path}" if rest else ""
    return None if not path or _LEFT_OUT.match(path) else path


def of_wheel(name: str) -> str | None:
    """Path in the image of a wheel's file; None for what no process uses, scripts and headers among it."""
    path = _clean(name)
    if _LEFT_OUT_OF_WHEELS.match(path):
        return None
    found = re.match(r"[^/]+\.data/([^/]+)/(.+)", path)
    if found is None:
        return f"{SITE}/{path}"
    kind, rest = found.groups()
    return {"purelib": f"{SITE}/{rest}", "platlib": f"{SITE}/{rest}", "data": f"usr/local/{rest}"}.get(kind)


def script(module: str, function: str) -> str:
    """Text of a console script."""
    return f"#!/usr/bin/{PYTHON}\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"


def _clean(name: str) -> str:
    path = PurePosixPath(name.removeprefix("./"))
    if path.is_absolute() or ".." in path.parts:
        raise ImageError(f"a package has a file outside of its root: {name}")
    return "" if str(path) == "." else str(path)
