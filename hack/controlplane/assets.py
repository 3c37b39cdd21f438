"""Finds the binaries of the control plane, per tool: KUBEBUILDER_ASSETS, PATH, a release, our own build.

`KUBEBUILDER_ASSETS` is a deliberate choice and is taken as it is. A binary on PATH is there by chance and counts
only when it is of the pinned minor. What remains is downloaded where the network allows, or else built, once, into the
cache. Standard library only: setup runs it before anything is installed.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from controlplane.build import go_build
from controlplane.cache import BinaryCache, default_root
from controlplane.errors import BuildError
from controlplane.pins import TOOLS, Tool, parse_version, pinned_version
from controlplane.releases import download
from controlplane.supervision import snapshot

Builder = Callable[[Tool, Path], None]
"""Builds a tool at a path or raises `BuildError`."""

Release = Callable[[Tool, Path], bool]
"""Puts a released tool at a path; False when there is none, or none that can be had here."""

_VERSION_TIMEOUT_S = 10.0  # A healthy binary answers in well under one second.


def find_tool(name: str) -> Path:
    """Return the path of one tool, building it when it must be."""
    return find_tools((name,))[name]


def find_tools(
    names: Iterable[str],
    *,
    env: Mapping[str, str] | None = None,
    cache: BinaryCache | None = None,
    build: Builder = go_build,
    release: Release = download,
) -> dict[str, Path]:
    """Return the path of each named tool, building what is nowhere to be found.

    Raises `BuildError`, and `KeyError` for a name that is no tool of ours.
    """
    env = os.environ if env is None else env
    cache = cache or BinaryCache(default_root(env) / "controlplane")
    tools = [TOOLS[name] for name in names]
    # Checking and hashing release the interpreter lock, so threads make the warm case short.
    with ThreadPoolExecutor() as pool:
        found = dict(zip(tools, pool.map(lambda t: find_given(t, env) or cache.verified(t), tools), strict=True))
    return {t.name: path or _make_once(t, cache, build, release) for t, path in found.items()}


def missing_tools(names: Iterable[str], env: Mapping[str, str] | None = None) -> list[str]:
    """Return those of the named tools that `find_tools` would have to download or build."""
    env = os.environ if env is None else env
    cache = BinaryCache(default_root(env) / "controlplane")
    tools = [TOOLS[name] for name in names]
    with ThreadPoolExecutor() as pool:
        there = list(pool.map(lambda t: cache.path(t).exists() or find_given(t, env) is not None, tools))
    return [tool.name for tool, is_there in zip(tools, there, strict=True) if not is_there]


def find_given(tool: Tool, env: Mapping[str, str]) -> Path | None:
    """Return what the environment offers for `tool`, or None."""
    if folder := env.get("KUBEBUILDER_ASSETS"):
        chosen = Path(folder) / tool.name
        if os.access(chosen, os.X_OK):
            return chosen
    by_chance = shutil.which(tool.name, path=env.get("PATH", ""))
    return Path(by_chance) if by_chance and _is_pinned_minor(tool, by_chance) else None


def _is_pinned_minor(tool: Tool, binary: str) -> bool:
    """Whether `binary` says that it is of the minor that is pinned for `tool`."""
    try:
        said = subprocess.run(
            (binary, *tool.version_args),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=snapshot(),
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = parse_version(said.stdout)
    return version is not None and version.has_minor_of(pinned_version(tool))


def _make_once(tool: Tool, cache: BinaryCache, build: Builder, release: Release) -> Path:
    """Put `tool` into the cache unless another process did so in the meantime."""
    with cache.locked(tool, lambda: _say(f"controlplane: another process builds {tool.name}, waiting\n")):
        if ready := cache.verified(tool):
            return ready
        why = "cached file damaged" if cache.path(tool).exists() else "once"
        began_s = time.monotonic()
        staged = cache.staging(tool)
        try:
            if _is_downloaded(tool, staged, release):
                _say(f"controlplane: downloaded {tool.name} ({why})")
            else:
                _say(f"controlplane: building {tool.name} {pinned_version(tool)} ({why}) ...")
                build(tool, staged)
            binary = cache.adopt(tool, staged)
        except BaseException:
            _say(" failed\n")
            staged.unlink(missing_ok=True)
            raise
        _say(f" {time.monotonic() - began_s:.1f} s, {binary.stat().st_size / (1 << 20):.0f} MiB\n")
        return binary


def _is_downloaded(tool: Tool, staged: Path, release: Release) -> bool:
    """Download a tool; one that is not what was pinned is built instead, and that is said."""
    try:
        return release(tool, staged)
    except BuildError as e:
        _say(f"controlplane: {e}; {tool.name} is built instead\n")
        return False


def _say(text: str) -> None:
    """Write progress where it is seen at once and does not mix with results."""
    sys.stderr.write(text)
    sys.stderr.flush()
