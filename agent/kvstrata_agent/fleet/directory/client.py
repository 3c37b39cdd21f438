"""The shared index of locations as the core sees it: implements `ports.Directory` over Redis. Never raises.

Away is absent: while Redis does not answer, other nodes' blocks are misses and our announcements wait, bounded.

Session records on their way to the directory: the newest of each session, bounded, written when Redis answers.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_agent.policy.quota import FairOrder
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_api.blocks import ScopeSecret
from kvstrata_api.errors import DirectoryAwayError, KvStrataError, RetryableError
from kvstrata_kube.tasks import cancel, repeat
from kvstrata_metadata.client.announcer import QUEUE_CHANGES_MAX, REPORT_JITTER_S, Announcer
from kvstrata_metadata.directory import messages, registry, shards
from kvstrata_metadata.directory.registry import SILENCE_S
from kvstrata_metadata.directory.sessions import read_session, write_sessions
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.cluster_store import open_store
from kvstrata_metadata.store.records import (
    AgentRecord,
    Announcement,
    Copy,
    Incarnation,
    Location,
    Nomination,
    Registration,
    SessionRecord,
)
from kvstrata_metadata.store.store import Store
from kvstrata_telemetry.metrics import Instruments
from kvstrata_telemetry.tracing import span

NOTES_MAX: Final = 65_536
"""Sessions that may wait; the oldest note of the scope that has most goes first, and the session's next turn writes it
again."""
FLUSH_MAX: Final = 256
"""Records written in one go, so that announcements are not held up."""

PAUSE_S: Final = 1.0
"""After a lookup that found no answer in time, the next ones do not ask for so long."""
RESOLVED_S: Final = 5.0
"""Age up to which the record of an agent is believed; a wrong one costs a refused fetch."""
RESOLVED_MAX: Final = 65_536
RECONNECT_FIRST_S: Final = 0.1
RECONNECT_LONGEST_S: Final = 2.0
LEAVE_TIMEOUT_S: Final = 1.0
SESSIONS_EVERY_S: Final = 0.5
"""How late other nodes may learn of a session's turn; only its newest record is written."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Note:
    secret: ScopeSecret
    session: str
    record: SessionRecord | None
    """None: the session has ended and is forgotten."""


class SessionNotes:
    """What other nodes should know about our sessions and has not been sent yet."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._notes: dict[tuple[str, str], _Note] = {}
        """By tag of the tenant's scope and name, in order of writing."""
        self._order: FairOrder[tuple[str, str]] = FairOrder()

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        """Keep the newest record of a session; None forgets the session. Returns at once."""
        key = (secret.tag(), session)
        self._notes.pop(key, None)
        ours = replace(record, agent=self._agent) if record else None
        self._notes[key] = _Note(secret, session, ours)
        self._order.use(secret.tag(), key)
        if len(self._notes) > NOTES_MAX:
            self._forget(self._order.next_to_evict())

    def _forget(self, key: tuple[str, str]) -> None:
        del self._notes[key]
        self._order.drop(key)

    async def flush(self, store: Store) -> int:
        """Write what waits, up to `FLUSH_MAX` in one round trip; returns how many records were written.

        Raises `DirectoryAwayError`; notes that could not be written go behind the others, unless newer ones came
        meanwhile: theirs may be the only part of the directory that is away.
        """
        notes = list(islice(self._notes.items(), FLUSH_MAX))
        if not notes:
            return 0
        done = await write_sessions(store, [(note.secret, note.session, note.record) for _, note in notes])
        for (key, note), is_written in zip(notes, done, strict=True):
            if self._notes.get(key) is not note:
                continue
            if is_written:
                self._forget(key)
            else:
                self._notes[key] = self._notes.pop(key)
        return sum(done)


AccessProvider = Callable[[], Awaitable[RedisAccess]]
"""Reads address and credentials again for each connection; raises a `KvStrataError` while there are none."""

Holdings = Callable[[], Iterable[tuple[ScopeSecret, Sequence[Announcement]]]]
"""`Lender.holdings`."""

_NOWHERE: Final[tuple[Location, ...]] = ()


