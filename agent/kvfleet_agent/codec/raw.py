"""The codec that does nothing: stored bytes are the block's bytes."""

from typing import Final

from kvfleet_api.errors import BlockCorruptError

NAME: Final = "raw"


class RawCodec:
    """Identity. A `Codec`."""

    name = NAME
    is_exact = True

    def encode(self, raw: memoryview, element_bytes: int) -> bytes:  # noqa: ARG002 - the contract's signature.
        """Copy `raw`."""
        return bytes(raw)

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Copy back. Raises `BlockCorruptError` when the sizes differ."""
        if len(stored) != len(into):
            raise BlockCorruptError(f"raw block of {len(stored)} B, {len(into)} B wanted")
        into[:] = stored
