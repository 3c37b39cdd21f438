"""NIXL's POSIX plugin by itself: registered memory, one preallocated file, O_DIRECT, io_uring, 16 transfers at a time.

What moving bytes costs without records, checksums, keys and an agent. Memory and file are registered once, untimed.
"""

import argparse
import importlib.metadata
import logging
import mmap
import os
import time
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.peers.disks import DiskBench
from bench.peers.loop import Bytes2D, Work, serve

AT_ONCE: Final = 16
POLL_S: Final = 50e-6


class Nixl:
    """One file that holds the set."""

    def __init__(self, directory: Path) -> None:
        """Start NIXL. Raises `ImportError` or `RuntimeError` when it cannot be had."""
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(backends=[]))
        options = {"use_uring": "true", "use_aio": "false", "use_posix_aio": "false"}
        self._agent.create_backend("POSIX", options)
        self._path = directory / "nixl"
        self._fd = -1

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"nixl": importlib.metadata.version("nixl-cu12")}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Make the file and register it with memory of the same size."""
        self.close()
        size_bytes = work.blocks * work.block_bytes
        self._work, self._source, self._sink = work, source, sink
        self._memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8).reshape(source.shape)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, size_bytes)
        at = self._memory.ctypes.data
        step = work.block_bytes
        self._registered = [
            self._agent.register_memory([(at, size_bytes, 0, "")], "DRAM", ["POSIX"]),
            self._agent.register_memory([(0, size_bytes, self._fd, "")], "FILE", ["POSIX"]),
        ]
        self._pairs = [((at + i * step, step, 0), (i * step, step, self._fd)) for i in range(work.blocks)]

    def prepare(self, _: int) -> None:
        """Lay the blocks into its memory."""
        self._memory[:] = self._source

    def put(self, _: int) -> dict[str, float]:
        """Memory to file, then one fdatasync."""
        self._move("WRITE")
        os.fdatasync(self._fd)
        return {}

    def get(self, _: int) -> dict[str, float]:
        """File to memory."""
        self._move("READ")
        return {}

    def _move(self, operation: str) -> None:
        left = iter(self._pairs)
        active = [self._begin(operation, pair) for pair in islice(left, AT_ONCE)]
        while active:
            done = [handle for handle in active if self._agent.check_xfer_state(handle) == "DONE"]
            for handle in done:
                active.remove(handle)
                handle.release()
            active += [self._begin(operation, pair) for pair in islice(left, len(done))]
            if not done:
                time.sleep(POLL_S)

    def _begin(self, operation: str, pair: tuple[tuple[int, int, int], tuple[int, int, int]]) -> Any:
        local = self._agent.get_xfer_descs([pair[0]], "DRAM")
        remote = self._agent.get_xfer_descs([pair[1]], "FILE")
        handle = self._agent.initialize_xfer(operation, local, remote, self._agent.name, b"", ["POSIX"])
        if self._agent.transfer(handle) == "ERR":
            raise RuntimeError(f"NIXL: {operation} failed")
        return handle

    def show(self, _: int) -> None:
        """Copy what was loaded."""
        self._sink[:] = self._memory
        self._memory.fill(0)

    def lookup(self, _: int) -> int:
        """It knows of no blocks."""
        return self._work.blocks

    def clear(self, _: int) -> None:
        """Nothing: the file is written over."""

    def close(self) -> None:
        """Remove the file. Idempotent."""
        if self._fd >= 0:
            for registered in self._registered:
                self._agent.deregister_memory(registered, ["POSIX"])
            os.close(self._fd)
            self._path.unlink()
            self._fd = -1


def main() -> None:
    """Parse the command line and answer verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where its file goes")
    directory = parser.parse_args().directory
    serve(lambda: Nixl(directory), DiskBench)


if __name__ == "__main__":
    main()
