"""Compressors of bytes, one thread, each beside copies of the same blocks.

Runs in the environment `codec` with that environment's packages only. Verbs: `open` with a file of blocks and how
many to make of them, `round` for the seconds of every compressor.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes2D = npt.NDArray[np.uint8]
ELEMENT_BYTES = 2


class Compressor(NamedTuple):
    """One package with the settings that suit bf16 best at its speed."""

    encode: Callable[[Bytes2D], Any]
    decode: Callable[[Any, Bytes2D], object]


def compressors() -> dict[str, Compressor]:
    """All of them, by name."""
    import blosc2
    import lz4.block
    import numcodecs

    numcodecs.blosc.use_threads = False
    bits = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE, typesize=ELEMENT_BYTES)

    def blosc(codec: Any) -> Compressor:
        settings = {"codec": codec, "clevel": 1, "typesize": ELEMENT_BYTES, "nthreads": 1}
        shuffle = {"filters": [blosc2.Filter.SHUFFLE], "filters_meta": [0]}
        return Compressor(
            lambda block: blosc2.compress2(block, **settings, **shuffle),
            lambda stored, into: blosc2.decompress2(stored, dst=into, nthreads=1),
        )

    return {
        "lz4": Compressor(
            lambda block: lz4.block.compress(block.data, store_size=False),
            lambda stored, into: np.copyto(into, np.frombuffer(lz4.block.decompress(stored, into.size), np.uint8)),
        ),
        "blosc2_lz4": blosc(blosc2.Codec.LZ4),
        "blosc2_zstd": blosc(blosc2.Codec.ZSTD),
        "numcodecs": Compressor(bits.encode, lambda stored, into: bits.decode(stored, out=into)),
    }


class Bench:
    """Blocks, and what the compressors made of them last."""

    def __init__(self) -> None:
        self._compressors = compressors()
        self._raw: Bytes2D = np.zeros((0, 0), np.uint8)

    def open(self, path: str, blocks: int) -> dict[str, Any]:
        """Take the blocks of a file, again and again until there are so many."""
        few = np.load(path)
        self._raw = np.stack([few[i % len(few)] for i in range(blocks)])
        self._into = np.ones_like(self._raw)
        return {}

    def round(self) -> dict[str, Any]:
        """Seconds and stored bytes by compressor; `memcpy` are the seconds of the copies before each."""
        return {name: self._timed(compressor) for name, compressor in self._compressors.items()}

    def _timed(self, one: Compressor) -> dict[str, Any]:
        before_encode_s, _ = self._seconds(lambda i: np.copyto(self._into[i], self._raw[i]))
        encode_s, stored = self._seconds(lambda i: one.encode(self._raw[i]))
        self._into[:] = 1
        before_decode_s, _ = self._seconds(lambda i: np.copyto(self._into[i], self._raw[i]))
        self._into[:] = 1
        decode_s, _ = self._seconds(lambda i: one.decode(stored[i], self._into[i]))
        return {
            "encode": [encode_s, before_encode_s],
            "decode": [decode_s, before_decode_s],
            "stored_bytes": sum(len(s) for s in stored),
            "is_same": bool(np.array_equal(self._into, self._raw)),
        }

    def _seconds(self, work: Callable[[int], Any]) -> tuple[float, list[Any]]:
        before_s = time.perf_counter()
        made = [work(i) for i in range(len(self._raw))]
        return time.perf_counter() - before_s, made


def main() -> None:
    """Answer verbs until stdin ends; libraries print to stdout, so answers go to a descriptor of their own."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        bench = Bench()
    except ImportError as e:
        print(json.dumps({"absent": f"{type(e).__name__}: {e}"}), file=answers)
        return
    print(json.dumps({"versions": {n: version(n) for n in ("blosc2", "lz4", "numcodecs")}}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        verb = asked.pop("verb")
        print(json.dumps(bench.open(**asked) if verb == "open" else bench.round()), file=answers)


if __name__ == "__main__":
    main()
