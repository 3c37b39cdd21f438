"""Writes a CycloneDX bill of materials for each pinned requirement file, and one for what the page of the wheel packs.

`python -m checks.sbom [--out DIR]`. Reproducible: the same pins give the same bytes. The control plane's Go modules are
pinned by their go.sum files.
"""

import argparse
import base64
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

import page_build

ROOT = Path(__file__).resolve().parents[2]


def command(requirements: Path, target: Path) -> list[str]:
    """Command that turns one requirement file into one bill of materials."""
    options = ["--output-format", "JSON", "--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml")]
    module = [sys.executable, "-m", "cyclonedx_py", "requirements"]
    return [*module, *options, "--output-file", str(target), str(requirements)]


def page() -> str:
    """The bill of the page's chart library, which the wheel has with its licence."""
    purl = PackageURL("npm", None, page_build.NAME, page_build.VERSION)
    digest = HashType(alg=HashAlgorithm.SHA_512, content=base64.b64decode(page_build.SHA512).hex())
    library = Component(
        name=purl.name,
        version=purl.version,
        purl=purl,
        bom_ref=str(purl),
        hashes=[digest],
        licenses=[LicenseFactory().make_from_string(page_build.LICENCE)],
    )
    bom = Bom(components=[library])
    bom.serial_number, bom.metadata.timestamp = None, None  # type: ignore[assignment]
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def parsed(bill: str) -> dict[str, Any]:
    """Return a bill as what a statement about it holds."""
    return dict(json.loads(bill))


def write(out: Path, names: Iterable[str] = ()) -> list[Path]:
    """Write the bills of these requirement files, or of all, into `out`, and the page's.

    Raises `subprocess.CalledProcessError` when the tool fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    made = []
    wanted = [ROOT / "requirements" / f"{name}.txt" for name in names]
    for requirements in wanted or sorted((ROOT / "requirements").glob("*.txt")):
        target = out / f"kvstrata-{requirements.stem}.cdx.json"
        subprocess.run(command(requirements, target), check=True, capture_output=True)
        made.append(target)
    made.append(out / "kvstrata-page.cdx.json")
    made[-1].write_text(page(), encoding="utf-8")
    return made


def main() -> int:
    """Write and say where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "sbom", help="default: %(default)s")
    for path in write(parser.parse_args().out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
