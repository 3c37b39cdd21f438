"""The contract of all codecs. Pure."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Shape:
    """What a codec may know of a block beside its bytes."""

    element_bytes: int


class Encoded(NamedTuple):
    """What became of a block."""

    codec: str
    """Name for the record."""
    stored_bytes: int


def room_bytes(raw_bytes: int) -> int:
    """Room in which every codec stores any block: it may add two bytes for 256 elements, and a header."""
    return raw_bytes + raw_bytes // 128 + 64


class Decoder(Protocol):
    """Reads one stored form. Formats are for ever: there are decoders whose form nobody writes any more."""

    @property
    def name(self) -> str:
        """Name kept in records; stable for ever."""

    @property
    def is_exact(self) -> bool:
        """True when a block comes back bit for bit."""

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Fill `into`, of exactly the raw size. Releases the GIL where it can; any number of threads at once.

        Raises `BlockCorruptError` on stored bytes that do not fit; whatever they are, nothing else happens.
        """


class Codec(Protocol):
    """Turns a block's bytes into stored bytes. Releases the GIL where it can; any number of threads at once."""

    @property
    def name(self) -> str:
        """What the pool's blocks are usually stored as."""

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:
        """Fill `into`, which has `room_bytes` of the raw size, from its start.

        Noise may become longer than it was; the caller stores the block as it is then.
        """
