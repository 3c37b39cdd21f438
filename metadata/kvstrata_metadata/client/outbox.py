"""What an agent still has to report to the directory, as numbered messages for each shard. Pure.

A lane is the agent's side of one stream (prelude.lua): one message of it is under way at a time and is repeated
unchanged until a verdict comes, because it may have been applied when its answer was lost. A lane that must be
reported ignores changes until its report begins: that reads what is held then, part by part. Changes from then on are
queued between the parts; whichever of the two is later has the newer state of a block.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata_metadata.directory.shards import CHUNK, Batch, Mode
from kvstrata_metadata.store.keys import Shard, shard_index
from kvstrata_metadata.store.records import Announcement, Incarnation, Verdict

ROUND_CHANGES_MAX: Final = 4_000
"""Changes of one round trip: about 6 ms of packing, during which the agent's loop does nothing else."""

ROUND_BATCHES_MAX: Final = 64
"""Messages of one round trip."""

SEQUENCE_STRIDE: Final = 1 << 20
"""Numbers skipped when a lane starts again: more than any withdrawal uses, so messages of one given up are old."""


ERASED_MAX: Final = 4_096
"""Shards of erased scopes that are remembered; of an older one the directory answers once more that it is erased."""


@dataclass(slots=True)
class _Lane:
    is_fresh: bool = True
    """Nothing of it can be in the directory, so nothing has to be withdrawn before a report."""
    sequence: int = 0
    """Last number used."""
    mode: Mode = Mode.RESET
    waiting: deque[Announcement] = field(default_factory=deque)
    under_way: Batch | None = None


