"""Writers that die at named points of the record store, and a check of what each leaves: `python -m faults.kills DIR`.

This process imports everything once and then only forks, so that a death costs milliseconds. Each writer goes on where
the one before died; another process recovers in between and compares with what the writers said before they died.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from crash.replay import Promise

from faults.killing_volume import POINTS, Killer, KillingVolume
from kvstrata_agent.backends.file import segment_io
from kvstrata_agent.backends.file.index_file import INDEX_FILE, IndexFile
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_api.errors import BackendFailedError, BlockCorruptError, TierFullError
from support.backends.contract import ANNA, BOB, content, record

if TYPE_CHECKING:
    from kvstrata_agent.backends.base import Record, SlotRef

CAPACITY_BYTES: Final = 1 << 20
BLOCK_BYTES: Final = 12_000
"""Three pages of payload, the last of them padded."""

_OPERATIONS_MAX: Final = 400
"""A writer that does so many without coming to its point ends by itself, which is reported."""

_TURNS_MAX: Final = 3
"""A writer dies when it comes to its point for the first to third time."""

_NONE: Final = Killer("", 0)
Promises = dict[int, Promise]


def _volume(directory: Path, killer: Killer, *, is_direct: bool) -> KillingVolume:
    return KillingVolume(directory, os.open(directory, os.O_RDONLY | os.O_DIRECTORY), killer, is_direct=is_direct)


class Writer:
    """Random operations; says on a descriptor what it has done, before it goes on."""

    def __init__(self, said_fd: int, rng: random.Random) -> None:
        self._said_fd = said_fd
        self._rng = rng
        self._held: dict[int, tuple[SlotRef, Record]] = {}
        self._dropped: set[int] = set()
        self._next = 0

    def _say(self, promise: Promise, number: int) -> None:
        os.write(self._said_fd, f"{promise.value} {number}\n".encode())

    async def run(self, store: RecordStore, first: int) -> None:
        """Work until the process dies."""
        self._next = first
        await self._recover(store)
        for _ in range(_OPERATIONS_MAX):
            step = self._rng.choice((self._put, self._put, self._drop, self._empty, self._bury, self._read, self._move))
            await step(store)
            if self._rng.random() < 0.2:
                await asyncio.gather(store.write_index(), self._put(store))
        await store.close()

    async def _recover(self, store: RecordStore) -> None:
        async for slot, made in store.recover():
            try:
                await store.read(slot, made, memoryview(bytearray(BLOCK_BYTES)))
            except BlockCorruptError:  # Torn by the death before; what was promised is compared elsewhere.
                store.drop(slot)
                continue
            self._held[int.from_bytes(made.key.digest, "big")] = (slot, made)

    async def _put(self, store: RecordStore) -> None:
        numbers = range(self._next, self._next + self._rng.randint(1, 3))
        self._next = numbers.stop
        await asyncio.gather(*(self._put_one(store, n) for n in numbers))

    async def _put_one(self, store: RecordStore, number: int) -> None:
        scope = BOB if number % 4 == 0 else ANNA
        try:
            slot = store.reserve(scope, BLOCK_BYTES)
        except TierFullError:
            await self._empty(store)
            return
        stored = content(number, BLOCK_BYTES)
        made = record(number, stored, slot, scope)
        self._say(Promise.OPEN, number)
        await store.write(slot, made, stored)
        self._say(Promise.HELD, number)
        self._held[number] = (slot, made)

    async def _drop(self, store: RecordStore) -> None:
        for number in self._rng.sample(sorted(self._held), min(2, len(self._held))):
            self._drop_one(store, number)

    def _drop_one(self, store: RecordStore, number: int) -> None:
        self._say(Promise.OPEN, number)
        store.drop(self._held.pop(number)[0])
        self._dropped.add(number)

    async def _empty(self, store: RecordStore) -> None:
        """Drop a scope, so that its segments go."""
        for number in [n for n in self._held if n % 4 == 0 or len(self._held) > 20]:
            self._drop_one(store, number)
        await self._bury(store)

    async def _bury(self, store: RecordStore) -> None:
        before, self._dropped = self._dropped, set()
        await store._io.discard()
        await store._io.settle_deletions()
        for number in before:
            self._say(Promise.GONE, number)

    async def _read(self, store: RecordStore) -> None:
        if self._held:
            await store.read(*self._held[min(self._held)], memoryview(bytearray(BLOCK_BYTES)))

    async def _move(self, store: RecordStore) -> None:
        """Leave a sparse segment."""
        if self._held:
            number = self._rng.choice(sorted(self._held))
            slot, made = self._held[number]
            await store.read(slot, made, memoryview(bytearray(BLOCK_BYTES)))
            self._drop_one(store, number)


async def write(directory: Path, killer: Killer, rng: random.Random, said_fd: int, first: int) -> None:
    """Run a writer in this process."""
    vars(segment_io)["_DISCARD_DELAY_S"] = 60.0  # It discards by itself, to know when it is done.
    store = await open_store(_volume(directory, killer, is_direct=rng.random() < 0.5), CAPACITY_BYTES)
    await Writer(said_fd, rng).run(store, first)


async def verify(directory: Path, *, is_closing: bool) -> dict[str, object]:
    """Recover, read everything, and say what is there: block -> right."""
    store = await open_store(_volume(directory, _NONE, is_direct=False), CAPACITY_BYTES)
    found: dict[int, bool] = {}
    wrong: list[int] = []
    async for slot, made in store.recover():
        number = int.from_bytes(made.key.digest, "big")
        into = bytearray(BLOCK_BYTES)
        try:
            await store.read(slot, made, memoryview(into))
        except (BlockCorruptError, BackendFailedError):
            found.setdefault(number, False)
            store.drop(slot)
            continue
        found[number] = True
        if into != content(number, BLOCK_BYTES):
            wrong.append(number)
    size_bytes = sum(p.stat().st_size for p in directory.iterdir())  # noqa: ASYNC240  Nobody else runs here.
    if is_closing:
        await store.close()
    return {"found": found, "wrong": wrong, "size_bytes": size_bytes}


def forked(work: Callable[[int], None]) -> tuple[str, int]:
    """Run `work(descriptor)` in a child; what it wrote, and how it ended (negative: the signal)."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_fd)
        try:
            work(write_fd)
        except BaseException as e:  # noqa: BLE001  The root of a process: the parent reads it.
            os.write(write_fd, f"failed {type(e).__name__}: {e}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as said:
        text = said.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Kills:
    """One directory and what was promised of it."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._directory = directory
        self._rng = rng
        self._promises: Promises = {}
        self._next = 1

    def one(self, point: str) -> list[str]:
        """Let a writer die at `point`; return what is wrong afterwards."""
        if not point.startswith("headers"):
            return self._kill(point)
        wrong = self._kill("write segment after")  # Leaves at least one segment,
        (self._directory / INDEX_FILE).unlink(missing_ok=True)  # whose headers have to be read then.
        return wrong + self._kill(point)

    def _kill(self, point: str) -> list[str]:
        seed = self._rng.randrange(1 << 30)
        is_once = point.startswith("headers") or "marker" in point
        killer = Killer(point, 1 if is_once else random.Random(seed).randint(1, _TURNS_MAX))
        first = self._next
        said, ended = forked(lambda fd: asyncio.run(write(self._directory, killer, random.Random(seed), fd, first)))
        for line in said.splitlines():
            word, _, rest = line.partition(" ")
            if word == "failed":
                return [f"{point}: the writer {rest}"]
            self._promises[int(rest)] = Promise(word)
            self._next = max(self._next, int(rest) + 1)
        if ended != -signal.SIGKILL:
            return [f"{point}: the writer never came there"]
        return [f"{point}, seed {seed}: {w}" for w in self._verify()]

    def _verify(self) -> list[str]:
        is_closing = self._rng.random() < 0.5
        left_bytes = sum(p.stat().st_size for p in self._directory.iterdir())
        said, _ = forked(lambda fd: _answer(fd, asyncio.run(verify(self._directory, is_closing=is_closing))))
        if not said.startswith("{"):
            return [f"recovery {said.strip()}"]
        seen = json.loads(said)
        found = {int(n): bool(right) for n, right in seen["found"].items()}
        wrong = [f"block {n} came back with other bytes" for n in seen["wrong"]]
        if max(left_bytes, seen["size_bytes"]) > CAPACITY_BYTES:
            wrong.append(f"{left_bytes}, then {seen['size_bytes']} B of {CAPACITY_BYTES} B taken")
        wrong += [
            f"block {n} was synced and is lost"
            for n, p in self._promises.items()
            if p is Promise.HELD and not found.get(n)
        ]
        wrong += [
            f"block {n} was dropped for good and is back"
            for n, p in self._promises.items()
            if p is Promise.GONE and n in found
        ]
        wrong += [f"block {n} was never written" for n in found if n not in self._promises]
        self._promises = (
            {n: Promise.HELD for n, is_right in found.items() if is_right}
            | {n: Promise.OPEN for n, p in self._promises.items() if p is Promise.OPEN and not found.get(n)}
            | {n: p for n, p in self._promises.items() if p is Promise.GONE}
        )
        return wrong


def _answer(fd: int, seen: dict[str, object]) -> None:
    os.write(fd, json.dumps(seen).encode())


async def _unmarked(self: IndexFile, segment_id: int) -> None:
    """Seeded defect: change segments without saying so."""


def main() -> int:
    """Kill `--repeats` writers at each point; one JSON line for each round of points."""
    parser = argparse.ArgumentParser(prog="kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--has-defect", action="store_true", help="seeded defect: the index is not marked")
    parser.add_argument("--points", default="", help="only points that begin with one of these, separated by commas")
    given = parser.parse_args()
    points = [p for p in POINTS if p.startswith(tuple(given.points.split(",")))]
    if given.has_defect:
        IndexFile.touch = _unmarked  # type: ignore[method-assign]
    for repeat in range(given.repeats):
        directory = given.directory / f"{given.seed}-{repeat}"
        directory.mkdir(parents=True)
        rng = random.Random(f"{given.seed} {repeat}")
        kills = Kills(directory, rng)
        order = sorted(rng.sample(points, len(points)), key=lambda p: p.startswith("headers"))
        violations = [v for point in order for v in kills.one(point)]
        sys.stdout.write(json.dumps({"kills": len(points), "violations": violations}) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
