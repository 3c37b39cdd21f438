"""The contract of all codecs. Pure."""

from typing import Protocol


class Codec(Protocol):
    """Turns a block's bytes into stored bytes and back. Calls release the GIL where they can and hold no state."""

    @property
    def name(self) -> str:
        """Name kept in records; stable for ever."""

    @property
    def is_exact(self) -> bool:
        """True when `decode(encode(x)) == x` bit for bit."""

    def encode(self, raw: memoryview, element_bytes: int) -> bytes:
        """Stored form of `raw`, whose elements have `element_bytes` bytes; never longer than raw plus 64 B."""

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Fill `into`, of exactly the raw size. Raises `BlockCorruptError` on stored bytes that do not fit."""
