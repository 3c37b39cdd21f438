"""Writes the listing of a folder's files into it: `python -m kvstrata_agent.weights DIRECTORY`.

With a listing at the source, nodes copy tensors that another revision has, instead of reading them again.
"""

import argparse
import hashlib
import sys
from pathlib import Path

from kvstrata_agent.weights.listing import (
    LENGTH_BYTES,
    LISTING_FILE,
    Chunk,
    Listing,
    ModelFile,
    check_paths,
    chunk_name,
    cut,
    header_bytes,
    listing_of,
    tensor_ends,
)
from kvstrata_agent.weights.staging import SAFETENSORS
from kvstrata_api.errors import InvalidInputError


def main(argv: list[str] | None = None) -> int:
    """Write the listing and print its digest; 1 when a file is not what it has to be."""
    parser = argparse.ArgumentParser(prog="python -m kvstrata_agent.weights", description=__doc__)
    parser.add_argument("directory", type=Path, help="folder of the files; the listing is written there")
    root: Path = parser.parse_args(argv).directory
    try:
        listing = list_folder(root)
        (root / LISTING_FILE).write_bytes(listing.encode())
    except (InvalidInputError, OSError) as e:
        print(e, file=sys.stderr)  # noqa: T201  A command.
        return 1
    print(listing.digest)  # noqa: T201
    return 0


def list_folder(root: Path) -> Listing:
    """Read all files below a folder. Raises `InvalidInputError`, `OSError`."""
    paths = sorted(p for p in root.rglob("*") if p.is_file() and p != root / LISTING_FILE)
    check_paths([path.relative_to(root).as_posix() for path in paths])
    return listing_of(tuple(_list_file(root, path) for path in paths))


def _list_file(root: Path, path: Path) -> ModelFile:
    name, size_bytes, hasher = path.relative_to(root).as_posix(), path.stat().st_size, hashlib.sha256()
    chunks = []
    with path.open("rb") as file:
        ends = None
        if name.endswith(SAFETENSORS):
            header = file.read(header_bytes(name, size_bytes, file.read(LENGTH_BYTES)))
            ends = [LENGTH_BYTES + len(header), *tensor_ends(name, size_bytes, header)]
            file.seek(0)
        for chunk_bytes in cut(size_bytes, ends):
            piece = file.read(chunk_bytes)
            if len(piece) != chunk_bytes:
                raise InvalidInputError(f"{name}: {len(piece)} B of {chunk_bytes} B: it was changed while it was read")
            hasher.update(piece)
            chunks.append(Chunk(chunk_bytes, chunk_name(piece)))
    return ModelFile(name, size_bytes, hasher.hexdigest(), tuple(chunks))


if __name__ == "__main__":
    sys.exit(main())
