"""Packages from the Debian mirror that this machine uses, fetched by an apt that has folders of its own.

Its package state is empty: it sees nothing of what is installed here, and nothing on this machine changes.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TIMEOUT_S: Final = 300.0


class ArchiveError(Exception):
    """Packages cannot be had here; the message says what is missing or what apt said."""


def release_codename() -> str:
    """Debian release of this machine; `ArchiveError` on anything else."""
    facts = platform.freedesktop_os_release()
    if facts.get("ID") != "debian" or "VERSION_CODENAME" not in facts:
        raise ArchiveError(f"packages come from Debian's archive by apt; this is {facts.get('PRETTY_NAME', '?')}")
    return facts["VERSION_CODENAME"]


def check_machine() -> None:
    """Raise `ArchiveError` unless apt can run here, on the only kind of machine that this was tried on."""
    missing = [name for name in ("apt-get", "apt-cache", "dpkg") if shutil.which(name) is None]
    if missing or not KEYRING.exists():
        raise ArchiveError(f"packages come from a Debian mirror by apt: {', '.join(missing) or KEYRING} is missing")
    if platform.machine() != "x86_64":
        raise ArchiveError(f"packages are unpacked and run on x86-64; this machine is {platform.machine()}")


def mirror(codename: str) -> str:
    """URI from which this machine has the suite `codename`; `ArchiveError` when it has none."""
    wanted = ("--format", "$(REPO_URI)", f"Codename: {codename}", "Component: main")
    printed = run(("apt-get", "indextargets", *wanted), {}).split()
    if not printed:
        raise ArchiveError(f"apt on this machine has no source for {codename}")
    return printed[0]


def source_line(uri: str, suite: str) -> str:
    """One line of a list of sources."""
    return f"deb [signed-by={KEYRING}] {uri} {suite} main\n"


class Archive:
    """apt with a state of its own, in which nothing is installed."""

    def __init__(self, folder: Path, sources: Iterable[str], architecture: str = "amd64") -> None:
        """Make the folders below `folder` and read the indexes of the lines `sources`; `ArchiveError`.

        Packages are those for machines of the Debian architecture `architecture`.
        """
        self._folder = folder
        for name in ("state/lists/partial", "cache/archives/partial", "single"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "sources.list").write_text("".join(sources))
        (folder / "apt.conf").write_text(_configuration(folder, architecture))
        self.apt("apt-get", "-q", "update")

    def download(self, packages: Sequence[str]) -> list[Path]:
        """Fetch each of `packages`, as `NAME`, `NAME=VERSION` or `NAME/SUITE`, and nothing that it needs."""
        into = self._folder / "single"
        self.apt("apt-get", "-q", "download", *packages, cwd=into)
        return sorted(into.glob("*.deb"))

    def download_with_dependencies(self, packages: Sequence[str], *, suite: str) -> list[Path]:
        """Fetch `packages`, from `suite` where it has them, with everything that they need."""
        wanted = ("install", "--download-only", "--yes", "--no-install-recommends", "-t", suite, *packages)
        self.apt("apt-get", "-q", *wanted)
        return sorted((self._folder / "cache/archives").glob("*.deb"))

    def apt(self, *arguments: str, cwd: Path | None = None) -> str:
        """What one of apt's commands prints; `ArchiveError` when it fails."""
        return run(arguments, {"APT_CONFIG": str(self._folder / "apt.conf"), "LC_ALL": "C"}, cwd)


def _configuration(folder: Path, architecture: str) -> str:
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "Dir::Cache::archives": folder / "cache/archives",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "",
    }
    return "".join(f'{name} "{value}";\n' for name, value in settings.items())


def run(arguments: Sequence[str], env: dict[str, str], cwd: Path | None = None) -> str:
    """What a command prints; `ArchiveError` with the end of its complaint when it fails."""
    ran = subprocess.run(
        arguments, env=os.environ | env, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if ran.returncode:
        raise ArchiveError(f"{' '.join(arguments[:4])}: {ran.stderr.strip()[-400:]}")
    return ran.stdout
