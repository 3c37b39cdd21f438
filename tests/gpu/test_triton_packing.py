"""Packing on a CUDA device makes the bytes that the processor makes. Without one it runs in Triton's interpreter."""

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Read when triton is imported: its own functions are kernels, too.
pytest.importorskip("triton", reason="triton is not installed: it comes with torch for CUDA")

import kvstrata_native  # noqa: E402
from kvstrata_agent.codec import triton_kernels as triton_packing  # noqa: E402
from kvstrata_native import python  # noqa: E402
from kvstrata_native.forms import Kind, Packing  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Words = npt.NDArray[np.uint16]
ROWS = 5
"""Few: the interpreter takes its time."""

PACKINGS = [
    Packing(kind, columns, group, is_by_column=is_by_column)
    for kind in Kind
    for columns, group, is_by_column in ((32, 32, False), (24, 12, False), (16, 3, True), (130, 8, True))
]


def numbers(rows: int, columns: int, which: str) -> Words:
    rng = np.random.default_rng(rows * columns)
    if which == "any":
        signs = rng.integers(0, 2, (rows, columns)) << 15
        return (rng.integers(0, 0x7B80, (rows, columns)) | signs).astype(np.uint16)
    if which == "zeros":
        return rng.choice(np.array([0, 0x8000, 1, 0x8001], np.uint16), (rows, columns))
    values = rng.standard_normal((rows, columns)) * np.where(rng.random(columns) < 0.1, 30.0, 1.0)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def on_device(array: npt.NDArray[np.uint16] | bytearray) -> Any:
    if isinstance(array, bytearray):
        return torch.frombuffer(array, dtype=torch.uint8).to(DEVICE)
    return torch.from_numpy(array.view(np.int16)).to(DEVICE).view(torch.bfloat16)


@pytest.mark.parametrize("which", ["normal", "any", "zeros"])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_the_device_packs_to_the_processors_bytes(packing: Packing, which: str) -> None:
    words = numbers(ROWS, packing.columns, which)
    codes, scales = bytearray(packing.codes_bytes(ROWS)), bytearray(packing.scales_bytes(ROWS))
    assert python.pack(codes, scales, words, packing)

    found = triton_packing.pack(on_device(words), packing)

    assert found is not None
    assert found[0].cpu().numpy().tobytes() == codes
    assert found[1].cpu().numpy().tobytes() == scales


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_the_device_unpacks_to_the_processors_bytes(packing: Packing) -> None:
    words = numbers(ROWS, packing.columns, "normal")
    codes, scales = bytearray(packing.codes_bytes(ROWS)), bytearray(packing.scales_bytes(ROWS))
    assert python.pack(codes, scales, words, packing)
    wanted = np.empty_like(words)
    python.unpack(wanted, codes, scales, packing)

    found = triton_packing.unpack(on_device(codes), on_device(scales), packing)

    assert found.view(torch.int16).cpu().numpy().tobytes() == wanted.tobytes()


def test_codes_that_lie_apart_are_unpacked_like_others() -> None:
    packing = PACKINGS[0]
    found = triton_packing.pack(on_device(numbers(ROWS, packing.columns, "normal")), packing)
    assert found is not None
    codes, scales = found
    apart = torch.stack((codes, ~codes), dim=1)[:, 0]

    assert torch.equal(triton_packing.unpack(apart, scales, packing), triton_packing.unpack(codes, scales, packing))


@pytest.mark.parametrize("word", [0x7F80, 0xFFC1, 0x7B80])
def test_what_cannot_be_packed_is_left_alone(word: int) -> None:
    words = numbers(4, 32, "normal")
    words[2, 5] = word

    assert triton_packing.pack(on_device(words), PACKINGS[0]) is None


def test_sizes_that_do_not_fit_are_refused() -> None:
    words = numbers(4, 32, "normal")

    with pytest.raises(ValueError, match="128 elements"):
        triton_packing.pack(on_device(words), Packing(Kind.INT8, 60, 60, is_by_column=False))
    with pytest.raises(ValueError, match="scales"):
        triton_packing.unpack(on_device(bytearray(64)), on_device(bytearray(2)), PACKINGS[0])


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter would take minutes; torch sees no CUDA device")
@pytest.mark.parametrize(
    "packing", [Packing(Kind.INT4, 128, 64, is_by_column=False), Packing(Kind.INT4, 128, 2, is_by_column=True)], ids=str
)
def test_more_rows_than_a_grid_is_wide_are_packed_like_others(packing: Packing) -> None:
    rows = 70_000 * packing.group if packing.is_by_column else 70_000
    words = numbers(rows, packing.columns, "normal")
    made = triton_packing.pack(on_device(words), packing)

    assert made is not None
    codes, scales = bytearray(packing.codes_bytes(rows)), bytearray(packing.scales_bytes(rows))
    assert kvstrata_native.pack(codes, scales, words, packing)
    assert made[0].cpu().numpy().tobytes() == codes
    assert made[1].cpu().numpy().tobytes() == scales
    wanted = np.empty_like(words)
    kvstrata_native.unpack(wanted, codes, scales, packing)
    found = triton_packing.unpack(*made, packing)
    assert found.view(torch.int16).cpu().numpy().tobytes() == wanted.tobytes()
