"""Mooncake's store with its own memory segment, over TCP: batch_put_from, batch_get_into, batch_is_exist.

Runs in the environment `mooncake` with that environment's packages only. The master is a process of its own;
blocks of a store's own segment are copied without the network, which is its fastest path on one node.
"""

import importlib.metadata
import socket
import subprocess
import sys
import time
from pathlib import Path

import mooncake.store
import numpy as np

from bench.harness.drivers import WITH_PARENT
from bench.peers.loop import Bytes2D, Work, serve

START_S = 20.0

ALIGN_BYTES = 16 << 20
"""Sizes of segments are multiples of this."""


def free_port() -> int:
    """Return a port of the loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class MooncakeStore:
    """One master, and one store for each set."""

    def __init__(self, *flags: str) -> None:
        """Start the master, with more `flags`. Raises `RuntimeError` when it does not listen."""
        self._port = free_port()
        master = Path(mooncake.store.__file__).parent / "mooncake_master"
        ports = (
            f"--rpc_port={self._port}",
            f"--metrics_port={free_port()}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
        )
        # With a parent: it outlived a store that did not come to its end.
        self._master = subprocess.Popen((*WITH_PARENT, str(master), *ports, *flags), stdout=sys.stderr)
        self._store: mooncake.store.MooncakeDistributedStore | None = None
        self._wait()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
            except OSError as e:
                if time.monotonic() > deadline_s or self._master.poll() is not None:
                    raise RuntimeError(f"mooncake_master did not start: {e}") from e
                time.sleep(0.05)
            else:
                return

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"mooncake": importlib.metadata.version("mooncake-transfer-engine-non-cuda")}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Make a store whose segment holds twice the set, and register the caller's buffers."""
        self._close_store()
        segment_bytes = -(-2 * source.nbytes // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES
        self._attach(work, source, sink, segment_bytes)

    def _attach(self, work: Work, source: Bytes2D, sink: Bytes2D, segment_bytes: int, disk: Path | None = None) -> None:
        """Make a store and register the caller's buffers; it writes to files below `disk`, if any."""
        self._store = mooncake.store.MooncakeDistributedStore()
        engine = None  # It makes its own.
        place = ("127.0.0.1", "P2PHANDSHAKE", segment_bytes, ALIGN_BYTES, "tcp", "", f"127.0.0.1:{self._port}")
        status = self._store.setup(*place, engine, disk is not None, str(disk or ""))
        for array in (source, sink):
            status = status or self._store.register_buffer(array.ctypes.data, array.nbytes)
        if status:
            raise RuntimeError(f"mooncake: set-up failed with {status}")
        self._work = work
        self._sizes = [work.block_bytes] * work.blocks
        self._from, self._into = self._addresses(source), self._addresses(sink)
        self._keys: list[str] = []

    @staticmethod
    def _addresses(rows: Bytes2D) -> list[int]:
        return [int(rows.ctypes.data) + i * rows.shape[1] for i in range(len(rows))]

    def prepare(self, generation: int) -> None:
        """Make the keys."""
        self._keys = [f"{self._work.client}/{generation}/{i:016}" for i in range(self._work.blocks)]

    def put(self, _: int) -> dict[str, float]:
        """Store the set, batch by batch."""
        assert self._store is not None
        for part in self._work.batches():
            results = self._store.batch_put_from(self._keys[part], self._from[part], self._sizes[part])
            if any(results):
                raise RuntimeError(f"mooncake: put answered {results}")
        return {}

    def get(self, _: int) -> dict[str, float]:
        """Load the set: the prefix check and the copies, batch by batch."""
        assert self._store is not None
        assert self.lookup(0) == len(self._keys), "the set is there"
        for part in self._work.batches():
            results = self._store.batch_get_into(self._keys[part], self._into[part], self._sizes[part])
            if min(results) < 0:
                raise RuntimeError(f"mooncake: get answered {results}")
        return {}

    def lookup(self, _: int) -> int:
        """Length of the prefix that is there."""
        assert self._store is not None
        found = np.asarray(self._store.batch_is_exist(self._keys)) == 1
        return len(found) if found.all() else int(found.argmin())

    def clear(self, _: int) -> None:
        """Remove the set."""
        assert self._store is not None
        self._store.batch_remove(self._keys, force=True)

    def close(self) -> None:
        """Stop the store and the master."""
        self._close_store()
        self._master.terminate()
        self._master.wait()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


if __name__ == "__main__":
    serve(MooncakeStore)
