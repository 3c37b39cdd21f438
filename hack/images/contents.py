"""The folders that layers are made of: Debian packages, wheels, and what no package has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from images import unpack
from images.catalog import PYTHON, SITE, USER_ID
from images.debian import Pin
from images.interpreter import compile_bytecode
from images.paths import MERGED
from images.wheels import Wheel

_FOLDERS: Final = ("dev", "etc", "proc", "run", "sys", "tmp", "var/lib/kvstrata", "var/tmp")
_FILES: Final = {
    "etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    f"kvstrata:x:{USER_ID}:{USER_ID}:kvstrata:/var/lib/kvstrata:/usr/sbin/nologin\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\nkvstrata:x:{USER_ID}:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_AUTHORITIES: Final = "usr/share/ca-certificates"


def debian(root: Path, group: str, files: Mapping[Pin, Path]) -> None:
    """Unpack a group of Debian packages; each leaves its control file where scanners look in images without dpkg."""
    if group == "system":
        _skeleton(root)
    for pin, path in files.items():
        control = unpack.debian(path, root)
        unpack.put(root, f"var/lib/dpkg/status.d/{pin.name}", control.encode())
    if group == "system":
        _trust(root)
    if group == "shell":
        unpack.link(root, "usr/bin/sh", "dash")
    if group == "python":
        unpack.link(root, "usr/bin/python3", PYTHON)


def _skeleton(root: Path) -> None:
    for folder in _FOLDERS:
        (root / folder).mkdir(parents=True)
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        unpack.link(root, name, f"usr/{name}")
    for name, text in _FILES.items():
        unpack.put(root, name, text.encode())


def _trust(root: Path) -> None:
    """Make the bundle that the package's own script makes when it is installed: every authority, by name."""
    certificates = sorted((root / _AUTHORITIES).rglob("*.crt"))
    bundle = b"".join(path.read_bytes().rstrip(b"\n") + b"\n" for path in certificates)
    unpack.put(root, "etc/ssl/certs/ca-certificates.crt", bundle)


def standard_library(root: Path, python: Sequence[Path]) -> None:
    """Compile Python's own modules."""
    compile_bytecode(python, root, [f"usr/lib/{PYTHON}"])


def wheels(root: Path, found: Sequence[Wheel], python: Sequence[Path]) -> None:
    """Unpack wheels and compile them."""
    for wheel in found:
        unpack.wheel(wheel.path, root)
    compile_bytecode(python, root, [SITE])


def product(root: Path, wheel: Wheel, python: Sequence[Path]) -> None:
    """Unpack the wheel of this tree, with the commands that it declares."""
    unpack.wheel(wheel.path, root)
    unpack.console_scripts(wheel.path, root)
    compile_bytecode(python, root, [SITE])
