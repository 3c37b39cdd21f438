"""Blocks as raw Redis values over a unix socket, pipelined; the server is started here and saves nothing.

This is what a cache without a data path of its own does. The only other user of the redis package is the store of
`kvstrata_metadata`; this process measures the package itself.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis

from bench.peers.loop import Bytes2D, Work, serve

START_S = 10.0


class RedisValues:
    """One server and one connection."""

    def __init__(self) -> None:
        """Start the server. Raises `OSError` when there is no redis-server."""
        self._directory = tempfile.TemporaryDirectory(prefix="kvstrata-bench-")
        path = Path(self._directory.name) / "redis.sock"
        command = ("redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no")
        self._server = subprocess.Popen((*command, "--dir", self._directory.name), stdout=sys.stderr)
        self._client = redis.Redis(unix_socket_path=str(path))
        self._wait()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                self._client.ping()
            except redis.ConnectionError as e:
                if time.monotonic() > deadline_s or self._server.poll() is not None:
                    raise RuntimeError(f"redis-server did not start: {e}") from e
                time.sleep(0.02)
            else:
                return

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"redis-server": self._client.info("server")["redis_version"], "redis-py": redis.__version__}

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Prepare for a set."""
        self._client.flushall()
        self._work, self._source, self._sink = work, source, sink
        self._keys: list[bytes] = []

    def prepare(self, generation: int) -> None:
        """Make the keys."""
        self._keys = [f"{self._work.client}/{generation}/{i:016}".encode() for i in range(self._work.blocks)]

    def put(self, _: int) -> dict[str, float]:
        """SET the set, one pipeline for each batch."""
        for part in self._work.batches():
            pipeline = self._client.pipeline(transaction=False)
            for key, block in zip(self._keys[part], self._source[part], strict=True):
                pipeline.set(key, memoryview(block))
            pipeline.execute()
        return {}

    def get(self, _: int) -> dict[str, float]:
        """GET the set, one pipeline for each batch, and copy it to where it belongs."""
        for part in self._work.batches():
            pipeline = self._client.pipeline(transaction=False)
            for key in self._keys[part]:
                pipeline.get(key)
            for value, into in zip(pipeline.execute(), self._sink[part], strict=True):
                memoryview(into)[:] = value
        return {}

    def lookup(self, _: int) -> int:
        """One EXISTS for each key in one pipeline, as an index in Redis is asked."""
        pipeline = self._client.pipeline(transaction=False)
        for key in self._keys:
            pipeline.exists(key)
        found = pipeline.execute()
        return found.index(0) if 0 in found else len(found)

    def clear(self, _: int) -> None:
        """Remove the set."""
        self._client.flushall()

    def close(self) -> None:
        """Stop the server."""
        self._client.close()
        self._server.terminate()
        self._server.wait()
        self._directory.cleanup()


if __name__ == "__main__":
    serve(RedisValues)
