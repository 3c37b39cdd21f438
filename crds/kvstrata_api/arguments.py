"""Values of command lines, for the `type` of argparse: a refusal names the value and what is wanted.

Readers raise `argparse.ArgumentTypeError`, before which argparse puts the option's name.
"""

import argparse
import math
from collections.abc import Callable
from typing import Final

PORT_MAX: Final = (1 << 16) - 1


def whole(least: int, most: int, what: str = "a whole number") -> Callable[[str], int]:
    """Reader of decimal digits, `least` and `most` included."""

    def read(text: str) -> int:
        try:
            value = int(text) if text.isascii() and text.isdigit() else None
        except ValueError:  # Python reads some thousand digits at most.
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: {what} from {least} to {most} wanted")
        return value

    return read


def number(least: float, most: float, what: str = "a number") -> Callable[[str], float]:
    """Reader of a number, `least` and `most` included."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: {what} from {least:.10g} to {most:.10g} wanted")
        return value

    return read


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Reader of a time in seconds."""
    return number(least, most, "seconds")


port: Final = whole(0, PORT_MAX, "a port")
"""Reader of a port; 0 stands for any free one."""


def address(text: str) -> tuple[str, int]:
    """Read HOST:PORT, an IPv6 address in brackets."""
    host, colon, digits = text.rpartition(":")
    if not colon or not host:
        raise argparse.ArgumentTypeError(f"{text!r}: HOST:PORT wanted")
    return host.removeprefix("[").removesuffix("]"), port(digits)
