"""`kvstrata_native.pack` and `unpack` for blocks on a CUDA device: the same codes and scales, to the bit.

One program packs one group of a row, or a strip of columns. Divisions are rounded as IEEE requires and nothing is
contracted to fused multiply-adds, else the last bits would differ from the processor's. Without a device the same
kernels run in Triton's interpreter (`TRITON_INTERPRET=1` before the first import), slowly.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from kvstrata_native.forms import Kind, Packing

_TOO_LARGE: Final = 0x7B80
"""bf16 of 2^120, as in the native kernels: such a block is kept as it is."""
_STRIP: Final = 64
"""Pairs of columns of one program."""

_FP8: tl.constexpr = tl.constexpr(int(Kind.FP8))
_INT8: tl.constexpr = tl.constexpr(int(Kind.INT8))
_INT4: tl.constexpr = tl.constexpr(int(Kind.INT4))


def pack(x: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and scales (uint8) of a bf16 tensor of whole rows, on its device; None where a value cannot be packed.

    Raises `ValueError` for a packing that is none, and for sizes that do not fit it.
    """
    words = x.contiguous().view(torch.int16).reshape(-1)
    rows = _rows(words.numel(), packing)
    if words.numel() and int((words & 0x7FFF).max()) >= _TOO_LARGE:
        return None
    codes = torch.empty(packing.codes_bytes(rows), dtype=torch.uint8, device=x.device)
    scales = torch.empty(packing.scales_bytes(rows) // 2, dtype=torch.int16, device=x.device)
    if words.numel():
        grid, sizes = _launch(rows, packing)
        _pack[grid](words, codes, scales, packing.groups(rows), **sizes)
    return codes, scales.view(torch.uint8)


def unpack(codes: torch.Tensor, scales: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Bf16 of codes and scales (uint8), flat, on their device. Raises `ValueError` as `pack` does."""
    rows = _rows(codes.numel() * packing.per_byte, packing)
    if scales.numel() != packing.scales_bytes(rows):
        raise ValueError(f"{scales.numel()} B of scales, {packing.scales_bytes(rows)} B wanted")
    into = torch.empty(rows * packing.columns, dtype=torch.int16, device=codes.device)
    if into.numel():
        grid, sizes = _launch(rows, packing)
        _unpack[grid](into, codes.contiguous(), scales.contiguous().view(torch.int16), packing.groups(rows), **sizes)
    return into.view(torch.bfloat16)


def _rows(count: int, packing: Packing) -> int:
    run = packing.columns if packing.is_by_column else packing.group
    if not packing.is_sound or count % packing.columns != 0 or run % 2:
        raise ValueError(f"{count} elements in {packing}: whole rows and groups of an even number wanted")
    return count // packing.columns


def _launch(rows: int, packing: Packing) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs and constants. A program sees `pairs` of neighbours in each of `deep` rows.

    Rows are first: CUDA has room for 65,535 programs of a grid in any other dimension.
    """
    if packing.is_by_column:
        pairs, deep = min(_STRIP, triton.next_power_of_2(packing.columns // 2)), packing.group
        grid = (triton.cdiv(rows, packing.group), triton.cdiv(packing.columns // 2, pairs))
    else:
        pairs, deep = triton.next_power_of_2(packing.group // 2), 1
        grid = (rows, packing.columns // packing.group)
    wide = packing.columns if packing.is_by_column else packing.group
    sizes = {"rows": rows, "columns": packing.columns, "wide": wide, "deep": deep, "KIND": int(packing.kind)}
    sizes |= {"BY_COLUMN": packing.is_by_column, "PAIRS": pairs, "enable_fp_fusion": False}
    return grid, sizes


@triton.jit
def _float(bits):
    """Words whose top half is bf16, as numbers."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _widened(words):
    return _float(words << 16)


@triton.jit
def _ordered(words):
    """Order of bf16 as order of integers; its own inverse."""
    return tl.where(words < 0, words ^ 0x7FFF, words)


@triton.jit
def _scaled(amount):
    """Bits of a scale that is not below `amount`, and its inverse."""
    amount = tl.where((amount > 0.0) & (amount < 7.888609052210118e-31), 7.888609052210118e-31, amount)  # 2^-100
    scale = (amount.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    by = tl.where(amount > 0.0, _widened(scale), 1.0)
    return scale, tl.where(amount > 0.0, tl.div_rn(by * 0.0 + 1.0, by), 0.0)


@triton.jit
def _coded(words, inverse, low, KIND: tl.constexpr):
    """Codes, in the low bits of words."""
    if KIND == _FP8:
        bits = (_widened(words & 0x7FFF) * inverse).to(tl.int32, bitcast=True)
        bits = tl.minimum(bits, 0x43E00000)
        power = tl.maximum(bits & 0x7F800000, 0x3C800000)
        steps = (_float(bits) + _float(power + (20 << 23))).to(tl.int32, bitcast=True) & 0x1F
        code = (((power - 0x3C800000) >> 20) + steps) | (words >> 8 & 0x80)
    elif KIND == _INT8:
        code = (_widened(words) * inverse + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # 1.5 x 2^23
    else:
        code = ((_widened(words) - low) * inverse + 8388608.0).to(tl.int32, bitcast=True) & 0xF  # 2^23
    return code


@triton.jit
def _decoded(code, by, low, KIND: tl.constexpr):
    """Bf16, in the low half of words."""
    sign = code * 0
    if KIND == _FP8:
        magnitude = code & 0x7F
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, _float((magnitude << 20) + (120 << 23)))
        value, sign = value * by, (code & 0x80) << 8
    elif KIND == _INT8:
        value = tl.where(code > 127, code - 256, code).to(tl.float32) * by
    else:
        value = code.to(tl.float32) * by + low
    bits = value.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(tl.int32) | sign


@triton.jit
def _share(least, most, largest, KIND: tl.constexpr):
    """Amount of a step, and bits of the least value."""
    low = _ordered(least)
    if KIND == _INT4:
        amount = tl.div_rn(_widened(_ordered(most)) - _widened(low), largest * 0.0 + 15.0)
    elif KIND == _INT8:
        amount = tl.div_rn(largest, largest * 0.0 + 127.0)
    else:
        amount = tl.div_rn(largest, largest * 0.0 + 448.0)
    return amount, low


@triton.jit
def _pack(
    x, codes, scales, groups, rows, columns, wide, deep,
    KIND: tl.constexpr, BY_COLUMN: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS) + (across * PAIRS if BY_COLUMN else 0)
    is_here = pair < wide // 2
    start = down * deep * columns + (0 if BY_COLUMN else across * wide)
    bottom = tl.minimum((down + 1) * deep, rows)
    first_least = tl.full((PAIRS,), 0x7FFF, tl.int32)
    first_most = tl.full((PAIRS,), -0x8000, tl.int32)
    second_least, second_most, largest, second_largest = first_least, first_most, pair * 0, pair * 0
    for row in range(down * deep, bottom):
        at = start + (row - down * deep) * columns + 2 * pair
        even = tl.load(x + at, mask=is_here, other=0).to(tl.int32)
        odd = tl.load(x + at + 1, mask=is_here, other=0).to(tl.int32)
        first_least = tl.minimum(first_least, tl.where(is_here, _ordered(even), 0x7FFF))
        first_most = tl.maximum(first_most, tl.where(is_here, _ordered(even), -0x8000))
        second_least = tl.minimum(second_least, tl.where(is_here, _ordered(odd), 0x7FFF))
        second_most = tl.maximum(second_most, tl.where(is_here, _ordered(odd), -0x8000))
        largest = tl.maximum(largest, even & 0x7FFF)
        second_largest = tl.maximum(second_largest, odd & 0x7FFF)
    if not BY_COLUMN:
        first_least = tl.min(tl.minimum(first_least, second_least), 0) + pair * 0
        first_most = tl.max(tl.maximum(first_most, second_most), 0) + pair * 0
        largest = tl.max(tl.maximum(largest, second_largest), 0) + pair * 0
        second_least, second_most, second_largest = first_least, first_most, largest
    amount, low = _share(first_least, first_most, _widened(largest), KIND)
    scale, inverse = _scaled(amount)
    second_amount, second_low = _share(second_least, second_most, _widened(second_largest), KIND)
    second_scale, second_inverse = _scaled(second_amount)
    if BY_COLUMN:
        into = scales + down * columns + 2 * pair
        tl.store(into, scale.to(tl.int16), mask=is_here)
        tl.store(into + 1, second_scale.to(tl.int16), mask=is_here)
        if KIND == _INT4:
            tl.store(into + groups, low.to(tl.int16), mask=is_here)
            tl.store(into + groups + 1, second_low.to(tl.int16), mask=is_here)
    else:
        into = scales + down * (columns // wide) + across + pair
        tl.store(into, scale.to(tl.int16), mask=pair == 0)
        if KIND == _INT4:
            tl.store(into + groups, low.to(tl.int16), mask=pair == 0)
    for row in range(down * deep, bottom):
        at = start + (row - down * deep) * columns + 2 * pair
        even = _coded(tl.load(x + at, mask=is_here, other=0).to(tl.int32), inverse, _widened(low), KIND)
        odd = _coded(
            tl.load(x + at + 1, mask=is_here, other=0).to(tl.int32), second_inverse, _widened(second_low), KIND
        )
        if KIND == _INT4:
            tl.store(codes + at // 2, (even | odd << 4).to(tl.uint8), mask=is_here)
        else:
            tl.store(codes + at, even.to(tl.uint8), mask=is_here)
            tl.store(codes + at + 1, odd.to(tl.uint8), mask=is_here)


@triton.jit
def _unpack(
    x, codes, scales, groups, rows, columns, wide, deep,
    KIND: tl.constexpr, BY_COLUMN: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS) + (across * PAIRS if BY_COLUMN else 0)
    is_here = pair < wide // 2
    start = down * deep * columns + (0 if BY_COLUMN else across * wide)
    bottom = tl.minimum((down + 1) * deep, rows)
    if BY_COLUMN:
        share, step = scales + down * columns + 2 * pair, 1
    else:
        share, step = scales + down * (columns // wide) + across + pair * 0, 0
    by = _widened(tl.load(share, mask=is_here, other=0).to(tl.int32))
    second_by = _widened(tl.load(share + step, mask=is_here, other=0).to(tl.int32))
    low, second_low = by, second_by
    if KIND == _INT4:
        low = _widened(tl.load(share + groups, mask=is_here, other=0).to(tl.int32))
        second_low = _widened(tl.load(share + groups + step, mask=is_here, other=0).to(tl.int32))
    for row in range(down * deep, bottom):
        at = start + (row - down * deep) * columns + 2 * pair
        if KIND == _INT4:
            both = tl.load(codes + at // 2, mask=is_here, other=0).to(tl.int32)
            even, odd = both & 0xF, both >> 4
        else:
            even = tl.load(codes + at, mask=is_here, other=0).to(tl.int32)
            odd = tl.load(codes + at + 1, mask=is_here, other=0).to(tl.int32)
        tl.store(x + at, _decoded(even, by, low, KIND).to(tl.int16), mask=is_here)
        tl.store(x + at + 1, _decoded(odd, second_by, second_low, KIND).to(tl.int16), mask=is_here)
