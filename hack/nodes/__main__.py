"""Entry point of `python -m nodes`."""

import sys

from nodes.cli import main

sys.exit(main())
