"""Keeps the directory up to date about one agent: registers, beats, reports, announces, checks.

One `serve` runs at a time. It ends by `DirectoryAwayError`; the caller waits and serves again with a new store. What
only a part of the directory refuses does not end it: the lanes of that part rest.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.client.outbox import ROUND_CHANGES_MAX, Outbox
from kvstrata_metadata.directory import registry, shards
from kvstrata_metadata.directory.registry import BEAT_S
from kvstrata_metadata.directory.shards import Batch, Mode
from kvstrata_metadata.store.keys import Shard
from kvstrata_metadata.store.records import AgentRecord, Announcement, Incarnation, Verdict
from kvstrata_metadata.store.store import Store

QUEUE_CHANGES_MAX: Final = 200_000
"""About 40 MB of changes while Redis is away; beyond it a full report is cheaper."""

CHECK_EVERY_BEATS: Final = 10
"""A lost announcement of a quiet shard is found within this many heartbeats."""

REPORT_JITTER_S: Final = 2.0
"""Reports of a fleet that lost its directory are spread over this time (HDFS-273: all at once took hours)."""

STALE_DELAY_S: Final = 15.0
"""A newer epoch of our name lives: try again after its heartbeats would have run out."""

FULL_DELAY_S: Final = 5.0
"""A shard that a full directory refused is withdrawn and reported again after this to twice this."""

REST_S: Final = 1.0
"""How long lanes rest whose part of the directory did not answer."""

REPORT_AHEAD: Final = 4_000
"""Changes queued ahead of what is sent: a report is read as it leaves, so a million blocks cost no memory. A round of
the outbox: what waits there goes before what changes meanwhile."""

ROUND_S: Final = 0.1
"""A round of a report that takes longer has met others: a server alone takes 25 ms for one."""

ROUND_CHANGES_MIN: Final = 128
"""The first round of a report, and the smallest."""
_PACE_S_MAX: Final = 60.0
_PACE_S_MIN: Final = 0.001

SHARDS_PER_CALL: Final = 64

Holdings = Callable[[], Iterable[tuple[str, Sequence[Announcement]]]]
"""Everything that the agent holds, by scope tag, in parts that are read when they are asked for. Names are taken at the
first part at the latest, so that a block which comes later is announced, and one that goes is withdrawn."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pace:
    """How large a round of a report is and how long it rests before the next one, by what the last one took. Pure.

    Without it all agents of a fleet have a round at the server at any time, and whatever else is asked of it waits for
    all of them: 5,000 rounds of 6 ms are longer than an agent may be silent. Rounds begin small and double while they
    are quick (slow start, RFC 5681); slow ones are halved, then rest half as long again, so they settle where one
    takes about `ROUND_S` however many agents there are. Figures chosen in `bench.scale`, for 2 to 5,000 agents.
    """

    changes: int = ROUND_CHANGES_MIN
    """Of the next round."""
    rest_s: float = 0.0

    def after(self, took_s: float, chance: float) -> float:
        """Rest after a round: `chance` in [0, 1) takes half to all of it, so that agents do not move together."""
        if took_s <= ROUND_S:
            self.changes = min(ROUND_CHANGES_MAX, 2 * self.changes) if took_s <= ROUND_S / 2 else self.changes
            self.rest_s = self.rest_s / 2 if self.rest_s > _PACE_S_MIN else 0.0
        elif self.changes > ROUND_CHANGES_MIN:
            self.changes = max(ROUND_CHANGES_MIN, self.changes // 2)
        else:
            self.rest_s = min(_PACE_S_MAX, max(1.5 * self.rest_s, took_s))
        return self.rest_s * (0.5 + chance / 2)


class Announcer:
    """The agent's voice in the directory. Not for use by several threads."""

    def __init__(
        self,
        record: AgentRecord,
        holdings: Holdings,
        *,
        queue_max: int = QUEUE_CHANGES_MAX,
        jitter_s: float = REPORT_JITTER_S,
    ) -> None:
        self._record = record
        self._holdings = holdings
        self._outbox = Outbox(queue_max)
        self._incarnation: Incarnation | None = None
        self._left: set[Shard] = set()
        """Shards that earlier incarnations spoke to and the registry has not noted since."""
        self._has_changes = asyncio.Event()
        self._jitter_s = jitter_s
        self._beat_due_s = 0.0
        self._report_due_s: float | None = None
        self._beats = 0
        self._breaks = 0
        self._wake_due_s = 0.0
        self._is_registry_away = False
        self._parts: Iterator[tuple[str, Sequence[Announcement]]] = iter(())
        """What the report under way has still to read."""
        self._pace = Pace()
        self._read_due_s = 0.0
        self.is_up = False
        """True from a registration or heartbeat that was answered until the directory goes away."""
        self.reports_total = 0
        """Reports of everything or of single shards since start; the first one is no loss."""

    @property
    def incarnation(self) -> Incarnation | None:
        """Our number in the directory; None before the first registration."""
        return self._incarnation

    @property
    def depth(self) -> int:
        """Changes that wait."""
        return self._outbox.depth

    @property
    def dropped_total(self) -> int:
        """Changes dropped at the queue's bound."""
        return self._outbox.dropped_total

    @property
    def is_full(self) -> bool:
        """True while the directory has no memory for what we announce."""
        return self._outbox.is_full

    @property
    def is_partial(self) -> bool:
        """True while some part of the directory does not answer, though others do."""
        return self.is_up and (self._is_registry_away or self._outbox.is_resting)

    @property
    def owes_all(self) -> bool:
        """True until a report of everything begins: what changes before is a part of it."""
        return self._outbox.owes_all

    @property
    def is_settled(self) -> bool:
        """True when the directory has everything."""
        return self.is_up and not self._outbox.has_work

    def announce(self, tag: str, changes: Sequence[Announcement]) -> None:
        """Queue changes. Returns at once."""
        self._outbox.add(tag, changes)
        self._has_changes.set()

    def doubt(self) -> None:
        """Beat at once: somebody who used the same server got no answer."""
        self._beat_due_s = 0.0
        self._has_changes.set()

    async def serve(self, store: Store) -> None:
        """Report everything to the directory until it goes away. Raises `DirectoryAwayError` then."""
        self._beat_due_s, self._beats, self._breaks = 0.0, 0, store.breaks
        self._outbox.wake()
        try:
            while True:
                await self._beat(store)
                await self._report_when_due(store)
                await self._read_ahead()
                await self._send_changes(store)
        finally:
            self.is_up = False

    async def leave(self, store: Store) -> None:
        """End our incarnation, so that nobody asks us any more. Raises `DirectoryAwayError`; the sweeper helps."""
        if self._incarnation:
            await registry.fence(store, self._incarnation, 0.0)

    async def _beat(self, store: Store) -> None:
        """Heartbeat when due. The first one of a connection checks every quiet lane: what was lost shows there.

        So does the first one after a part of the directory was away, or moved to another server.
        """
        if self._outbox.is_resting and _now_s() >= self._wake_due_s:
            self._outbox.wake()
        if store.breaks != self._breaks:
            self._breaks, self._beat_due_s, self._beats = store.breaks, 0.0, 0
        if _now_s() < self._beat_due_s:
            return
        verdict = await self._heartbeat(store)
        if verdict not in {Verdict.OK, Verdict.AWAY}:
            await self._register(store)
        self.is_up = True
        self._is_registry_away = verdict is Verdict.AWAY
        await self._point_back(store)
        is_check_due = self._beats % CHECK_EVERY_BEATS == 0
        if not is_check_due or await self._check(store):
            self._beats += 1
        self._beat_due_s = _now_s() + BEAT_S

    async def _heartbeat(self, store: Store) -> Verdict:
        """Beat; AWAY when only the registry's part of the directory is away: the shards may go on."""
        if not self._incarnation:
            return Verdict.UNKNOWN
        try:
            return await registry.heartbeat(store, self._incarnation, self._record)
        except DirectoryAwayError as e:
            if not e.is_partial:
                raise
            return Verdict.AWAY

    async def _register(self, store: Store) -> None:
        """Begin a new incarnation and owe a full report; at once for the first one, later ones are spread."""
        answer = await registry.register_agent(store, self._record)
        if answer.verdict is not Verdict.OK:
            message = f"agent {self._record.agent}: a newer epoch than {self._record.epoch} lives"
            raise DirectoryAwayError(message, delay_s=STALE_DELAY_S)
        _log.info("registered", extra={"incarnation": answer.incarnation.hex(), "directory": answer.directory_id})
        delay_s = random.uniform(0, self._jitter_s) if self._incarnation else 0.0
        self._report_due_s = _now_s() + delay_s
        self._incarnation = answer.incarnation
        self._left |= self._outbox.restart(answer.incarnation)

    async def _point_back(self, store: Store) -> None:
        """Let the sweeper find the shards where an earlier incarnation may have been heard after all.

        A registry that lost everything no longer knows of them, and nobody may ever use the scope again.
        """
        while part := sorted(self._left)[:SHARDS_PER_CALL]:
            assert self._incarnation is not None, "registered first"
            if await _open_shards(store, self._incarnation, part) is not Verdict.OK:
                return
            self._left -= set(part)

    async def _check(self, store: Store) -> bool:
        """Ask whether the last message of each quiet lane is there; false when a part did not answer."""
        checks = self._outbox.checks()
        verdicts = await shards.announce(store, checks)
        if not self._outbox.settle(checks, verdicts):
            await self._register(store)
        return Verdict.AWAY not in verdicts

    async def _report_when_due(self, store: Store) -> None:
        """Take our old locations out of the shards in question and begin to report what we hold now."""
        if not self._outbox.must_report or self._outbox.is_reporting:
            return
        if self._report_due_s is None:
            self._report_due_s = _now_s() + self._report_delay_s()
        if _now_s() < self._report_due_s:
            return
        if await self._withdraw(store):
            self._report_due_s = None
            if self._outbox.begin_report():
                self._parts, self._pace = iter(self._holdings()), Pace()
                self.reports_total += 1

    def _report_delay_s(self) -> float:
        if self._outbox.is_full:
            return random.uniform(FULL_DELAY_S, 2 * FULL_DELAY_S)
        return random.uniform(0, self._jitter_s)

    async def _withdraw(self, store: Store) -> bool:
        """Withdraw what must be; false when the incarnation ended meanwhile and another one began."""
        ours = self._incarnation
        assert ours is not None, "registered first"
        for shard, sequence in self._outbox.begin_withdrawals():
            verdict, last = await _withdraw_shard(store, shard, ours, sequence)
            if verdict is Verdict.FENCED:
                await self._register(store)
            else:
                await self._beat(store)
            if self._incarnation is not ours:
                return False
            if verdict is Verdict.OK:
                self._outbox.withdrawn(shard, last)
            elif verdict is Verdict.ERASED:
                self._outbox.erased(shard)
        return True

    async def _read_ahead(self) -> None:
        """Read the next parts of the report under way; others have the loop between two parts."""
        if _now_s() < self._read_due_s:
            return
        while self._outbox.is_reporting and self._outbox.depth < REPORT_AHEAD:
            part = next(self._parts, None)
            if part is None:
                self._outbox.end_report()
                return
            self._outbox.report(*part)
            await asyncio.sleep(0)

    async def _send_changes(self, store: Store) -> None:
        """Send one round of changes, or wait for some until the next thing is due."""
        self._has_changes.clear()
        batches = self._outbox.next_round(self._pace.changes if self._outbox.is_reporting else ROUND_CHANGES_MAX)
        if not batches:
            await self._wait()
            return
        began_s = _now_s()
        verdicts = await self._deliver(store, batches)
        if self._outbox.is_reporting:
            ended_s = _now_s()
            self._read_due_s = ended_s + self._pace.after(ended_s - began_s, random.random())
        if Verdict.AWAY in verdicts and not self._outbox.is_resting:
            self._wake_due_s = _now_s() + REST_S
        if not self._outbox.settle(batches, verdicts):
            await self._register(store)

    async def _deliver(self, store: Store, batches: Sequence[Batch]) -> list[Verdict]:
        """Send messages; those that start a stream only once the registry knows of it."""
        starting = [b.shard for b in batches if b.mode is Mode.RESET]
        opened = await _open_shards(store, batches[0].incarnation, starting) if starting else Verdict.OK
        if opened is Verdict.OK:
            return await shards.announce(store, batches)
        if opened is not Verdict.AWAY:
            return [Verdict.FENCED] * len(batches)
        going_on = [b for b in batches if b.mode is not Mode.RESET]
        answers = iter(await shards.announce(store, going_on))
        return [opened if b.mode is Mode.RESET else next(answers) for b in batches]

    async def _wait(self) -> None:
        due_s = min(self._beat_due_s, self._report_due_s or self._beat_due_s)
        if self._outbox.is_resting:
            due_s = min(due_s, self._wake_due_s)
        if self._outbox.is_reporting:
            due_s = min(due_s, self._read_due_s)
        try:
            async with asyncio.timeout(max(0.0, due_s - _now_s())):
                await self._has_changes.wait()
        except TimeoutError:
            return


async def _open_shards(store: Store, incarnation: Incarnation, starting: Sequence[Shard]) -> Verdict:
    """Note shards in the registry; AWAY when only its part of the directory is away."""
    try:
        return await registry.open_shards(store, incarnation, starting)
    except DirectoryAwayError as e:
        if not e.is_partial:
            raise
        return Verdict.AWAY


async def _withdraw_shard(store: Store, shard: Shard, incarnation: Incarnation, sequence: int) -> tuple[Verdict, int]:
    """Withdraw a shard; AWAY when only its part of the directory is away."""
    try:
        return await shards.withdraw(store, shard, incarnation, sequence)
    except DirectoryAwayError as e:
        if not e.is_partial:
            raise
        return Verdict.AWAY, sequence


def _now_s() -> float:
    """Seconds on the clock of the loop, which a simulator may turn."""
    return asyncio.get_running_loop().time()
