"""`python -m adversity`: put the operator through it; the last line is one JSON object. Exit 1 when a claim broke."""

import sys

from adversity.registry import CLAIMS, runner
from support.runner.proofs import Suite

SUITE = Suite("adversity", "Lie to the operator, kill it, and write what nobody should.", CLAIMS, runner)

if __name__ == "__main__":
    sys.exit(SUITE.main())
