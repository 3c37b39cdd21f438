"""What the directory is compared with: redis-benchmark over the least script, and over the layout of a peer's index."""

import subprocess
from enum import Enum
from typing import Final

import redis

from kvstrata_metadata.server.embedded import EmbeddedRedis

CONNECTIONS: Final = 8
PIPELINE: Final = 16
_SPACE: Final = 1_000_000
"""Random numbers that keys are made of."""
_DIGEST: Final = "__rand_int__bytes-20"  # redis-benchmark puts 12 digits in place of the name: 20 bytes.
_LOCATION: Final = "location-18-bytes."
_RECORD: Final = "s" * 64
"""About the size of a packed session."""
_BUCKET: Final = "local bucket = KEYS[1] .. 'b' .. string.sub(ARGV[1], 8, 12) "
_PEER_KEY: Final = "kf:{llmd}model@__rand_int__"


class Work(Enum):
    """What is done for one location, or session, a call: script and arguments."""

    PUBLISH = (_BUCKET + "return redis.call('HSET', bucket, ARGV[1], ARGV[2])", (_DIGEST, _LOCATION))
    LOOKUP = (_BUCKET + "return redis.call('HGET', bucket, ARGV[1])", (_DIGEST,))
    ERASE = (_BUCKET + "return redis.call('HDEL', bucket, ARGV[1])", (_DIGEST,))
    SESSION = ("return redis.call('SET', KEYS[1] .. ARGV[1], ARGV[2], 'EX', 604800)", ("n__rand_int__", _RECORD))


class Bare:
    """Runs redis-benchmark against a server whose administrator is `admin`."""

    PEER: Final = {Work.PUBLISH: ("HSET", _PEER_KEY, "pod-1@gpu", "1700000000"), Work.LOOKUP: ("HKEYS", _PEER_KEY)}
    """Documented layout of llm-d-kv-cache's Redis index: a hash for each block, a field for each pod and tier."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._port = server.port
        self._admin = redis.Redis("127.0.0.1", server.port, username="admin", password="admin")  # noqa: S106
        self.used_bytes = 0
        """Memory that the last `run` of `Work.PUBLISH` and its peer took."""

    def empty(self) -> None:
        """Drop what earlier runs have left."""
        for prefix in ("kf:{bare}*", "kf:{llmd}*"):
            for keys in _chunks(list(self._admin.scan_iter(prefix, count=10_000))):
                self._admin.unlink(*keys)
        self.used_bytes = 0

    def run(self, work: Work, count: int) -> tuple[int, float]:
        """Calls made, and calls per second."""
        script, arguments = work.value
        before_bytes = self._memory()
        sha = self._admin.script_load(script)
        rate = self._benchmark(count, "EVALSHA", str(sha), "1", "kf:{bare}", *arguments)
        if work is Work.PUBLISH:
            self.used_bytes += self._memory() - before_bytes
        return count, rate

    def run_peer(self, work: Work, count: int) -> float:
        """Calls per second of the peer's layout."""
        before_bytes = self._memory()
        rate = self._benchmark(count, *self.PEER[work])
        if work is Work.PUBLISH:
            self.used_bytes += self._memory() - before_bytes
        return rate

    def memory_per_location(self, count: int) -> float:
        """Bytes of one location in the peer's layout, with keys as long as ours."""
        self.empty()
        before_bytes = self._memory()
        for start in range(0, count, 1_000):
            pipeline = self._admin.pipeline(transaction=False)
            for n in range(start, start + 1_000):
                pipeline.hset(f"kf:{{llmd}}model@{n:020x}", "pod-1@gpu", "1700000000")
            pipeline.execute()
        used_bytes = self._memory() - before_bytes
        self.empty()
        return used_bytes / count

    def _memory(self) -> int:
        return int(self._admin.info("memory")["used_memory"])

    def _benchmark(self, count: int, *command: str) -> float:
        shape = ("-c", str(CONNECTIONS), "-P", str(PIPELINE), "-n", str(count), "-r", str(_SPACE), "--csv")
        login = ("-p", str(self._port), "--user", "admin", "-a", "admin")
        done = subprocess.run(
            ("redis-benchmark", *login, *shape, *command), capture_output=True, text=True, check=True, timeout=300
        )
        last = done.stdout.strip().splitlines()[-1]
        return float(last.split('","')[1])


def redis_version() -> str:
    """Version of the server's program."""
    words = subprocess.run(("redis-server", "--version"), capture_output=True, text=True, check=True).stdout.split()
    return next(word[2:] for word in words if word.startswith("v="))


def _chunks(keys: list[bytes]) -> list[list[bytes]]:
    return [keys[i : i + 1_000] for i in range(0, len(keys), 1_000)]
