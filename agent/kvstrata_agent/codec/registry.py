"""The codecs that this build has, by name and by the pool's policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata_agent.codec.exact import PackedCodec, RawCodec
from kvstrata_agent.codec.lossy import Drift, KeepingCodec, MixedCodec, MixedDecoder
from kvstrata_api.errors import UnsupportedError

if TYPE_CHECKING:
    from kvstrata_agent.codec.base import Codec, Decoder
    from kvstrata_api.models.pool import CalibratedLayout, CompressionPolicy

_RAW: Final = RawCodec()
_PACKED: Final = PackedCodec()
_KEEPING: Final = KeepingCodec()
_BY_NAME: Final[dict[str, Decoder]] = {d.name: d for d in (_RAW, _PACKED, MixedDecoder())}
_RESERVED: Final = frozenset({"lossless"})
"""Forms that were removed before the first release. No other form gets such a name: an old block is never misread."""
_BY_MODE: Final[dict[str, Codec]] = {"None": _RAW, "Lossless": _PACKED, "Auto": _PACKED}
"""Auto is exact until a pool permits an error."""


class CodecRegistry:
    """Codecs by name and policy. Remembers what a lossy codec has learned, for the error that is permitted now."""

    def __init__(self) -> None:
        self._mixed: MixedCodec | None = None
        self._archive: MixedCodec | None = None
        self._policy: CompressionPolicy | None = None
        self._permit: _Permit | None = None

    def named(self, name: str) -> Decoder:
        """Return what reads the records of a codec. Raises `UnsupportedError` for one that this build lacks."""
        codec = _BY_NAME.get(name)
        if codec is None:
            why = "was removed before the first release" if name in _RESERVED else "is not in this build"
            raise UnsupportedError(f"codec {name!r} {why}; this build has {sorted(_BY_NAME)}")
        return codec

    def for_policy(self, policy: CompressionPolicy, *, is_worn: bool, is_archive: bool = False) -> Codec:
        """Return the codec of `spec.policy.compression`, for blocks that may have lost something already or not.

        For an archive it may take its time, where room counts more.

        Raises `UnsupportedError` for an unknown mode.
        """
        codec = _BY_MODE.get(policy.mode)
        if codec is None:
            raise UnsupportedError(f"compression mode {policy.mode!r}: must be one of {sorted(_BY_MODE)}")
        if codec is _RAW:
            return _RAW
        if is_worn:
            return _KEEPING
        return self._for_error(policy, is_archive=is_archive) if policy.mode == "Auto" else codec

    def drift(self, policy: CompressionPolicy) -> Drift | None:
        """How far blocks are from the policy's calibration; None where it has none for its error."""
        permit = _permit(policy)
        if policy.mode != "Auto" or not permit.calibration:
            return None
        return self._mixed.drift if self._mixed is not None and self._permit == permit else _NOTHING_SEEN

    def _for_error(self, policy: CompressionPolicy, *, is_archive: bool) -> Codec:
        if policy.max_relative_error_permille == 0:
            return _PACKED
        if self._mixed is None or policy is not self._policy:
            self._policy, permit = policy, _permit(policy)
            if self._mixed is None or permit != self._permit:
                rungs = {bytes.fromhex(c.layout_id): bytes(map(int, c.forms)) for c in permit.calibration}
                self._permit, self._mixed = permit, MixedCodec(permit.permille / 1000, _PACKED, rungs)
                self._archive = MixedCodec(permit.permille / 1000, _PACKED, is_rotated=True)
        return self._archive if is_archive and self._archive is not None else self._mixed


class _Permit(NamedTuple):
    """What a lossy codec is made for; an equal policy keeps what it has learned."""

    permille: int
    calibration: tuple[CalibratedLayout, ...]


_NOTHING_SEEN: Final = Drift(0, 0.0, is_over=False)


def _permit(policy: CompressionPolicy) -> _Permit:
    permille = policy.max_relative_error_permille
    return _Permit(permille, tuple(c for c in policy.calibration if c.max_relative_error_permille == permille))


assert _RESERVED.isdisjoint(_BY_NAME), "a name stands for one form for ever"
