"""Typed transitions on session records, which let another node take a conversation over."""

from collections.abc import Sequence

import msgspec

from kvstrata_api.blocks import ScopeSecret
from kvstrata_api.errors import DirectoryAwayError
from kvstrata_metadata.store.keys import SESSION_TTL_S, Shard, session_digest, shard_index
from kvstrata_metadata.store.records import SessionRecord, pack_session, unpack_session
from kvstrata_metadata.store.scripts import Script
from kvstrata_metadata.store.store import Call, Store


async def open_session(store: Store, secret: ScopeSecret, session: str, record: SessionRecord) -> None:
    """Write a session's record, replacing an older one."""
    await _run(store, secret, session, "open", pack_session(record))


async def write_sessions(store: Store, writes: Sequence[tuple[ScopeSecret, str, SessionRecord | None]]) -> list[bool]:
    """Write, or forget where there is no record, many sessions in one round trip; for each whether it was done.

    Raises `DirectoryAwayError` when no part of the directory answers.
    """
    calls = [
        _call(secret, session, "open", pack_session(record)) if record else _call(secret, session, "close")
        for secret, session, record in writes
    ]
    replies = await store.run_each(calls)
    for reply in replies:
        if isinstance(reply, DirectoryAwayError) and not reply.is_partial:
            raise reply
    return [not isinstance(reply, DirectoryAwayError) for reply in replies]


async def fork_session(
    store: Store, secret: ScopeSecret, session: str, *, parent: str, agent: str
) -> SessionRecord | None:
    """Open a session that starts where `parent` is now; None when the parent is unknown, and nothing is written."""
    origin = await read_session(store, secret, parent)
    if origin is None:
        return None
    digest = session_digest(secret, parent)
    record = SessionRecord(origin.tenant, origin.priority, "open", digest, origin.head, agent)
    await open_session(store, secret, session, record)
    return record


async def touch_session(store: Store, secret: ScopeSecret, session: str, change: SessionRecord) -> SessionRecord | None:
    """Set state, urgency and expected return; head and agent too when a head is given. None when unknown."""
    fields = (change.state, change.urgency, change.expected_return_s, change.head.hex(), change.agent)
    return await _run(store, secret, session, "touch", msgspec.msgpack.encode(fields))


async def read_session(store: Store, secret: ScopeSecret, session: str) -> SessionRecord | None:
    """Read a session's record; None when unknown or corrupt."""
    return await _run(store, secret, session, "read")


async def close_session(store: Store, secret: ScopeSecret, session: str) -> SessionRecord | None:
    """Forget a session; its last record, or None when unknown. Closing twice is harmless."""
    return await _run(store, secret, session, "close")


async def _run(store: Store, secret: ScopeSecret, session: str, verb: str, packed: bytes = b"") -> SessionRecord | None:
    return unpack_session(await store.run_one(_call(secret, session, verb, packed)))


def _call(secret: ScopeSecret, session: str, verb: str, packed: bytes = b"") -> Call:
    digest = session_digest(secret, session)
    shard = Shard(secret.tag(), shard_index(digest))
    return Call(Script.SESSION, shard.key, (verb, digest, SESSION_TTL_S, packed))
