"""Whether an object still says what was applied to it, whoever changed it since. Pure."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_FACTORS: Final = {"": Decimal(1), "m": Decimal("0.001")} | {
    suffix: Decimal(base) ** (power + 1)
    for base, suffixes in ((1000, ("k", "M", "G", "T", "P", "E")), (1024, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")))
    for power, suffix in enumerate(suffixes)
}


def holds(wanted: Any, seen: Any) -> bool:
    """True when `seen` says all that `wanted` does.

    What the API server fills in beside it does not count, nor that it leaves empty values out and writes quantities in
    its own way (1024Mi is 1Gi). Lists are compared from end to end.
    """
    if isinstance(wanted, Mapping):
        inside = seen if isinstance(seen, Mapping) else {}
        return all(holds(value, inside.get(key)) for key, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        inner = seen if isinstance(seen, Sequence) and not isinstance(seen, str) else ()
        return len(wanted) == len(inner) and all(map(holds, wanted, inner))
    if wanted == seen or (not wanted and seen is None):
        return True
    amount = _amount(wanted)
    return amount is not None and amount == _amount(seen)


def _amount(value: Any) -> Decimal | None:
    """Read a quantity; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    found = _QUANTITY.fullmatch(str(value))
    return Decimal(found[1]) * _FACTORS[found[2] or ""] if found else None
