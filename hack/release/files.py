"""The files of a release: wheels for two machines, a source distribution, the chart.

All are made from the commit, not from what lies in the tree, with the commit's time. Kernels are compiled by clang out
of Zig's wheel, for the C library that the wheels' names promise, with the headers of Debian's Python for that machine.
"""

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

import yaml

import native_build
import page_build
from controlplane.cache import default_root, sha256_of
from images import debian, unpack
from images.catalog import Machine
from release.errors import ReleaseError

ROOT: Final = Path(__file__).resolve().parents[2]
PINS: Final = ("hack/images/debian.json", "requirements/release.txt")
"""What pins the tools, beside the requirements of images."""
_GLIBC: Final = (2, 17)
"""The oldest C library that wheels run with: that of manylinux2014, older than any that Python 3.11 is built for."""
_CHART: Final = Path("charts/kvstrata")
_TIMEOUT_S: Final = 900.0
_HEADERS: Final = ("usr/include/python3.11", "usr/include")


def commit(*, may_differ: bool) -> tuple[str, int]:
    """Return the commit that is checked out and its second; `ReleaseError` when the tree has something else in it."""
    changed = _git("status", "--porcelain", "--untracked-files=no").strip()
    if changed and not may_differ:
        raise ReleaseError(f"the tree differs from its commit, which is what is released: {changed.splitlines()[0]}")
    name, _, epoch_s = _git("log", "-1", "--format=%H %ct").strip().partition(" ")
    return name, int(epoch_s)


def export(commit_name: str, tree: Path) -> None:
    """Put the commit's files into `tree`, and the page's chart library, which git has not; `ReleaseError`."""
    tree.mkdir(parents=True)
    packed = subprocess.run(["git", "archive", commit_name], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tree, filter="data")
    library = ROOT / page_build.PAGE
    if not page_build.is_there(library) and (failure := page_build.fetch(library)):
        raise ReleaseError(f"the chart library of the page: {failure}")
    shutil.copytree(library, tree / page_build.PAGE, dirs_exist_ok=True)


def version_of(tree: Path, *, is_trial: bool = False) -> str:
    """Return the version that every file with one agrees on; `ReleaseError`.

    So it is when the changelog has no heading for it, or, but for a trial, something that no version has yet.
    """
    chart = yaml.safe_load((tree / _CHART / "Chart.yaml").read_text())
    found = {
        "pyproject.toml": _found(r'^version = "(.+)"$', tree / "pyproject.toml"),
        "crds/kvstrata_api/__init__.py": _found(r'^__version__ = "(.+)"$', tree / "crds/kvstrata_api/__init__.py"),
        "version of the chart": chart["version"],
        "appVersion of the chart": chart["appVersion"],
    }
    if len(set(found.values())) != 1:
        raise ReleaseError("versions differ: " + ", ".join(f"{name} {version}" for name, version in found.items()))
    version: str = chart["version"]
    notes(tree, version)
    if not is_trial and "\n- " in (left := "\n" + notes(tree, "Unreleased")):
        count = left.count("\n- ")
        raise ReleaseError(f"CHANGELOG.md has {count} entries under Unreleased: they go to {version}")
    return version


def notes(tree: Path, version: str) -> str:
    """What CHANGELOG.md says of a version; `ReleaseError` when that has no heading for it."""
    found = re.search(
        rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)",
        (tree / "CHANGELOG.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no heading for {version}")
    return found.group(1).strip() + "\n"


def source_distribution(tree: Path, out: Path, epoch_s: int) -> Path:
    """Make the source distribution, from which a wheel can be built without git and npm."""
    build(tree, out, epoch_s, "--sdist")
    (made,) = out.glob("*.tar.gz")
    return made


def wheel(tree: Path, out: Path, machine: Machine, epoch_s: int) -> Path:
    """Make the wheel for one machine, with kernels; `ReleaseError` when its name promises too much."""
    tools = _tools()
    root = _headers(machine)
    folders = [*(root / folder for folder in _HEADERS), root / "usr/include" / Path(machine.libraries).name]
    target = f"{machine.wheel}-linux-gnu.{_GLIBC[0]}.{_GLIBC[1]}"
    platform = f"manylinux_{_GLIBC[0]}_{_GLIBC[1]}_{machine.wheel}"
    scratch = out / f".zig-{machine.name}"
    environment = {
        # -s: what debuggers want names the folders of this build.
        "CC": f"{tools / 'python'} -m ziglang cc -target {target} -g0 -s",
        "ZIG_GLOBAL_CACHE_DIR": str(scratch),
        "ZIG_LOCAL_CACHE_DIR": str(scratch),
        native_build.HEADERS: os.pathsep.join(map(str, folders)),
        native_build.PLATFORM: f"{platform}.manylinux2014_{machine.wheel}",
    }
    try:
        build(tree, out, epoch_s, "--wheel", environment)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    (made,) = out.glob(f"*_{machine.wheel}.whl")
    check_promise(made, tools)
    if machine.wheel == os.uname().machine:
        check_levels(made, out)
    return made


def check_levels(made: Path, out: Path) -> None:
    """Raise `ReleaseError` when a wheel's kernels leave out instruction sets that the tree's own use on this machine.

    A compiler whose runtime library does not know the processor makes a wheel that is right and slow.
    """
    asked = "from kvstrata_native.choice import compiled as c; print(*c().levels())"
    with tempfile.TemporaryDirectory(dir=out, prefix=".levels-") as folder, ZipFile(made) as archive:
        archive.extractall(folder)  # noqa: S202  Made here a moment ago.
        ours, theirs = (
            _run([sys.executable, "-c", asked], {"PYTHONPATH": str(path)}).strip() for path in (ROOT / "agent", folder)
        )
    if ours != theirs:
        raise ReleaseError(f"{made.name}: kernels of {theirs}; the tree's are of {ours} here")