class Outbox:
    """Bounded queue of changes of one agent. `limit` counts changes that wait, those of a report not included."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._incarnation: Incarnation | None = None
        self._lanes: dict[Shard, _Lane] = {}
        self._erased: dict[Shard, None] = {}
        """Shards of erased scopes, oldest first; there is nothing to send."""
        self._active: dict[Shard, None] = {}
        """Lanes with something to send or under way, oldest first."""
        self._resting: dict[Shard, None] = {}
        """Lanes with something to send whose part of the directory did not answer."""
        self._due: set[Shard] = set()
        """Lanes that must be reported."""
        self._is_all_due = True
        self._reporting: set[Shard] | None = None
        """Lanes that the report under way is for; None when there is none."""
        self._is_reporting_all = False
        """The report under way is also for shards that have no lane yet."""
        self.depth = 0
        """Changes that wait, those under way not counted."""
        self.dropped_total = 0
        """Changes that found the queue full; each time, everything is reported again."""
        self.is_full = False
        """True from a message that a full directory refused until it takes an announcement again."""
        self._reported = 0

    @property
    def must_report(self) -> bool:
        """True when a report has to begin before anything else can be sent for some shard."""
        return self._is_all_due or bool(self._due)

    @property
    def owes_all(self) -> bool:
        """True until a report of everything begins, which reads what is held then: changes are ignored meanwhile."""
        return self._is_all_due

    @property
    def is_reporting(self) -> bool:
        """True between `begin_report` and `end_report`, unless a restart or an overflow ended it."""
        return self._reporting is not None

    @property
    def is_resting(self) -> bool:
        """True while lanes wait for a part of the directory that did not answer."""
        return bool(self._resting)

    @property
    def has_work(self) -> bool:
        """True when the directory does not have everything."""
        return self.must_report or self.is_reporting or bool(self._active) or bool(self._resting)

    def add(self, tag: str, changes: Sequence[Announcement]) -> None:
        """Queue changes of blocks of one scope, in order. At the limit all are dropped for a full report."""
        if self._is_all_due:
            return
        if self.depth + len(changes) > self._limit + self._reported:
            self.dropped_total += self.depth + len(changes)
            self.report_everything()
            return
        for shard, part in _by_shard(tag, changes):
            if shard not in self._due:
                # A lane that is new after a full report holds nothing else: its first message starts the stream.
                self._queue(shard, part)

    def _queue(self, shard: Shard, changes: Sequence[Announcement]) -> None:
        if shard in self._erased:
            return
        lane = self._lanes.setdefault(shard, _Lane())
        lane.waiting.extend(changes)
        self.depth += len(changes)
        if shard not in self._resting:
            self._active[shard] = None

    def report_everything(self) -> None:
        """Forget what waits; the next report has all."""
        self._is_all_due = True
        self._reporting = None
        for shard in self._lanes:
            self._make_due(shard)

    def restart(self, incarnation: Incarnation) -> set[Shard]:
        """Speak for a new incarnation, of which the directory knows nothing yet; shards that the last one spoke to."""
        spoken = {shard for shard, lane in self._lanes.items() if lane.sequence} | self._erased.keys()
        self._incarnation = incarnation
        self._lanes.clear()
        self._erased.clear()
        self._active.clear()
        self._resting.clear()
        self._due.clear()
        self._is_all_due = True
        self._reporting = None
        self.depth = self._reported = 0
        return spoken

    def begin_withdrawals(self) -> list[tuple[Shard, int]]:
        """Shards whose old locations must be removed before they are reported, and the sequences to start from."""
        started = []
        for shard in self._due:
            lane = self._lanes[shard]
            if not lane.is_fresh:
                lane.sequence += SEQUENCE_STRIDE
                started.append((shard, lane.sequence))
        return started

    def withdrawn(self, shard: Shard, sequence: int) -> None:
        """Note that nothing is left of a lane in the directory, once message `sequence` is there.

        The report goes on from that number: should a failover lose the withdrawal, its first message shows a gap.
        """
        lane = self._lanes[shard]
        lane.sequence, lane.is_fresh = sequence, True

    def begin_report(self) -> bool:
        """Open the lanes that must be reported and of which nothing is left; false when there is none.

        To be called without a pause before the names of what is held are read.
        """
        ready = {shard for shard in self._due if self._lanes[shard].is_fresh}
        if not ready and not self._is_all_due:
            return False
        self._is_reporting_all, self._is_all_due = self._is_all_due, False
        self._reporting = ready
        self._due -= ready
        self._active |= dict.fromkeys(ready)
        return True

    def report(self, tag: str, held: Iterable[Announcement]) -> None:
        """Queue a part of what the agent holds, as it is now; shards that the report is not for are left out."""
        assert self._reporting is not None, "begun first"
        before = self.depth
        for shard, part in _by_shard(tag, held):
            if shard in self._reporting or (self._is_reporting_all and shard not in self._due):
                self._queue(shard, part)
        self._reported += self.depth - before

    def end_report(self) -> None:
        """Everything that is held has been queued."""
        self._reporting = None

    def next_round(self, changes_max: int = ROUND_CHANGES_MAX) -> list[Batch]:
        """Messages to send now, at most one for each shard; the same ones again until they are settled."""
        batches: list[Batch] = []
        room = changes_max
        for shard in self._active:
            if len(batches) == ROUND_BATCHES_MAX or room <= 0:
                break
            batch = self._lanes[shard].under_way or self._send(shard, min(CHUNK, room))
            batches.append(batch)
            room -= len(batch.changes)
        return batches

    def _send(self, shard: Shard, most: int) -> Batch:
        assert self._incarnation is not None, "registered first"
        lane = self._lanes[shard]
        take = lane.waiting.popleft
        changes = tuple([take() for _ in range(min(most, len(lane.waiting)))])
        self._forget(len(changes))
        lane.sequence += 1
        lane.is_fresh = False
        lane.under_way = Batch(shard, self._incarnation, lane.sequence, lane.mode, changes)
        return lane.under_way

    def _forget(self, count: int) -> None:
        """`count` changes no longer wait."""
        self.depth -= count
        self._reported = max(0, self._reported - count)

    def checks(self) -> list[Batch]:
        """Questions whether the directory has the last message of each quiet lane."""
        assert self._incarnation is not None, "registered first"
        return [
            Batch(shard, self._incarnation, lane.sequence, Mode.CHECK)
            for shard, lane in self._lanes.items()
            if not (shard in self._active or shard in self._resting or shard in self._due)
        ]

    def settle(self, batches: Iterable[Batch], verdicts: Iterable[Verdict]) -> bool:
        """Take verdicts in; false when the incarnation has ended and the agent must register again."""
        is_alive = True
        for batch, verdict in zip(batches, verdicts, strict=True):
            is_alive = is_alive and verdict is not Verdict.FENCED
            self._settle(batch, verdict)
        return is_alive

    def _settle(self, batch: Batch, verdict: Verdict) -> None:
        is_under_way = batch is self._lanes[batch.shard].under_way
        if verdict is Verdict.ERASED:
            self.erased(batch.shard)
        elif verdict in {Verdict.GAP, Verdict.FULL}:
            self.is_full = self.is_full or verdict is Verdict.FULL
            self._make_due(batch.shard)
        elif verdict is Verdict.AWAY:
            if is_under_way:
                self._rest(batch.shard)
        elif verdict is not Verdict.FENCED and is_under_way:
            self.is_full = self.is_full and all(change.is_gone for change in batch.changes)
            self._delivered(batch.shard)

    def _delivered(self, shard: Shard) -> None:
        lane = self._lanes[shard]
        lane.under_way, lane.mode = None, Mode.CONTINUE
        self._active.pop(shard, None)
        if lane.waiting:
            self._active[shard] = None

    def _rest(self, shard: Shard) -> None:
        self._active.pop(shard, None)
        self._resting[shard] = None

    def wake(self) -> None:
        """Try the lanes again that rested."""
        self._active |= self._resting
        self._resting.clear()

    def erased(self, shard: Shard) -> None:
        """Forget a lane whose scope was erased."""
        self._make_due(shard)
        self._due.discard(shard)
        del self._lanes[shard]
        self._erased[shard] = None
        if len(self._erased) > ERASED_MAX:
            del self._erased[next(iter(self._erased))]

    def _make_due(self, shard: Shard) -> None:
        """Forget what waits for a shard until a report has it."""
        lane = self._lanes[shard]
        self._forget(len(lane.waiting))
        lane.waiting.clear()
        lane.under_way, lane.mode = None, Mode.RESET
        self._active.pop(shard, None)
        self._resting.pop(shard, None)
        self._due.add(shard)
        if self._reporting is not None:
            self._reporting.discard(shard)


def _by_shard(tag: str, changes: Iterable[Announcement]) -> Iterator[tuple[Shard, list[Announcement]]]:
    """Cut changes of one scope into shards, each in order."""
    cut: dict[int, list[Announcement]] = {}
    for change in changes:
        index = shard_index(change.digest)
        if index in cut:
            cut[index].append(change)
        else:
            cut[index] = [change]
    return ((Shard(tag, index), part) for index, part in cut.items())
