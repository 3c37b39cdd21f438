"""vLLM's side of the secondary tier without an engine: makes it as vLLM does and calls it, by lines of JSON.

The CPU tier is plain memory of as many rows as asked for. A real one is in `test_vllm_tier.py`'s engines.
"""

import json
import logging
import os
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.kv_events import EventBatch, ZmqEventPublisher
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from bench.harness.identity import SECRET

ROW_BYTES = 64 << 10
POLL_S = 0.002
ENDS_S = 60.0


def spec(*, has_events: bool) -> Any:
    """What a tier reads of vLLM's: an engine of one worker, pages of 32 tokens in fp32."""
    numbered = {"group_id": 0} if "group_id" in OffloadingGroupConfig.__dataclass_fields__ else {}  # Since 0.30.
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("l0", "l1"), **numbered),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=has_events,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig("m", "float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=True),
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=has_events))


def wanted(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(-128, 128, ROW_BYTES, np.int8)


class Called:
    """One tier, and a CPU tier of which row `n` is for chunk `n`."""

    def __init__(self, tier: dict[str, Any], rows: int = 64, *, has_events: bool = False, hash_bytes: int = 32) -> None:
        self.rows = np.zeros((rows, ROW_BYTES), np.int8)
        self._hash_bytes = hash_bytes
        self._jobs: Counter[str] = Counter()
        self._steps = ScheduleEndContext((), ())
        self._metrics: Counter[str] = Counter()
        kind = {"type": "KvstrataTier", "module_path": "kvstrata_client.connectors.vllm.tier"}
        view = self.rows.data
        self.tier = SecondaryTierFactory.create_secondary_tier(kind | tier, view, spec(has_events=has_events))

    def look_up(self, numbers: list[int], request: str = "r") -> dict[str, Any]:
        """What a request is told in the end, and how often it was told to ask again."""
        context, again, started_s = ReqContext(request), 0, time.monotonic()
        while True:
            told = [self.tier.lookup(self._key(n), context) for n in numbers]
            self.tier.on_schedule_end(self._steps)
            if LookupResult.RETRY not in told:
                return {"told": [t.name for t in told], "again": again, "took_s": time.monotonic() - started_s}
            again += 1
            assert time.monotonic() - started_s < ENDS_S
            time.sleep(POLL_S)

    def store(self, numbers: list[int]) -> dict[str, Any]:
        for n in numbers:
            self.rows[n] = wanted(n)
        return self._done(self._submit(numbers, "store"))

    def load(self, numbers: list[int], request: str = "r") -> dict[str, Any]:
        """How a load ended, which chunks came, and whether these have the bytes that were stored."""
        self.rows[:] = 0
        ended = self._done(self._submit(numbers, "load", request))
        ended["are_right"] = all((self.rows[n] == wanted(n)).all() for n in ended["done"])
        return ended

    def flood(self, count: int) -> dict[str, Any]:
        """Submit stores of one chunk each without waiting; how many have ended as failed by then."""
        started_s = time.monotonic()
        jobs = [self._submit([n % len(self.rows)], "store") for n in range(count)]
        ended = list(self.tier.get_finished_jobs())
        assert {e.job_id for e in ended} <= set(jobs)
        return {"refused": sum(not e.success for e in ended), "took_s": time.monotonic() - started_s}

    def drain(self) -> dict[str, Any]:
        """Wait for all jobs; how many have ended since they were looked at last."""
        started_s = time.monotonic()
        self.tier.drain_jobs()
        return {"ended": len(list(self.tier.get_finished_jobs())), "took_s": time.monotonic() - started_s}

    def finish(self, request: str = "r") -> dict[str, Any]:
        self.tier.on_request_finished(ReqContext(request))
        return {}

    def touch(self, numbers: list[int]) -> dict[str, Any]:
        self.tier.touch([self._key(n) for n in numbers], ReqContext("r"))
        time.sleep(1.1)
        self.tier.on_schedule_end(self._steps)
        return {}

    def digests(self, numbers: list[int]) -> dict[str, Any]:
        """Of the last block of each chunk, in the agent that benchmarks and tests start."""
        namer = self.tier._chunks._find.namer
        return {"of": [namer.keys(SECRET, self._key(n), ROW_BYTES)[-1].digest.hex() for n in numbers]}

    def events(self) -> dict[str, Any]:
        taken = list(self.tier.take_events())
        return {"stored": [len(e.keys) for e in taken if not e.removed], "media": [e.medium.value for e in taken]}

    def stats(self) -> dict[str, Any]:
        """The tier's metrics, summed up."""
        stats = self.tier.get_stats()
        for name, value in (stats.reduce() if stats is not None else {}).items():
            self._metrics[name] += value
        return dict(self._metrics)

    def close(self) -> dict[str, Any]:
        """End the tier; vLLM gives its memory back right after that."""
        started_s = time.monotonic()
        self.tier.shutdown()
        self.tier._primary_kv_view.release()
        return {"took_s": time.monotonic() - started_s}

    def _key(self, number: int) -> Any:
        return make_offload_key(number.to_bytes(self._hash_bytes, "big"), 0)

    def _submit(self, numbers: list[int], kind: str, request: str = "r") -> int:
        self._jobs["submitted"] += 1
        job, rows = self._jobs["submitted"], np.array(numbers, np.int32)
        keys, context = [self._key(n) for n in numbers], ReqContext(request)
        self.numbers = dict(zip(keys, numbers, strict=True))
        getattr(self.tier, f"submit_{kind}")(TransferJob(job, keys, rows, kind == "load", context))
        return job

    def _done(self, job: int) -> dict[str, Any]:
        started_s = time.monotonic()
        while True:
            for ended in self.tier.get_finished_jobs():
                assert ended.job_id == job
                keys = self.numbers if ended.success else ended.successful_keys or ()
                done = [self.numbers[key] for key in keys]
                return {"is_whole": ended.success, "done": done, "took_s": time.monotonic() - started_s}
            assert time.monotonic() - started_s < ENDS_S
            time.sleep(POLL_S)


class Publishing:
    """vLLM's publisher of KV events; a page has the number of its chunk."""

    def __init__(self) -> None:
        self._publisher: ZmqEventPublisher | None = None

    def begin(self, published: str, replayed: str) -> dict[str, Any]:
        """Start one, in place of the one before."""
        self.end()
        self._publisher = ZmqEventPublisher(0, published, replayed or None)
        return {}

    def say(self, stored: list[list[Any]], encoding: str = "map") -> dict[str, Any]:
        """Publish one batch; each event has pages, what the first one continues, and a session."""
        events: list[Any] = []
        for pages, parent, session in stored:
            hashes = [p.to_bytes(32, "big") for p in pages] if encoding == "array" else pages
            tokens = [0] * (32 * len(pages))
            named = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 32}
            named |= {"lora_id": None, "medium": "GPU", "lora_name": None, "session_id": session}
            unknown = [None] * 6  # From `extra_keys` to `ownership`.
            by_place = ["BlockStored", *list(named.values())[:-1], *unknown, session]
            events.append(by_place if encoding == "array" else {"type": "BlockStored", **named})
        assert self._publisher is not None
        self._publisher.publish(EventBatch(time.time(), events))
        return {}

    def end(self) -> dict[str, Any]:
        if self._publisher is not None:
            self._publisher.shutdown()
        self._publisher = None
        return {}


class Said(logging.Handler):
    """Keeps what the tier warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(record.getMessage())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What vLLM says.
    print(json.dumps({"versions": {}}), file=answers, flush=True)
    said = Said()
    logging.getLogger("vllm.kvstrata").addHandler(said)
    called: Called | None = None
    publishing = Publishing()
    for line in sys.stdin:
        asked = json.loads(line)
        verb = asked.pop("verb")
        answer: dict[str, Any] = {}
        if verb == "open":
            said.lines.clear()
            try:
                called = Called(**asked)
            except Exception as e:  # noqa: BLE001  vLLM tells it to its user.
                answer = {"refused": str(e)}
        elif verb.startswith("publish_"):
            answer = getattr(publishing, verb.removeprefix("publish_"))(**asked)
        elif verb == "said":
            answer = {"lines": said.lines}
        else:
            answer = getattr(called, verb)(**asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
