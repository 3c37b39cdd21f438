"""The limit: numpy copies of the same blocks between two buffers, one thread; a dict of digests for lookups.

Under `GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=...` the same copies use non-temporal stores.
"""

import hashlib

import numpy as np

from bench.peers.loop import Bytes2D, Work, serve


class Memcpy:
    """Blocks in one array, at the place of their number."""

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"numpy": np.__version__}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Prepare for a set."""
        self._work, self._source, self._sink = work, source, sink
        self._pool = np.empty_like(source)
        self._pool.fill(2)
        self._digests: list[bytes] = []
        self._present: dict[bytes, int] = {}

    def prepare(self, generation: int) -> None:
        """Make digests of the length of ours."""
        seeds = (f"{self._work.client}/{generation}/{i}".encode() for i in range(self._work.blocks))
        self._digests = [hashlib.blake2b(s, digest_size=20).digest() for s in seeds]

    def put(self, _: int) -> dict[str, float]:
        """Copy the set in."""
        for block, slot in zip(self._source, self._pool, strict=True):
            np.copyto(slot, block)
        self._present = dict.fromkeys(self._digests, 1)
        return {}

    def get(self, _: int) -> dict[str, float]:
        """Copy the set out."""
        for slot, into in zip(self._pool, self._sink, strict=True):
            np.copyto(into, slot)
        return {}

    def lookup(self, _: int) -> int:
        """Count leading digests that are in the dict."""
        present = self._present
        count = 0
        for digest in self._digests:
            if digest not in present:
                break
            count += 1
        return count

    def clear(self, _: int) -> None:
        """Nothing: the next generation overwrites."""

    def close(self) -> None:
        """Nothing to let go of."""


if __name__ == "__main__":
    serve(Memcpy)
