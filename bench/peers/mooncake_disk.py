"""Mooncake's SSD offload: objects of a store's own memory segment go to bucket files, leave memory, and are read back.

Runs in the environment `mooncake` with that environment's packages only. The store's heartbeat, once a second at
most, fetches from the master what is to be written: a set waits for it in memory, and the clock runs from the first
bucket file to the moment the master has the last block's place on the disk. Written is through the page cache and
nothing is synced. `--direct` has it read by io_uring with O_DIRECT; without it, as by default, reads come from the page
cache. What is read passes its staging buffer and a TCP connection to itself. That buffer keeps its default size of
1.25 GiB, which io_uring does not register: where it does, the second store of a process loads wrong bytes (0.3.13).
"""

import argparse
import ctypes
import errno
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.peers.buckets import keys_of_bucket
from bench.peers.disks import DiskBench
from bench.peers.loop import Bytes2D, Work, serve
from bench.peers.mooncake_store import ALIGN_BYTES, MooncakeStore

LEASE_MS: Final = 2000
"""What was asked for stays in memory for so long; longer than one batch takes to read."""
BEAT_S: Final = 1
"""The shortest heartbeat there is; the default is 10."""
BEAT_BYTES: Final = 4096
SETS_KEPT: Final = 3
"""What is removed stays in its bucket until that is evicted."""
POLL_S: Final = 200e-6
WAIT_S: Final = 12.0
ATTEMPTS: Final = 4
AT_FDCWD, STATX_BTIME = -100, 0x800
"""Of linux/fcntl.h and linux/stat.h; man 2 statx gives the offsets read below."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class StalledError(RuntimeError):
    """What it was to do has not happened in time."""


class MooncakeDisk(MooncakeStore):
    """One master, and one store with a directory of its own for each set."""

    def __init__(self, directory: Path, *, is_direct: bool) -> None:
        """Use files below `directory`."""
        self._root, self._is_direct = directory, is_direct
        self._stores = 0
        super().__init__("--enable_offload=true", f"--default_kv_lease_ttl={LEASE_MS}")

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Make a store whose segment holds twice the set."""
        self._close_store()
        self._rows = source, sink
        self._stores += 1
        self._directory = self._root / str(work.block_bytes)
        while self._directory.exists():
            self._directory = self._directory.with_suffix(f".{time.monotonic_ns()}")
        self._directory.mkdir()
        self._bucket_keys = keys_of_bucket(work)
        settings = {
            "HEARTBEAT_INTERVAL_SECONDS": BEAT_S,
            "BUCKET_KEYS_LIMIT": self._bucket_keys,
            "BUCKET_MAX_TOTAL_SIZE": SETS_KEPT * source.nbytes + ALIGN_BYTES,
            "USE_URING": str(self._is_direct).lower(),
        }
        os.environ.update({f"MOONCAKE_OFFLOAD_{name}": str(value) for name, value in settings.items()})
        segment_bytes = -(-2 * source.nbytes // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES
        self._attach(work, source, sink, segment_bytes, self._directory)

    def prepare(self, generation: int) -> None:
        """Lay the blocks into its memory."""
        self._keys = [f"{self._stores}/{generation}/{i:016}" for i in range(self._work.blocks)]
        self._wait_for_heartbeat(generation)
        self._earlier = set(self._files(".bucket"))
        super().put(generation)

    def _wait_for_heartbeat(self, generation: int) -> None:
        """Return when one has just passed: of a batch that is stored while the next one looks, nothing is ever written.

        A bucket of small objects is written by it, and gone.
        """
        assert self._store is not None
        keys = [f"heartbeat/{self._stores}/{generation}/{i}" for i in range(self._bucket_keys)]
        self._earlier = set(self._files(".bucket"))
        for part in self._work.batches():
            named = keys[part]
            results = self._store.batch_put_from(named, self._from[: len(named)], [BEAT_BYTES] * len(named))
            if any(results):
                raise RuntimeError(f"mooncake: put answered {results}")
        _wait_until("had a heartbeat", lambda: any(self._written(".meta")))
        self._store.batch_remove(keys, force=True)

    def put(self, generation: int) -> dict[str, float]:
        """Memory to files, until the master knows where each block lies; returns seconds since the first was made."""
        for _attempt in range(ATTEMPTS - 1):
            try:
                return self._write()
            except StalledError:
                self._begin_again(generation)
        return self._write()

    def _begin_again(self, generation: int) -> None:
        """A store that has left out a block holds back others of its bucket for good: a new one takes its place."""
        directory = self._directory
        self.open(self._work, *self._rows)
        shutil.rmtree(directory)
        self.prepare(generation)

    def _write(self) -> dict[str, float]:
        buckets = self._work.blocks // self._bucket_keys
        _wait_until("wrote all buckets", lambda: len(list(self._written(".meta"))) == buckets)
        _wait_until("told the master", self._is_on_disk)
        return {"write": time.time() - min(map(_made_s, self._written(".bucket")))}

    def evict(self) -> None:
        """Take the set out of memory; what was written reaches the disk, so that no read waits for that."""
        for path in self._written(".bucket"):
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.close(fd)
        assert self._store is not None
        left = set(self._keys)
        until_s = time.monotonic() + WAIT_S
        time.sleep(LEASE_MS / 1e3)
        while left:  # As leases end.
            time.sleep(LEASE_MS / 20e3)
            left -= set(self._store.batch_replica_clear(sorted(left), self._store.get_hostname()))
            if time.monotonic() > until_s:
                raise RuntimeError(f"mooncake: {len(left)} blocks stay in memory")

    def show(self, _: int) -> None:
        """What was loaded lies in `sink` already."""

    def _is_on_disk(self) -> bool:
        assert self._store is not None
        replicas: dict[str, list[Any]] = self._store.batch_get_replica_desc(self._keys)
        return all(any(r.is_local_disk_replica() for r in replicas.get(key, ())) for key in self._keys)

    def _files(self, suffix: str) -> Iterator[Path]:
        return (p for p in self._directory.iterdir() if p.suffix == suffix)

    def _written(self, suffix: str) -> Iterator[Path]:
        """Files of the present generation."""
        return (p for p in self._files(suffix) if p.with_suffix(".bucket") not in self._earlier)


def _made_s(path: Path) -> float:
    """Unix time at which a file was made. Raises `OSError` where the file system does not tell."""
    facts = ctypes.create_string_buffer(256)
    if _LIBC.statx(AT_FDCWD, os.fsencode(path), 0, STATX_BTIME, facts):
        raise OSError(ctypes.get_errno(), f"statx {path}")
    mask, seconds, nanoseconds = struct.unpack_from("=I76xqI", facts)
    if not mask & STATX_BTIME:
        raise OSError(errno.EOPNOTSUPP, f"{path}: its file system keeps no time of birth")
    return float(seconds + nanoseconds / 1e9)


def _wait_until(what: str, is_so: Callable[[], bool]) -> None:
    """Poll; raises `StalledError` with `what` did not come."""
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > until_s:
            raise StalledError(f"mooncake: it never {what}")
        time.sleep(POLL_S)


class EvictingBench(DiskBench):
    """Counts no wait for the heartbeat, and takes what was stored out of memory, untimed, before it is loaded."""

    def __init__(self, store: MooncakeDisk) -> None:
        super().__init__(store)
        self._evicting = store

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carry out one verb."""
        is_put = asked["verb"] == "put"
        answer = super().answer(asked)
        if is_put:
            answer["seconds"] = answer["parts"]["write"]
            self._evicting.evict()
        return answer


def main() -> None:
    """Parse the command line and answer verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where its files go")
    parser.add_argument("--direct", action="store_true", help="O_DIRECT and io_uring for reads")
    chosen = parser.parse_args()
    serve(lambda: MooncakeDisk(chosen.directory, is_direct=chosen.direct), EvictingBench)


if __name__ == "__main__":
    main()
