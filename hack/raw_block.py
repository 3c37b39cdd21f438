"""Builds LMCache's Rust module `lmcache_rust_raw_block_io`, which no wheel has, from LMCache's source distribution.

The source is pinned by the hashes of `requirements/peers-raw-block.txt`, its crates by those of
`requirements/peers-raw-block.crates`. Needs cargo.
"""

import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "lmcache"
CRATE: Final = "rust/raw_block"
MODULE: Final = "lmcache_rust_raw_block_io"
BUILD_S: Final = 300

Crates = AbstractSet[tuple[str, str, str]]
"""Name, version and SHA-256 of each."""

_PINNED = re.compile(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)
_LOCKED = re.compile(r'name = "([^"]+)"\nversion = "([^"]+)"\nsource = "[^"]+"\nchecksum = "([0-9a-f]{64})"')


class CrateError(Exception):
    """A crate is not the pinned one."""


def pinned(text: str) -> Crates:
    """Crates of a file of pins."""
    return frozenset(_PINNED.findall(text))


def locked(text: str) -> Crates:
    """Crates of a Cargo.lock that come from a registry."""
    return frozenset(_LOCKED.findall(text))


def check(wanted: Crates, found: Crates) -> None:
    """Raise `CrateError` unless both are the same."""
    if differing := sorted({f"{name} {version}" for name, version, _ in wanted ^ found}):
        raise CrateError(f"crates that are not as pinned: {', '.join(differing)}")


def build(python: Path, requirements: Path, crates: Path) -> None:
    """Put the module into the environment of `python`. Raises `OSError`, `subprocess.SubprocessError`, `CrateError`."""
    wanted = pinned(crates.read_text())
    with tempfile.TemporaryDirectory(prefix="kvstrata-raw-block-") as name:
        directory = Path(name)
        crate = _source(python, requirements, directory)
        _pin(crate, wanted)
        environment = {**os.environ, "PYO3_PYTHON": str(python), "CARGO_TARGET_DIR": str(directory / "target")}
        _cargo(crate, "build", "--release", "--locked", environment=environment)
        built = directory / "target" / "release" / f"lib{MODULE}.so"
        purelib = _run((str(python), "-c", "import sysconfig; print(sysconfig.get_path('platlib'))")).strip()
        (Path(purelib) / f"{MODULE}.so").write_bytes(built.read_bytes())


def _source(python: Path, requirements: Path, directory: Path) -> Path:
    """Fetch the source distribution, unpack the crate; pip asks the source its version, so its build tools are here."""
    pins = directory / "source.txt"
    text = requirements.read_text()
    pins.write_text(re.search(rf"^{DISTRIBUTION}==(?:.*\\\n)*.*\n", text, re.MULTILINE)[0])  # type: ignore[index]
    how = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--require-hashes")
    command = (str(python), "-m", "pip", "download", "--quiet", *how, "--dest", str(directory), "-r", str(pins))
    _run(command, {**os.environ, "NO_CUDA_EXT": "1"})
    (archive,) = directory.glob(f"{DISTRIBUTION}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz") / CRATE


def _pin(crate: Path, wanted: Crates) -> None:
    """Lock the crates at what is pinned."""
    lock = crate / "Cargo.lock"
    _cargo(crate, "generate-lockfile")
    for name, version, digest in sorted(wanted):
        if (name, version, digest) not in locked(lock.read_text()):
            _cargo(crate, "update", "--package", name, "--precise", version)
    check(wanted, locked(lock.read_text()))


def _cargo(crate: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
    _run(("cargo", *arguments, "--quiet", "--manifest-path", str(crate / "Cargo.toml")), environment)


def _run(command: tuple[str, ...], environment: Mapping[str, str] | None = None) -> str:
    """Its stdout; stderr goes where ours goes."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=BUILD_S)
    return done.stdout
