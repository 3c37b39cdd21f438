"""Entry point of `python -m controlplane`."""

import sys

from controlplane.cli import main

sys.exit(main())
