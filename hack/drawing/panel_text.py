"""Numbers as people read them, by Grafana's names of units, and axes that end at round numbers. Pure."""

import math
import sys
from typing import Final

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL: Final = ("", "K", "M", "G", "T")
_TIMES: Final = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6))
_ROUND_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


def text(value: float, unit: str) -> str:
    """A value with its unit, in at most three significant digits; `-` where there is no number."""
    if math.isnan(value) or math.isinf(value):
        return "-"
    if unit == "s":
        return _time(value)
    if unit == "percentunit":
        return f"{_short(value * 100)} %"
    binary = {"bytes": "", "binBps": "/s"}
    if unit in binary:
        return _scaled(value, _BINARY, 1024) + binary[unit]
    return _scaled(value, _DECIMAL, 1000) + ("/s" if unit == "cps" else "")


def ticks(highest: float, count: int = 4, base: float = 10.0) -> list[float]:
    """Round numbers from 0 to at least `highest`; `base` 1024 gives round binary sizes."""
    rough = highest / count
    if rough < sys.float_info.min:  # Nothing, or so little that its magnitude is no number.
        return [0.0, 1.0]
    magnitude = base ** math.floor(math.log(rough, base))
    steps = [step * power * magnitude for power in _powers(base) for step in _ROUND_STEPS]
    step = min(step for step in steps if step >= rough * 0.999)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _powers(base: float) -> list[float]:
    """Decimal magnitudes between two powers of the base: 1 for 10; 1, 10, 100, 1000 for 1024."""
    return [10.0**k for k in range(max(1, math.ceil(math.log10(base))))]


def _short(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    trimmed = f"{value:.{min(digits, 6)}f}"
    return trimmed.rstrip("0").rstrip(".") if "." in trimmed else trimmed


def _scaled(value: float, names: tuple[str, ...], base: int) -> str:
    scale = 0 if abs(value) < base else min(len(names) - 1, int(math.log(abs(value), base)))
    name = names[scale]
    return f"{_short(value / base**scale)}{' ' if len(name) > 1 or base == 1024 else ''}{name}".strip()


def _time(value_s: float) -> str:
    for least_s, name, factor in _TIMES:
        if abs(value_s) >= least_s or name == "µs":
            return f"{_short(value_s * factor)} {name}"
    raise AssertionError("the last unit takes everything")
