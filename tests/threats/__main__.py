"""`python -m threats`: try every threat to isolation; the last line is one JSON object. Exit 1 when one succeeded."""

import sys

from support.runner.proofs import Suite
from threats.registry import RUNNABLE, runner

SUITE = Suite("threats", "Try every threat to the isolation of tenants.", RUNNABLE, runner)

if __name__ == "__main__":
    sys.exit(SUITE.main())
