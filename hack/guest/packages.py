"""QEMU, a kernel and a few tools, from the Debian mirror that this machine uses, unpacked into the cache.

apt runs on folders of its own with an empty package state: it fetches the programs with every library they need, down
to the C library, and nothing on this machine changes. A set of packages is made once and put in place by renaming.
"""

import fcntl
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.cache import default_root
from guest.errors import UnavailableError

_TOOLS: Final = ("qemu-system-x86", "busybox-static", "e2fsprogs")
_KERNEL: Final = "linux-image-cloud-amd64"
"""A metapackage. The cloud kernel has CXL, DAX, HMAT and NVMe, and half the size of the generic one."""
_EDITION: Final = "1"
"""Part of the folder's name; another one makes everything anew."""
_TIMEOUT_S: Final = 300.0
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True, slots=True)
class Packages:
    """Packages that were unpacked below one folder."""

    root: Path

    @property
    def kernel(self) -> Path:
        """The kernel's image."""
        return next(iter(sorted((self.root / "boot").glob("vmlinuz-*"))))

    @property
    def modules(self) -> Path:
        """Folder of the kernel's modules, named after its release."""
        parents = (self.root / "lib/modules", self.root / "usr/lib/modules")
        return next(path for parent in parents if parent.is_dir() for path in parent.iterdir())

    @property
    def busybox(self) -> Path:
        """The static shell and its commands."""
        return next(p for p in (self.root / "bin/busybox", self.root / "usr/bin/busybox") if p.exists())

    def command(self, program: str) -> list[str]:
        """Arguments that run a program of the packages with their own loader and libraries, on any distribution."""
        libraries = [self.root / "usr/lib/x86_64-linux-gnu", self.root / "lib/x86_64-linux-gnu"]
        loader = next(p for p in (lib / "ld-linux-x86-64.so.2" for lib in libraries) if p.exists())
        return [str(loader), "--library-path", ":".join(map(str, libraries)), str(self.root / program)]


def guest_packages(cache: Path | None = None) -> Packages:
    """Return the unpacked packages, downloading them first when this is the first time (70 MB).

    Raises `UnavailableError`. Processes that want them at the same time wait for the one that came first.
    """
    parent = (cache or default_root(os.environ)) / "guest"
    root = parent / f"packages-{_EDITION}"
    if root.is_dir():
        return Packages(root)
    _check_machine()
    with _locked(parent):
        if not root.is_dir():
            _make(parent / f"new-{os.getpid()}", root)
    return Packages(root)


def _check_machine() -> None:
    missing = [name for name in ("apt-get", "apt-cache", "dpkg") if shutil.which(name) is None]
    if missing or not _KEYRING.exists():
        raise UnavailableError(
            f"packages come from a Debian mirror by apt: {', '.join(missing) or _KEYRING} is missing"
        )
    if platform.machine() != "x86_64":
        raise UnavailableError(
            f"the guest runs this machine's Python and is x86-64; this machine is {platform.machine()}"
        )


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(work: Path, root: Path) -> None:
    try:
        apt = _Apt(work / "apt", _codename())
        unpacked = work / "root"
        for package in apt.download():
            _run(["dpkg", "-x", str(package), str(unpacked)], {})
        unpacked.replace(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _codename() -> str:
    facts = platform.freedesktop_os_release()
    if facts.get("ID") != "debian" or "VERSION_CODENAME" not in facts:
        raise UnavailableError(f"packages come from Debian's backports; this is {facts.get('PRETTY_NAME', '?')}")
    return facts["VERSION_CODENAME"]


class _Apt:
    """apt with a state of its own, in which nothing is installed."""

    def __init__(self, folder: Path, codename: str) -> None:
        self._folder = folder
        self._backports = f"{codename}-backports"
        for name in ("state/lists/partial", "cache/archives/partial", "kernel"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        suites = (codename, f"{codename}-updates", self._backports)
        lines = [f"deb [signed-by={_KEYRING}] {_mirror(codename)} {suite} main\n" for suite in suites]
        (folder / "sources.list").write_text("".join(lines))
        (folder / "apt.conf").write_text(_configuration(folder))

    def download(self) -> list[Path]:
        """Fetch the tools with all they need, and the kernel alone: its dependencies are for installing it."""
        self._apt("apt-get", "-q", "update")
        wanted = ("install", "--download-only", "--yes", "--no-install-recommends", "-t", self._backports, *_TOOLS)
        self._apt("apt-get", "-q", *wanted)
        facts = self._apt("apt-cache", "depends", "--important", f"{_KERNEL}/{self._backports}")
        image = next((word for word in facts.split() if word.startswith("linux-image-") and word[12].isdigit()), None)
        if image is None:
            raise UnavailableError(f"{_KERNEL} of {self._backports} names no kernel")
        self._apt("apt-get", "-q", "download", image, cwd=self._folder / "kernel")
        found = (*(self._folder / "cache/archives").glob("*.deb"), *(self._folder / "kernel").glob("*.deb"))
        return sorted(found)

    def _apt(self, *arguments: str, cwd: Path | None = None) -> str:
        return _run(arguments, {"APT_CONFIG": str(self._folder / "apt.conf")}, cwd)


def _configuration(folder: Path) -> str:
    settings = {
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


def _mirror(codename: str) -> str:
    """URI of the mirror that this machine has its own packages from."""
    printed = _run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {codename}", "Component: main"], {}
    )
    if not printed.split():
        raise UnavailableError(f"apt on this machine has no source for {codename}")
    return printed.split()[0]


def _run(arguments: list[str] | tuple[str, ...], env: dict[str, str], cwd: Path | None = None) -> str:
    ran = subprocess.run(
        arguments, env=os.environ | env, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if ran.returncode:
        raise UnavailableError(f"{' '.join(arguments[:4])}: {ran.stderr.strip()[-400:]}")
    return ran.stdout
