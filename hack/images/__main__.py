"""`python -m images`: build the images, or pin the Debian packages anew."""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from images.build import HOST, Builder, Built, build
from images.catalog import DEFAULT, IMAGES
from images.debian import PINS, write_pins
from images.errors import ImageError
from images.wheels import ROOT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m images", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="IMAGE", help=f"default: {', '.join(DEFAULT)}")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "images", help="default: build/images")
    parser.add_argument("--registry", default=HOST, metavar="HOST", help="host of the images' names (%(default)s)")
    parser.add_argument("--sources", type=Path, metavar="FILE", help="lines of apt to fetch Debian packages from")
    parser.add_argument("--pin", action="store_true", help=f"write hack/images/{PINS.name} anew and build nothing")
    return parser


def _say(line: str) -> None:
    print(f"[images] {line}", file=sys.stderr, flush=True)


def _make(names: Sequence[str], out: Path, host: str, sources: Sequence[str] | None) -> dict[str, Built]:
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out))
    try:
        return build(names, Builder(work, out, _say, sources), out, host)
    finally:
        shutil.rmtree(work)


def _print(built: dict[str, Built], out: Path) -> None:
    for name, image in built.items():
        sizes = f"{image.unpacked_bytes / 1e6:5.0f} MB of {image.bytes_max / 1e6:.0f}, {image.archive_bytes / 1e6:4.0f}"
        print(f"{name:<10}  {sizes} packed  {image.reference:<24}  {image.digest}")
    print(f"in {out}: archives, digests.json, values.json for helm, a bill of materials for each (*.cdx.json)")


def main() -> int:
    """Build, and say what was made; 1 when an image could not be made, 2 for a name that is none."""
    parser = _parser()
    arguments = parser.parse_args()
    names = arguments.names or DEFAULT
    if unknown := [name for name in names if name not in IMAGES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(IMAGES)}")
    sources = arguments.sources.read_text().splitlines(keepends=True) if arguments.sources else None
    began_s = time.monotonic()
    try:
        if arguments.pin:
            write_pins(sources)
            _say(f"pinned in {PINS}")
            return 0
        built = _make(names, arguments.out, arguments.registry, sources)
    except ImageError as e:
        _say(str(e))
        return 1
    _print(built, arguments.out)
    _say(f"{time.monotonic() - began_s:.0f} s")
    return int(any(image.unpacked_bytes > image.bytes_max for image in built.values()))


if __name__ == "__main__":
    sys.exit(main())
