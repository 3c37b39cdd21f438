"""Puts the contents of Debian packages and wheels below a folder, with the modes that images have."""

import lzma
import tarfile
from collections.abc import Iterator
from configparser import ConfigParser
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import ZipFile, ZipInfo

from images import paths
from images.errors import ImageError

_AR: Final = b"!<arch>\n"
_EXECUTABLE: Final = 0o755
_PLAIN: Final = 0o644


def debian(package: Path, root: Path) -> str:
    """Unpack a `.deb` below `root`; returns its control file. `ImageError` for what is none."""
    parts = dict(_members(package))
    control = _tar_part(parts, "control", package)
    with _tar_part(parts, "data", package) as data:
        for member in data:
            target = paths.of_debian(member.name)
            if target is not None:
                _put_member(data, member, root, target)
    with control:
        return _text(control, "control", package)


def _members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an ar archive's members; ar(5)."""
    raw = package.read_bytes()
    if not raw.startswith(_AR):
        raise ImageError(f"{package.name} is no Debian package")
    at = len(_AR)
    while at + 60 <= len(raw):
        header = raw[at : at + 60]
        size_bytes = int(header[48:58])
        yield header[:16].decode().strip().rstrip("/"), raw[at + 60 : at + 60 + size_bytes]
        at += 60 + size_bytes + size_bytes % 2


def _tar_part(parts: dict[str, bytes], name: str, package: Path) -> tarfile.TarFile:
    content = parts.get(f"{name}.tar.xz")
    if content is None:
        raise ImageError(f"{package.name} has no {name}.tar.xz but {', '.join(parts)}")
    return tarfile.open(fileobj=BytesIO(lzma.decompress(content)))


def _text(tar: tarfile.TarFile, name: str, package: Path) -> str:
    for member in tar:
        file = tar.extractfile(member) if member.name.removeprefix("./") == name else None
        if file is not None:
            return file.read().decode()
    raise ImageError(f"{package.name} has no {name} file")


def _put_member(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path, target: str) -> None:
    if member.isdir():
        (root / target).mkdir(parents=True, exist_ok=True)
    elif member.issym():
        link(root, target, member.linkname)
    elif member.isfile() or member.islnk():
        file = tar.extractfile(member)  # Of a hard link: what it is a name of.
        assert file is not None
        put(root, target, file.read(), is_executable=bool(member.mode & 0o100))
    else:
        raise ImageError(f"a package has a file of type {member.type!r}: {member.name}")


def wheel(package: Path, root: Path) -> None:
    """Unpack a wheel below `root`, without the scripts that installers make."""
    with ZipFile(package) as archive:
        for member in archive.infolist():
            target = None if member.is_dir() else paths.of_wheel(member.filename)
            if target is not None:
                put(root, target, archive.read(member), is_executable=_is_executable(member))


def _is_executable(member: ZipInfo) -> bool:
    return bool((member.external_attr >> 16) & 0o100)


def console_scripts(package: Path, root: Path) -> list[str]:
    """Make the commands that a wheel declares, in /usr/local/bin; returns their names."""
    with ZipFile(package) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")), None)
        declared = ConfigParser()
        declared.read_string(archive.read(name).decode() if name else "")
    scripts = dict(declared["console_scripts"]) if declared.has_section("console_scripts") else {}
    for command, reference in scripts.items():
        module, _, function = reference.partition(":")
        put(root, f"usr/local/bin/{command}", paths.script(module, function).encode(), is_executable=True)
    return sorted(scripts)


def put(root: Path, target: str, content: bytes, *, is_executable: bool = False) -> None:
    """Write one file; `ImageError` when two packages disagree about it."""
    path = root / target
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_bytes() != content:
        raise ImageError(f"two packages have different files at /{target}")
    path.write_bytes(content)
    path.chmod(_EXECUTABLE if is_executable else _PLAIN)


def link(root: Path, target: str, to: str) -> None:
    """Make one symbolic link."""
    path = root / target
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    path.symlink_to(to)
