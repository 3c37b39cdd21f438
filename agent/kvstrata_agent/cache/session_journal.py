"""What a node remembers of its sessions across restarts: one append-only file, the newest entry of each counts.

Names of sessions are not on the disk: entries are known by `session_digest` under the tenant's secret. The file is not
synced: a killed agent loses nothing, a power cut at most the last moments, and the client's keys still find the
blocks then. The directory has the same in short for other nodes; this file works without Redis and has every head.
"""

from __future__ import annotations

import binascii
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kvstrata_agent.backends.threads import in_thread
from kvstrata_agent.blocks.block import account_of
from kvstrata_agent.policy.quota import FairOrder
from kvstrata_api.blocks import ScopeId
from kvstrata_api.decoding import UNDECODABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENTRIES_MAX: Final = 65_536
"""Sessions remembered; of the account that has most, the one that was noted longest ago goes first."""
SLACK_BYTES: Final = 1 << 20
"""The file is rewritten when it is longer than this and has twice the bytes that count."""
MAGIC: Final = b"kvstrata sessions 1\n"
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


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, Remembered | None])


class SessionJournal:
    """Remembers sessions by digest. Without a path it lasts as long as the process."""

    def __init__(self, path: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        """`wall` returns Unix seconds, the only time that outlives a process."""
        self.wall = wall
        self._path = path
        self._known: dict[bytes, bytes] = {}
        """Frames by digest."""
        self._order: FairOrder[bytes] = FairOrder()
        self._known_bytes = 0
        self._file_bytes = 0
        self._unwritten: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._known)

    def load(self) -> None:
        """Read the file of earlier runs, as far as it is sound. Blocks; called once, first."""
        if self._path is None:
            return
        try:
            content = self._path.read_bytes()
        except OSError as e:
            _log.info("no sessions remembered", extra={"cause": e.strerror})
            return
        for digest, frame, remembered in _frames(content):
            self._keep(digest, frame if remembered is not None else b"", _account(remembered))
        self._file_bytes = 0  # The first flush rewrites the file: what follows a torn end could not be read again.

    def find(self, digest: bytes) -> Remembered | None:
        """Return what is known of a session, or None."""
        frame = self._known.get(digest)
        return _decoder.decode(frame[_HEADER_BYTES:])[1] if frame is not None else None

    def latest(self) -> Iterator[Remembered]:
        """Sessions that are known when this is called, those that were noted last first."""
        for frame in reversed(tuple(self._known.values())):
            remembered = _decoder.decode(frame[_HEADER_BYTES:])[1]
            if remembered is not None:
                yield remembered

    def note(self, digest: bytes, remembered: Remembered | None, tenant: str) -> None:
        """Remember a session of `tenant` as it is now; None forgets it. Written by the next `flush`."""
        body = _encoder.encode((digest, remembered))
        frame = len(body).to_bytes(4, "big") + binascii.crc32(body).to_bytes(4, "big") + body
        self._keep(digest, frame if remembered is not None else b"", tenant)
        if self._path is not None:
            self._unwritten[digest] = frame

    async def flush(self) -> None:
        """Write what was noted since the last time. A failure is logged; what was noted stays in memory."""
        if not self._unwritten or self._path is None:
            return
        is_long = self._file_bytes > SLACK_BYTES + 2 * self._known_bytes
        frames, self._unwritten = b"".join(self._unwritten.values()), {}
        try:
            if is_long or not self._file_bytes:
                await in_thread(None, partial(self._rewrite, MAGIC + b"".join(self._known.values())))
            else:
                await in_thread(None, partial(self._append, frames))
        except OSError as e:
            self._file_bytes = 0
            _log.warning("sessions cannot be remembered", extra={"path": str(self._path), "cause": e.strerror})

    def _keep(self, digest: bytes, frame: bytes, account: str) -> None:
        self._forget(digest)
        if frame:
            self._known[digest] = frame
            self._known_bytes += len(frame)
            self._order.use(account, digest)
        if len(self._known) > ENTRIES_MAX:
            self._forget(self._order.next_to_evict())

    def _forget(self, digest: bytes) -> None:
        self._known_bytes -= len(self._known.pop(digest, b""))
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


def _account(remembered: Remembered | None) -> str:
    """Account of a session of an earlier run until its tenant comes: that of its blocks, for the file names nobody."""
    heads = remembered.heads if remembered is not None else ()
    return account_of(ScopeId(heads[0][0])) if heads else ""


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
