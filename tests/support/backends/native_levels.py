"""Every kind of kernels that this machine can run, for tests that must hold for all of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import kvstrata_native
from kvstrata_native import python
from kvstrata_native.choice import PYTHON, Kernels, compiled

_COMPILED = compiled()
LEVELS: tuple[str, ...] = (*(_COMPILED.levels() if _COMPILED is not None else ()), PYTHON)


@contextmanager
def kernels_of(level: str) -> Iterator[Kernels]:
    """Run a level; the process goes back to its own afterwards."""
    if level == PYTHON or _COMPILED is None:
        yield python
        return
    _COMPILED.use(level)
    try:
        yield _COMPILED
    finally:
        _COMPILED.use(kvstrata_native.level if kvstrata_native.level != PYTHON else _COMPILED.levels()[0])
