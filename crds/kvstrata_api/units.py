"""Kubernetes quantities as integers of bytes, and page sizes. Pure."""

import re
from typing import Final

from kvstrata_api.errors import InvalidInputError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_BINARY: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
_DECIMAL: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
FACTORS: Final = _BINARY | _DECIMAL
"""What each suffix of a quantity stands for."""

QUANTITY_PATTERN: Final = r"^[1-9][0-9]{0,18}(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?$"
"""Positive whole quantities only: kvstrata never needs half a byte, and integers compare exactly."""

QUANTITY_BYTES_MAX: Final = (1 << 63) - 1
"""int64, the largest number that the API server keeps exactly."""
SIZE_BYTES_MAX: Final = 1 << 62
"""4 Ei, the bound of what is counted in bytes: the API server compares bounds as float64, in which 2^63 - 1 rounds up
and overflows, and 2^62 is exact. A declared size above it counts as it."""

_ANY_BYTES_MAX: Final = 10**18 - 1
"""Up to here the pattern of a CRD takes every whole number of bytes; beyond it only whole Pi."""

PAGE_BYTES: Final = {"4Ki": 4 * KIB, "2Mi": 2 * MIB, "1Gi": GIB}
"""Page sizes that a memory tier may ask for."""


def parse_quantity(text: str | int) -> int:
    """Bytes of a quantity such as `64Gi` or `1048576`. Raises `InvalidInputError` with the allowed form."""
    match = re.fullmatch(r"([0-9]+)([A-Za-z]*)", str(text))
    if not re.match(QUANTITY_PATTERN, str(text)) or match is None:
        raise InvalidInputError(f"quantity {text!r}: must be a positive whole number with Ki, Mi, Gi, Ti, Pi or Ei")
    size_bytes = int(match[1]) * FACTORS[match[2]]
    if size_bytes > QUANTITY_BYTES_MAX:
        raise InvalidInputError(f"quantity {text!r}: {size_bytes} is over the limit {QUANTITY_BYTES_MAX}")
    return size_bytes


def format_quantity(size_bytes: int) -> str:
    """Write bytes as the shortest exact binary quantity: 68719476736 -> `64Gi`, 1000 -> `1000`."""
    for suffix, factor in reversed(_BINARY.items()):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{suffix}"
    return str(size_bytes)


def whole_quantity(size_bytes: int) -> int:
    """Round a sum down to what can be stored as a quantity: to whole Pi where it is large, to 4 Ei at most."""
    if size_bytes <= _ANY_BYTES_MAX:
        return size_bytes
    pib = _BINARY["Pi"]
    return min(size_bytes, SIZE_BYTES_MAX) // pib * pib


def format_rounded(size_bytes: int) -> str:
    """Write bytes for a reader with one decimal at most: 1319413953331 -> `1.2Ti`."""
    for suffix, factor in reversed(_BINARY.items()):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f}".removesuffix(".0") + suffix
    return str(size_bytes)


def percent(part: int, whole: int) -> int | None:
    """Parts per hundred, rounded down; None of nothing."""
    return min(100, 100 * part // whole) if whole else None


def format_rate(per_second: float) -> str:
    """Such as 0, 0.25 or 12: two significant digits below 10, whole numbers from there on."""
    return f"{per_second:.2g}" if per_second < 10 else f"{per_second:.0f}"


def coarse(count: int) -> int:
    """Round a growing count down by an eighth at most: the larger it is, the more rarely it is written."""
    step = max(0, count.bit_length() - 4)
    return count >> step << step
