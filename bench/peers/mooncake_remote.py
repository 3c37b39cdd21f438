"""Mooncake's store between two processes over TCP: one holds the segment, the other stores and loads without any.

Runs in the environment `mooncake` with that environment's packages only.
"""

import subprocess
import sys

import mooncake.store

from bench.peers.loop import Bytes2D, Work, serve
from bench.peers.mooncake_store import ALIGN_BYTES, MooncakeStore

HOST = "127.0.0.1"


def hold(port: int, segment_bytes: int) -> None:
    """Child: give the master a segment until stdin ends."""
    store = mooncake.store.MooncakeDistributedStore()
    status = store.setup(HOST, "P2PHANDSHAKE", segment_bytes, ALIGN_BYTES, "tcp", "", f"{HOST}:{port}")
    print(status, flush=True)
    sys.stdin.read()
    store.close()  # Tells the master, which would give the segment's space away otherwise.


class MooncakeRemote(MooncakeStore):
    """The segment of each set is in a child process."""

    def __init__(self) -> None:
        """Start the master."""
        super().__init__()
        self._holder: subprocess.Popen[str] | None = None

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Start a holder of a segment for twice the set, and a store without one."""
        self._close_store()
        segment_bytes = -(-2 * source.nbytes // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES
        command = (sys.executable, "-m", "bench.peers.mooncake_remote", str(self._port), str(segment_bytes))
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "0":
            raise RuntimeError("mooncake: the holder of the segment could not be set up")
        self._attach(work, source, sink, 0)

    def _close_store(self) -> None:
        super()._close_store()
        if self._holder is not None:
            self._holder.communicate()
            self._holder = None


if __name__ == "__main__":
    if len(sys.argv) == 3:
        hold(int(sys.argv[1]), int(sys.argv[2]))
    else:
        serve(MooncakeRemote)
