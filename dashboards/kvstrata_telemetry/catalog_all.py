"""The catalogue of every metric of every process. Pure.

A process adds its metrics in `catalog_<process>.py` as the constant `<PROCESS>`; nothing needs to be written here.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

import kvstrata_telemetry
from kvstrata_telemetry.catalog import Metric, index

_PREFIX: Final = "catalog_"


def _load() -> dict[str, tuple[Metric, ...]]:
    modules = sorted(m.name for m in iter_modules(kvstrata_telemetry.__path__) if m.name.startswith(_PREFIX))
    processes = [name.removeprefix(_PREFIX) for name in modules if name != "catalog_all"]
    return {p: getattr(import_module(f"kvstrata_telemetry.{_PREFIX}{p}"), p.upper()) for p in processes}


BY_PROCESS: Final = _load()
"""Metrics by the process that exports them."""

BY_NAME: Final = index(metric for metrics in BY_PROCESS.values() for metric in metrics)
"""Every metric by its name; no two processes share one."""
