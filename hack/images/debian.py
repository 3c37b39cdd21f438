"""Pinned Debian packages: the file that pins them, and fetching what it names.

`debian.json` beside this module has version, size and SHA-256 of each package for each machine, and no address. What
was fetched is kept in the cache under its hash, so that a second build needs no network.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from controlplane.cache import default_root, sha256_of
from debian_archive import Archive, ArchiveError, check_machine, mirror, source_line
from images.catalog import AMD64, MACHINES, PACKAGES, SUITES, Machine
from images.errors import ImageError

PINS: Final = Path(__file__).with_name("debian.json")


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """One package at one version."""

    name: str
    version: str
    sha256: str
    size_bytes: int
    source: str
    """Name of the source package: security advisories name that."""


def read_pins(machine: Machine = AMD64, path: Path = PINS) -> dict[str, tuple[Pin, ...]]:
    """Pins of each group; `ImageError` when they are not those of the catalogue."""
    listed = json.loads(path.read_text())[machine.name]
    pins = {group: tuple(Pin(**pin) for pin in of_group) for group, of_group in listed.items()}
    for group, names in PACKAGES.items():
        if tuple(pin.name for pin in pins.get(group, ())) != names:
            raise ImageError(f"{path.name} does not pin what group {group} has; run `make image-pins`")
    return pins


def write_pins(sources: Sequence[str] | None = None, path: Path = PINS) -> None:
    """Pin what the mirror offers now: of each package the newest version of the suites, for each machine."""
    pins = {name: _pin(machine, sources) for name, machine in MACHINES.items()}
    path.write_text(json.dumps(pins, indent=1) + "\n")


def _pin(machine: Machine, sources: Sequence[str] | None) -> dict[str, list[dict[str, object]]]:
    with tempfile.TemporaryDirectory() as folder:
        archive = _archive(Path(folder), sources, machine)
        names = sorted(name for group in PACKAGES.values() for name in group)
        newest = {pin.name: pin for pin in _offered(archive, names)}
    if missing := [name for name in names if name not in newest]:
        raise ImageError(f"the mirror has no package {', '.join(missing)} for {machine.name}")
    return {group: [asdict(newest[name]) for name in names] for group, names in PACKAGES.items()}


def _offered(archive: Archive, names: Sequence[str]) -> Iterable[Pin]:
    for stanza in archive.apt("apt-cache", "--no-all-versions", "show", *names).strip().split("\n\n"):
        lines = (line.partition(": ") for line in stanza.splitlines() if not line.startswith(" "))
        facts = {key: value for key, _, value in lines}
        source = facts.get("Source", facts["Package"]).split()[0]
        yield Pin(facts["Package"], facts["Version"], facts["SHA256"], int(facts["Size"]), source)


def fetch(pins: Iterable[Pin], sources: Sequence[str] | None = None, machine: Machine = AMD64) -> dict[Pin, Path]:
    """Files of pinned packages, downloaded where the cache has them not.

    Raises `ImageError` when the mirror has a version no more, or sends other bytes than were pinned.
    """
    store = default_root(os.environ) / "images" / "debian"
    store.mkdir(parents=True, exist_ok=True)
    files = {pin: store / f"{pin.sha256}.deb" for pin in pins}
    missing = [pin for pin, path in files.items() if not path.exists() or sha256_of(path) != pin.sha256]
    if missing:
        with tempfile.TemporaryDirectory(dir=store) as folder:
            _download(missing, files, _archive(Path(folder), sources, machine))
    return files


def _download(missing: Sequence[Pin], files: dict[Pin, Path], archive: Archive) -> None:
    try:
        found = {sha256_of(path): path for path in archive.download([f"{pin.name}={pin.version}" for pin in missing])}
    except ArchiveError as e:
        raise ImageError(f"{e}\nA version that the mirror has no more: `make image-pins`, or --sources FILE") from e
    for pin in missing:
        if pin.sha256 not in found:
            raise ImageError(f"the mirror's {pin.name} {pin.version} is not what was pinned (SHA-256 {pin.sha256})")
        shutil.move(found[pin.sha256], files[pin])


def _archive(folder: Path, sources: Sequence[str] | None, machine: Machine) -> Archive:
    try:
        check_machine()
        lines = sources or [source_line(mirror(suite), suite) for suite in SUITES]
        return Archive(folder / "apt", lines, machine.name)
    except ArchiveError as e:
        raise ImageError(str(e)) from e
