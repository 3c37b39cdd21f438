"""Lets Python keep compiled modules outside of the tree: without, every process compiles its packages for seconds."""

import os
import sys

from controlplane.cache import default_root


def keep_bytecode() -> None:
    """Keep bytecode of this process and of its children in kvstrata's cache, unless the user has said where."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(default_root(os.environ) / "bytecode"))
    sys.dont_write_bytecode = False
    sys.pycache_prefix = prefix
