"""The connector as vLLM makes it: one half in the scheduler's process, one in each worker's."""

import contextlib
import json
import logging
import math
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.trace_context import HEADER
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.connectors.vllm.engine import (
    Adapters,
    Geometry,
    Settings,
    geometry_of,
    hashes_media,
    layout_of,
    parse,
    variant_of,
)
from kvstrata_client.connectors.vllm.events import EventBook, Removed, Sizes, Stored, medium_of
from kvstrata_client.connectors.vllm.hints import (
    PARAMS,
    Generating,
    Hints,
    LateNotes,
    Note,
    give_early,
    give_end,
    give_late,
    give_pause,
    hints_of,
    tokens_of,
)
from kvstrata_client.connectors.vllm.planner import Fetched, Limits, Plan, Planner, Saved, Tokens
from kvstrata_client.connectors.vllm.worker import Pages, Worker
from kvstrata_client.verbs.results import Located

_log: Final = logging.getLogger("vllm.kvstrata")
ATTACH_WAIT_S: Final = 2.0
"""How long an engine's start waits for the agent; it is attached to later as well."""
PAUSE_S: Final = 0.0005
"""Of a step that computes nothing while blocks are fetched. vLLM's loop would keep Python's lock from the threads that
copy them, 5 ms at a time, once for each block."""
REPORT_S: Final = 5.0
"""Between two reports of how fast the engine computes and what waits for it; one counts for 30 s."""
PROBLEMS_S: Final = 60.0
"""Between two lines of the log about requests whose hints are wrong."""
NOTES_MAX: Final = 1024
"""Reports of sessions that wait to be sent."""
GENERATION_BYTES: Final = 16
"""Two engines never choose the same one."""
OWNERSHIP: Final = "kvstrata"
"""`ownership` of our events: whose tier it is."""


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """A plan on its way to the workers."""

    plan: Plan


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers have fetched and saved, on its way to the scheduler."""

    fetched: Fetched
    saved: Saved

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReports":
        """Join reports of two workers: a fetch has as many blocks as the one with fewest, a save is whole at both."""
        assert isinstance(other, WorkerReports)
        joined = {**self.fetched}
        for number, end in other.fetched.items():
            known = joined.get(number)
            joined[number] = known.joined(end) if known else end
        saved = dict(self.saved)
        for number, (reports, is_whole) in other.saved.items():
            count, others_are = saved.get(number, (0, True))
            saved[number] = (count + reports, is_whole and others_are)
        return WorkerReports(joined, saved)


class KvstrataConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of the connector: vLLM makes one in the scheduler's process and one in each worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Attach in the background. Raises `InvalidInputError` for a wrong configuration.

        A model whose KV cannot be kept in blocks is served without: the log says why.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        settings = parse(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: _Scheduler | None = None
        self._worker: Worker | None = None
        self._refused = WorkerReports({}, {})
        """What was planned for a worker whose pages cannot be kept: ended at once, with nothing."""
        self._open: Callable[[dict[str, Any]], Worker] | None = None
        try:
            geometry = geometry_of(kv_cache_config, vllm_config.cache_config.cache_dtype, settings.block_tokens)
            parallel = vllm_config.parallel_config
            rank = parallel.rank % parallel.world_size if role is KVConnectorRole.WORKER else 0
            layout = layout_of(settings, vllm_config, geometry, rank)
        except InvalidInputError as e:
            _log.warning("kvstrata keeps nothing of this model: %s", e)
            return
        if role is KVConnectorRole.SCHEDULER:
            client = Client(settings.target(layout, timeout_s=settings.lookup_timeout_s))
            self._scheduler = _Scheduler(settings, geometry, client, vllm_config, kv_cache_config)
        else:
            client = Client(settings.target(layout, timeout_s=min(0.5, settings.load_deadline_s)))
            is_first = geometry.kv_parts == 2 or rank % parallel.tensor_parallel_size == 0

            def open_worker(kv_caches: dict[str, Any]) -> Worker:
                return Worker(settings, Pages(kv_caches, geometry, layout, None), client, saves=is_first)

            self._open = open_worker
        if not client.wait_settled(ATTACH_WAIT_S):
            _log.warning("kvstrata's agent is not there (%s); attaching goes on", client.reason)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is a miss later."""
        return False

    # Scheduler.

    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        if self._scheduler is not None:
            self._scheduler.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM. None until the blocks of a hit lie in the workers' memory; their load is part of a step then."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.planner.match(request.request_id, num_computed_tokens), False

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """See vLLM, since 0.32."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        hit = self._scheduler.hits.get(request.request_id) if self._scheduler is not None else None
        if not hit or sum(hit.values()) != num_external_tokens:
            found: dict[Any, int] = super().get_external_cache_hit_sources(request, num_external_tokens)
            return found
        counted: Counter[Any] = Counter()
        for tier, tokens in hit.items():
            counted[CacheHitSource.P2P if tier == "remote" else CacheHitSource.HOST] += tokens
        return dict(counted)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM."""
        if self._scheduler is not None:
            self._scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See vLLM."""
        return StepPlan(self._scheduler.step(scheduler_output) if self._scheduler is not None else Plan())

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        reports = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(reports, WorkerReports):
            self._scheduler.planner.fetched(reports.fetched)
            self._scheduler.saved(reports.saved)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """See vLLM. Pages may be freed at once; the answer's `kv_transfer_params` has the tokens that were loaded."""
        return False, self._scheduler.finish(request) if self._scheduler is not None else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self.request_finished(request, list(block_ids[0]) if block_ids else [])

    def take_events(self) -> Iterable[Any]:
        """See vLLM. Blocks of the agent that this engine has stored, found, or not found again."""
        return self._scheduler.take_events() if self._scheduler is not None else ()

    def reset_cache(self) -> bool:
        """See vLLM. True: from now on nothing of before is found, unless `forgets_at_reset` is off."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def has_pending_push_work(self) -> bool:
        """See vLLM. True while blocks are stored that routers are to hear of, or hints are about: steps are made."""
        return self._scheduler is not None and self._scheduler.awaits_saves

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See vLLM."""
        if self._open is None:
            return
        try:
            self._worker = self._open(kv_caches)
        except InvalidInputError as e:
            _log.warning("kvstrata keeps nothing of this model: %s", e)

    def start_load_kv(self, forward_context: Any, **_kwargs: Any) -> None:  # noqa: ARG002
        """See vLLM."""
        if self._worker is not None:
            self._worker.start(self._planned())
        elif self._open is not None:
            self._refused = WorkerReports(*self._planned().refused())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See vLLM."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See vLLM. Blocks are taken out of their pages when all layers are there."""

    def wait_for_save(self) -> None:
        """See vLLM."""
        if self._worker is not None and self.has_connector_metadata():
            self._worker.save(self._planned())

    def build_connector_worker_meta(self) -> WorkerReports | None:
        """See vLLM."""
        if self._worker is None:
            reports, self._refused = self._refused, WorkerReports({}, {})
        else:
            reports = WorkerReports(self._worker.ended(), self._worker.saved())
        return reports if reports.fetched or reports.saved else None

    def shutdown(self) -> None:
        """See vLLM."""
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()

    def _planned(self) -> Plan:
        made = self._get_connector_metadata()
        assert isinstance(made, StepPlan)
        return made.plan


