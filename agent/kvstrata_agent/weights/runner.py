"""Carries out what KVModelCaches want of this node, and reports how far it has come. One budget with KV.

Level-triggered, as orders are: what is declared is staged, what no order names goes once nobody uses it, and what was
evicted for the order that stands stays away. Staging, eviction and KV share the tier's capacity: bytes of weights are
set aside from KV before the first of them is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.memory.persistence import NO_PERSISTENCE
from kvstrata_agent.backends.threads import in_thread
from kvstrata_agent.fleet.peers.client import PeerHolding, WeightsPlace
from kvstrata_agent.policy.operations import MESSAGE_CHARS_MAX
from kvstrata_agent.weights.folder import ModelFolder, is_full, read_at
from kvstrata_agent.weights.plan import Cause, Fault, Resident, plan_for_kv, plan_room
from kvstrata_agent.weights.source import open_source
from kvstrata_agent.weights.staging import Origin, Staging, Wanted
from kvstrata_api.directories import MODEL_TIERS_TEXT, directories_of, holds_models
from kvstrata_api.errors import (
    AgentAwayError,
    BackendFailedError,
    BlockCorruptError,
    InvalidInputError,
    KvStrataError,
    RetryableError,
    UnsupportedError,
)
from kvstrata_api.models.poolnode import MODELS_MAX, ModelReport
from kvstrata_kube.tasks import cancel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from kvstrata_agent.backends.memory.persistence import PersistenceRoot
    from kvstrata_agent.backends.registry import ReadSecret
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.movement.scheduler import MoveScheduler
    from kvstrata_agent.provision.provisioner import Provisioner
    from kvstrata_agent.weights.folder import Revision
    from kvstrata_agent.weights.source import Source
    from kvstrata_agent.weights.staging import WeightPeers
    from kvstrata_api.models.poolnode import ModelOrder

TEND_S: Final = 2.0
"""Polling interval of who uses what, and of KV that wants room. Asking takes microseconds for each file."""
STAGINGS_MAX: Final = 2
"""Models that are staged at once; others wait."""
RETRY_S: Final = 5.0
"""After a first failure; twice as long after each further one."""
RETRY_S_MAX: Final = 300.0
ROOM_POLL_INTERVAL_S: Final = 0.1
"""Polling interval of KV that leaves; the sweep that moves it comes round as often."""
SOURCE_PATH: Final = "source"
"""Where bytes come from that go to memory, and all on a node without a memory tier."""
LEFT_WEIGHT: Final = 100
"""Of a revision that no order names any more."""
_OTHER_FILES: Final = frozenset({Fault.DIGEST_MISMATCH.value, Fault.SOURCE_INVALID.value})
"""After these the next try lists the files again."""

_log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """What keeps a model from being staged now, with its reason in the report."""

    def __init__(self, reason: Fault, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of the agent, beside those of its tiers."""

    memory: PersistenceRoot = NO_PERSISTENCE
    """Where tiers of host memory have their files."""
    closed: tuple[Path, ...] = ()
    """No source of weights, as folders of tiers are none."""


NO_FOLDERS: Final = Folders()


@dataclass(slots=True)
class _Run:
    """One order."""

    order: ModelOrder
    report: ModelReport
    task: asyncio.Task[None] | None = None
    """None for what was evicted before this agent started."""
    staging: Staging | None = None
    """Under way."""
    reserved_bytes: int = 0
    """Of the tier, for files on their way; between two tries what has come of them."""
    counted: dict[Origin, int] = field(default_factory=dict)
    """Bytes of this staging that the metrics know of."""

    @property
    def key(self) -> tuple[str, str]:
        return self.order.name, self.order.revision


