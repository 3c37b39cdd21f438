"""Codec that loses what the pool permits: each plane in the cheapest form whose error is small enough.

Stored form, little-endian: `version u8 | bits of a code u8 | zero u16 | planes u32 | rows u32 | columns u32 |
raw bytes u64`, then what `kvstrata_native.mix` makes (docs/format.md).

Each plane is tried first on the rung that the last block of its layout settled on (`Guesses`); layouts of which nothing
is known start where the calibration states, and else at the cheapest. Rungs are named by their places on the ladder
(`kvstrata_native.forms.LADDER`), a byte for each plane. `DriftWatch` measures whether the calibration still holds.
Nothing here has a clock or I/O.
"""

import struct
from collections.abc import Mapping
from threading import Lock
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata_agent.codec.base import Codec, Encoded, Planes, Settled, Shape
from kvstrata_api.errors import BlockCorruptError
from kvstrata_native import mix, unmix, width_of
from kvstrata_native.forms import LADDER, PLANE_BYTES_MAX, ROTATED, WIDTH_LEAST, WIDTH_MOST, Mixing, Rung

LAYOUTS_MAX: Final = 16
"""Layouts remembered, a byte for each plane; a pool has one for each rank of a tensor-parallel engine."""
PROBE_EVERY: Final = 16
"""Of so many blocks of a layout one is tried a rung cheaper: the numbers may have become easier meanwhile."""

_BLOCKS: Final = 256
"""Blocks that the share is of: the last of them weigh as much as all before."""
_BLOCKS_LEAST: Final = 64
"""Fewer prove nothing."""
_FROM_RATIO: Final = 0.05
"""A calibration is made such that 1 % of planes miss (`kvstrata_client.calibration.forms`); five times that is
another cache."""
_UNTIL_RATIO: Final = 0.025
"""Half of it ends what began, so that nothing flaps."""
NAME: Final = "mixed"
_VERSION: Final = 1


class First(NamedTuple):
    """Where the planes of a block start."""

    places: bytes
    is_guess: bool
    """They were known to do; false where nothing is known, and where cheaper ones are tried."""


class Guesses:
    """The memory of one permitted error. Threads may share it."""

    def __init__(self, calibrated: Mapping[bytes, bytes] | None = None) -> None:
        """Start with what a calibration found, places by layout id."""
        self._lock = Lock()
        self._places: dict[bytes, bytes] = dict(list((calibrated or {}).items())[:LAYOUTS_MAX])
        self._blocks = 0

    def first(self, layout_id: bytes, planes: int) -> First:
        """Place for each plane."""
        with self._lock:
            known = self._places.get(layout_id)
            if known is None or len(known) != planes:
                return First(bytes(planes), is_guess=False)
            self._blocks += 1
            is_probe = self._blocks % PROBE_EVERY == 0
        return First(known.translate(_CHEAPER), is_guess=False) if is_probe else First(known, is_guess=True)

    def settle(self, layout_id: bytes, places: bytes) -> None:
        """Remember what a block settled on; the layout that was used least lately is forgotten."""
        with self._lock:
            self._places.pop(layout_id, None)
            self._places[layout_id] = places
            if len(self._places) > LAYOUTS_MAX:
                del self._places[next(iter(self._places))]


_CHEAPER: Final = bytes(max(0, place - 1) for place in range(256))


class Drift(NamedTuple):
    """What the watch sees."""

    blocks: int
    """Blocks of calibrated layouts since the calibration is known."""
    ratio: float
    """Share of their planes of late that needed a safer form."""
    is_over: bool


class DriftWatch:
    """The watch over one calibration. Threads may share it."""

    def __init__(self, calibrated: Mapping[bytes, bytes]) -> None:
        """Compare with places on the ladder by layout id."""
        self._calibrated = dict(calibrated)
        self._lock = Lock()
        self._seen = Drift(0, 0.0, is_over=False)

    @property
    def seen(self) -> Drift:
        """What was seen so far."""
        return self._seen

    def note(self, layout_id: bytes, places: bytes) -> int:
        """Note where the planes of a block settled; return how many are above their calibration."""
        wanted = self._calibrated.get(layout_id)
        if wanted is None or len(wanted) != len(places):
            return 0
        above = int((np.frombuffer(places, np.uint8) > np.frombuffer(wanted, np.uint8)).sum())
        with self._lock:
            blocks = self._seen.blocks + 1
            ratio = self._seen.ratio + (above / len(places) - self._seen.ratio) / min(blocks, _BLOCKS)
            bound = _UNTIL_RATIO if self._seen.is_over else _FROM_RATIO
            self._seen = Drift(blocks, ratio, is_over=blocks >= _BLOCKS_LEAST and ratio > bound)
        return above


_HEADER: Final = struct.Struct("<BBHIIIQ")

_EXACT_PLACE: Final = LADDER.index(Rung.EXACT)
_ROTATED_RUNGS: Final = bytes(LADDER[min(place, _EXACT_PLACE)] for place in range(256))
"""By place; a damaged calibration may name any."""
_RUNGS: Final = bytes(
    next(r for r in LADDER[min(place, _EXACT_PLACE) :: -1] if r not in ROTATED) for place in range(256)
)
"""The same without rotated planes: the next cheaper one stands for them."""
_EXACT_PLACES: Final = bytes(range(_EXACT_PLACE, 256))
_FORMS: Final = tuple(rung.name.lower() for rung in LADDER)
_NONE_MISSED: Final = [0] * len(LADDER)
_PLACES: Final = bytes(LADDER.index(Rung(rung)) if rung in LADDER else _EXACT_PLACE for rung in range(256))


