"""Run every benchmark, one after the other; the table and the last line of each."""

import argparse
import subprocess
import sys
from typing import Final

BENCHES: Final = (
    "local", "nvme", "remote", "layers", "handover", "directory", "startup", "isolation", "encryption", "codec", "l2",
    "offload", "pressure", "operator", "scale",
)  # fmt: skip
"""Modules of this package; each is a command line of its own."""


def main() -> int:
    """Return 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sets and few repeats")
    flags = ("--quick",) if parser.parse_args().quick else ()
    codes = [
        subprocess.run((sys.executable, "-m", f"bench.{name}", *flags), check=False).returncode for name in BENCHES
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
