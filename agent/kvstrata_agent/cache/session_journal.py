"""What a node remembers of its sessions across restarts: one append-only file, the newest entry of each counts.

Names of sessions are not on the disk: entries are known by `session_digest` under the tenant's secret. The file is not
synced: a killed agent loses nothing, a power cut at most the last moments, and the client's keys still find the
blocks then. The directory has the same in short for other nodes; this file works without Redis and has every head.
"""

from __future__ import annotations

import binascii
import logging
import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvstrata_agent.backends.threads import in_thread
from kvstrata_agent.blocks.block import account_of
from kvstrata_agent.policy.quota import FairOrder
from kvstrata_api.blocks import ScopeId
from kvstrata_api.decoding import UNDECODABLE
from kvstrata_api.trust import ScopeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENTRIES_MAX: Final = 65_536
"""Sessions remembered; of the account that has most, the one that was noted longest ago goes first."""
SLACK_BYTES: Final = 1 << 20
"""The file is rewritten when it is longer than this and has twice the bytes that count."""
MAGIC: Final = b"kvstrata sessions 1\n"
_OWN_SCOPE: Final = re.compile(rf"{ScopeKind.TENANT}/[^/]+/[^/]+/v[0-9]{{1,18}}")
_HEADER_BYTES: Final = 8
"""Length and CRC-32 of the body that follows, both big-endian."""

_log = logging.getLogger(__name__)


class Remembered(msgspec.Struct, frozen=True, array_like=True):
    """One session as it was."""

    state: str
    priority: str
    parent: bytes
    """Digest of the session that it was forked from; empty when there is none."""
    turns: int
    urgency: int
    returns_at_s: float
    """Unix time of the expected return; 0 when unknown."""
    heads: tuple[tuple[str, bytes], ...]
    """Scope and digest of the last block of each chain, oldest first; before them those that a window keeps."""
    sink_tokens: int = 0
    window_tokens: int = 0
    """0, as in entries of earlier agents: the session attends to all tokens."""
    anchor_tokens: int = 0
    kept: int = 0
    """So many of the heads, the first ones, are sinks and anchors that its window has left behind."""
    blocks: tuple[int, ...] = ()
    """Of the chain of each head; 0: not known. Empty in entries of earlier agents."""
    scope: str = ""
    """The tenant's own, with which the session is erased; empty in entries of earlier agents."""

    @property
    def erased_with(self) -> str:
        """The tenant's own scope, of entries of earlier agents that of a head; empty where there is none."""
        return next((s for s in (self.scope, *(scope for scope, _ in self.heads)) if _OWN_SCOPE.fullmatch(s)), "")


