"""Real engines on a CPU in processes of their own: their model, how each is started, and what reaches an agent.

Programs and plugins that run in the engines' environments are in `tests/support/engines`. Owns the processes it starts.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import redis

from bench.harness.drivers import ROOT, WITH_PARENT, Command, FailedError
from bench.harness.identity import BLOCK_TOKENS, MODEL, POOL, REVISION

PATHS: Final = os.pathsep.join(str(ROOT / part) for part in ("crds", "agent", "tests"))
"""Python path of an engine: what our client needs, and the programs."""
MODEL_S: Final = 300.0
LMCACHE_START_S: Final = 180.0
"""An LMCache server that starts imports torch, on a machine that may be busy."""
LMCACHE_STORE_S: Final = 60.0
REDIS_START_S: Final = 10.0
_ANSWER_S: Final = 10.0
_POLL_S: Final = 0.05
_PLUGIN: Final = "[sglang.srt.plugins]\nkvstrata_tests_cpu = support.engines.sglang_cpu:register\n"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent of the benchmarks listens, and the token it knows."""

    socket: Path
    token: Path

    @property
    def settings(self) -> Json:
        """What our connector and our tier for vLLM are given."""
        at = {"socket": str(self.socket), "pool": POOL, "token_file": str(self.token)}
        return {**at, "model": MODEL, "revision": REVISION}

    def sglang_storage(self, dtype: str, module: str, name: str) -> Json:
        """`hicache-storage-backend-extra-config` of SGLang for a backend of this class."""
        dynamic = {"backend_name": "kvstrata", "module_path": module, "class_name": name, "interface_v1": 1}
        return {**dynamic, **self.settings, "dtype": dtype, "block_tokens": BLOCK_TOKENS}

    def lmcache_adapter(self, layout: Json, **params: Any) -> Json:
        """Specification of LMCache's L2 adapter, with the shard's geometry and further parameters."""
        at = {"socket": str(self.socket), "pool": POOL, "token_file": str(self.token)}
        named = {**at, "layout": {"model": MODEL, "revision": REVISION, "block_tokens": BLOCK_TOKENS, **layout}}
        plugin = {"module_path": "kvstrata_client.connectors.lmcache", "class_name": "KvstrataL2Adapter"}
        return {"type": "plugin", **plugin, "adapter_params": {**named, **params}}


