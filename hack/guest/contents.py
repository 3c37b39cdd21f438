"""What the guest has: a shell, kernel modules, this interpreter with chosen packages, and the product's own code."""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from guest.cpio import CONSOLE, FOLDER, Entry, file, link
from guest.modules import module_files
from guest.packages import Packages

ROOT: Final = Path(__file__).resolve().parents[2]
SITE: Final = "/guest/site"
"""Where the guest's Python finds packages."""
_PRODUCT: Final = ("agent/kvstrata_agent", "agent/kvstrata_native", "agent/kvstrata_node", "crds/kvstrata_api")
_THIRD_PARTY: Final = (
    "numpy", "numpy.libs", "msgspec", "xxhash", "pydantic", "pydantic_core", "annotated_types", "typing_extensions.py",
    "typing_inspection", "pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments", "pytest_asyncio",
    "pytest_asyncio-*.dist-info",
)  # fmt: skip
"""What tier backends and the settings of tiers import, and what runs tests."""
_LEFT_OUT: Final = frozenset(
    {"test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "turtledemo", "site-packages", "pydoc_data",
     "_tkinter", "_sqlite3", "_ssl", "_dbm", "_gdbm", "_curses", "_curses_panel", "readline", "nis"}
)  # fmt: skip
_USELESS: Final = (".h", ".c", ".pyi", ".a", ".opt-1.pyc", ".opt-2.pyc", ".exe", ".lib")
_COMMANDS: Final = ("sh", "mount", "mkdir", "insmod", "poweroff", "stty", "sleep")


def contents(packages: Packages) -> dict[str, Entry]:
    """Every file of the guest but its tests, by absolute path. Blocking; a second."""
    python = _python()
    shell = {f"/bin/{name}": link("busybox") for name in _COMMANDS} | {"/bin/busybox": file(packages.busybox)}
    folders = dict.fromkeys(("/proc", "/sys", "/dev", "/tmp", "/run", "/mnt", "/root"), FOLDER)  # noqa: S108
    init = {"/init": file(Path(__file__).with_name("init")), "/dev/console": CONSOLE}
    account = {"/etc/passwd": file(b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n", 0o644)}
    everything = folders | init | account | shell | module_files(packages) | python | _site()
    return everything | _libraries(everything)


def tree(folder: Path, at: str, is_wanted: Callable[[Path], bool] = lambda _: True) -> dict[str, Entry]:
    """Every useful file of a folder, to lie below `at` in the guest."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kept = (
        path
        for path in found
        if not path.name.endswith(_USELESS) and _LEFT_OUT.isdisjoint((*path.parts, path.name.partition(".")[0]))
    )
    return {f"{at}/{path}": file((folder / path).resolve(), 0o644) for path in kept if is_wanted(path)}


def _python() -> dict[str, Entry]:
    """This interpreter, at its own paths: it finds its library by them."""
    own = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    library = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})
    return {"/bin/python3": link(str(own)), str(own): file(own.resolve())} | tree(Path(library), library)


def site_packages() -> list[Path]:
    """Packages and modules that the guest's Python finds besides its own."""
    installed = Path(sysconfig.get_path("purelib"))
    third_party = [path for name in _THIRD_PARTY for path in installed.glob(name)]
    return [*third_party, *(ROOT / name for name in _PRODUCT)]


def _site() -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for path in site_packages():
        entries |= tree(path, f"{SITE}/{path.name}") if path.is_dir() else {f"{SITE}/{path.name}": file(path, 0o644)}
    return entries


def _libraries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Shared libraries of this machine that the entries' programs and extensions load."""
    paths = [e.content for p, e in entries.items() if isinstance(e.content, Path) and _is_linked(p, e.content)]
    printed = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False).stdout
    names = set(re.findall(r"(?:=> )?(/\S+\.so\S*) \(0x", printed))
    own = str(Path(sys.prefix).resolve())
    return {name: file(Path(name).resolve()) for name in names if not str(Path(name).resolve()).startswith(own)}


def _is_linked(path: str, source: Path) -> bool:
    return ".so" in source.name or path.startswith(str(Path(sys.base_prefix) / "bin"))