class _Known(NamedTuple):
    frame: bytes
    scope: ScopeId
    """With which it is erased."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, Remembered | None])


class SessionJournal:
    """Remembers sessions by digest. Without a path it lasts as long as the process."""

    def __init__(self, path: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        """`wall` returns Unix seconds, the only time that outlives a process."""
        self.wall = wall
        self._path = path
        self._known: dict[bytes, _Known] = {}
        """By digest."""
        self._order: FairOrder[bytes] = FairOrder()
        self._known_bytes = 0
        self._file_bytes = 0
        self._unwritten: dict[bytes, bytes] = {}
        self._scopes: set[ScopeId] = set()
        """Of all that may be in the file or comes there, sessions that were forgotten included."""
        self._erased: set[ScopeId] = set()
        """Those of them that are to be taken out of the file."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def has_erased(self) -> bool:
        """True while the file may hold sessions that were erased."""
        return bool(self._erased)

    def load(self) -> None:
        """Read the file of earlier runs, as far as it is sound. Blocks; called once, first.

        A session that nobody could erase, as the scope of its tenant is not known, is not taken up.
        """
        if self._path is None:
            return
        try:
            content = self._path.read_bytes()
        except OSError as e:
            _log.info("no sessions remembered", extra={"cause": e.strerror})
            return
        for digest, frame, remembered in _frames(content):
            scope = remembered.erased_with if remembered is not None else ""
            if remembered is not None:
                (self._scopes if scope else self._erased).add(ScopeId(scope))
            self._keep(digest, _Known(frame, ScopeId(sys.intern(scope))) if scope else None, account_of(ScopeId(scope)))
        self._file_bytes = 0  # The first flush rewrites the file: what follows a torn end could not be read again.

    def find(self, digest: bytes) -> Remembered | None:
        """Return what is known of a session, or None."""
        known = self._known.get(digest)
        return _decoder.decode(known.frame[_HEADER_BYTES:])[1] if known is not None else None

    def latest(self) -> Iterator[Remembered]:
        """Sessions that are known when this is called, those that were noted last first."""
        for known in reversed(tuple(self._known.values())):
            remembered = _decoder.decode(known.frame[_HEADER_BYTES:])[1]
            if remembered is not None:
                yield remembered

    def scopes(self) -> set[ScopeId]:
        """Scopes with which something that is remembered, or in the file, would be erased."""
        return set(self._scopes)

    def erase(self, scope: ScopeId) -> None:
        """Forget the sessions of a tenant's own scope; the next `flush` takes them out of the file."""
        erased = [digest for digest, known in self._known.items() if known.scope == scope]
        for digest in erased:
            self._forget(digest)
            self._unwritten.pop(digest, None)
        if scope in self._scopes:
            self._scopes.remove(scope)
            if self._path is not None:
                self._erased.add(scope)

    def note(self, digest: bytes, remembered: Remembered | None, tenant: str) -> None:
        """Remember a session of `tenant` as it is now; None forgets it. Written by the next `flush`."""
        body = _encoder.encode((digest, remembered))
        frame = len(body).to_bytes(4, "big") + binascii.crc32(body).to_bytes(4, "big") + body
        scope = ScopeId(sys.intern(remembered.erased_with if remembered is not None else ""))
        if scope:
            self._scopes.add(scope)
        self._keep(digest, _Known(frame, scope) if remembered is not None else None, tenant)
        if self._path is not None:
            self._unwritten[digest] = frame

    async def flush(self) -> None:
        """Write what was noted since the last time. A failure is logged; what was noted stays in memory."""
        if not (self._unwritten or self.has_erased) or self._path is None:
            return
        is_long = self._file_bytes > SLACK_BYTES + 2 * self._known_bytes
        frames, self._unwritten = b"".join(self._unwritten.values()), {}
        erased = set(self._erased)
        try:
            if is_long or self.has_erased or not self._file_bytes:
                frames = b"".join([known.frame for known in self._known.values()])
                await in_thread(None, partial(self._rewrite, MAGIC + frames))
                self._erased -= erased
            else:
                await in_thread(None, partial(self._append, frames))
        except OSError as e:
            self._file_bytes = 0
            _log.warning("sessions cannot be remembered", extra={"path": str(self._path), "cause": e.strerror})

    def _keep(self, digest: bytes, known: _Known | None, account: str) -> None:
        self._forget(digest)
        if known is not None:
            self._known[digest] = known
            self._known_bytes += len(known.frame)
            self._order.use(account, digest)
        if len(self._known) > ENTRIES_MAX:
            self._forget(self._order.next_to_evict())

    def _forget(self, digest: bytes) -> None:
        known = self._known.pop(digest, None)
        self._known_bytes -= len(known.frame) if known is not None else 0
        self._order.drop(digest)

    def _append(self, frames: bytes) -> None:
        assert self._path is not None
        with self._path.open("ab") as file:
            file.write(frames)
            self._file_bytes = file.tell()

    def _rewrite(self, content: bytes) -> None:
        assert self._path is not None
        temporary = self._path.with_suffix(".new")
        temporary.touch(mode=0o600)
        temporary.write_bytes(content)
        temporary.replace(self._path)
        self._file_bytes = len(content)


def _frames(content: bytes) -> Iterator[tuple[bytes, bytes, Remembered | None]]:
    """Digest, frame and value of each sound entry up to the first that is not."""
    if not content.startswith(MAGIC):
        return
    at = len(MAGIC)
    while at + _HEADER_BYTES <= len(content):
        end = at + _HEADER_BYTES + int.from_bytes(content[at : at + 4], "big")
        body = content[at + _HEADER_BYTES : end]
        if end > len(content) or binascii.crc32(body) != int.from_bytes(content[at + 4 : at + 8], "big"):
            return
        try:
            digest, remembered = _decoder.decode(body)
        except UNDECODABLE:
            return
        yield digest, content[at:end], remembered
        at = end
