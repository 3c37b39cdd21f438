"""LMCache (multi-process mode): an L2 adapter of type `plugin` over the node's agent.

    {"type": "plugin", "module_path": "kvstrata_client.connectors.lmcache", "class_name": "KvstrataL2Adapter",
     "adapter_params": {"socket": ..., "pool": ..., "token_file": ..., "layout": {...}, "chunk_tokens": 256}}

Nothing here waits on a thread of LMCache's, except `close`. While the agent is away lookups and loads are misses and
stores fail, each announced as usual. For LMCache 0.5.5 to 0.5.7rc2; later methods are not called by earlier ones.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeVar

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvstrata_api.errors import InvalidInputError
from kvstrata_client.client import Client
from kvstrata_client.connectors import object_transfers as transfers
from kvstrata_client.connectors.lmcache_board import LOCK_S, Board, Locks
from kvstrata_client.connectors.lmcache_costs import LoadCosts, announce
from kvstrata_client.connectors.lmcache_names import Name, Namer, Options, Params, parse
from kvstrata_client.connectors.object_transfers import Object
from kvstrata_client.connectors.object_workers import Task, Workers

T = TypeVar("T")

ATTACH_WAIT_S: Final = 5.0
"""How long a server that starts waits for its agent's answer; without one it goes on, and attaches later."""
WARN_EVERY_S: Final = 30.0
USAGE_S: Final = 1.0
"""Age at which what the agent reported of the tenant's usage is asked for again."""

_log: Final = logging.getLogger(__name__)


