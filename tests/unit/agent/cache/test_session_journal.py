"""Laws of the journal of sessions: what it keeps, and what a torn end costs."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.cache import session_journal
from kvstrata_agent.cache.session_journal import Remembered, SessionJournal
from kvstrata_api.blocks import ScopeId

pytestmark = pytest.mark.unit

SCOPE = "tenant/a/u1/v1"

notes = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 9))), max_size=30)


@given(notes=notes, cut=st.integers(0, 400))
def test_the_journal_keeps_the_newest_note_and_a_torn_end_costs_only_itself(
    notes: list[tuple[int, int | None]], cut: int
) -> None:
    asyncio.run(_written_and_torn(notes, cut))


async def _written_and_torn(notes: list[tuple[int, int | None]], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = SessionJournal(path)
        states: list[dict[bytes, int]] = [{}]
        for key, turns in notes:
            name = bytes([key]) * 16
            past = Remembered("idle", "", b"", turns, 0, 0.0, ((SCOPE, name),)) if turns is not None else None
            journal.note(name, past, "a")
            await journal.flush()
            now = {k: v for k, v in states[-1].items() if k != name}
            states.append(now | ({name: turns} if turns is not None else {}))
        whole = _load(path)
        assert _turns(whole) == states[-1]
        if path.exists():
            path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - cut)])
            torn = _load(path)
            assert _turns(torn) in states
            torn.note(b"z" * 16, Remembered("idle", "", b"", 1, 0, 0.0, (), scope=SCOPE), "a")
            await torn.flush()
            assert _load(path).find(b"z" * 16) is not None, "what follows a torn end can be read"


def _load(path: Path) -> SessionJournal:
    journal = SessionJournal(path)
    journal.load()
    return journal


def _turns(journal: SessionJournal) -> dict[bytes, int]:
    found = {bytes([k]) * 16: journal.find(bytes([k]) * 16) for k in range(6)}
    return {name: past.turns for name, past in found.items() if past is not None}


def _past(turns: int, scope: str = SCOPE) -> Remembered:
    return Remembered("idle", "", b"", turns, 0, 0.0, ((scope, b"h" * 32),))


@pytest.mark.parametrize("scope", ["", "a", "tenant", "tenant/", "/", "tenant/a/u1/v", "domain/d/u/v1"])
async def test_a_session_that_no_erasure_would_reach_is_not_taken_up_and_stops_nobody(
    tmp_path: Path, scope: str
) -> None:
    journal = SessionJournal(tmp_path / "journal")
    journal.note(b"odd", _past(1, scope), "a")
    journal.note(b"next", _past(2), "a")
    await journal.flush()

    again = _load(tmp_path / "journal")
    assert [past.turns for past in again.latest()] == [2]
    assert again.has_erased
    await again.flush()
    assert not again.has_erased
    assert b"odd" not in (tmp_path / "journal").read_bytes()


async def test_sessions_of_an_erased_scope_are_gone_from_the_file_once_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = SessionJournal(path)
    own = Remembered("idle", "", b"", 7, 0, 0.0, (("domain/d/u/v1", b"h" * 32),), scope=SCOPE)
    journal.note(b"shared heads", own, "a")
    journal.note(b"of an earlier agent", _past(2), "a")
    journal.note(b"next version", _past(3, "tenant/a/u1/v2"), "a")
    journal.note(b"forgotten", _past(4), "a")
    await journal.flush()
    journal.note(b"forgotten", None, "a")
    await journal.flush()
    again = _load(path)
    await again.flush()
    assert again.scopes() == {SCOPE, "tenant/a/u1/v2"}

    again.erase(ScopeId(SCOPE))
    assert again.has_erased, "it is still in the file"
    assert [past.turns for past in again.latest()] == [3]
    await again.flush()
    assert not again.has_erased
    assert not [name for name in (b"shared heads", b"forgotten") if name in path.read_bytes()]
    assert [past.turns for past in _load(path).latest()] == [3]


async def test_what_cannot_be_written_keeps_an_erasure_open(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    journal = SessionJournal(folder / "journal")
    journal.note(b"n", _past(1), "a")
    await journal.flush()
    (folder / "journal.new").mkdir()  # Where the next file is written.
    journal.erase(ScopeId(SCOPE))
    await journal.flush()
    assert journal.has_erased
    (folder / "journal.new").rmdir()
    await journal.flush()
    assert not journal.has_erased


async def test_a_tenant_that_notes_sessions_without_end_forgets_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_journal, "ENTRIES_MAX", 64)
    journal = SessionJournal(tmp_path / "journal")
    for i in range(10):
        journal.note(b"b%d" % i, _past(i, "tenant/b/u2/v1"), "b")
    for i in range(100):
        journal.note(b"a%d" % i, _past(i), "a")
    await journal.flush()
    again = _load(tmp_path / "journal")
    for i in range(100, 200):
        again.note(b"a%d" % i, _past(i), "a")

    assert len(journal) == len(again) == 64
    assert all(known.find(b"b%d" % i) is not None for known in (journal, again) for i in range(10))
    assert again.find(b"a199") is not None
