"""A pool of kvstrata as a secondary tier of vLLM's own CPU offloading, loaded by its module path.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "secondary_tiers": [{
        "type": "KvstrataTier", "module_path": "kvstrata_client.connectors.vllm.tier",
        "socket": "/run/kvstrata/POOL/agent.sock", "pool": "POOL",
        "token_file": "/var/run/secrets/kvstrata.io/token", "model": "MODEL", "revision": "REVISION"}]}}'

vLLM calls from its scheduler's thread, which never waits here for the agent: lookups answer from what is known, and
threads copy straight between vLLM's memory and the agent's. Whatever becomes of the agent is a miss, or a store that
failed; nothing is raised into the engine but a wrong configuration, at the start. For vLLM 0.29 to 0.32.

vLLM tells a tier of no sessions. Its KV events do, since 0.32, and are heard in a thread where `events` says so.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.client import Client
from kvstrata_client.connectors import object_transfers as transfers
from kvstrata_client.connectors.engine_events import OUTCOMES, EventStream, SessionBook, Stored, in_chain_order
from kvstrata_client.connectors.event_listener import EventListener
from kvstrata_client.connectors.object_transfers import Object
from kvstrata_client.connectors.object_workers import StateLog, Task, Workers
from kvstrata_client.connectors.vllm.chunks import (
    GROUP_BYTES,
    ChunkNamer,
    Lookups,
    Probe,
    TierSettings,
    answer,
    endpoints_of,
    has_safe_hash,
    layout_of_chunks,
    parse_tier,
)

ATTACH_WAIT_S: Final = 2.0
"""How long an engine's start waits for the agent; it is attached to later as well."""
STORE_S: Final = 10.0
"""How long a chunk may be held in vLLM's CPU tier for a store. Blocks not begun by then are not stored."""
EVENTS_LATE_S: Final = 2.0
"""How long a store waits for the events of its chunks, which are on their way since they were computed: longer than a
subscriber takes that has just connected, or that gets little of a processor. Rows are held meanwhile."""
YIELD_S: Final = 0.00005
"""Of a step in which a request waits for the agent. vLLM's loop keeps Python's lock from the threads that find and
load, 5 ms at a time, while it has nothing to compute."""
TOUCH_S: Final = 1.0
"""Between two reports of use."""
TOUCHED_MAX: Final = 4096
"""Chunks of one report, about; others are not reported."""
CHUNKS: Final = "vllm:kv_offload_kvstrata_chunks"
ATTACHED: Final = "vllm:kv_offload_kvstrata_attached"
EVENTS: Final = "vllm:kv_offload_kvstrata_events"

_log: Final = logging.getLogger("vllm.kvstrata")


@dataclass(frozen=True, slots=True)
class _Job:
    """A transfer of vLLM's, and what becomes of it."""

    number: int
    request: str
    keys: tuple[Any, ...]
    rows: tuple[int, ...]
    """Of the CPU tier, one for each key."""
    is_load: bool
    submitted_s: float


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a job; from here on no thread touches its rows."""

    job: _Job
    done: tuple[bool, ...]
    """For each key. All false: the job failed."""
    took_s: float


def _hit_source() -> Any:
    """What vLLM calls where chunks came from. A pool has memory, disks and other nodes, and one name is for all."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # Before 0.32.
        return None
    return CacheHitSource.EXTERNAL_UNSPECIFIED


class KvstrataTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types for us.
    """Finds, loads and stores chunks of vLLM's CPU tier in the node's agent."""

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[Any] = _hit_source()

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """Attach in the background. Raises `InvalidInputError` for a wrong configuration.

        An engine whose chunks cannot be kept is served without: the log says why.
        """
        settings = parse_tier(given)
        endpoints = endpoints_of(settings, offloading_spec.config.parallel.data_parallel_index)
        detector = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(
            offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, tier_type=tier_type, **detector
        )
        self.locality = Locality(settings.locality) if settings.locality else None
        publishes = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if settings.enable_kv_events and publishes else None
        if settings.enable_kv_events and not publishes:
            _log.warning("enable_kv_events: true, and vLLM publishes no KV events: the tier reports none")
        if settings.events and not publishes:
            _log.warning("events: %r, and vLLM publishes no KV events: chunks have no sessions", settings.events)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._was_attached: bool | None = None
        self._lookups = Lookups(settings, time.monotonic)
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._running = 0
        self._loading = 0
        self._storing = 0
        """Chunks that are held for stores."""
        self._changed = threading.Condition()
        self._touched: dict[Any, None] = {}
        self._touches_sent_s = time.monotonic()
        self._chunks: _ChunkStore | None = None
        self._is_hash_refused = False
        rows, self._row_bytes = primary_kv_view.shape or (0, 0)
        self._storing_max = max(1, int(rows * settings.store_share))
        try:
            layout = layout_of_chunks(settings, offloading_spec.config, self._row_bytes)
            namer = ChunkNamer(layout, offloading_spec.config, vllm.__version__)
            client = Client(settings.target(layout, timeout_s=settings.lookup_timeout_s))
            book = SessionBook(offloading_spec.config.cache.blocks_per_chunk, GROUP_BYTES) if settings.events else None
            self._chunks = _ChunkStore(settings, namer, primary_kv_view, client, book if publishes else None)
        except InvalidInputError as e:
            _log.warning("kvstrata keeps no chunks of this engine: %s", e)
        if self._chunks is not None:
            self._chunks.listen(*endpoints)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """See vLLM."""
        del extra_config
        return {
            CHUNKS: OffloadingCounterMetadata(
                documentation="Chunks that kvstrata's tier loaded and stored, or did not, and lookups that were late.",
                labelnames=("operation", "outcome"),
            ),
            ATTACHED: OffloadingGaugeMetadata(documentation="1 while kvstrata's agent answers, else 0."),
            EVENTS: OffloadingCounterMetadata(
                documentation="Batches of KV events that kvstrata's tier heard, had replayed or missed; batches and "
                "events that it could not read (unreadable) or whose session has too long a name (unnamed).",
                labelnames=("outcome",),
            ),
        }

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """See vLLM. A miss while the agent is away; RETRY until its answer is there, or late."""
        if self._chunks is None or not self._chunks.client.is_attached or not self._is_kept(key):
            return LookupResult.MISS
        found = self._lookups.find(req_context.req_id, key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        """See vLLM."""
        job = _job(job_metadata, is_load=True)
        self._begin(job)
        if self._chunks is None:
            self._end(job)
            return
        self._chunks.loaders.submit(Task(partial(self._load, self._chunks, job), partial(self._end, job)))

    def submit_store(self, job_metadata: Any) -> None:
        """See vLLM. Refused while the agent is away, and beyond `store_share`: it ends at once, as failed."""
        job = _job(job_metadata, is_load=False)
        self._begin(job)
        chunks = self._chunks
        if chunks is None or not chunks.client.is_attached or not all(map(self._is_kept, job.keys)):
            self._end(job)
        elif self._storing > self._storing_max and self._storing > len(job.keys):
            self._counts["store", "refused"] += len(job.keys)
            self._end(job)
        else:
            chunks.storers.submit(Task(partial(self._store, chunks, job), partial(self._end, job)))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See vLLM. Chunks that could not be loaded are misses from now on."""
        results = []
        while (ended := self._next_ended()) is not None:
            results.append(self._result(ended))
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """See vLLM."""
        taken, self._events = self._events, None if self._events is None else []
        return taken or ()

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """See vLLM; called until 0.30, for all chunks of a request in each step that it waits."""
        del req_context
        for key in keys if len(self._touched) < TOUCHED_MAX else ():
            self._touched[key] = None

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See vLLM. Who the tenant is says the token alone, so nothing of the request is read."""
        del req_context
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """See vLLM."""
        self._lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """See vLLM. Has the lookups of this step asked, all at once."""
        del context
        probes, chunks = self._lookups.take(), self._chunks
        if chunks is None:
            return
        chunks.note_agent()
        if probes:
            nowhere = partial(answer, probes, [False] * len(probes))
            chunks.finders.submit(Task(partial(chunks.look_up, probes), nowhere))
        now_s = time.monotonic()
        if self._touched and now_s - self._touches_sent_s >= TOUCH_S:
            touched, self._touched, self._touches_sent_s = tuple(self._touched), {}, now_s
            chunks.finders.submit(Task(partial(chunks.touch, touched), _nothing))
        if self._loading or self._lookups.are_open:
            time.sleep(YIELD_S)

    def drain_jobs(self) -> None:
        """See vLLM. As long as deadlines let it take."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """See vLLM. None where nothing has changed."""
        is_attached = self._chunks is not None and self._chunks.client.is_attached
        late, self._lookups.late = self._lookups.late, 0
        counts, self._counts = self._counts, Counter()
        if late:
            counts["lookup", "late"] += late
        events = self._chunks.new_events() if self._chunks is not None else {}
        if not counts and not events and is_attached == self._was_attached:
            return None
        stats = OffloadingConnectorStats()
        for outcome, batches in events.items():
            stats.increase_counter(EVENTS, batches, (outcome,))
        for labels, chunks in counts.items():
            stats.increase_counter(CHUNKS, chunks, labels)
        stats.set_gauge(ATTACHED, float(is_attached))
        self._was_attached = is_attached
        return stats

    def shutdown(self) -> None:
        """See vLLM. Gives up what waits, and returns when no thread touches vLLM's memory any more."""
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks.close()

    def _is_kept(self, key: bytes) -> bool:
        if has_safe_hash(key):
            return True
        if not self._is_hash_refused:
            self._is_hash_refused = True
            _log.warning("kvstrata keeps no chunks of this engine: prefix_caching_hash_algo: sha256 wanted")
        return False

    def _begin(self, job: _Job) -> None:
        with self._changed:
            self._running += 1
            self._loading += job.is_load
            self._storing += 0 if job.is_load else len(job.keys)

    def _end(self, job: _Job, done: Sequence[bool] = (), took_s: float = 0.0) -> None:
        """Hand a job's end to the scheduler; any thread may, once for each job, when it is done with the rows."""
        self._ended.put(_Ended(job, tuple(done) or (False,) * len(job.keys), took_s))
        with self._changed:
            self._running -= 1
            self._loading -= job.is_load
            self._storing -= 0 if job.is_load else len(job.keys)
            self._changed.notify_all()

    def _next_ended(self) -> _Ended | None:
        try:
            return self._ended.get_nowait()
        except queue.Empty:
            return None

    def _result(self, ended: _Ended) -> JobResult:
        job = ended.job
        done = [key for key, is_done in zip(job.keys, ended.done, strict=True) if is_done]
        operation = "load" if job.is_load else "store"
        for outcome, chunks in (("done", len(done)), ("failed", len(job.keys) - len(done))):
            if chunks:
                self._counts[operation, outcome] += chunks
        if job.is_load:
            self._lookups.fail(job.request, (k for k, is_done in zip(job.keys, ended.done, strict=True) if not is_done))
        elif done and self._events is not None:
            self._events.append(OffloadingEvent(done, self.medium, removed=False, locality=self.locality))
        is_whole = len(done) == len(job.keys)
        partly = tuple(done) if done and not is_whole and job.is_load else None
        moved = {"transfer_bytes": len(done) * self._row_bytes} if _TELLS_BYTES and done else {}
        return JobResult(job.number, is_whole, partly, ended.took_s, **moved)

    def _load(self, chunks: "_ChunkStore", job: _Job) -> None:
        started_s = time.monotonic()
        self._end(job, chunks.load(job), time.monotonic() - started_s)

    def _store(self, chunks: "_ChunkStore", job: _Job) -> None:
        started_s = time.monotonic()
        self._end(job, chunks.store(job), time.monotonic() - started_s)


_TELLS_BYTES: Final = any(f.name == "transfer_bytes" for f in dataclasses.fields(JobResult))
"""Since 0.31."""


class _ChunkStore:
    """The client, the threads, and vLLM's memory. All that waits for the agent waits in these threads."""

    def __init__(
        self, settings: TierSettings, namer: ChunkNamer, view: memoryview, client: Client, book: SessionBook | None
    ) -> None:
        self.client = client
        self._book = book
        self._stream = EventStream(self._learn)
        self._listener: EventListener | None = None
        self._reported: Counter[str] = Counter()
        self._rows = view.cast("B")
        self._row_bytes = view.shape[1] if view.shape else 0
        self._settings = settings
        target = client.target
        self._find = transfers.TransferJob(target, client, namer, time.monotonic, settings.load_deadline_s)
        # Nobody's request waits for a store: it need not be given up as soon.
        self._move = replace(self._find, target=replace(target, timeout_s=target.move_timeout_s))
        self._state = StateLog(_log, "chunks are misses")
        # Lookups hold requests up and move no bytes: they must not wait behind copies, nor loads behind stores.
        self.finders = Workers("kvstrata-tier-find", 1)
        self.loaders = Workers("kvstrata-tier-load", settings.threads)
        self.storers = Workers("kvstrata-tier-store", 1)
        self.client.wait_settled(ATTACH_WAIT_S)
        self.note_agent()

    def listen(self, published: str, replayed: str) -> None:
        """Hear KV events from now on, where there is a book for them."""
        if self._book is None:
            return
        try:
            self._listener = EventListener(published, replayed, self._stream, self._report)
        except InvalidInputError as e:
            self._book = None
            _log.warning("chunks have no sessions: %s", e)

    def new_events(self) -> dict[str, int]:
        """Outcomes of KV events that were not returned before."""
        counts = dict(self._stream.counts)
        new = {name: counts[name] - self._reported[name] for name in OUTCOMES if counts[name] > self._reported[name]}
        self._reported.update(new)
        return new

    def note_agent(self) -> None:
        """Log whether the agent is there, when that has changed."""
        self._state.note("kvstrata's agent", None if self.client.is_attached else self.client.reason)

    def look_up(self, probes: Sequence[Probe]) -> None:
        """Answer lookups; what is there is on its way into memory then. Nobody waits any more for what is late."""
        if time.monotonic() - probes[0].asked_s >= self._settings.lookup_timeout_s:
            answer(probes, [False] * len(probes))
            return
        objects = [Object(p.key, self._row_bytes) for p in probes]
        found = self.client.run(transfers.look_up(self._find, objects))
        answer(probes, [bool(keys) for keys in found])
        self.client.run(transfers.follow_up(self._find, objects, found))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Report use of chunks."""
        self.client.run(transfers.touch(self._find, [Object(k, self._row_bytes) for k in keys]))

    def load(self, job: _Job) -> list[bool]:
        """Fill rows; False for each that holds nothing of use. What waited for too long is not begun."""
        left_s = job.submitted_s + self._settings.load_deadline_s - time.monotonic()
        if left_s <= 0 or not self.client.is_attached:
            return []
        answer_s = min(self._find.target.timeout_s, left_s / 2)
        in_time = replace(
            self._find, deadline_s=left_s - answer_s, target=replace(self._find.target, timeout_s=answer_s)
        )
        done = self.client.run(transfers.load(in_time, self._objects(job)))
        if self._book is not None:
            self._book.keep([key for key, is_done in zip(job.keys, done, strict=True) if is_done])
        return done

    def store(self, job: _Job) -> list[bool]:
        """Store rows, of a prompt the first ones first; True for those that can be had now."""
        if self._book is not None and self.client.is_attached:
            self._book.await_events(job.keys, EVENTS_LATE_S)
        left_s = job.submitted_s + STORE_S - time.monotonic()
        if left_s <= 0 or not self.client.is_attached:
            return []
        objects, session, order = self._objects(job), "", list(range(len(job.keys)))
        if self._book is not None:
            parents, session = self._book.parents_of(job.keys), self._book.session_of(job.keys)
            order = in_chain_order(job.keys, parents)
            objects = [replace(objects[i], parent=parents[i]) for i in order]
        stored = self.client.run(transfers.store(self._move, objects, left_s, session))
        if stored.is_whole or stored.error is not None:
            self._state.note("stores", stored.error)
        done = order[: stored.leading]
        if self._book is not None:
            self._book.keep([job.keys[i] for i in done])
        there = set(done)
        return [i in there for i in range(len(job.keys))]

    def _learn(self, stored: Stored) -> None:
        assert self._book is not None
        self._book.learn(stored, time.monotonic())

    def _report(self) -> None:
        """Report sessions and their chunks; in the listener's thread, which may wait."""
        if self._book is None or not self.client.is_attached:
            return
        report = self._book.take(time.monotonic())
        for session, state in report.states:
            self.client.run(transfers.enter(self._find, session, state))
        for session, run in report.runs:
            self.client.run(transfers.touch(self._find, [Object(k, self._row_bytes) for k in run], session))

    def close(self) -> None:
        """End the threads and the connection. Idempotent."""
        self.client.close()
        if self._listener is not None:
            self._listener.close()
        for workers in (self.finders, self.loaders, self.storers):
            workers.close()
        self._rows.release()

    def _objects(self, job: _Job) -> list[Object]:
        size = self._row_bytes
        rows = (self._rows[row * size : (row + 1) * size] for row in job.rows)
        return [Object(key, size, (row,)) for key, row in zip(job.keys, rows, strict=True)]


def _job(given: Any, *, is_load: bool) -> _Job:
    """Read a transfer of vLLM's. Rows are `block_ids` in 0.29, `chunk_ids` later."""
    rows = given.chunk_ids if hasattr(given, "chunk_ids") else given.block_ids
    keys = tuple(given.keys)
    assert len(keys) == len(rows), f"{len(keys)} keys and {len(rows)} rows"
    return _Job(
        given.job_id, given.req_context.req_id, keys, tuple(int(row) for row in rows), is_load, time.monotonic()
    )


def _nothing() -> None:
    """What is given up when nobody waits for it."""
