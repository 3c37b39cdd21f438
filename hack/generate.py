"""Write or check everything that is generated: CRDs, chart CRDs, dashboards, pages of reference, the wire protocol.

`--check` compares and fails on drift; `--write` brings the files up to date.
"""

import argparse
import subprocess
import sys
from typing import Final

GENERATORS: Final = (
    ("CRDs", ("-m", "kvstrata_api.schema")),
    ("dashboards", ("-m", "kvstrata_telemetry.dashboard")),
    ("metric docs", ("-m", "kvstrata_telemetry.generated")),
    ("wire protocol", ("hack/protocol.py",)),
    ("reference", ("hack/reference.py",)),
    ("figures", ("-m", "bench.figures")),
    ("chart", ("hack/sync_chart.py",)),  # Last: it copies what the others make.
)


def main() -> int:
    """Run every generator; 1 when one of them found drift."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_const", dest="flag", const="--check", help="fail on drift")
    mode.add_argument("--write", action="store_const", dest="flag", const="--write", help="write the files")
    flag = parser.parse_args().flag
    drifted = [n for n, cmd in GENERATORS if subprocess.run([sys.executable, *cmd, flag], check=False).returncode]
    print(f"drift: {'ok' if not drifted else ', '.join(drifted) + ' differ; run `make generate`'}")
    return int(bool(drifted))


if __name__ == "__main__":
    sys.exit(main())
