"""Raw NIXL over UCX between two processes: registered memory on both sides, reads of whole batches, nothing verified.

The owner is a child process that only lets UCX progress. This is the limit of `bench.remote`: what the transport gives
to whoever knows the addresses and asks for no proof of what arrives.
"""

import importlib.metadata
import logging
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from bench.peers.loop import Bytes2D, Work, serve

PLUGIN: Final = "UCX"
POLL_S: Final = 100e-6
"""Between two looks of the owner: without a pause it takes the core that the reader needs."""


def start_agent(name: str) -> Any:
    """NIXL agent with the UCX plugin, on the loopback."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(PLUGIN, {})
    return agent


def register(agent: Any, rows: Bytes2D) -> None:
    """Make rows readable and writable by transfers."""
    agent.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], "DRAM", [PLUGIN])


def own(pipe: Connection, work: Work) -> None:
    """Child: hold the blocks of a set and let UCX serve them until told to end."""
    agent = start_agent("owner")
    rows = np.random.default_rng(work.client).integers(0, 256, (work.blocks, work.block_bytes), np.uint8)
    register(agent, rows)
    pipe.send((agent.get_agent_metadata(), rows.ctypes.data))
    while not pipe.poll(POLL_S):
        agent.get_new_notifs([PLUGIN])
    os._exit(0)  # NIXL's own end waits for peers that are gone.


class NixlRaw:
    """One owner for each set; the reader is this process."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._agent: Any = None
        self._owner: Any = None

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"nixl": importlib.metadata.version("nixl-cu12"), "UCX_TLS": os.environ.get("UCX_TLS", "default")}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Start an owner that holds the same blocks as `source`, and register `sink`."""
        del source
        self.close()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._owner = context.Process(target=own, args=(theirs, work), daemon=True)
        self._owner.start()
        self._agent = start_agent("reader")
        register(self._agent, sink)
        described, self._from = self._pipe.recv()
        name = self._agent.add_remote_agent(described)
        self._name = name.decode() if isinstance(name, bytes) else name
        self._work, self._into = work, int(sink.ctypes.data)

    def prepare(self, generation: int) -> None:
        """Nothing: there are no keys."""

    def put(self, _: int) -> dict[str, float]:
        """Nothing: the blocks lie with the owner."""
        return {}

    def get(self, _: int) -> dict[str, float]:
        """Read the set: all batches are posted at once, then polled until the last has ended."""
        flying = [self._post(part) for part in self._work.batches()]
        while flying:
            flying = [handle for handle in flying if not self._has_landed(handle)]
        return {}

    def _post(self, part: slice) -> Any:
        size, blocks = self._work.block_bytes, range(part.start, part.stop)
        local = self._agent.get_xfer_descs([(self._into + i * size, size, 0) for i in blocks], "DRAM")
        remote = self._agent.get_xfer_descs([(self._from + i * size, size, 0) for i in blocks], "DRAM")
        handle = self._agent.initialize_xfer("READ", local, remote, self._name, b"", [PLUGIN])
        self._agent.transfer(handle)
        return handle

    def _has_landed(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state == "PROC":
            return False
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"nixl transfer: {state}")
        return True

    def lookup(self, _: int) -> int:
        """All of the set is there."""
        return self._work.blocks

    def clear(self, _: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """End the owner."""
        if self._owner is not None:
            self._owner.kill()
            self._owner.join()
            self._owner = None


if __name__ == "__main__":
    serve(NixlRaw)