class Models:
    """The weights of one node."""

    def __init__(
        self,
        node: Node,
        scheduler: MoveScheduler,
        provisioner: Provisioner,
        read_secret: ReadSecret | None = None,
        peers: WeightPeers | None = None,
        folders: Folders = NO_FOLDERS,
    ) -> None:
        """Nothing is read before `follow`."""
        self._closed = folders.closed
        self._memory = folders.memory
        self._node = node
        self._scheduler = scheduler
        self._provisioner = provisioner
        self._read_secret = read_secret
        self._peers = peers
        self._folders: dict[str, ModelFolder] = {}
        self._errors: dict[str, _RefusedError] = {}
        """Why a tier has no folder."""
        self._runs: dict[str, _Run] = {}
        self._refused: tuple[ModelReport, ...] = ()
        self._in_use: dict[tuple[str, str], bool] = {}
        self._gate = asyncio.Semaphore(STAGINGS_MAX)
        self._room = asyncio.Lock()
        """One decision on the room of tiers at a time."""
        self._settling = asyncio.Lock()
        """Who counted first sets aside first."""

    async def follow(
        self, wanted: Iterable[ModelOrder], stored: Iterable[ModelReport] = (), refused: Iterable[ModelReport] = ()
    ) -> None:
        """Begin what is new and end what is wanted no more. Waits for no staging.

        `stored` is what the API server holds: what it calls evicted for the same generation stays away. `refused` are
        reports on orders that cannot be read.
        """
        self._refused = tuple(refused)
        orders = {order.name: order for order in wanted}
        await self._open_folders({order.tier for order in orders.values()})
        gone = [run for name, run in self._runs.items() if name not in orders or _is_other(run.order, orders[name])]
        await cancel([run.task for run in gone if run.task is not None])
        for run in gone:
            del self._runs[run.order.name]
            self._node.counters.forget("kvstrata_model_staged_bytes", model=run.order.name)
        before = {r.name: r for r in stored}
        for name, order in orders.items():
            if name in self._runs:
                await self._follow_order(self._runs[name], order)
            else:
                self._begin(order, before.get(name))
        if gone or not self._runs:
            await self._drop_unwanted()
        await self._settle()

    async def _follow_order(self, run: _Run, order: ModelOrder) -> None:
        """Go on under an order that differs in nothing that was begun; its digest may be known only now."""
        before, run.order = run.order.digest, order
        if order.digest == before or order.digest is None:
            return
        if run.report.state == "Staged":
            if run.report.digest != order.digest and run.task is not None:
                await cancel([run.task])
                self._begin(order, None)
        elif run.staging is not None:
            run.staging.wanted = replace(run.staging.wanted, digest=order.digest)

    def _begin(self, order: ModelOrder, stored: ModelReport | None) -> None:
        fields = {"name": order.name, "uid": order.uid, "generation": order.generation, "revision": order.revision}
        is_same = stored is not None and (stored.uid, stored.revision) == (order.uid, order.revision)
        if stored is not None and is_same and stored.state == "Staged":  # Where it came from stays true.
            fields |= {name: getattr(stored, name) for name in ("source_bytes", "peer_bytes", "shared_bytes")}
        self._node.counters.begin_model(order.name)
        run = self._runs[order.name] = _Run(order, ModelReport(state="Staging", **fields))
        folder = self._folders.get(order.tier)
        is_absent = folder is None or run.key not in folder.revisions
        is_evicted = stored is not None and is_same and stored.state == "Evicted" and is_absent
        if stored is not None and is_evicted and stored.generation == order.generation:
            run.report = stored
            return
        run.task = asyncio.create_task(self._carry_out(run), name=f"model {order.name}")

    async def _open_folders(self, wanted: set[str]) -> None:
        """Take up the folders of tiers that are up, and let go of those of tiers that are not."""
        roots = self._roots()
        for name in [n for n, folder in self._folders.items() if roots.get(n) != folder.root.parent]:
            runs = [run for run in self._runs.values() if run.order.tier == name]
            await cancel([run.task for run in runs if run.task is not None])
            for run in runs:
                del self._runs[run.order.name]
            self._folders.pop(name).close()
            await self._provisioner.set_aside(name, 0)  # Whoever comes in its place says what it has.
        for name in roots.keys() - self._folders.keys():
            try:
                folder = await in_thread(None, partial(_opened, roots[name], is_wanted=name in wanted))
            except (OSError, InvalidInputError) as e:
                self._errors[name] = _RefusedError(Fault.TIER_ABSENT, str(e))
                continue
            if folder is not None:
                self._folders[name] = folder
                self._errors.pop(name, None)

    def _roots(self) -> dict[str, Path]:
        """Directories of the tiers that are up and can hold weights; why another one cannot is in `_errors`."""
        roots: dict[str, Path] = {}
        for tier in self._node.tiers:
            if tier.spec.nvme is not None:
                roots[tier.name] = Path(tier.spec.nvme.directories[0])
            elif holds_models(tier.spec):
                try:
                    roots[tier.name] = replace(self._memory, tier=tier.name).tier_directory()
                except UnsupportedError as e:
                    self._errors[tier.name] = _RefusedError(Fault.UNSUPPORTED, str(e))
        return roots

    async def _drop_unwanted(self) -> None:
        """Remove files on their way that no order names."""
        wanted = {run.key for run in self._runs.values()}
        for name, folder in tuple(self._folders.items()):
            try:
                for key in set(await in_thread(None, folder.stagings)) - wanted:
                    await in_thread(None, partial(folder.drop_staging, *key))
            except OSError as e:  # The next one who wants nothing tries again.
                _log.warning("weights on their way not removed", extra={"tier": name, "cause": str(e)})

    async def close(self) -> None:
        """Cancel what is under way and let go of the folders; files stay. Idempotent."""
        await cancel([run.task for run in self._runs.values() if run.task is not None])
        self._runs.clear()
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()

    async def _carry_out(self, run: _Run) -> None:
        """Stage until it is staged; a failure is reported and tried again, less and less often."""
        pause_s = RETRY_S
        while True:
            try:
                is_staged = await self._succeeds(run, self._stage)
            finally:
                self._count(run)
                run.staging, run.reserved_bytes = None, 0
                run.counted.clear()  # The next try keeps what this one brought, and counts from 0.
            if is_staged:
                return
            await self._succeeds(run, self._leave)
            await self._succeeds(run, partial(self._pause, pause_s=pause_s))
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _succeeds(self, run: _Run, step: Callable[[_Run], Awaitable[None]]) -> bool:
        """Take one step of an order; False for one that failed, which is in the report."""
        try:
            await step(run)
        except _RefusedError as e:
            self._failed(run, e.reason, str(e))
        except KvStrataError as e:
            self._failed(run, _reason(e), str(e))
        except OSError as e:
            reason = Fault.DISK_FULL if is_full(e) else Fault.DISK_FAILED
            self._failed(run, reason, f"{e.filename or run.order.tier}: {e.strerror or e}")
        except Exception as e:  # noqa: BLE001  A task root: whatever it was, it is reported.
            _log.exception("model failed", extra={"model": run.order.name})
            self._failed(run, Fault.INTERNAL, repr(e))
        else:
            return True
        return False

    async def _leave(self, run: _Run) -> None:
        """Count what a try has left here for the next one, unless that may find other files."""
        folder = self._folders.get(run.order.tier)
        if folder is not None:
            if run.report.reason in _OTHER_FILES:
                await in_thread(None, partial(folder.drop_staging, *run.key))
            run.reserved_bytes = await in_thread(None, partial(folder.staging_bytes, *run.key))
        await self._settle()

    async def _pause(self, run: _Run, pause_s: float) -> None:
        """Wait for the next try: so long, and after a full disk until it has room, if that is sooner."""
        folder = self._folders.get(run.order.tier)
        ends_s = time.monotonic() + pause_s
        while (left_s := ends_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, RETRY_S))
            if folder is None or run.report.reason != Fault.DISK_FULL:
                continue
            free_bytes = await in_thread(None, lambda: folder.free_bytes)
            if free_bytes >= run.report.size_bytes - run.reserved_bytes:
                return

    def _failed(self, run: _Run, reason: Fault, message: str) -> None:
        update = {"state": "Failed", "reason": reason.value, "message": message[:MESSAGE_CHARS_MAX]}
        run.report = _progress(run).model_copy(update=update)
        _log.warning("model not staged", extra={"model": run.order.name, "reason": reason, "cause": message})

    async def _stage(self, run: _Run) -> None:
        order, folder = run.order, self._folder(run.order.tier)
        held = folder.revisions.get(run.key)
        if held is not None and order.digest not in (None, held.digest):
            async with self._room:
                is_gone = await in_thread(None, partial(folder.remove, *run.key))
            if not is_gone:
                raise _RefusedError(
                    Fault.DIGEST_MISMATCH, f"{held.digest} is here and in use, {order.digest} is wanted"
                )
            held = None
        if held is None:
            wanted = Wanted(order.name, order.revision, run.order.digest or "")
            run.staging = staging = Staging(
                wanted,
                folder,
                partial(self._open_source, run),
                partial(self._turn, run),
                partial(self._reserve, run),
                lambda: run.order.peers,
                self._peers,
            )
            async with self._gate:
                listing = await staging.run()
            held, digest = folder.revisions[run.key], run.order.digest
            if digest not in (None, held.digest):  # It is known since the files have their name.
                raise BlockCorruptError(f"the files have the digest {held.digest}, {digest} is wanted")
            _log.info("model staged", extra={"model": order.name, "path": str(held.path), "bytes": listing.size_bytes})
        run.report = self._whole(_progress(run), held)
        run.reserved_bytes = 0
        await self._settle()

    async def _open_source(self, run: _Run) -> Source:
        tiers = [Path(d.path) for tier in self._node.tiers for d in directories_of(tier.spec)]
        return await open_source(run.order.source, self._read_secret, (*self._closed, *tiers))

    def _folder(self, name: str) -> ModelFolder:
        """The folder of a tier. Raises `_RefusedError` where there is none."""
        folder = self._folders.get(name)
        if folder is not None:
            return folder
        tier = self._node.tier(name)
        if tier is not None and not holds_models(tier.spec):
            raise _RefusedError(Fault.UNSUPPORTED, f"tier {name} is {tier.spec.type.value}: {MODEL_TIERS_TEXT}")
        found = self._errors.get(name)
        if found is not None:
            raise _RefusedError(found.reason, str(found))
        raise _RefusedError(Fault.TIER_ABSENT, f"tier {name} is not up on this node")

    def _turn(self, run: _Run, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Weights go where blocks go that are demoted to the tier, and share that path with them."""
        memory = next((t.name for t in self._node.tiers if t.backend.capabilities.is_memory), SOURCE_PATH)
        source = memory if memory != run.order.tier else SOURCE_PATH
        return self._scheduler.weights(source, run.order.tier, run.order.name, run.order.weight, size_bytes)

    async def _reserve(self, run: _Run, size_bytes: int) -> None:
        """Make room for a model, and wait until KV has left it. Raises `_RefusedError` when that cannot be."""
        name = run.order.tier
        tier = self._node.tier(name)
        if tier is None:
            raise _RefusedError(Fault.TIER_ABSENT, f"tier {name} is not up on this node")
        async with self._room:
            granted_bytes = self._provisioner.granted_bytes(name)
            left_bytes = granted_bytes - self._reserved(name) + run.reserved_bytes
            residents = await self._residents(name)
            room = plan_room(left_bytes, residents, size_bytes)
            if room.is_too_large and size_bytes > granted_bytes - granted_bytes // 16:
                raise _RefusedError(
                    Fault.TOO_LARGE, f"{size_bytes} B in a tier of {granted_bytes} B, of which KV keeps 1/16"
                )
            if room.short_bytes:
                raise _RefusedError(
                    Fault.NO_ROOM, f"{size_bytes} B wanted, {room.short_bytes} B are missing beside others"
                )
            for victim in room.leaves:
                await self._evict(name, victim, Cause.ROOM_FOR_MODEL)
            run.reserved_bytes = size_bytes
        await self._settle(name)
        while tier.shrinking & tier.closing:
            run.report = run.report.model_copy(update={"state": "Staging", "reason": "WaitingForRoom"})
            await asyncio.sleep(ROOM_POLL_INTERVAL_S)
        run.report = run.report.model_copy(update={"state": "Staging", "reason": "", "message": ""})

    def _reserved(self, tier: str) -> int:
        return sum(run.reserved_bytes for run in self._runs.values() if run.order.tier == tier)

    async def _settle(self, needed: str = "") -> None:
        """Set aside from KV what models have, and are to have. Raises `OSError` for the tier `needed` alone."""
        async with self._settling:
            for name, folder in tuple(self._folders.items()):
                try:
                    size_bytes = await self._taken(name, folder)
                except OSError as e:  # What was set aside stays so.
                    if name == needed:
                        raise
                    _log.warning("weights not counted", extra={"tier": name, "cause": str(e)})
                    continue
                if self._folders.get(name) is folder:  # It may have gone meanwhile.
                    await self._provisioner.set_aside(name, size_bytes)

    async def _taken(self, name: str, folder: ModelFolder) -> int:
        """Bytes of revisions and of what is on its way; what becomes a revision meanwhile counts once."""
        reserved = {run.key: run.reserved_bytes for run in self._runs.values() if run.order.tier == name}
        return sum((reserved | await in_thread(None, folder.sizes)).values())

    async def _residents(self, tier: str) -> list[Resident]:
        """The revisions of a tier as they are now."""
        folder = self._folders.get(tier)
        if folder is None:
            return []
        sizes = await in_thread(None, folder.sizes)
        found = []
        for key, size_bytes in sizes.items():
            is_used = await in_thread(None, partial(folder.is_in_use, *key))
            if is_used is not None:
                self._in_use[key] = is_used
            idle_s = None if is_used in (None, True) else max(0.0, self._node.wall() - folder.used_at_s(*key))
            run = self._runs.get(key[0])
            is_wanted = run is not None and run.key == key
            weight = run.order.weight if run is not None else LEFT_WEIGHT
            idle_seconds = float(run.order.idle_seconds) if run is not None else 0.0
            found.append(Resident(*key, size_bytes, weight, idle_seconds, idle_s, is_wanted))
        self._in_use = {
            key: used for key, used in self._in_use.items() if any(key in f.revisions for f in self._folders.values())
        }
        return found

    async def tend(self) -> None:
        """Note what is used, and remove what KV is to have the room of. One round, of the tiers that can be read."""
        for name in tuple(self._folders):
            try:
                await self._tend(name)
            except OSError as e:  # The others have their round.
                _log.warning("weights not tended", extra={"tier": name, "cause": str(e)})
        for run in self._runs.values():
            self._count(run)

    async def _tend(self, name: str) -> None:
        async with self._room:
            residents = await self._residents(name)
            tier = self._node.tier(name)
            if tier is None:
                return
            capacity_bytes = self._provisioner.granted_bytes(name) - self._reserved(name)
            leaves = plan_for_kv(capacity_bytes, residents, kv_wants_room=self._wants_room(tier))
            for victim in leaves:
                await self._evict(name, victim, Cause.ROOM_FOR_KV)
        if leaves:
            await self._settle()

    def _wants_room(self, tier: Tier) -> bool:
        """Whether KV has no free place in a tier, which is when places have a price."""
        low = self._node.spec.policy.eviction.low_watermark_percent
        return tier.fill_ratio * 100 >= low

    async def _evict(self, tier: str, victim: Resident, reason: Cause) -> None:
        folder = self._folders[tier]
        key = victim.name, victim.revision
        if not await in_thread(None, partial(folder.remove, *key)):
            return  # Somebody has opened it just now.
        reason = reason if victim.is_wanted else Cause.UNWANTED
        self._node.counters.add("kvstrata_model_evicted_total", model=victim.name, reason=reason)
        _log.info("model removed", extra={"model": victim.name, "revision": victim.revision, "reason": reason})
        run = self._runs.get(victim.name)
        if run is None or run.key != key:
            return
        message = f"unused for {victim.idle_s or 0.0:.0f} s, {victim.size_bytes} B given back"
        update = {"state": "Evicted", "reason": reason.value, "message": message, "path": "", "in_use": False}
        none = dict.fromkeys(("staged_bytes", "source_bytes", "peer_bytes", "shared_bytes"), 0)
        run.report = run.report.model_copy(update={**update, **none})

    def _count(self, run: _Run) -> None:
        """Let the metrics know what has come since the last time."""
        counters, name = self._node.counters, run.order.name
        if run.staging is not None:
            for origin, size_bytes in run.staging.progress.by_origin.items():
                if origin is not Origin.KEPT:
                    more = size_bytes - run.counted.get(origin, 0)
                    counters.add("kvstrata_model_source_bytes_total", more, model=name, origin=origin.value)
                    run.counted[origin] = size_bytes
        counters.set("kvstrata_model_staged_bytes", _progress(run).staged_bytes, model=name)

    def reports(self) -> tuple[ModelReport, ...]:
        """One for each order, and one for each revision that is here without, exact."""
        found = [self._seen(_progress(run), run.key) for run in self._runs.values()]
        wanted = {run.key for run in self._runs.values()}
        for folder in self._folders.values():
            for key, held in tuple(folder.revisions.items()):  # Threads change it.
                if key not in wanted:
                    fields = {"name": held.model, "uid": "", "revision": held.revision}
                    found.append(self._seen(self._whole(ModelReport(state="Staged", **fields), held), key))
        return tuple(sorted([*found, *self._refused], key=lambda r: (r.name, r.revision))[: 2 * MODELS_MAX])

    def _whole(self, report: ModelReport, held: Revision) -> ModelReport:
        size_bytes, path = held.listing.size_bytes, self._memory.on_host(held.path)
        update = {"size_bytes": size_bytes, "staged_bytes": size_bytes, "digest": held.digest, "path": str(path)}
        return report.model_copy(update={**update, "state": "Staged", "reason": "", "message": ""})

    def _seen(self, report: ModelReport, key: tuple[str, str]) -> ModelReport:
        return report.model_copy(update={"in_use": report.state == "Staged" and self._in_use.get(key, False)})

    def held(self, model: str, revision: str) -> PeerHolding | None:
        """What other agents may have of a revision; None where it is not here."""
        for folder in self._folders.values():
            if (held := folder.revisions.get((model, revision))) is not None:
                return PeerHolding(held.digest, len(held.listing.encode()), held.listing.size_bytes)
        run = self._runs.get(model)
        return run.staging.held() if run is not None and run.key == (model, revision) and run.staging else None

    async def read(self, at: WeightsPlace, size_bytes: int) -> memoryview:
        """Bytes for another agent. Raises `AgentAwayError` when they are not here (yet)."""
        key = at.model, at.revision
        for folder in self._folders.values():
            with folder.reading(*key) as held:
                if held is not None and held.digest == at.digest:
                    if at.file < 0:
                        return _part(held.listing.encode(), at.offset, size_bytes)
                    paths = [held.path / f.path for f in held.listing.files[at.file : at.file + 1]]
                    return await _read(paths[0] if paths else None, at.offset, size_bytes)
        run = self._runs.get(at.model)
        staging = run.staging if run is not None and run.key == key else None
        listing = staging.progress.listing if staging is not None else None
        if staging is None or listing is None or listing.digest != at.digest:
            raise AgentAwayError(f"model {at.model} {at.revision} is not here")
        if at.file < 0:
            return _part(staging.document, at.offset, size_bytes)
        files = listing.files[at.file : at.file + 1]
        path = staging.path_of(files[0], at.offset + size_bytes) if files else None
        return await _read(path, at.offset, size_bytes)


_REASONS: Final[Sequence[tuple[type[KvStrataError], Fault]]] = (
    (BlockCorruptError, Fault.DIGEST_MISMATCH),
    (InvalidInputError, Fault.SOURCE_INVALID),
    (UnsupportedError, Fault.UNSUPPORTED),
    (BackendFailedError, Fault.SOURCE_AWAY),
    (RetryableError, Fault.SOURCE_CHANGED),
)


def _reason(error: KvStrataError) -> Fault:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), Fault.INTERNAL)


def _is_other(order: ModelOrder, wanted: ModelOrder) -> bool:
    """True when what is under way is not what is wanted now; peers, weight and digest begin nothing."""
    free = {"peers": (), "weight": 1, "idle_seconds": 0, "digest": None}
    return order.model_copy(update=free) != wanted.model_copy(update=free)


def _progress(run: _Run) -> ModelReport:
    """A report with the counts of what is under way."""
    if run.staging is None or run.report.state == "Staged":
        return run.report
    progress = run.staging.progress
    counts = {
        "size_bytes": progress.size_bytes,
        "staged_bytes": progress.staged_bytes,
        "source_bytes": progress.by_origin[Origin.SOURCE],
        "peer_bytes": progress.by_origin[Origin.PEER],
        "shared_bytes": progress.by_origin[Origin.SHARED],
        "digest": progress.listing.digest if progress.listing is not None else "",
    }
    return run.report.model_copy(update=counts)


def _opened(root: Path, *, is_wanted: bool) -> ModelFolder | None:
    """Open and read the folder below a tier's; None where there is none and none is wanted."""
    if not is_wanted and not ModelFolder.is_at(root):
        return None
    root.mkdir(parents=True, exist_ok=True)  # Of a memory tier: it has one for weights alone.
    folder = ModelFolder(root)
    try:
        folder.scan()
    except BaseException:
        folder.close()
        raise
    return folder


def _part(document: bytes, offset: int, size_bytes: int) -> memoryview:
    part = memoryview(document)[offset : offset + size_bytes]
    if len(part) != size_bytes:
        raise AgentAwayError(f"{len(part)} B from {offset} of a listing of {len(document)} B, {size_bytes} B wanted")
    return part


async def _read(path: Path | None, offset: int, size_bytes: int) -> memoryview:
    if path is None:
        raise AgentAwayError(f"{size_bytes} B from {offset} are not here yet")
    piece = await in_thread(None, partial(_read_file, path, offset, size_bytes))
    if len(piece) != size_bytes:
        raise AgentAwayError(f"{len(piece)} B from {offset}, {size_bytes} B wanted")
    return piece


def _read_file(path: Path, offset: int, size_bytes: int) -> memoryview:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise AgentAwayError(f"{path}: {e.strerror}") from e
    try:
        return read_at(fd, offset, size_bytes)
    finally:
        os.close(fd)
