"""Session records on their way to the directory: the newest of each session, bounded, written when Redis answers."""

from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from kvstrata_agent.policy.fair_share import FairOrder
from kvstrata_api.blocks import ScopeSecret
from kvstrata_metadata.records import SessionRecord
from kvstrata_metadata.sessions import write_sessions
from kvstrata_metadata.store import Store

NOTES_MAX: Final = 65_536
"""Sessions that may wait; the oldest note of the scope that has most goes first, and the session's next turn writes it
again."""
FLUSH_MAX: Final = 256
"""Records written in one go, so that announcements are not held up."""


@dataclass(frozen=True, slots=True)
class _Note:
    secret: ScopeSecret
    session: str
    record: SessionRecord | None
    """None: the session has ended and is forgotten."""


class SessionNotes:
    """What other nodes should know about our sessions and have not been told yet."""

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
            self._forget(self._order.surplus())

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