class MixedCodec:
    """A `Codec` for one permitted error. Blocks whose planes nobody knows, or that gain nothing, go to `exact`."""

    name = NAME

    def __init__(
        self,
        permitted_error: float,
        exact: Codec,
        calibrated: Mapping[bytes, bytes] | None = None,
        *,
        is_rotated: bool = False,
    ) -> None:
        """Permit ||x - x'|| / ||x|| of each plane up to `permitted_error`.

        `calibrated` gives the rungs that planes are tried on first, by layout id. With `is_rotated` channels may be
        mixed: shorter, and several times as long in the making.
        """
        self._is_rotated = is_rotated
        self._permitted = permitted_error
        self._exact = exact
        places = {layout_id: rungs.translate(_PLACES) for layout_id, rungs in (calibrated or {}).items()}
        self._guesses, self._watch = Guesses(places), DriftWatch(places)

    @property
    def drift(self) -> Drift:
        """How far blocks are from the calibration."""
        return self._watch.seen

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:
        """Stored form; the error of every plane is known, and those that would lose too much are exact."""
        if shape.planes is None:
            return self._exact.encode(raw, shape, into)
        first = self._guesses.first(shape.layout_id, shape.planes.planes)
        if first.is_guess and _are_exact(first.places):
            self._watch.note(shape.layout_id, first.places)
            return self._exact.encode(raw, shape, into)
        rungs = bytearray(first.places.translate(_ROTATED_RUNGS if self._is_rotated else _RUNGS))
        errors = np.zeros(shape.planes.planes)
        mixing = Mixing(*shape.planes, width_of(raw, 2), self._permitted, self._is_rotated)
        stored_bytes = _mixed(raw, into, rungs, errors, mixing)
        places = bytes(rungs.translate(_PLACES))
        self._guesses.settle(shape.layout_id, places)
        settled, drifted = _settled(first, places, errors), self._watch.note(shape.layout_id, places)
        if _are_exact(places):  # Nothing was lost, and the record shall state so.
            return self._exact.encode(raw, shape, into)._replace(settled=settled, drifted=drifted)
        return Encoded(NAME, stored_bytes, settled, drifted)


class KeepingCodec:
    """Stores blocks that may have lost something: nothing is lost again, and their records state so. A `Codec`."""

    name = NAME

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:  # noqa: ARG002 - the contract's.
        """Stored form: one exact plane. As long as `raw`, of which nothing was made, where there is no such plane."""
        planes = Planes(1, 1, len(raw) // 2)
        if len(raw) % 4 != 0 or not 0 < len(raw) <= PLANE_BYTES_MAX:
            return Encoded(NAME, len(raw))
        mixing = Mixing(*planes, width_of(raw, 2))
        return Encoded(NAME, _mixed(raw, into, bytearray((Rung.EXACT,)), np.zeros(1), mixing))


class MixedDecoder:
    """A `Decoder`."""

    name = NAME

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Fill `into`, of exactly the raw size. Raises `BlockCorruptError` on stored bytes that do not fit."""
        mixing = _parse(stored, len(into))
        with stored[_HEADER.size :] as planes:
            if not unmix(into, planes, mixing):
                raise BlockCorruptError(f"mixed block of {len(stored)} B: planes do not fit {len(into)} B")


def _mixed(raw: memoryview, into: memoryview, rungs: bytearray, errors: npt.NDArray[np.float64], mixing: Mixing) -> int:
    """Fill `into` and return the length; rungs and errors are those that the planes settled on."""
    _HEADER.pack_into(into, 0, _VERSION, mixing.width, 0, *mixing[:3], len(raw))
    with into[_HEADER.size :] as body:
        return _HEADER.size + mix(body, raw, rungs, errors, mixing)


def _are_exact(places: bytes) -> bool:
    """True when no plane loses anything; without a loop over planes."""
    return not places.translate(None, _EXACT_PLACES)


def _settled(first: First, places: bytes, errors: npt.NDArray[np.float64]) -> tuple[Settled, ...]:
    taken, worst, missed = np.frombuffer(places, np.uint8), np.zeros(len(LADDER)), _NONE_MISSED
    np.maximum.at(worst, taken, errors)
    if first.is_guess and first.places != places:
        missed = _counted(taken[np.frombuffer(first.places, np.uint8) < taken])
    rows = zip(_FORMS, _counted(taken), missed, worst.tolist(), strict=True)
    return tuple([Settled._make(row) for row in rows if row[1]])


def _counted(places: npt.NDArray[np.uint8]) -> list[int]:
    """Planes on each place of the ladder."""
    found: list[int] = np.bincount(places, minlength=len(LADDER)).tolist()
    return found


def _parse(stored: memoryview, raw_bytes: int) -> Mixing:
    """Planes of a stored form."""
    if len(stored) < _HEADER.size:
        raise BlockCorruptError(f"mixed block of {len(stored)} B is shorter than its header")
    version, width, zero, planes, rows, columns, size_bytes = _HEADER.unpack_from(stored)
    mixing = Mixing(planes, rows, columns, width)
    is_form = version == _VERSION and zero == 0 and WIDTH_LEAST <= width <= WIDTH_MOST and mixing.is_sound
    if not is_form or not size_bytes == raw_bytes == planes * mixing.plane_bytes:
        raise BlockCorruptError(
            f"mixed block: version {version}, codes of {width} bits, {planes} planes of {rows} rows of {columns} "
            f"columns, {size_bytes} B raw, {raw_bytes} B wanted"
        )
    return mixing