class RedisDirectory:
    """Announces our blocks and finds those of others. `start` first, `close` last, one event loop."""

    def __init__(
        self,
        record: AgentRecord,
        access: AccessProvider,
        holdings: Holdings,
        instruments: Instruments,
        *,
        queue_max: int = QUEUE_CHANGES_MAX,
        jitter_s: float = REPORT_JITTER_S,
    ) -> None:
        self._record = record
        self._access = access
        by_tag = lambda: ((secret.tag(), held) for secret, held in holdings())  # noqa: E731
        self._announcer = announcer = Announcer(record, by_tag, queue_max=queue_max, jitter_s=jitter_s)
        pool, _, node = record.agent.partition(".")
        up = instruments.gauge("kvstrata_directory_up", pool=pool, node=node)
        up.set_function(lambda: float(announcer.is_up))
        full = instruments.gauge("kvstrata_directory_full", pool=pool, node=node)
        full.set_function(lambda: float(announcer.is_full))
        partial = instruments.gauge("kvstrata_directory_partly_away", pool=pool, node=node)
        partial.set_function(lambda: float(announcer.is_partial))
        depth = instruments.gauge("kvstrata_directory_queue_depth", pool=pool, node=node)
        depth.set_function(lambda: float(announcer.depth))
        self._dropped_total = instruments.counter("kvstrata_directory_dropped_total", pool=pool, node=node)
        self._resolved: dict[Incarnation, tuple[float, Registration | None]] = {}
        self._peers: dict[str, AgentRecord] = {}
        self._store: Store | None = None
        self._paused_until_s = 0.0
        self._sessions = SessionNotes(record.agent)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_up(self) -> bool:
        """True while Redis answers."""
        return self._announcer.is_up

    @property
    def owes_all(self) -> bool:
        """True until a report of everything begins."""
        return self._announcer.owes_all

    @property
    def state(self) -> DirectoryState:
        """What the directory does for us, for the node's condition."""
        if not self.is_up:
            return DirectoryState.AWAY
        if self._announcer.is_partial or (self._store is not None and self._store.is_partial):
            return DirectoryState.PARTLY_AWAY
        return DirectoryState.FULL if self._announcer.is_full else DirectoryState.ANSWERS

    @property
    def is_settled(self) -> bool:
        """True when the directory has everything that we hold."""
        return self._announcer.is_settled

    @property
    def reports_total(self) -> int:
        """Reports of everything, or of shards that had gaps, since start."""
        return self._announcer.reports_total

    @property
    def waiting_sessions(self) -> int:
        """Session records that the directory does not have yet."""
        return len(self._sessions)

    @staticmethod
    def open_store(access: RedisAccess) -> Store:
        """Open a connection to Redis; a simulator puts its own in place."""
        return open_store(access)

    def start(self) -> None:
        """Begin to connect, register and announce in the background."""
        self._tasks = [
            asyncio.create_task(self._run(), name="directory"),
            asyncio.create_task(repeat("directory-sessions", SESSIONS_EVERY_S, self._send_sessions)),
        ]

    async def close(self) -> None:
        """Deregister where that is quick, and end the background tasks. Idempotent."""
        if not self._tasks:
            return
        with contextlib.suppress(DirectoryAwayError, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                if self._store and self.is_up:
                    await self._announcer.leave(self._store)
        await cancel(self._tasks)
        self._tasks = []

    def announce(self, secret: ScopeSecret, changes: Sequence[Announcement]) -> None:
        """Queue changes, in order. Returns at once; the queue is bounded, and a drop causes a full re-report."""
        dropped = self._announcer.dropped_total
        self._announcer.announce(secret.tag(), changes)
        self._dropped_total.inc(self._announcer.dropped_total - dropped)

    def note_session(self, secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        """Queue a session's newest record; None forgets it. Returns at once; the queue is bounded."""
        self._sessions.note(secret, session, record)

    async def find_session(self, secret: ScopeSecret, session: str) -> SessionRecord | None:
        """What any node has reported of a session; None when nothing is known or the directory is away."""
        store = self._store
        if store is None or not self.is_up:
            return None
        try:
            async with asyncio.timeout(LOCATE_S_MIN):
                return await read_session(store, secret, session)
        except (DirectoryAwayError, TimeoutError):
            return None

    async def locate(
        self, secret: ScopeSecret, digests: Sequence[bytes], *, within_s: float = LOCATE_S_MIN
    ) -> list[tuple[Location, ...]]:
        """Copies on other agents, for each digest; empty tuples when unknown, away, or not returned in time.

        `within_s` bounds the wait for locations, and once more that for the records of agents which we do not know.
        """
        store = self._store
        if not digests or store is None or not self.is_up or _now_s() < self._paused_until_s:
            return [_NOWHERE] * len(digests)
        try:
            with span("kvstrata.directory", requested_blocks=len(digests)) as active:
                async with asyncio.timeout(2 * within_s):
                    found = await self._find(store, secret.tag(), digests, within_s)
                    await self._resolve(store, {c.incarnation for copies in found for c in copies}, within_s)
                active.set(hit_blocks=sum(1 for copies in found if copies))
        except (DirectoryAwayError, TimeoutError):
            self._paused_until_s = _now_s() + PAUSE_S
            self._announcer.doubt()
            return [_NOWHERE] * len(digests)
        return [self._locations(copies) if copies else _NOWHERE for copies in found]

    async def take_nominations(self, limit: int) -> tuple[Nomination, ...]:
        """Take what the metadata service would have us drop; nothing while the directory is away."""
        store, incarnation = self._store, self._announcer.incarnation
        if store is None or incarnation is None or not self.is_up:
            return ()
        try:
            return await messages.take_nominations(store, incarnation, limit)
        except DirectoryAwayError:
            return ()

    async def claim_erased(self, secret: ScopeSecret) -> bool:
        """Report that a scope's key is gone; false when the directory could not be reached."""
        store = self._store
        if store is None or not self.is_up:
            return False
        try:
            await messages.claim_erased(store, secret)
        except DirectoryAwayError:
            return False
        return True

    async def _find(self, store: Store, tag: str, digests: Sequence[bytes], within_s: float) -> list[Sequence[Copy]]:
        """Copies of blocks as the directory has them. Raises `DirectoryAwayError`."""
        return list(await shards.locate(store, tag, digests, within_s=within_s)) if digests else []

    def peer(self, agent: str, epoch: int) -> AgentRecord | None:
        """How to reach the agent of a location that `locate` returned; None when it is no longer known."""
        record = self._peers.get(agent)
        return record if record and record.epoch == epoch else None

    def _locations(self, copies: Sequence[Copy]) -> tuple[Location, ...]:
        """Locations of living agents other than ours, newest first."""
        locations = []
        for copy in reversed(copies):
            _, found = self._resolved.get(copy.incarnation, (0.0, None))
            if found and _is_reachable(found) and found.record.agent != self._record.agent:
                at = found.record
                locations.append(Location(at.agent, at.epoch, copy.tier, copy.stamp, copy.stored_bytes))
        return tuple(locations)

    async def _resolve(self, store: Store, wanted: set[Incarnation], within_s: float) -> None:
        now_s = _now_s()
        old = [i for i in wanted if self._resolved.get(i, (-RESOLVED_S, None))[0] <= now_s - RESOLVED_S]
        if len(self._resolved) + len(old) > RESOLVED_MAX:
            self._resolved.clear()
            self._peers.clear()
        try:
            read = await registry.resolve(store, old, within_s=within_s)
        except DirectoryAwayError as e:
            if not e.is_partial:
                raise
            return  # The registry's primary alone is away: what was read before is believed a little longer.
        for incarnation, found in zip(old, read, strict=True):
            self._resolved[incarnation] = (now_s, found)
            if found and not found.is_fenced:
                self._peers[found.record.agent] = found.record

    async def _run(self) -> None:
        failures = 0
        while True:
            started_s = _now_s()
            delay_s = await self._serve()
            failures = failures + 1 if _now_s() - started_s < RECONNECT_LONGEST_S else 0
            backoff_s = min(RECONNECT_LONGEST_S, RECONNECT_FIRST_S * 2.0 ** min(failures, 16))
            await asyncio.sleep(max(delay_s, backoff_s) * random.uniform(0.5, 1.0))

    async def _send_sessions(self) -> None:
        if self._store is not None and self.is_up:
            with contextlib.suppress(DirectoryAwayError):
                await self._sessions.flush(self._store)

    async def _serve(self) -> float:
        """One connection's life; returns how long to wait at least before the next one."""
        try:
            self._store = self.open_store(await self._access())
            await self._announcer.serve(self._store)
        except RetryableError as e:
            _log.warning("directory away", extra={"error": str(e)})
            return e.delay_s if e.delay_s > RECONNECT_LONGEST_S else 0.0
        except KvStrataError as e:
            _log.error("directory cannot be used", extra={"error": str(e)})
            return RECONNECT_LONGEST_S
        except Exception:  # noqa: BLE001
            _log.exception("directory failed")  # A task's root: the agent goes on without the directory meanwhile.
            return RECONNECT_LONGEST_S
        finally:
            store, self._store = self._store, None
            if store is not None:
                await store.close()
        return 0.0


def _now_s() -> float:
    """Seconds on the clock of the loop, which a simulator may turn."""
    return asyncio.get_running_loop().time()


def _is_reachable(found: Registration) -> bool:
    return not found.is_fenced and found.silence_s is not None and found.silence_s < SILENCE_S
