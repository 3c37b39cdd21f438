"""The contract of all codecs. Pure."""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kvstrata_api.blocks import Layout
from kvstrata_native.forms import PLANE_BYTES_MAX

RAW: Final = "raw"
"""Form of a block that is stored as it came from its writer."""
RAW_AFTER_LOSS: Final = "worn"
"""Form of a block that is stored raw after a loss: it may differ from what was written, within the permitted error."""
UNENCODED: Final = frozenset({RAW, RAW_AFTER_LOSS})
"""Forms whose stored bytes are the block's."""
LOSSY: Final = frozenset({"mixed", RAW_AFTER_LOSS})
"""Forms that do not vouch for every bit. What is read from one is never coded with loss again: errors would add up."""

ORDER: Final = "layer,kv,head,token,dim"
"""The memory order whose planes lie one behind the other."""
PLANE_BYTES_MIN: Final = 1024
"""Shorter planes gain little over their heads; room for these is part of `room_bytes`."""


class Planes(NamedTuple):
    """The K or V of each head of each layer, one behind the other, in bf16."""

    planes: int
    rows: int
    """Tokens."""
    columns: int
    """Channels of one head."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a codec may know of a block beside its bytes."""

    element_bytes: int
    planes: Planes | None = None
    """None where every bit counts, or nobody knows what lies where."""
    layout_id: bytes = b""


class Settled(NamedTuple):
    """What a lossy codec made of some planes of one block."""

    form: str
    planes: int
    missed: int
    """Planes of which a cheaper form was expected to do, and did not: the cache's numbers drift."""
    worst_error: float
    """The largest ||x - x'|| / ||x|| of a plane, or up to `forms.ERROR_ABOVE` more."""


class Encoded(NamedTuple):
    """What became of a block."""

    codec: str
    """Name for the record."""
    stored_bytes: int
    settled: tuple[Settled, ...] = ()
    drifted: int = 0
    """Planes that needed a safer form than the pool's calibration states."""


def planes_of(layout: Layout | None, raw_bytes: int) -> Planes | None:
    """Planes of a block; None unless its layout is known, in bf16, in our order and of exactly this size."""
    if layout is None or (layout.dtype, layout.element_bytes) != ("bf16", 2) or layout.block_bytes != raw_bytes:
        return None
    planes = Planes(layout.layers * layout.kv_parts * layout.kv_heads, layout.block_tokens, layout.head_dim)
    is_ours = layout.order == ORDER and layout.head_dim % 2 == 0
    return planes if is_ours and PLANE_BYTES_MIN <= 2 * planes.rows * planes.columns <= PLANE_BYTES_MAX else None


def room_bytes(raw_bytes: int) -> int:
    """Room in which every codec stores any block: it may add two bytes for 256 elements, and a header."""
    return raw_bytes + raw_bytes // 128 + 64


class Decoder(Protocol):
    """Reads one stored form. Formats are for ever: there are decoders whose form nobody writes any more."""

    @property
    def name(self) -> str:
        """Name kept in records; stable for ever."""

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