def make_model(python: Path, folder: Path, *sizes: str) -> Path:
    """Write the tiny model, with arguments of `support.engines.tiny_model`. Raises `FailedError`."""
    program = (str(python), "-m", "support.engines.tiny_model", str(folder), *sizes)
    # One thread: several wait for each other by spinning, for minutes where they have to share a core with others.
    environment = {"PYTHONPATH": PATHS, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MODEL_S, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise FailedError(f"the tiny model was not made in {MODEL_S:.0f} s") from e
    if done.returncode:
        raise FailedError(f"the tiny model was not made: {done.stderr[-400:]}")
    return folder


def vllm_command(
    python: Path, model: Path, *arguments: str, name: str = "vllm", variables: Mapping[str, str] | None = None
) -> Command:
    """How to start a vLLM with arguments of `support.engines.vllm_process`."""
    # With the seed, hashes of blocks are the same in all engines, also before 0.32.
    given = {"PYTHONPATH": PATHS, "PYTHONHASHSEED": "0", **(variables or {})}
    return Command(name, python, "support.engines.vllm_process", (str(model), *arguments), tuple(given.items()))


def sglang_command(python: Path, folder: Path, *, name: str = "sglang", module: str = "") -> Command:
    """How to start an SGLang that obeys verbs; what it leaves goes into `folder`, made for it. Runs one thread."""
    (folder / "left").mkdir(parents=True)
    # SGLang finds a plugin in all its processes by a distribution of the Python path.
    metadata = folder / "plugin" / "kvstrata_tests_sglang_cpu-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstrata-tests-sglang-cpu\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(_PLUGIN)
    given = {
        "PYTHONPATH": os.pathsep.join((PATHS, str(ROOT / "tests" / "peers"), str(folder / "plugin"))),
        "TMPDIR": str(folder / "left"),
        # A model of this size is slower with more, and far slower where others work.
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # SGLang 0.5.21 gives out pages by a Triton kernel, on a CPU as well; later ones have Python for it.
        "TRITON_INTERPRET": str(int("sglang-0.5.21" in str(python))),
    }
    return Command(name, python, module or "support.engines.sglang_process", environment=tuple(given.items()))


class LmcacheServer:
    """An LMCache server with one L2 adapter; leaving it ends it, and its memory (L1) is gone."""

    def __init__(self, python: Path, folder: Path, adapter: Json, chunk_tokens: int, *options: str) -> None:
        """Start it; entering waits for it. Its words go to a file of `folder`."""
        self.port, self._http_port = free_ports(2)
        at = {"host": "127.0.0.1", "port": self.port, "http-host": "127.0.0.1", "http-port": self._http_port}
        sized = {"l1-size-gb": 0.5, "chunk-size": chunk_tokens, "eviction-policy": "LRU"}
        how = {"supported-transfer-mode": "engine_driven", "l2-adapter": json.dumps(adapter)}
        given = [part for key, value in {**at, **sized, **how}.items() for part in (f"--{key}", str(value))]
        program = (*WITH_PARENT, str(python.parent / "lmcache"), "server", *given, "--disable-metrics", *options)
        self._log = folder / f"lmcache-{self.port}.log"
        with self._log.open("w") as log:
            environment = {**os.environ, "PYTHONPATH": PATHS, "LMCACHE_DISABLE_BANNER": "1"}
            self._process = subprocess.Popen(
                program, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def transfer(self) -> Json:
        """What vLLM is given as `kv_transfer_config` for this server."""
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port, "lmcache.mp.mq_timeout": 60}
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def __enter__(self) -> Self:
        """Raises `FailedError` as `wait` does; it has ended then."""
        try:
            self.wait()
        except FailedError:
            self.__exit__()
            raise
        return self

    def wait(self) -> None:
        """Wait until it listens and answers. Raises `FailedError` when it ends before, or does not in time."""
        ends_s = time.monotonic() + LMCACHE_START_S
        while not (is_listening(self.port) and self._has_begun()):
            if self._process.poll() is not None or time.monotonic() > ends_s:
                raise FailedError(f"the LMCache server does not answer: {self.said}")
            time.sleep(_POLL_S)

    @property
    def said(self) -> str:
        """Its last words, and how it ended if it has."""
        return f"{self._log.read_text()[-1000:]} [{self._process.poll()}]"

    def _has_begun(self) -> bool:
        """Whether its storage is made: whoever listens on its port may be another, and it may listen before."""
        try:
            self._state()
        except (OSError, ValueError, KeyError):
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def clear(self) -> None:
        """Wait until all is stored below, then empty the server's memory (L1). Raises `FailedError`."""
        ends_s = time.monotonic() + LMCACHE_STORE_S
        while (state := self._state())["stores"] or state["objects"]:
            if time.monotonic() > ends_s:
                raise FailedError(f"LMCache's memory was not emptied in {LMCACHE_STORE_S} s: {state}")
            if not state["stores"]:
                self._asked("cache/clear", b"{}")
            time.sleep(_POLL_S)

    def _state(self) -> dict[str, int]:
        """Stores under way to L2, and objects in L1."""
        said = json.loads(self._asked("status"))["storage_manager"]
        stores = said["store_controller"]
        return {
            "stores": stores["pending_keys_count"] + stores["in_flight_task_count"],
            "objects": said["l1_manager"]["total_object_count"],
        }

    def _asked(self, path: str, body: bytes | None = None) -> bytes:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._http_port}/{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=_ANSWER_S) as answer:  # noqa: S310  Loopback.
            return bytes(answer.read())


@contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    """Run a Redis that saves nothing; yields its port. Raises `FailedError` when it does not answer."""
    (port,) = free_ports(1)
    command = (
        *WITH_PARENT,
        "redis-server",
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--dir",
        str(directory),
        "--save",
        "",
    )
    quiet = subprocess.DEVNULL
    with subprocess.Popen((*command, "--appendonly", "no"), stdout=quiet, start_new_session=True) as server:
        try:
            _await(redis.Redis(port=port), server)
            yield port
        finally:
            server.terminate()


def _await(client: redis.Redis, server: subprocess.Popen[bytes]) -> None:
    ends_s = time.monotonic() + REDIS_START_S
    while True:
        try:
            client.ping()
        except redis.ConnectionError as e:
            if server.poll() is not None:
                raise FailedError(f"redis-server ended with {server.returncode}") from e
            if time.monotonic() > ends_s:
                raise FailedError(f"redis-server did not answer for {REDIS_START_S} s") from e
            time.sleep(_POLL_S)
        else:
            return


def free_ports(count: int) -> Sequence[int]:
    """Ports of loopback that nobody uses now."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in taken]
    for s in taken:
        s.close()
    return ports


def is_listening(port: int) -> bool:
    """Whether a server accepts on this port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
