"""Damage to files."""

from pathlib import Path


def flip(file: Path, at: int, mask: int) -> None:
    """Flip the bits of `mask` in one byte."""
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ mask]))
