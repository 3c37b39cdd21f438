"""How far one step of autoscaling goes: agents measure what it would bring, the operator makes it. Pure."""

from typing import Final

STEP: Final = (5, 4)
"""A step up is a quarter more, a step down goes back by one: what one brings is what the other costs."""


def grown(size_bytes: int, grain_bytes: int) -> int:
    """A step up in whole grains, at least one of them."""
    up, down = STEP
    return max(size_bytes * up // down // grain_bytes, size_bytes // grain_bytes + 1) * grain_bytes


def shrunk(size_bytes: int, grain_bytes: int) -> int:
    """A step down in whole grains, never below one; never further than a step up brings back, grains apart."""
    up, down = STEP
    return max(1, -(-size_bytes * down // up // grain_bytes)) * grain_bytes
