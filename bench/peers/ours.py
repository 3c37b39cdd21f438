"""Ours: the real client against the real agent, verb by verb, or tokens in and blocks out with `--tokens`."""

import argparse
import importlib.metadata
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.harness.identity import BLOCK_TOKENS, POOL, SECRET, TOKEN, layout_of
from bench.peers.loop import Bytes2D, Store, Work, serve
from kvstrata import Client, Lease, PrefixCache, Published, Reservation, Target
from kvstrata_api.blocks import BlockKey, chain_keys
from kvstrata_client.prompt.chain import Tokens
from kvstrata_client.prompt.pipeline import BATCHES_IN_FLIGHT
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Ahead, Answers, Call, Collect, Operation
from kvstrata_client.verbs.copying import copy_verified, fill


def tokens_of(work: Work, generation: int) -> Tokens:
    """Tokens of a prompt that no other client and generation has."""
    tokens = np.arange(work.blocks * BLOCK_TOKENS, dtype=np.uint32)
    tokens[:2] = work.client, generation
    return tokens


LEASE_S = 30.0


class Verbs:
    """Reserve, fill, publish; lookup, acquire, copy, release; `BATCHES_IN_FLIGHT` batches in flight at a time."""

    def __init__(self, socket: Path) -> None:
        """Use the agent that listens on `socket`."""
        self._socket = socket
        self._client: Client | None = None

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"kvstrata": importlib.metadata.version("kvstrata"), "xxhash": importlib.metadata.version("xxhash")}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Attach with the layout of these blocks. Raises `AgentAwayError` and its like."""
        self.close()
        target = Target(self._socket, POOL, TOKEN, layout_of(work.block_bytes))
        self._client = Client.attach(target, strict=True)
        if not self._client.is_attached:
            raise self._client.reason
        self._work, self._source, self._sink = work, source, sink
        self._keys: list[BlockKey] = []

    def prepare(self, generation: int) -> None:
        """Make the keys."""
        layout_id = layout_of(self._work.block_bytes).layout_id()
        self._keys = chain_keys(SECRET, layout_id, tokens_of(self._work, generation), BLOCK_TOKENS)

    def put(self, _: int) -> dict[str, float]:
        """Store the set, batch by batch; the parts are seconds in each verb."""
        return self._attached.run(self._storing())

    def _storing(self) -> Operation[dict[str, float]]:
        """While a batch is filled, the agent publishes those before it and reserves those behind it."""
        parts, begun_s, fill_s = list(self._work.batches()), time.perf_counter(), 0.0
        in_flight = deque[Ahead]()
        later = parts[BATCHES_IN_FLIGHT:]
        for part in parts[:BATCHES_IN_FLIGHT]:
            in_flight.append(Ahead((self._reserve(part),)))
            yield in_flight[-1]
        for i, part in enumerate(parts):
            *published, reserved = yield Collect(in_flight.popleft())
            _check_published(published)
            filling_s = time.perf_counter()
            sums = self._fill(reserved.value, self._source[part])
            fill_s += time.perf_counter() - filling_s
            publishing = calls.publish(self._attached.target, reserved.value, sums)
            in_flight.append(Ahead((publishing, *map(self._reserve, later[i : i + 1]))))
            yield in_flight[-1]
        for ahead in in_flight:
            _check_published((yield Collect(ahead)))
        return {"fill": fill_s, "reserve and publish": time.perf_counter() - begun_s - fill_s}

    def _reserve(self, part: slice) -> Call[tuple[Reservation, ...]]:
        parent = self._keys[part.start - 1].digest if part.start else b""
        return calls.reserve(self._attached.target, parent, self._keys[part], "")

    def _fill(self, slots: Sequence[Reservation], blocks: Bytes2D) -> list[bytes]:
        return [fill(slot, memoryview(block)) for slot, block in zip(slots, blocks, strict=True)]

    def get(self, _: int) -> dict[str, float]:
        """Load the set: one lookup, then batch by batch; the parts are seconds in each verb."""
        return self._attached.run(self._loading())

    def _loading(self) -> Operation[dict[str, float]]:
        """While a batch is copied, the agent ends the leases of those before it and gives those of the ones behind."""
        keys, target = self._keys, self._attached.target
        parts, begun_s, copy_s = list(self._work.batches()), time.perf_counter(), 0.0
        assert (yield (calls.lookup(target, keys, ""),))[0].value.blocks == len(keys), "the set is there"
        lookup_s = time.perf_counter() - begun_s
        in_flight, held = deque[Ahead](), deque[int]()
        later = parts[BATCHES_IN_FLIGHT:]
        for part in parts[:BATCHES_IN_FLIGHT]:
            in_flight.append(Ahead((self._acquire(part),)))
            yield in_flight[-1]
        for i, part in enumerate(parts):
            *released, acquired = yield Collect(in_flight.popleft())
            _check_released(released, held)
            copying_s = time.perf_counter()
            self._copy(acquired.value, self._sink[part])
            copy_s += time.perf_counter() - copying_s
            held.append(len(acquired.value))
            releasing = calls.release(target, acquired.value)
            in_flight.append(Ahead((releasing, *map(self._acquire, later[i : i + 1]))))
            yield in_flight[-1]
        for ahead in in_flight:
            _check_released((yield Collect(ahead)), held)
        waited_s = time.perf_counter() - begun_s - lookup_s - copy_s
        return {"lookup": lookup_s, "copy": copy_s, "acquire and release": waited_s}

    def _acquire(self, part: slice) -> Call[tuple[Lease, ...]]:
        return calls.acquire(self._attached.target, self._keys[part], "", LEASE_S, LEASE_S)

    def _copy(self, leases: Sequence[Lease], rows: Bytes2D) -> None:
        for lease, row in zip(leases, rows, strict=True):
            assert copy_verified(lease, memoryview(row)), "a block differs from its checksum"

    def lookup(self, _: int) -> int:
        """Length of the prefix that is there."""
        return self._attached.lookup(self._keys).blocks

    def clear(self, _: int) -> None:
        """Nothing: the agent is told by the driver."""

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def _attached(self) -> Client:
        assert self._client is not None, "opened first"
        return self._client


def _check_published(answers: Answers) -> None:
    for answer in answers:
        assert set(answer.value) == {Published.PUBLISHED}, answer


def _check_released(answers: Answers, held: deque[int]) -> None:
    for answer in answers:
        assert answer.value == held.popleft(), "a lease ended while its block was copied"


class TokensInBlocksOut(Verbs):
    """What connectors use: keys are computed, scopes tried and routes found inside the timed part."""

    def put(self, generation: int) -> dict[str, float]:
        """Store the set in one call."""
        stored = PrefixCache(self._attached).store(tokens_of(self._work, generation), self._source)
        assert stored.published == self._work.blocks, stored
        return {}

    def get(self, generation: int) -> dict[str, float]:
        """Load the set in one call."""
        loaded = PrefixCache(self._attached).load(tokens_of(self._work, generation), self._sink)
        assert loaded.blocks == self._work.blocks, loaded
        return {}

    def lookup(self, generation: int) -> int:
        """Length of the longest prefix that is there."""
        return PrefixCache(self._attached).lookup(tokens_of(self._work, generation)).blocks


def main() -> None:
    """Parse the command line and answer verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="unix socket of the agent")
    parser.add_argument("--tokens", action="store_true", help="tokens in, blocks out")
    arguments = parser.parse_args()
    made: Store = (TokensInBlocksOut if arguments.tokens else Verbs)(arguments.socket)
    serve(lambda: made)


if __name__ == "__main__":
    main()
