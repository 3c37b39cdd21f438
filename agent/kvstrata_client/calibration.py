"""Which form each plane of captured KV takes under a permitted error: what mode Auto begins with.

Captured KV is bf16 blocks from a file that an engine, or a script beside one, has written: an array `(blocks, layers,
2, heads, tokens, dim)`, K before V, one rank's heads, which is what blocks of a pool are, in their order. `.npy` holds
bf16 as 16-bit integers, or float32 and float16, which are rounded; `.safetensors` holds BF16.

A calibration is a JSON file, versioned, with a digest of itself. It decides nothing about bytes: agents measure every
plane of every block, whatever a calibration has, and a wrong one costs room and time alone.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import CALIBRATED_PLANES_MAX, CalibratedLayout
from kvstrata_native import mix, width_of
from kvstrata_native.forms import LADDER, PLANE_BYTES_MAX, ROTATED, Mixing, Rung

Words = npt.NDArray[np.uint16]

VERSION: Final = 1
FILE_BYTES_MAX: Final = 64 << 20
HOLDS_RATIO: Final = 0.99
"""Of the captured blocks a form must do for this share: more would let one block in a thousand decide for all."""
_FORMS: Final = tuple(rung for rung in LADDER[: LADDER.index(Rung.EXACT)] if rung not in ROTATED)
"""Those of media below memory; what archives take besides, agents find out."""
_ANY_ERROR: Final = math.inf
_PLANES_PER_LAYER: Final = 2
_DIMENSIONS: Final = 6
_HEADER_BYTES_MAX: Final = 16 << 20
_UNREADABLE: Final = (OSError, ValueError, EOFError, RecursionError, SyntaxError, TokenError)
"""What NumPy (2.4) raises for files that are none of its: it reads headers with Python's tokenizer."""
_DTYPES: Final[dict[str, np.dtype[Any]]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


def read(path: Path, tensor: str = "") -> Words:
    """Read blocks; large files are mapped, not loaded. Raises `InvalidInputError` for what is no captured KV."""
    try:
        found = _safetensors(path, tensor) if path.suffix == ".safetensors" else _array(path)
    except _UNREADABLE as e:
        raise InvalidInputError(f"{path}: {e}") from e
    if found.ndim != _DIMENSIONS or found.shape[2] != 2 or not found.size:
        raise InvalidInputError(
            f"{path}: shape {found.shape}: (blocks, layers, 2, heads, tokens, dim) wanted, none of them 0"
        )
    if found.dtype.kind not in "iuf" or (found.dtype.kind in "iu" and found.dtype.itemsize != 2):
        raise InvalidInputError(f"{path}: numbers of {found.dtype}: int16 or uint16 (bf16's bits) or floats wanted")
    return found


def _array(path: Path) -> npt.NDArray[Any]:
    with path.open("rb") as file:
        if file.read(2) == b"PK":  # Of zip, which NumPy would leave open.
            raise InvalidInputError(f"{path}: an archive, one array wanted")
    found: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    return found


def bf16(block: npt.NDArray[Any]) -> Words:
    """Bits of one block, contiguous; floats are rounded to the nearest, ties to even."""
    if block.dtype.kind in "iu":
        return np.ascontiguousarray(block).view(np.uint16)
    bits = np.ascontiguousarray(block, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded)


def _safetensors(path: Path, tensor: str) -> npt.NDArray[Any]:
    """Map one tensor. Raises `InvalidInputError` for a file that does not describe what it holds."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(_HEADER_BYTES_MAX, path.stat().st_size - 8):
            raise InvalidInputError(f"{path}: a header of {header_bytes} B: 2 to {_HEADER_BYTES_MAX} wanted")
        header = json.loads(file.read(header_bytes))
    if not isinstance(header, dict):
        raise InvalidInputError(f"{path}: the header is no object")
    names = sorted(set(header) - {"__metadata__"})
    name = tensor or (names[0] if len(names) == 1 else "")
    if name not in names:
        raise InvalidInputError(f"{path}: tensor {tensor!r}: must be one of {names[:20]}")
    return _mapped(path, header[name], 8 + header_bytes)


def _mapped(path: Path, entry: Mapping[str, Any], start: int) -> npt.NDArray[Any]:
    try:
        dtype: np.dtype[Any] = _DTYPES[entry["dtype"]]
        shape, (begin, end) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
        size_bytes = math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise InvalidInputError(f"{path}: dtype of {sorted(_DTYPES)}, shape and data_offsets wanted: {e!r}") from e
    if min(shape, default=0) < 1 or begin < 0 or end - begin != size_bytes or path.stat().st_size < start + end:
        raise InvalidInputError(f"{path}: bytes {begin} to {end} for shape {shape} of {entry['dtype']}")
    found: npt.NDArray[Any] = np.memmap(path, dtype=dtype, mode="r", offset=start + int(begin), shape=shape)
    return found


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found. Arrays go by plane: layer, K before V, head."""

    layout: Layout
    layout_id: str
    permille: int
    blocks: int
    rungs: tuple[int, ...]
    errors: tuple[tuple[float, ...], ...]
    """For each plane the error of each form, in the order tried, that 99 % of the blocks are within; -1: none."""
    ratios: tuple[float, ...]
    """Raw bytes per stored byte of each plane in its form."""

    @property
    def ratio(self) -> float:
        """Of whole blocks, whose planes are all as long."""
        return len(self.ratios) / sum(1 / ratio for ratio in self.ratios)

    @property
    def for_pool(self) -> CalibratedLayout:
        """Entry of `spec.policy.compression.calibration`."""
        return CalibratedLayout(
            layout_id=self.layout_id,
            max_relative_error_permille=self.permille,
            forms="".join(map(str, self.rungs)),
        )


def calibrate(captured: Words, layout: Layout, permille: int) -> Calibration:
    """Measure every form on every plane of blocks `(blocks, layers, 2, heads, tokens, dim)`.

    Raises `InvalidInputError` for planes that pools do not code with loss.
    """
    blocks, layers, _, heads, rows, columns = captured.shape
    planes = layers * _PLANES_PER_LAYER * heads
    plane_bytes = 2 * rows * columns
    if planes > CALIBRATED_PLANES_MAX or columns % 2 or not 1024 <= plane_bytes <= PLANE_BYTES_MAX:
        raise InvalidInputError(
            f"{planes} planes of {plane_bytes} B, {columns} channels: at most {CALIBRATED_PLANES_MAX} of 1024 to "
            f"{PLANE_BYTES_MAX} B with an even number of channels wanted"
        )
    errors = np.empty((blocks, len(_FORMS), planes))
    stored = np.empty((blocks, len(_FORMS) + 1, planes))
    for number in range(blocks):
        _measure(bf16(captured[number]), Mixing(planes, rows, columns, 3), errors[number], stored[number])
    worst = np.quantile(errors, HOLDS_RATIO, axis=0, method="higher")
    places = _places(worst, permille / 1000)
    lengths = np.take_along_axis(stored.mean(axis=0), places[None], 0)[0]
    return Calibration(
        layout,
        layout.layout_id().hex(),
        permille,
        blocks,
        tuple(int((*_FORMS, Rung.EXACT)[place]) for place in places),
        tuple(tuple(round(float(e), 6) if np.isfinite(e) else -1.0 for e in plane) for plane in worst.T),
        tuple(round(float(plane_bytes / length), 4) for length in lengths),
    )


def _places(worst: npt.NDArray[np.float64], permitted: float) -> npt.NDArray[np.intp]:
    """Place on the ladder of each plane: the first whose error is permitted, or that of exact planes."""
    does = np.vstack((worst <= permitted, np.ones((1, worst.shape[1]), bool)))
    found: npt.NDArray[np.intp] = does.argmax(axis=0)
    return found


def _measure(block: Words, mixing: Mixing, errors: npt.NDArray[np.float64], stored: npt.NDArray[np.float64]) -> None:
    """Error and stored bytes of each plane in each form; no form at all has an infinite error."""
    mixing = mixing._replace(width=width_of(block, 2), limit=_ANY_ERROR)
    room = np.empty(mixing.room_bytes(), np.uint8)
    for place, form in enumerate((*_FORMS, Rung.EXACT)):
        rungs, found = bytearray((form,)) * mixing.planes, np.empty(mixing.planes)
        mix(room, block, rungs, found, mixing)
        heads = room[: 4 * mixing.planes].view("<u4")
        stored[place] = heads & 0xFFFFFF
        if form != Rung.EXACT:
            errors[place] = np.where(np.frombuffer(rungs, np.uint8) == form, found, np.inf)


def save(found: Calibration, path: Path) -> None:
    """Write the file."""
    content = asdict(found) | {"version": VERSION, "kind": "kvstrata-calibration"}
    path.write_text(json.dumps(content | {"digest": _digest(content)}, indent=1) + "\n", "utf-8")


def load(path: Path) -> Calibration:
    """Read a file that `save` wrote. Raises `InvalidInputError` for any other, and for one that was changed."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InvalidInputError(f"{path}: {path.stat().st_size} B, at most {FILE_BYTES_MAX} wanted")
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidInputError(f"{path}: {e}") from e
    if (
        not isinstance(content, dict)
        or content.get("kind") != "kvstrata-calibration"
        or content.get("version") != VERSION
    ):
        raise InvalidInputError(f"{path}: a calibration of version {VERSION} wanted")
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise InvalidInputError(f"{path}: digest {digest!r} is not that of the content: run `kvstrata calibrate` again")
    return _parsed(path, content)


def _parsed(path: Path, content: Mapping[str, Any]) -> Calibration:
    try:
        layout = Layout(**content["layout"])
        found = Calibration(
            layout, content["layout_id"], content["permille"], content["blocks"], tuple(content["rungs"]),
            tuple(map(tuple, content["errors"])), tuple(content["ratios"]),
        )  # fmt: skip
        planes = layout.layers * _PLANES_PER_LAYER * layout.kv_heads
        is_whole = len(found.rungs) == len(found.errors) == len(found.ratios) == planes
        is_sound = is_whole and found.layout_id == layout.layout_id().hex() and bool(found.for_pool)
    except (KeyError, TypeError, ValueError) as e:
        raise InvalidInputError(f"{path}: {e}") from e
    if not is_sound:
        raise InvalidInputError(f"{path}: layout {found.layout_id} with {len(found.rungs)} planes is not what it names")
    return found


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16, person=b"kvstrata.calib").hexdigest()
