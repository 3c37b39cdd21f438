"""The codecs that this build has, by name and by the pool's policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvfleet_agent.codec.mixed import KeepingCodec, MixedCodec, MixedDecoder
from kvfleet_agent.codec.packed import PackedCodec
from kvfleet_agent.codec.raw import RawCodec
from kvfleet_api.errors import UnsupportedError

if TYPE_CHECKING:
    from kvfleet_agent.codec.base import Codec, Decoder
    from kvfleet_api.models.pool import CompressionPolicy

_RAW: Final = RawCodec()
_PACKED: Final = PackedCodec()
_KEEPING: Final = KeepingCodec()
_BY_NAME: Final[dict[str, Decoder]] = {d.name: d for d in (_RAW, _PACKED, MixedDecoder())}
_OLD: Final = "lossless"
"""Written by agents up to 0.1; its decoder needs a library that nothing else here does."""
_BY_MODE: Final[dict[str, Codec]] = {"None": _RAW, "Lossless": _PACKED, "Auto": _PACKED}
"""Auto is exact until a pool permits an error."""


class CodecRegistry:
    """Codecs by name and policy. Remembers what a lossy codec has learned, for the error that is permitted now."""

    def __init__(self) -> None:
        self._mixed: tuple[int, MixedCodec] | None = None

    def named(self, name: str) -> Decoder:
        """Return what reads the records of a codec. Raises `UnsupportedError` for one that this build lacks."""
        codec = _old() if name == _OLD else _BY_NAME.get(name)
        if codec is None:
            raise UnsupportedError(f"codec {name!r} is not in this build, which has {sorted((*_BY_NAME, _OLD))}")
        return codec

    def for_policy(self, policy: CompressionPolicy, *, is_worn: bool) -> Codec:
        """Return the codec of `spec.policy.compression`, for blocks that may have lost something already or not.

        Raises `UnsupportedError` for an unknown mode.
        """
        codec = _BY_MODE.get(policy.mode)
        if codec is None:
            raise UnsupportedError(f"compression mode {policy.mode!r}: must be one of {sorted(_BY_MODE)}")
        if codec is _RAW:
            return _RAW
        if is_worn:
            return _KEEPING
        return self._for_error(policy.max_relative_error_permille) if policy.mode == "Auto" else codec

    def _for_error(self, permille: int) -> Codec:
        if permille == 0:
            return _PACKED
        if self._mixed is None or self._mixed[0] != permille:
            self._mixed = permille, MixedCodec(permille / 1000, _PACKED)
        return self._mixed[1]


def _old() -> Decoder:
    try:
        from kvfleet_agent.codec.lossless import LosslessCodec
    except ImportError as e:
        raise UnsupportedError(f"codec {_OLD!r}: {e}; install the `agent` extra") from e
    return LosslessCodec()
