"""Fetches the chart library of `kvstrata ui` (uPlot, MIT) into the page, with its licence; checked by its digest.

As a script it does so where it is missing. npm fetches it from the registry that the machine uses; where npm is
missing, that is said and is no error: everything but the page's graphs works without.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

PAGE: Final = Path("dashboards/kvstrata_ui/page/vendor")
NAME: Final = "uplot"
VERSION: Final = "1.6.32"
LICENCE: Final = "MIT"
SHA512: Final = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
"""Of the package as the registry has it: its `dist.integrity`."""
FILES: Final = {
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "uPlot.LICENSE",
}
STAMP: Final = "uPlot.version"
_FETCH_S: Final = 30.0


def is_there(folder: Path) -> bool:
    """True when the folder has this version."""
    stamp = folder / STAMP
    return stamp.exists() and stamp.read_text(encoding="utf-8").strip() == VERSION


def fetch(folder: Path) -> str | None:
    """Put the library into the folder; None, or why it could not be had."""
    if shutil.which("npm") is None:
        return "npm is not installed (apt-get install npm)"
    with tempfile.TemporaryDirectory(prefix="kvstrata-page-") as place:
        command = ["npm", "pack", f"{NAME}@{VERSION}", "--silent", "--fetch-retries=1", "--pack-destination", place]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place, timeout=_FETCH_S)
        except subprocess.TimeoutExpired:
            return f"npm pack {NAME} took more than {_FETCH_S:.0f} s"
        package = Path(place, f"{NAME}-{VERSION}.tgz")
        if done.returncode != 0 or not package.exists():
            return f"npm pack {NAME}@{VERSION}: {(done.stderr.strip() or 'failed').splitlines()[-1]}"
        return unpack(package, folder)


def unpack(package: Path, folder: Path) -> str | None:
    """Take the files out of the registry's package; None, or why it is refused."""
    digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if digest != SHA512:
        return f"{package.name} has SHA-512 {digest[:16]}..., {SHA512[:16]}... is wanted"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as archive:
        for member, name in FILES.items():
            content = archive.extractfile(member)
            assert content is not None, member
            (folder / name).write_bytes(content.read())
    (folder / STAMP).write_text(VERSION + "\n", encoding="utf-8")  # Last: it says that all of it is there.
    return None


def main() -> int:
    """Fetch what is missing; always 0."""
    folder = Path(__file__).resolve().parents[1] / PAGE
    failure = None if is_there(folder) else fetch(folder)
    if failure is not None:
        print(f"the chart library of `kvstrata ui` is left out: {failure}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
