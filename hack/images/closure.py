"""Checks that every library that something in an image asks for is in that image."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from images.elf import needed
from images.errors import ImageError
from images.layers import Layer

FROM_THE_NODE: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the GPU's driver: the container runtime mounts the node's own."""


def check(name: str, layers: Sequence[Layer], allowed: Iterable[str] = ()) -> None:
    """Raise `ImageError` with what is missing; libraries named in `allowed` may be."""
    files = [path for layer in layers for path in layer.root.rglob("*") if path.is_file() and not path.is_symlink()]
    present = {path.name for layer in layers for path in layer.root.rglob("*.so*")}
    missing = [
        f"{path.name} needs {library}"
        for path in files
        for library in _of(path)
        if library not in present and library not in (*FROM_THE_NODE, *allowed)
    ]
    if missing:
        raise ImageError(f"{name}: {'; '.join(sorted(missing)[:20])}")


def _of(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        start = file.read(4)
        return needed(start + file.read()) if start == b"\x7fELF" else ()
