"""A calibration says what agents would find: the first form on the ladder that 99 % of captured planes fit."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml

from kvstrata_agent.codec.base import Planes, Shape, room_bytes
from kvstrata_agent.codec.exact import PackedCodec
from kvstrata_agent.codec.lossy import MixedCodec
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.pool import CompressionPolicy
from kvstrata_client.calibration import bf16, calibrate, load, read, save
from kvstrata_client.cli import main
from kvstrata_native.forms import Rung
from support.backends.generated_kv import kv_block

pytestmark = pytest.mark.unit

SHAPE = (4, 2, 2, 2, 16, 64)
LAYOUT = Layout("tiny", "r1", "bf16", 16, layers=2, kv_heads=2, head_dim=64, element_bytes=2)


def captured(shape: tuple[int, ...] = SHAPE) -> npt.NDArray[np.uint16]:
    blocks = [kv_block(seed, heads=shape[3], dim=shape[5], layers=shape[1]) for seed in range(shape[0])]
    return np.stack([np.frombuffer(b, np.uint16).reshape(shape[1:]) for b in blocks])


def safetensors(path: Path, tensors: dict[str, npt.NDArray[np.uint16]], **entry: Any) -> None:
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]} | entry
        at += tensor.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.tobytes() for t in tensors.values()))


@pytest.mark.parametrize("permille", [20, 60, 200])
def test_blocks_settle_where_the_calibration_says(permille: int) -> None:
    found = calibrate(captured(), LAYOUT, permille)
    codec = MixedCodec(permille / 1000, PackedCodec(), {LAYOUT.layout_id(): bytes(found.rungs)})
    planes, raw = Planes(8, 16, 64), captured()[0].tobytes()

    made = codec.encode(
        memoryview(raw), Shape(2, planes, LAYOUT.layout_id()), memoryview(bytearray(room_bytes(len(raw))))
    )

    assert made.drifted == sum(s.missed for s in made.settled) == 0
    assert sum(s.planes for s in made.settled if s.form == "exact") == found.rungs.count(Rung.EXACT)
    assert all(
        e <= permille / 1000 for e in (plane[0] for plane, r in zip(found.errors, found.rungs, strict=True) if r == 0)
    )
    assert len(raw) / made.stored_bytes == pytest.approx(found.ratio, rel=0.05)


def test_a_few_large_channels_take_a_scale_for_each_channel() -> None:
    values = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    values[:, :, 0, :, :, :3] *= 20

    found = calibrate(bf16(values), LAYOUT, 150)

    assert np.array_equal(np.array(found.rungs).reshape(2, 2, 2)[0], [[Rung.INT4_COLUMN] * 2, [Rung.INT4_ROW] * 2])


def test_what_is_not_finite_stays_exact() -> None:
    words = captured().copy()
    words[:, 1, 0, 1, 3, 5] = 0x7FC0

    found = calibrate(words, LAYOUT, 500)

    assert found.rungs[6 - 1] == Rung.EXACT
    assert found.errors[6 - 1] == (-1.0,) * 5
    assert found.rungs.count(Rung.EXACT) == 1


def test_a_file_comes_back_and_a_changed_one_does_not(tmp_path: Path) -> None:
    found, path = calibrate(captured(), LAYOUT, 30), tmp_path / "c.json"
    save(found, path)
    assert load(path) == found

    path.write_text(path.read_text().replace('"permille": 30', '"permille": 90'))
    with pytest.raises(InvalidInputError, match="is not that of the content"):
        load(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "kvstrata-calibration", "version": 2}'])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)

    with pytest.raises(InvalidInputError, match=r"c\.json"):
        load(tmp_path / "c.json")


@pytest.mark.parametrize("form", ["npy", "float32", "safetensors"])
def test_files_are_read_as_bf16(tmp_path: Path, form: str) -> None:
    words = captured()
    path = tmp_path / ("kv.safetensors" if form == "safetensors" else "kv.npy")
    if form == "safetensors":
        safetensors(path, {"other": words[:1], "kv": words})
    elif form == "npy":
        np.save(path, words.view(np.int16))
    else:
        np.save(path, (words.astype(np.uint32) << 16).view(np.float32))

    found = read(path, "kv")

    assert np.array_equal(np.stack([bf16(block) for block in found]), words)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "I8"}, "dtype of"),
        ({"shape": [4, 2, 2, 2, 16, 63]}, "for shape"),
        ({"data_offsets": [0, 1 << 40]}, "for shape"),
        ({"shape": [-1]}, "for shape"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    safetensors(tmp_path / "kv.safetensors", {"kv": captured()}, **entry)

    with pytest.raises(InvalidInputError, match=says):
        read(tmp_path / "kv.safetensors")


@pytest.mark.parametrize("content", [b"", b"\xff" * 7, b"\xff" * 64, struct.pack("<Q", 4) + b"[12]"])
def test_what_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "kv.safetensors").write_bytes(content)

    with pytest.raises(InvalidInputError, match=r"kv\.safetensors"):
        read(tmp_path / "kv.safetensors")


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 3, 2, 16, 64), (0, 2, 2, 2, 16, 64)])
def test_other_shapes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "kv.npy", np.zeros(shape, np.uint16))

    with pytest.raises(InvalidInputError, match="shape"):
        read(tmp_path / "kv.npy")


@pytest.mark.parametrize("shape", [(1, 1, 2, 1, 4, 64), (1, 1, 2, 1, 16, 63)])
def test_planes_that_pools_keep_exactly_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="planes of"):
        calibrate(np.zeros(shape, np.uint16), LAYOUT, 20)


def test_the_command_tells_what_to_put_into_the_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "kv.npy", captured())
    base = [str(tmp_path / "kv.npy"), "--model", "tiny", "--revision", "r1", "--error-permille", "60"]
    with pytest.raises(SystemExit) as end:
        main(["calibrate", *base, "--out", str(tmp_path / "c.json")])
    first = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["calibrate", str(tmp_path / "c.json")])

    assert (end.value.code or 0) == 0
    assert capsys.readouterr().out == first
    policy = CompressionPolicy.model_validate(yaml.safe_load(first)["spec"]["policy"]["compression"])
    assert policy.calibration[0].layout_id == LAYOUT.layout_id().hex()
    assert len(policy.calibration[0].forms) == 8


def test_the_command_wants_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "kv.npy", captured())
    with pytest.raises(SystemExit):
        main(["calibrate", str(tmp_path / "kv.npy")])

    assert "--model and --revision are missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", b""),
        ("a.npy", b"\x93NUMPY\x01\x00\x10\x00{'shape':(2,1,   \n"),
        ("a.npy", b"PK\x03\x04" + bytes(30)),
        ("a.safetensors", (3000).to_bytes(8, "little") + b"[" * 3000),
        (
            "a.safetensors",
            (60).to_bytes(8, "little")
            + b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}'.ljust(60)
            + b"\0\0\0\0",
        ),
    ],
)
def test_a_file_that_is_no_capture_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(InvalidInputError, match=name):
        read(path)
