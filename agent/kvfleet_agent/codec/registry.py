"""The codecs that this build has, by name and by the pool's compression mode."""

from typing import Final

from kvfleet_agent.codec.base import Codec
from kvfleet_agent.codec.lossless import LosslessCodec
from kvfleet_agent.codec.raw import RawCodec
from kvfleet_api.errors import UnsupportedError

_RAW: Final = RawCodec()
_LOSSLESS: Final = LosslessCodec()
_BY_NAME: Final[dict[str, Codec]] = {c.name: c for c in (_RAW, _LOSSLESS)}
_BY_MODE: Final[dict[str, Codec]] = {"None": _RAW, "Lossless": _LOSSLESS, "Auto": _LOSSLESS}
"""Auto takes the exact codec: no lossy one is built in, whatever error the pool permits."""


class CodecRegistry:
    """Codecs by name and mode."""

    def named(self, name: str) -> Codec:
        """Return the codec that wrote a record. Raises `UnsupportedError` for one that this build lacks."""
        codec = _BY_NAME.get(name)
        if codec is None:
            raise UnsupportedError(f"codec {name!r} is not in this build, which has {sorted(_BY_NAME)}")
        return codec

    def for_mode(self, mode: str) -> Codec:
        """Return the codec of `spec.policy.compression.mode`. Raises `UnsupportedError` for an unknown mode."""
        codec = _BY_MODE.get(mode)
        if codec is None:
            raise UnsupportedError(f"compression mode {mode!r}: must be one of {sorted(_BY_MODE)}")
        return codec
