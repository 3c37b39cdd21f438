"""The codecs that this build has, by name and by the pool's compression mode."""

from typing import Final

from kvfleet_agent.codec.base import Codec, Decoder
from kvfleet_agent.codec.packed import PackedCodec
from kvfleet_agent.codec.raw import RawCodec
from kvfleet_api.errors import UnsupportedError

_RAW: Final = RawCodec()
_PACKED: Final = PackedCodec()
_BY_NAME: Final[dict[str, Decoder]] = {d.name: d for d in (_RAW, _PACKED)}
_OLD: Final = "lossless"
"""Written by agents up to 0.1; its decoder needs a library that nothing else here does."""
_BY_MODE: Final[dict[str, Codec]] = {"None": _RAW, "Lossless": _PACKED, "Auto": _PACKED}
"""Auto takes the exact codec: no lossy one is built in, whatever error the pool permits."""


class CodecRegistry:
    """Codecs by name and mode."""

    def named(self, name: str) -> Decoder:
        """Return what reads the records of a codec. Raises `UnsupportedError` for one that this build lacks."""
        codec = _old() if name == _OLD else _BY_NAME.get(name)
        if codec is None:
            raise UnsupportedError(f"codec {name!r} is not in this build, which has {sorted((*_BY_NAME, _OLD))}")
        return codec

    def for_mode(self, mode: str) -> Codec:
        """Return the codec of `spec.policy.compression.mode`. Raises `UnsupportedError` for an unknown mode."""
        codec = _BY_MODE.get(mode)
        if codec is None:
            raise UnsupportedError(f"compression mode {mode!r}: must be one of {sorted(_BY_MODE)}")
        return codec


def _old() -> Decoder:
    try:
        from kvfleet_agent.codec.lossless import LosslessCodec
    except ImportError as e:
        raise UnsupportedError(f"codec {_OLD!r}: {e}; install the `agent` extra") from e
    return LosslessCodec()
