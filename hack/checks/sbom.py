"""Writes a CycloneDX bill of materials for each pinned requirement file: `python -m checks.sbom [--out DIR]`.

Reproducible: the same pins give the same bytes. The control plane's Go modules are pinned by their go.sum files.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command(requirements: Path, target: Path) -> list[str]:
    """Command that turns one requirement file into one bill of materials."""
    options = ["--output-format", "JSON", "--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml")]
    module = [sys.executable, "-m", "cyclonedx_py", "requirements"]
    return [*module, *options, "--output-file", str(target), str(requirements)]


def write(out: Path) -> list[Path]:
    """Write all bills into the folder `out`; `subprocess.CalledProcessError` when the tool fails."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for requirements in sorted((ROOT / "requirements").glob("*.txt")):
        target = out / f"kvstrata-{requirements.stem}.cdx.json"
        subprocess.run(command(requirements, target), check=True, capture_output=True)
        made.append(target)
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
