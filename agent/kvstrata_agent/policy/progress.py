"""How far an order has come, and how its work has ended. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

UNKNOWN_ORDER: Final = "UnknownOrder"
"""Reason of an order that this version cannot read. Not final: the node's next version may know it."""
MESSAGE_CHARS_MAX: Final = 256
"""`maxLength` of an answer's message."""


@dataclass(frozen=True, slots=True)
class Count:
    """Blocks and bytes that there were, or are to be, and that were dealt with; fields as in `OrderAnswer`."""

    blocks_done: int = 0
    blocks_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    blocks_missing: int = 0
    """Of the total, those that nobody has."""


class Ended(NamedTuple):
    """What the work on an order came to."""

    message: str
    reason: str = ""
    """CamelCase cause of a failure; empty when it is done."""


Tell = Callable[[Count, Ended | None], None]
"""Takes how far it has come, and what keeps it from going on."""
