"""Laws of session records on their way to the directory."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvstrata_agent.fleet.directory.client import FLUSH_MAX, SessionNotes
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.store.keys import session_digest, shard_index
from kvstrata_metadata.store.records import SessionRecord
from kvstrata_metadata.store.store import Call, Store
from support.agent.doubles import SCOPE, secret

pytestmark = pytest.mark.unit


class HalfAway(Store):
    """A part of the directory that answers beside one that does not: that of the shards in `away`."""

    def __init__(self, away: frozenset[bytes]) -> None:  # Opens nothing.
        self.away = away

    async def run_each(self, calls: Sequence[Call], *, within_s: float | None = None) -> list[Any]:  # noqa: ARG002
        away = DirectoryAwayError("redis: away", is_partial=True)
        return [away if call.key[-2:] in self.away else b"" for call in calls]


async def test_notes_for_a_part_that_is_away_hold_up_no_others() -> None:
    notes, names = SessionNotes("pool.a"), [f"s{number}" for number in range(20 * FLUSH_MAX)]
    for name in names:
        notes.note(secret(SCOPE), name, SessionRecord("", "", "idle"))
    store = HalfAway(frozenset(b"%x}" % shard for shard in range(15)))

    written = sum([await notes.flush(store) for _ in range(20)])

    assert written == sum(shard_index(session_digest(secret(SCOPE), name)) == 15 for name in names)
    assert len(notes) == len(names) - written
    store.away = frozenset()
    while len(notes):
        assert await notes.flush(store) > 0