class _Publisher:
    """Makes vLLM's events of ours: its fields differ with its version."""

    def __init__(self, page_tokens: int, kv_cache_config: Any) -> None:
        from vllm.distributed import kv_events
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils

        self._events, self._utils, self._page_tokens = kv_events, kv_cache_utils, page_tokens
        self._untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys or None)
        kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
        window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
        self._groups = [
            {
                "kv_cache_spec_kind": kind(group.kv_cache_spec).value if kind else None,
                "kv_cache_spec_sliding_window": window(group.kv_cache_spec) if window else None,
            }
            for group in kv_cache_config.kv_cache_groups
        ]

    def describe(self, request: Any, first_page: int, stop_page: int) -> dict[str, Any]:
        """See `events.Describe`."""
        size, keys, at = self._page_tokens, [], 0
        for page in range(first_page, stop_page):
            extra, at = self._utils.generate_block_hash_extra_keys(request, page * size, (page + 1) * size, at)
            keys.append(extra)
        lora = request.lora_request
        return {
            "lora_id": lora.adapter_id if lora else None,
            "lora_name": lora.name if lora else None,
            "extra_keys": self._untagged(keys),
            "session_id": getattr(request, "session_id", None),
        }

    def made(self, event: Stored | Removed) -> list[Any]:
        """One event for each cache group: a block of ours has the layers of all."""
        hashes = [self._utils.maybe_convert_block_hash(page) for page in event.hashes]
        place = {"medium": event.place.medium, "locality": event.place.locality, "ownership": OWNERSHIP}
        if isinstance(event, Removed):
            removed = self._events.BlockRemoved
            return [_made(removed, block_hashes=hashes, group_idx=g, **place) for g in range(len(self._groups))]
        parent = None if event.parent is None else self._utils.maybe_convert_block_hash(event.parent)
        run = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": list(event.tokens)}
        said = run | {"block_size": self._page_tokens} | event.about | place
        return [_made(self._events.BlockStored, group_idx=g, **said, **spec) for g, spec in enumerate(self._groups)]


