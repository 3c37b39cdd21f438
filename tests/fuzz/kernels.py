"""The compiled kernels at odd sizes and alignments: what NumPy makes of the same, and nothing beside the target.

An input is an operation, where its memories begin, its parameters and the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuzz.target import Target, expect
from kvstrata_native import choice, forms, python

if TYPE_CHECKING:
    from collections.abc import Callable

_HEAD: Final = 12
_GUARD: Final = b"\xa5" * 64
_REFUSED: Final = "refused"
_OF_WORDS: Final = (1, 3, 4, 5)
"""Operations that the compiled kernels refuse at odd addresses, and NumPy does not."""


class _Arena:
    """Memory between guards, at an alignment."""

    def __init__(self, size_bytes: int, align: int) -> None:
        self._whole = np.frombuffer(_GUARD + bytes(align + size_bytes) + _GUARD, np.uint8).copy()
        self._begin, self._end = len(_GUARD) + align, len(_GUARD) + align + size_bytes

    @property
    def memory(self) -> memoryview:
        return self._whole.data[self._begin : self._end]

    def check(self, what: str) -> None:
        before, after = bytes(self._whole[: self._begin]), bytes(self._whole[self._end :])
        is_whole = before == _GUARD + bytes(len(before) - len(_GUARD)) and after == _GUARD
        expect(is_whole, "nothing is written beside the target", what)


def _run(kernels: Any, data: bytes) -> tuple[Any, ...]:
    op, align_from, align_to, element, width, planes, rows, columns, kind, group, trim, seed = data[:_HEAD]
    source = _Arena(len(data) - _HEAD, align_from % 64)
    source.memory[:] = data[_HEAD:]
    element_bytes, width, columns = (1, 2, 4, 3)[element % 4], 2 + width % 7, 2 * columns or 1
    given, outs = source.memory, []

    def out(size_bytes: int) -> memoryview:
        outs.append(_Arena(max(0, size_bytes - (trim if trim < 8 else 0)), align_to % 64))
        return outs[-1].memory

    mixing = forms.Mixing(1 + planes % 4, 1 + rows % 64, columns, width, seed / 255, is_rotated=bool(kind & 128))
    packing = forms.Packing(forms.Kind(kind % 3), columns, max(1, group), bool(kind & 64))
    count = max(1, len(given) // max(1, 2 * columns))
    actions: tuple[Callable[[], Any], ...] = (
        lambda: kernels.widen(out(1 + 16 * rows), given, element_bytes, width),
        lambda: kernels.unmix(out(mixing.planes * mixing.plane_bytes), given, mixing),
        lambda: kernels.narrow(out(forms.narrowed_bytes_max(len(given), element_bytes)), given, element_bytes, width),
        lambda: kernels.mix(
            out(mixing.room_bytes()), given, bytearray([kind % 11] * mixing.planes), np.zeros(mixing.planes), mixing
        ),
        lambda: kernels.pack(out(packing.codes_bytes(count)), out(packing.scales_bytes(count)), given, packing),
        lambda: kernels.unpack(
            out(2 * columns * count),
            given[: packing.codes_bytes(count)],
            given[-packing.scales_bytes(count) :],
            packing,
        ),
        lambda: kernels.xxh3_128(given, seed),
        lambda: kernels.copy_digest(out(len(given)), given, seed),
        lambda: kernels.copy_digests(out(len(given)), given, seed, kind),
        lambda: kernels.copy(out(len(given)), given),
        lambda: kernels.width_of(given, element_bytes),
        lambda: kernels.copy_digest_each([(out(len(given)), given, seed), (out(0), given[:0], kind)], 1 + planes % 3),
        lambda: kernels.digest_pairs([(given, seed, kind), (given[1:], kind, seed)]),
        lambda: kernels.copy_sound([(out(len(given)), given, seed, kind, kernels.xxh3_128(given, seed % 2 * seed))]),
    )
    name = f"operation {op % len(actions)}"
    try:
        result = actions[op % len(actions)]()
    except ValueError:
        result = _REFUSED
    for arena in (source, *outs):
        arena.check(name)
    expect(bytes(source.memory) == data[_HEAD:], "the source stays as it is", name)
    if result is False or result is _REFUSED:  # What was filled means nothing then.
        return name, result
    if isinstance(result, int) and not isinstance(result, bool) and outs:  # What it took; behind it stands nothing.
        return name, result, bytes(outs[0].memory[:result])
    return name, result, *(bytes(one.memory) for one in outs)


def _seeds() -> list[bytes]:
    rng = np.random.default_rng(2)
    x = (rng.normal(size=256).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    heads = [bytes([op, 1, 3, 1, 1, 0, 3, 16, 2, 32, 255, 1]) for op in range(14)]
    narrowed, mixed = bytearray(1024), bytearray(2048)
    stored = python.narrow(narrowed, x, 2, 3)
    mixing = forms.Mixing(1, 4, 32, 3, 1.0)
    used = python.mix(mixed, x[: mixing.plane_bytes], bytearray(1), np.zeros(1), mixing)
    widened = bytes([0, 1, 3, 1, 1, 0, 32, 0, 0, 1, 1, 0]) + narrowed[:stored]
    unmixed = bytes([1, 2, 2, 0, 1, 0, 3, 16, 0, 1, 255, 255]) + mixed[:used]
    return [*(head + x for head in heads), bytes(widened), bytes(unmixed)]


def _check(data: bytes) -> bool:
    compiled = choice.compiled()
    if len(data) < _HEAD or compiled is None:
        return False
    wanted = _run(python, data)
    for level in compiled.levels():
        compiled.use(level)
        found = _run(compiled, data)
        is_refused = found[1] is _REFUSED and data[0] % 14 in _OF_WORDS and any(n % 2 for n in (*data[1:3], len(data)))
        expect(is_refused or found == wanted, f"level {level} does as NumPy does", found, wanted)
    return wanted[1] is not _REFUSED


TARGETS: Final = (Target("kernels", "compiled kernels at odd sizes and alignments", _seeds, _check, bytes_max=2048),)
