"""Which kernels run: those compiled for the best instruction set of this processor, or the ones in NumPy."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final, Protocol

from kvstrata_native import python

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_native.forms import Buffer, Mixing, Packing

PYTHON: Final = "python"
THREADS_MOST: Final = 16


class Kernels(Protocol):
    """The data path's inner loops. Stateless; results are the same to the bit at every level.

    Large calls release the GIL. Threads are started where they are asked for. Memory may change under a call, or become
    zeros: the result is of whatever was read then, and each byte is read once where a function promises so.
    """

    def copy(self, into: Buffer, source: Buffer, /) -> None:
        """Fill `into` with `source`; large copies leave the caches alone. Raises `ValueError` when sizes differ."""

    def flush(self, memory: Buffer, /) -> None:
        """Write the cache lines of `memory` back and drop them: what other hosts wrote there is read next.

        Stores before it are in memory on return. For memory that several hosts reach without coherent caches. At level
        python it does nothing.
        """

    def xxh3_128(self, source: Buffer, seed: int = 0, /) -> bytes:
        """Return XXH3-128 of `source` in canonical form: as `xxhash.xxh3_128_digest` does."""

    def digest_pairs(self, blocks: Sequence[tuple[Buffer, int, int]], /) -> list[tuple[bytes, bytes]]:
        """Return XXH3-128 of each memory under its two seeds, letting go of the GIL once for all.

        Both digests are of the same bytes: others who write there meanwhile never get one for their bytes while the
        other one is sound.
        """

    def copy_digest(self, into: Buffer, source: Buffer, seed: int = 0, /) -> bytes:
        """Fill `into` with `source`; return XXH3-128 of it.

        Each byte is read once, and what was read is what is written and hashed: others who write to either side
        meanwhile never get a digest for their bytes where they were not copied, nor a copy without its digest.
        Raises `ValueError` when sizes differ, or when the two overlap.
        """

    def copy_digest_each(self, blocks: Sequence[tuple[Buffer, Buffer, int]], threads: int = 1, /) -> list[bytes]:
        """Do what `copy_digest` does for each, letting go of the GIL once for all.

        Who copies block by block waits for the GIL as often: 5 ms each time beside a thread that keeps it. Large ones
        are shared by up to `threads` threads, 16 at most, so no target may lie in another. Raises `ValueError` before
        anything is copied.
        """

    def copy_digests(self, into: Buffer, source: Buffer, seed: int, other: int, /) -> tuple[bytes, bytes]:
        """Do what `copy_digest` does, with the digests under two seeds of the same reading."""

    def copy_sound(self, blocks: Sequence[tuple[Buffer, Buffer, int, int, bytes]], /) -> list[bytes]:
        """Fill the first memory of each with the second one where XXH3-128 of that under the first seed is the bytes.

        Returns the digests under the second seeds, empty where nothing was copied; lets go of the GIL once for all.
        The sources must be out of others' reach: they are read twice. Raises `ValueError` before anything is copied
        when two sizes differ or two memories overlap, and for a digest that is not of 16 B.
        """

    def width_of(self, source: Buffer, element_bytes: int, /) -> int:
        """Return the bits of a code, 3 to 7, with which `narrow` makes such elements (1, 2 or 4 B) shortest.

        Looks at a few strips. Raises `ValueError` for other elements.
        """

    def narrow(self, into: Buffer, source: Buffer, element_bytes: int, width: int, /) -> int:
        """Fill `into` with `source`, top bytes of elements in `width` bits each (`forms.py`); return how much it took.

        Bytes behind the last 256 elements stay as they are. Raises `ValueError` for elements or codes that there are
        none of, and where there is less room than `forms.narrowed_bytes_max`.
        """

    def widen(self, into: Buffer, stored: Buffer, element_bytes: int, width: int, /) -> bool:
        """Undo `narrow` into exactly the size that it took from.

        False where the stored bytes are none of such a block; what was filled means nothing then. Raises `ValueError`
        for elements or codes that there are none of.
        """

    def pack(self, codes: Buffer, scales: Buffer, source: Buffer, packing: Packing, /) -> bool:
        """Fill `codes` and `scales` from the bf16 of `source`.

        False where a value is not finite or not below 2^120: such a block is kept as it is, and what was filled means
        nothing. The error of an element: FP8 1/14 of its magnitude and a thousandth of the scale, INT8 1/125 of the
        largest magnitude of its group, INT4 1/29 of the span of its group and 1/250 of its largest magnitude.
        Raises `ValueError` for a packing that is none, sizes that do not fit it, and odd addresses.
        """

    def unpack(self, into: Buffer, codes: Buffer, scales: Buffer, packing: Packing, /) -> None:
        """Fill `into` with bf16. Any bytes decode to something. Raises `ValueError` as `pack` does."""

    def mix(self, into: Buffer, source: Buffer, rungs: Buffer, errors: Buffer, mixing: Mixing, /) -> int:
        """Fill `into` with the planes of `source` (`forms.py`); return how much it took.

        `rungs` gives the first rung to try for each plane, and gets the one that it is stored on: the first from there
        on whose relative error is at most the mixing's limit. `errors` (float64) gets these errors. Planes
        with numbers that `pack` refuses are stored exactly, and so is what no packing shortens. Raises
        `ValueError` for planes that there are none of, too little room, and odd addresses.
        """

    def unmix(self, into: Buffer, stored: Buffer, mixing: Mixing, /) -> bool:
        """Undo `mix`, as far as it can be undone, into exactly the size that it took from.

        False where the stored bytes are none of such a block; what was filled means nothing then. Raises `ValueError`
        as `mix` does.
        """


class Compiled(Kernels, Protocol):
    """What the extension module has beside the kernels."""

    def levels(self) -> list[str]:
        """Levels that this processor can run, the best one first."""

    def use(self, level: str, /) -> None:
        """Take the kernels of another level, in the whole process. Raises `ValueError` for what cannot run here.

        An offload engine that is attached is let go.
        """

    def attach(self, library: str | None, configuration: str | None = None, from_bytes: int = 0, /) -> None:
        """Let an offload engine do what the kernels do, for blocks of `from_bytes` and more; None is the reference.

        What it fails at, the kernels do. Raises `ValueError` for a library that is none, and changes nothing then.
        """

    def detach(self) -> None:
        """Let go of the engine, once it has done what it has under way."""

    def attached(self) -> tuple[str, str, int, str, int, int, int] | None:
        """Name, version, capabilities, why it was given up, descriptors, fallbacks and bytes of the engine."""


def compiled() -> Compiled | None:
    """The extension module; None where this build has none."""
    try:
        from kvstrata_native import _kernels
    except ImportError:
        return None
    return _kernels


def choose(wanted: str) -> tuple[str, Kernels]:
    """Level and kernels; the best there is when `wanted` is empty, or, with a warning, when it cannot be had."""
    found = compiled()
    levels = [*(found.levels() if found is not None else ()), PYTHON]
    level = wanted if wanted in levels else levels[0]
    if level != wanted and wanted:
        warnings.warn(f"kernels of level {wanted!r} asked for: must be one of {levels}", stacklevel=2)
    if found is None or level == PYTHON:
        return PYTHON, python
    found.use(level)
    return level, found


def choose_threads(wanted: str, cores: int) -> int:
    """Threads that copy large blocks at a time: a fourth of the cores, 8 at most, or those that are wanted.

    One copies 9 to 10 GB/s with a digest, 4 made 28 and 8 made 46, beside a link of 54 to the GPU (16 cores of a Xeon,
    an H100; `bench/README.md`); engines want the other cores. Warns of what is no number from 1 to 16.
    """
    if wanted.isdecimal() and 1 <= int(wanted) <= THREADS_MOST:
        return int(wanted)
    if wanted:
        warnings.warn(f"{wanted!r} threads that copy: 1 to {THREADS_MOST} wanted", stacklevel=2)
    return max(1, min(8, cores // 4))
