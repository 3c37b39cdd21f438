"""`python -m faults`: run the invariants against faults; the last line is one JSON object. Exit 1 when one broke."""

import sys

from faults.registry import INVARIANTS, runner
from support.runner.proofs import Suite

SUITE = Suite("faults", "Run the invariants of the metadata against faults.", INVARIANTS, runner)

if __name__ == "__main__":
    sys.exit(SUITE.main())
