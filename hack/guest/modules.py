"""Kernel modules for the guest, each after those it needs."""

import lzma
import re
from pathlib import Path
from typing import Final

from guest.cpio import Entry, file
from guest.packages import Packages

AT: Final = "/lib/modules"
_WANTED: Final = (
    "nfit", "nd_pmem", "cxl_acpi", "cxl_pci", "cxl_mem", "cxl_pmem", "dax_hmem", "dax_cxl", "dax_pmem", "device_dax",
)  # fmt: skip
LATER: Final = "kmem"
"""Not loaded at the start: it would take dax devices for memory before anybody can look at them."""


def module_files(packages: Packages) -> dict[str, Entry]:
    """Return unpacked modules below `AT`, and `order`, the names to load one after the other."""
    found = {_name(path): path for path in packages.modules.rglob("*.ko*")}
    loaded: dict[str, bytes] = {}
    for name in (*_WANTED, LATER):
        _load(name, found, loaded)
    order = "".join(f"{name}\n" for name in loaded if name != LATER)
    modules = {f"{AT}/{name}.ko": file(image, 0o644) for name, image in loaded.items()}
    return modules | {f"{AT}/order": file(order.encode(), 0o644)}


def _load(name: str, found: dict[str, Path], loaded: dict[str, bytes]) -> None:
    """Add a module and those it needs. One that is not there is part of this kernel's image."""
    if name in loaded or name not in found:
        return
    image = _unpacked(found[name])
    for needed in _needs(image):
        _load(needed, found, loaded)
    loaded[name] = image


def _needs(image: bytes) -> list[str]:
    """Names in the line `depends=` of the section .modinfo (scripts/mod/modpost.c, add_depends)."""
    line = re.search(rb"\0depends=([^\0]*)\0", image)
    return [_plain(name) for name in line[1].decode().split(",") if name] if line else []


def _unpacked(path: Path) -> bytes:
    image = path.read_bytes()
    return lzma.decompress(image) if path.suffix == ".xz" else image


def _name(path: Path) -> str:
    return _plain(path.name.partition(".ko")[0])


def _plain(name: str) -> str:
    return name.replace("-", "_")