def check_promise(made: Path, tools: Path) -> None:
    """Raise `ReleaseError` when auditwheel finds that a wheel wants a newer system than its name says."""
    shown = json.loads(_run([str(tools / "auditwheel"), "show", "--json", str(made)]))
    promised = made.stem.rpartition("-")[2].partition(".")[0]
    wanted = str(shown["overall_tag"])
    both = [re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag) for tag in (promised, wanted)]
    if None in both:
        raise ReleaseError(f"{made.name}: auditwheel calls it {wanted}")
    (*has, of), (*wants, on) = (found.groups() for found in both if found is not None)
    if of != on or tuple(map(int, wants)) > tuple(map(int, has)):
        raise ReleaseError(f"{made.name}: auditwheel says that it needs {wanted}")


def chart(tree: Path, out: Path, images: Mapping[str, Mapping[str, str]], epoch_s: int) -> Path:
    """Pack the chart as Helm does, but with the commit's time; `images` go into its values by their repository.

    Each of them has the `repository`, `tag` and `digest` that take the place of the ones in the chart.
    """
    folder = tree / _CHART
    version = yaml.safe_load((folder / "Chart.yaml").read_text())["version"]
    made = out / f"kvstrata-chart-{version}.tgz"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _of_chart(folder):
            content = path.read_bytes()
            if path == folder / "values.yaml":
                content = with_digests(content.decode(), images).encode()
            member = tarfile.TarInfo(f"kvstrata/{path.relative_to(folder)}")
            member.size, member.mode, member.mtime = len(content), 0o644, epoch_s
            archive.addfile(member, io.BytesIO(content))
    with made.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch_s) as compressed:
        compressed.write(packed.getvalue())
    return made


def chart_metadata(tree: Path) -> dict[str, Any]:
    """Chart.yaml, which a registry has beside the chart."""
    return dict(yaml.safe_load((tree / _CHART / "Chart.yaml").read_text()))


def with_digests(values: str, images: Mapping[str, Mapping[str, str]]) -> str:
    """Values of the chart whose images are named by digest; comments and order stay. `ReleaseError`.

    An image in it is three lines of one depth: `repository`, `tag` and `digest`, comments between them.
    """
    named: Mapping[str, str] = {}
    lines, filled = [], set[str]()
    for line in values.splitlines(keepends=True):
        key, colon, value = line.strip().partition(": ")
        if colon and key == "repository":
            name = value.strip('"')
            named = images.get(name, {})
            filled |= {name} if named else set()
        depth = line[: len(line) - len(line.lstrip())]
        lines.append(f'{depth}{key}: "{named[key]}"\n' if colon and key in named else line)
        if colon and key == "digest":
            named = {}
    if missing := set(images) - filled:
        raise ReleaseError(f"the chart's values have no image {', '.join(sorted(missing))}")
    return "".join(lines)


def _of_chart(folder: Path) -> list[Path]:
    """Files of the chart but those that .helmignore has: names, folders and endings."""
    ignored = [line.strip() for line in (folder / ".helmignore").read_text().splitlines() if line.strip()]
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not _is_ignored(path.relative_to(folder), ignored))


def _is_ignored(path: Path, patterns: Sequence[str]) -> bool:
    folders = {f"{part}/" for part in path.parts[:-1]}
    return any(pattern in folders or path.match(pattern) for pattern in patterns)


def _headers(machine: Machine) -> Path:
    """Unpack the headers of Debian's Python for `machine` into the cache."""
    pins = debian.read_pins(machine)["headers"]
    root = _cache() / f"headers-{machine.name}-{pins[0].sha256[:16]}"
    if not root.is_dir():
        making = root.with_name(f".{root.name}.{os.getpid()}")
        for path in debian.fetch(pins, machine=machine).values():
            unpack.debian(path, making)
        making.replace(root)
    return root


def _tools() -> Path:
    """Make the environment that has the compiler and auditwheel, pinned; returns its bin folder."""
    pinned = ROOT / "requirements/release.txt"
    place = _cache() / f"tools-{sha256_of(pinned)[:16]}"
    if not (place / "ready").exists():
        uv = Path(sys.executable).with_name("uv")
        _run([str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(place)])
        install = ("pip", "install", "--quiet", "--require-hashes", "-r", str(pinned))
        _run([str(uv), *install, "--python", str(place / "bin/python")])
        (place / "ready").touch()
    return place / "bin"


def _cache() -> Path:
    folder = default_root(os.environ) / "release"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build(tree: Path, out: Path, epoch_s: int, kind: str, more: Mapping[str, str] | None = None) -> None:
    """Have uv and hatchling make a wheel or a source distribution, `kind`, of the time `epoch_s`; `ReleaseError`."""
    uv = Path(sys.executable).with_name("uv")
    options = (
        kind,
        "--quiet",
        "--no-create-gitignore",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "-o",
        str(out),
    )
    _run([str(uv), "build", *options, str(tree)], {"SOURCE_DATE_EPOCH": str(epoch_s)} | dict(more or {}))


def _found(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    if found is None:
        raise ReleaseError(f"{path.name} has no version")
    return found.group(1)


def _git(*arguments: str) -> str:
    return _run(["git", "-C", str(ROOT), *arguments])


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        env=os.environ | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise ReleaseError(f"`{' '.join(command[:4])} ...`: {done.stderr.strip()[-800:]}")
    return done.stdout
