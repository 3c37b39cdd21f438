"""Ours between two nodes: stores with the owner's agent, reads through the reader's, which fetches and verifies."""

import argparse
import time
from pathlib import Path
from typing import Final

from bench.peers.loop import Bytes2D, Work, serve
from bench.peers.ours import Verbs

DEADLINE_S: Final = 60.0


class Fetching(Verbs):
    """A client of the reader's agent."""

    def get(self, _: int) -> dict[str, float]:
        """One acquire of the whole set, which brings it here; then copy it out and verify the copies."""
        start_s = time.perf_counter()
        leases = self._attached.acquire(self._keys, deadline_s=DEADLINE_S)
        fetch_s = time.perf_counter() - start_s
        assert len(leases) == len(self._keys), f"{len(leases)} of {len(self._keys)} blocks came"
        self._copy(leases, self._sink)
        assert leases.release(), "the leases lived until the copies were done"
        return {"fetch": fetch_s}


class TwoNodes:
    """A client of each node. A load is one acquire of the whole set; then its blocks are copied out and compared."""

    def __init__(self, owner: Path, reader: Path) -> None:
        """Use the agents that listen on these sockets."""
        self._owner, self._reader = Verbs(owner), Fetching(reader)

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return self._owner.versions()

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Attach to both."""
        for verbs in (self._owner, self._reader):
            verbs.open(work, source, sink)

    def prepare(self, generation: int) -> None:
        """Make the keys."""
        for verbs in (self._owner, self._reader):
            verbs.prepare(generation)

    def put(self, generation: int) -> dict[str, float]:
        """Store the set with the owner."""
        return self._owner.put(generation)

    def get(self, generation: int) -> dict[str, float]:
        """`fetch`: seconds until verified blocks lie in the memory of the reader's node, where engines map them."""
        return self._reader.get(generation)

    def lookup(self, generation: int) -> int:
        """Length of the prefix that the reader can have."""
        return self._reader.lookup(generation)

    def clear(self, _: int) -> None:
        """Nothing: the agents are told by the driver."""

    def close(self) -> None:
        """End both connections."""
        self._owner.close()
        self._reader.close()


def main() -> None:
    """Parse the command line and answer verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owner", type=Path, required=True, help="unix socket of the owner's agent")
    parser.add_argument("--reader", type=Path, required=True, help="unix socket of the reader's agent")
    arguments = parser.parse_args()
    serve(lambda: TwoNodes(arguments.owner, arguments.reader))


if __name__ == "__main__":
    main()