class KvstrataL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]  # LMCache has no types for us.
    """Configuration of the adapter; LMCache finds it by its name."""

    def __init__(self, options: Options) -> None:
        """Hold checked options."""
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Parse `adapter_params`. Raises `InvalidInputError` that names the field, the value and the limit."""
        return cls(parse(d))

    @classmethod
    def help(cls) -> str:
        """List the fields."""
        return f"kvstrata: adapter_params {', '.join(Params.__struct_fields__)}; see docs/lmcache.md"


class KvstrataL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Stores, finds and loads LMCache's objects in the agent's pool. Thread-safe.

    The pool evicts by itself, so LMCache is not asked to by capacity; its quotas of cache salts work by `delete`.
    """

    def __init__(self, config: KvstrataL2AdapterConfig, **_: object) -> None:
        """Attach in the background. What else LMCache gives (its memory) is not needed: this process copies."""
        super().__init__()
        options = config.options
        self._namer = Namer(options.fingerprint)
        self._client = Client(options.target)
        self._client.wait_settled(ATTACH_WAIT_S)
        find = transfers.TransferJob(options.target, self._client, self._namer, time.monotonic, options.load_deadline_s)
        # Nobody's request waits for a store, and a load has its deadline: they need not be given up as soon.
        patient = replace(options.target, timeout_s=options.target.move_timeout_s)
        self._find, self._move = find, replace(find, target=patient)
        self._notifiers = [create_event_notifier() for _ in range(3)]
        store, lookup, load = self._notifiers
        self._stores: Board[L2StoreResult] = Board(store.notify)
        self._lookups: Board[Bitmap] = Board(lookup.notify)
        self._loads: Board[Bitmap] = Board(load.notify)
        self._locks = Locks(time.monotonic)
        self._costs = LoadCosts(time.monotonic)
        announce(options.fingerprint.model_name, self._costs)
        self._tasks = itertools.count(1)
        self._closing = threading.Lock()
        self._is_closed = False
        self._warned_s = -WARN_EVERY_S
        self._sizes: dict[int, int] = {}
        """Bytes of an object of each object group, as last seen: a deletion names no sizes."""
        self._usage = (0, 0)
        """Bytes that the tenant has on this node and may have there."""
        self._usage_asked_s = -USAGE_S
        # Lookups hold a request up and move no bytes: they must not wait behind copies.
        self._finders = Workers("kvstrata-lookup", 1)
        self._movers = Workers("kvstrata-move", options.workers)

    def get_store_event_fd(self) -> int:
        """Descriptor that is ready when stores are done."""
        return int(self._notifiers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Descriptor that is ready when lookups are done."""
        return int(self._notifiers[1].fileno())

    def get_load_event_fd(self) -> int:
        """Descriptor that is ready when loads are done."""
        return int(self._notifiers[2].fileno())

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store objects, all or the task fails. What fails leaves nothing that could be found."""
        task = next(self._tasks)
        put = partial(self._stores.put, task)
        run = self._posting(put, partial(self._store, keys, objects))
        self._movers.submit(Task(run, partial(put, L2StoreResult(False, 0))))  # noqa: FBT003  LMCache's signature.
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return results of stores, each once."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Find objects; those that are there stay in memory until they are unlocked, 60 s at most."""
        task = next(self._tasks)
        put = partial(self._lookups.put, task)
        run = partial(self._look_up, keys, dict(group_layout_descs), put, time.monotonic())
        self._finders.submit(Task(run, partial(put, Bitmap(len(keys)))))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a lookup, once; None while there is none."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Take locks back. What cannot be sent to the agent ends there by itself."""
        names = [_name(k) for k in keys]
        self._finders.submit(Task(lambda: self._unlock(names), _nothing))  # Behind the lookups that came before it.

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Fill the objects' memory; where the result has no bit the memory holds nothing of use."""
        task = next(self._tasks)
        put = partial(self._loads.put, task)
        run = self._posting(put, partial(self._load, keys, objects, time.monotonic()))
        self._movers.submit(Task(run, partial(put, Bitmap(len(keys)))))
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a load, once; None while there is none."""
        return self._loads.take(task_id)

    def delete(self, keys: Sequence[Any]) -> None:
        """Drop from this node what is the tenant's alone and nobody holds; listeners learn of what went."""
        self._movers.submit(Task(partial(self._delete, list(keys)), _nothing))

    def submit_touch(self, keys: Sequence[Any]) -> None:
        """Record use of objects without reading them, here and with the agent. LMCache asks for it from 0.5.7 on."""
        self._notify_keys_accessed(list(keys))
        self._movers.submit(Task(partial(self._touch, list(keys)), _nothing))

    def get_usage(self) -> AdapterUsage:
        """Return what the tenant has on this node by the agent's account, and what this server stored of each salt.

        Never waits: it is what the agent reported a moment ago, and asks it again.
        """
        now_s = time.monotonic()
        if now_s - self._usage_asked_s >= USAGE_S:
            self._usage_asked_s = now_s
            self._movers.submit(Task(self._ask_usage, _nothing))
        used_bytes, limit_bytes = self._usage
        return replace(super().get_usage(), total_bytes_used=used_bytes, total_capacity_bytes=limit_bytes)

    def get_memory_tags(self) -> Any:
        """Return where the bytes lie, `MemoryTags`: with the agent of this host. LMCache asks from 0.5.7 on."""
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL)

    def report_status(self) -> dict[str, Any]:
        """Report whether the agent is attached, why not, and what the client has counted."""
        is_healthy = self._client.is_attached and self._finders.is_alive and self._movers.is_alive
        counters = self._client.counters
        return {
            "is_healthy": is_healthy,
            "type": type(self).__name__,
            "pool": self._find.target.pool,
            "socket": str(self._find.target.socket),
            "reason": "" if self._client.is_attached else str(self._client.reason),
            "locked_objects": len(self._locks),
            "calls": counters.calls,
            "errors": dict(counters.errors),
            "costs": self._costs.report(),
        }

    def close(self) -> None:
        """Give up what waits and return when no memory of LMCache's is touched any more. Idempotent."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._client.close()  # Whoever waits for the agent is answered at once.
            self._finders.close()
            self._movers.close()
            for board in (self._stores, self._lookups, self._loads):
                board.close()
            for notifier in self._notifiers:
                notifier.close()

    # What workers do.

    @staticmethod
    def _posting(put: Callable[[T], None], do: Callable[[], T]) -> Callable[[], None]:
        return lambda: put(do())

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        made = [_object(k, o) for k, o in zip(keys, objects, strict=True)]
        known = [i for i, o in enumerate(made) if self._fits(o)]
        done = self._client.run(transfers.store(self._move, [made[i] for i in known]))
        self._sizes.update((made[i].name.group, made[i].size_bytes) for i in known)
        if done.is_whole and known:
            # What was there already is on the account of its salt; nothing is counted twice.
            sizes = [made[i].size_bytes if n in done.new else 0 for n, i in enumerate(known)]
            self._notify_keys_stored([keys[i] for i in known], sizes)
        is_whole = done.is_whole and len(known) == len(made)
        return L2StoreResult(is_whole, done.published * self._find.target.layout.block_bytes)

    def _unlock(self, names: Sequence[Name]) -> None:
        freed = self._locks.give(names)
        if freed:
            self._client.run(transfers.unlock(self._find, freed))

    def _look_up(
        self, keys: Sequence[Any], layouts: Mapping[int, Any], put: Callable[[Bitmap], None], since_s: float
    ) -> None:
        sizes = {group: _described_bytes(layout) for group, layout in layouts.items()}
        usual = self._namer.fingerprint.object_bytes
        self._sizes.update((group, size) for group, size in sizes.items() if size)
        asked = [Object(_name(k), sizes.get(k.object_group_id, 0) or usual) for k in keys]
        known = [i for i, o in enumerate(asked) if self._fits(o)]
        objects = [asked[i] for i in known]
        found = self._client.run(transfers.look_up(self._find, objects, LOCK_S))
        self._locks.take([o.name for o in objects], found)
        put(_bits(len(keys), (i for i, owned in zip(known, found, strict=True) if owned)))
        self._costs.looked_up(time.monotonic() - since_s)
        self._finders.submit(Task(lambda: self._client.run(transfers.follow_up(self._find, objects, found)), _nothing))

    def _load(self, keys: Sequence[Any], objects: Sequence[Any], since_s: float) -> Bitmap:
        asked = [_object(k, o) for k, o in zip(keys, objects, strict=True)]
        known = [i for i, o in enumerate(asked) if self._fits(o)]
        sources: set[str] = set()
        is_loaded = self._client.run(transfers.load(self._move, [asked[i] for i in known], sources))
        loaded = [i for i, is_there in zip(known, is_loaded, strict=True) if is_there]
        if loaded:
            self._notify_keys_accessed([keys[i] for i in loaded])
            chunks = len({asked[i].name.chunk for i in loaded})  # Of all ranks and groups together.
            tokens = chunks * self._namer.fingerprint.chunk_tokens
            # More tiers than one: neither of them alone was as fast.
            self._costs.loaded("+".join(sorted(sources)), tokens, time.monotonic() - since_s)
        return _bits(len(keys), loaded)

    def _touch(self, keys: Sequence[Any]) -> None:
        self._client.run(transfers.touch(self._find, [o for o in map(self._sized, keys) if self._fits(o)]))

    def _delete(self, keys: Sequence[Any]) -> None:
        asked = [self._sized(k) for k in keys]
        known = [i for i, o in enumerate(asked) if self._fits(o)]
        is_gone = self._client.run(transfers.drop(self._find, [asked[i] for i in known]))
        gone = [i for i, went in zip(known, is_gone, strict=True) if went]
        if gone:
            self._notify_keys_deleted([keys[i] for i in gone], [asked[i].size_bytes for i in gone])
        if len(gone) < len(keys):
            self._warn(
                f"{len(keys) - len(gone)} of {len(keys)} objects were not deleted: they are held, shared, or away"
            )

    def _ask_usage(self) -> None:
        self._usage = self._client.run(transfers.usage(self._find))

    def _sized(self, key: Any) -> Object:
        """Object of a key that comes without its size."""
        return Object(_name(key), self._sizes.get(key.object_group_id, self._namer.fingerprint.object_bytes))

    def _fits(self, one: Object) -> bool:
        """True when an object can be in the pool; logs why not where it cannot."""
        try:
            self._namer.check(one.name)
            self._namer.fingerprint.blocks_of(one.size_bytes)
        except InvalidInputError as e:
            self._warn(str(e))
            return False
        return True

    def _warn(self, message: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning("%s", message)


def _nothing() -> None:
    """Nobody waits for it."""


def _name(key: Any) -> Name:
    return Name(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash)


def _object(key: Any, held: Any) -> Object:
    """Object with its memory as unsigned bytes, which LMCache keeps valid until the task is done."""
    memory = np.frombuffer(held.byte_array, np.uint8).data
    return Object(_name(key), memory.nbytes, (memory,))


def _described_bytes(layout: Any) -> int:
    """Bytes of an object of this layout; 0 for an empty description."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))


def _bits(size: int, indices: Iterable[int]) -> Bitmap:
    bitmap = Bitmap(size)
    bitmap.batched_set(list(indices))
    return bitmap
