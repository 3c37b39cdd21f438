"""Which form each plane of captured KV takes under a permitted error: what mode Auto is told to begin with.

The file is JSON, versioned, with a digest of itself. It decides nothing about bytes: agents measure every plane of
every block, whatever a calibration says, and a wrong one costs room and time alone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import CALIBRATED_PLANES_MAX, CalibratedLayout
from kvstrata_client.calibration.captured import Words, bf16
from kvstrata_native import mix, width_of
from kvstrata_native.mixing import LADDER, PLANE_BYTES_MAX, ROTATED, Mixing, Rung

VERSION: Final = 1
FILE_BYTES_MAX: Final = 64 << 20
HOLDS_RATIO: Final = 0.99
"""Of the captured blocks a form must do for this share: more would let one block in a thousand decide for all."""
_FORMS: Final = tuple(rung for rung in LADDER[: LADDER.index(Rung.EXACT)] if rung not in ROTATED)
"""Those of media below memory; what archives take besides, agents find out."""
_ANY_ERROR: Final = 1e30
_PLANES_PER_LAYER: Final = 2


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
    told = asdict(found) | {"version": VERSION, "kind": "kvstrata-calibration"}
    path.write_text(json.dumps(told | {"digest": _digest(told)}, indent=1) + "\n", "utf-8")


def load(path: Path) -> Calibration:
    """Read a file that `save` wrote. Raises `InvalidInputError` for any other, and for one that was changed."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InvalidInputError(f"{path}: {path.stat().st_size} B, at most {FILE_BYTES_MAX} wanted")
        told = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise InvalidInputError(f"{path}: {e}") from e
    if not isinstance(told, dict) or told.get("kind") != "kvstrata-calibration" or told.get("version") != VERSION:
        raise InvalidInputError(f"{path}: a calibration of version {VERSION} wanted")
    digest = told.pop("digest", None)
    if digest != _digest(told):
        raise InvalidInputError(f"{path}: digest {digest!r} is not that of the content: run `kvstrata calibrate` again")
    return _parsed(path, told)


def _parsed(path: Path, told: Mapping[str, Any]) -> Calibration:
    try:
        layout = Layout(**told["layout"])
        found = Calibration(
            layout, told["layout_id"], told["permille"], told["blocks"], tuple(told["rungs"]),
            tuple(map(tuple, told["errors"])), tuple(told["ratios"]),
        )  # fmt: skip
        planes = layout.layers * _PLANES_PER_LAYER * layout.kv_heads
        is_whole = len(found.rungs) == len(found.errors) == len(found.ratios) == planes
        is_sound = is_whole and found.layout_id == layout.layout_id().hex() and bool(found.for_pool)
    except (KeyError, TypeError, ValueError) as e:
        raise InvalidInputError(f"{path}: {e}") from e
    if not is_sound:
        raise InvalidInputError(f"{path}: layout {found.layout_id} with {len(found.rungs)} planes is not what it names")
    return found


def _digest(told: Mapping[str, Any]) -> str:
    canonical = json.dumps(told, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16, person=b"kvstrata.calib").hexdigest()