def _made(kind: Any, **fields: Any) -> Any:
    """Make an event of the fields that this vLLM's has."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})


class _Scheduler:
    """What the scheduler's process has: the planner, and a client for lookups and sessions."""

    def __init__(
        self, settings: Settings, geometry: Geometry, client: Client, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self._client = client
        self._deadline_s = settings.load_deadline_s
        parallel = vllm_config.parallel_config
        savers = parallel.world_size // (parallel.tensor_parallel_size if geometry.kv_parts == 1 else 1)
        limits = Limits(
            settings.block_tokens,
            geometry.page_tokens,
            parallel.world_size,
            settings.load_deadline_s,
            settings.miss_s,
            settings.staging_bytes // client.target.layout.block_bytes,
            savers,
        )
        self.events: EventBook | None = None
        if getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False):
            self._publisher = _Publisher(geometry.page_tokens, kv_cache_config)
            sizes = Sizes(
                page_tokens=geometry.page_tokens,
                hash_tokens=getattr(vllm_config.cache_config, "prefix_match_unit", None) or geometry.page_tokens,
                page_blocks=geometry.page_tokens // settings.block_tokens,
                savers=savers,
                pending_s=settings.load_deadline_s,
            )
            self.events = EventBook(sizes, self._publisher.describe, time.monotonic)
        self.planner = Planner(self._lookup, limits, time.monotonic, self.events)
        self.hits: dict[str, Counter[str]] = {}
        """Of requests that were just given pages."""
        self._adapters = Adapters()
        self._media_are_hashed = hashes_media(vllm_config)
        self._forgets = settings.forgets_at_reset
        self._generation = ""
        """Of weights since the last reset. Random: nobody knows which other engines have the same ones."""
        self._generating = Generating()
        self._unnamed = False
        self._next_problem_s = 0.0
        self._next_report_s = 0.0
        self._notes: queue.SimpleQueue[Note | None] = queue.SimpleQueue()
        self._late = LateNotes()
        """The sending thread's."""
        self._awaited: set[int] = set()
        """Saves that late notes wait for."""
        self._awaited_until_s = 0.0
        self._sending = threading.Thread(target=self._send_notes, name="kvstrata-sessions", daemon=True)
        self._sending.start()

    def begin(self, request: Any) -> None:
        variant = self._variant(request)
        if variant is None:
            if not self._unnamed:
                self._unnamed = True
                _log.warning(
                    "kvstrata keeps nothing of requests with prompt embeddings, an adapter whose files cannot be read "
                    "or have changed since its first request, or media while vLLM does not hash them (its prefix cache "
                    "and mm_processor_cache_gb are both off)"
                )
            return
        hints = self._hints(request)
        headers = getattr(request, "trace_headers", None) or {}
        self.planner.begin(request, variant, hints.session, headers.get(HEADER, ""))
        if self.events is not None and not self.events.media:
            self._note(self._read_media)
        client, name = self._client, hints.session
        if name:
            self._note(lambda: _give(self._late.goes_on(name)))
            if self._generating.begin(request.request_id, name):
                self._note(lambda: client.open_session(name, parent=hints.parent, priority=hints.priority))
            self._note(lambda: client.touch_session(name, "decoding", urgency=hints.urgency))
        if hints.prefetch or hints.fetch:
            cache, tokens = PrefixCache(client, variant=variant), tokens_of(request)
            self._note(lambda: give_early(cache, tokens, hints))

    def allocated(self, request_id: str, tables: Any, loaded_tokens: int) -> None:
        self.hits = {request_id: self.planner.allocated(request_id, tables, loaded_tokens)}

    def step(self, output: Any) -> Plan:
        for new in output.scheduled_new_reqs:
            self.planner.give_pages(new.req_id, new.block_ids, are_all=True)
        cached = output.scheduled_cached_reqs
        for request_id, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if pages is not None:
                self.planner.give_pages(request_id, pages, are_all=request_id in cached.resumed_req_ids)
        plan = self.planner.step(output.num_scheduled_tokens)
        if not output.num_scheduled_tokens and not plan.fetches and (self.planner.is_waiting or self.awaits_saves):
            time.sleep(PAUSE_S)
        self._report()
        return plan

    def finish(self, request: Any) -> dict[str, Any] | None:
        hints, _ = hints_of(request)
        is_last = self._generating.end(request.request_id)
        variant = self._variant(request)
        if hints != Hints() and variant is not None:
            late = partial(give_late, PrefixCache(self._client, variant=variant), tokens_of(request), hints)
            saves_of, session = partial(self.planner.saves_of, request.request_id), hints.session
            if is_last:
                self._note(partial(give_pause, self._client, hints))
            if hints.pin_s or hints.share or hints.demote:
                self._note_late(late, saves_of())
            if is_last and hints.complete:
                self._note_late(partial(give_end, self._client, hints), saves_of(session), session)
        hits = self.planner.finish(request.request_id)
        return {PARAMS: {"hit_tokens": dict(hits)}} if hits or PARAMS in (request.kv_transfer_params or {}) else None

    def reset(self) -> None:
        if self._forgets:
            self._generation = secrets.token_hex(GENERATION_BYTES)
            self.planner.reset()
            _log.warning("vLLM has reset its caches: what kvstrata keeps from now on is found by this engine alone")

    def saved(self, saved: Saved) -> None:
        ended = self.planner.saved(saved) & self._awaited
        if ended:
            self._awaited -= ended
            self._note(lambda: _give(self._late.ended(ended)))

    @property
    def awaits_saves(self) -> bool:
        """True while a save is on its way that should end soon, and that routers or hints wait for."""
        if self.events is not None and self.events.is_waiting:
            return True
        return bool(self._awaited) and time.monotonic() < self._awaited_until_s

    def take_events(self) -> Iterable[Any]:
        """Events since the last call, as vLLM publishes them."""
        return [e for event in self.events.take() for e in self._publisher.made(event)] if self.events else ()

    def close(self) -> None:
        self._notes.put(None)
        self._sending.join(self._deadline_s)
        self._client.close()

    def _lookup(self, tokens: Tokens, variant: str, session: str, blocks_max: int) -> Located:
        if not self._client.is_attached:
            return Located()
        return PrefixCache(self._client, variant=variant).lookup(tokens, session=session, blocks_max=blocks_max)

    def _variant(self, request: Any) -> str | None:
        return variant_of(request, self._adapters, media_are_hashed=self._media_are_hashed, generation=self._generation)

    def _hints(self, request: Any) -> Hints:
        hints, problem = hints_of(request)
        if problem and time.monotonic() >= self._next_problem_s:
            self._next_problem_s = time.monotonic() + PROBLEMS_S
            _log.warning("hints of request %s are left out: %s", request.request_id, problem)
        return hints

    def _read_media(self) -> None:
        """Ask what the pool's tiers are, for routers."""
        assert self.events is not None
        if not self.events.media:
            tiers = json.loads(self._client.stats()).get("tiers", ())
            self.events.media = {tier["name"]: medium_of(tier["type"]) for tier in tiers}

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_report_s or (pace := self.planner.pace) is None:
            return
        self._next_report_s = now_s + REPORT_S
        rate, load = pace.prefill_tokens_per_s, {"queued_tokens": pace.queued_tokens, "running": pace.running}
        load["half_rate_tokens"] = pace.half_rate_tokens
        self._note(lambda: self._client.report_engine(rate, **load))

    def _note_late(self, note: Note, saves: set[int], session: str = "") -> None:
        """Send a note once saves have ended, their session has another request, or a load would be given up."""
        if not saves:
            self._note(note)
            return
        self._awaited |= saves
        self._awaited_until_s = time.monotonic() + self._deadline_s
        self._note(partial(self._late.add, note, saves, self._awaited_until_s, session))

    def _note(self, note: Note) -> None:
        """Send a note from another thread than the scheduler's; dropped while an agent that hangs holds up too many."""
        if self._notes.qsize() < NOTES_MAX:
            self._notes.put(note)

    def _send_notes(self) -> None:
        is_open = True
        while is_open:
            next_s = self._late.next_s
            with contextlib.suppress(queue.Empty):
                note = self._notes.get(timeout=None if next_s is None else max(0.0, next_s - time.monotonic()))
                is_open = note is not None
                _give([note] if note is not None else [])
            _give(self._late.due(time.monotonic() if is_open else math.inf))


def _give(notes: Iterable[Note]) -> None:
    for note in notes:
        try:
            note()
        except Exception:  # noqa: BLE001  A thread's root: the engine goes on.
            _log.exception("a session's state was not reported")
