"""The codec that does nothing: stored bytes are the block's bytes."""

from typing import Final

from kvstrata_agent.codec.base import RAW, Encoded, Shape
from kvstrata_api.errors import BlockCorruptError
from kvstrata_native import copy

NAME: Final = RAW


class RawCodec:
    """Identity. A `Codec` and its `Decoder`."""

    name = NAME

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:  # noqa: ARG002 - the contract's.
        """Copy `raw`."""
        with into[: len(raw)] as filled:
            copy(filled, raw)
        return Encoded(NAME, len(raw))

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Copy back. Raises `BlockCorruptError` when the sizes differ."""
        if len(stored) != len(into):
            raise BlockCorruptError(f"raw block of {len(stored)} B, {len(into)} B wanted")
        copy(into, stored)
