"""The listening socket of an agent: accepts engines, each as one connection, within the connection limits.

Unauthenticated connections have a limit of their own; callers share theirs fairly by tenant.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING, Final, Generic

from kvstrata_agent.policy.quota import FairOrder, K
from kvstrata_agent.serve.connection import Connection
from kvstrata_api.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from kvstrata_agent.serve.verbs import Verbs


CALLERS_MAX: Final = 1024
"""Engine processes of one pool on one node; a node has some tens of GPUs."""
UNAUTHENTICATED_MAX: Final = 128
"""Connections that have not attached yet; an engine attaches at once, so the one that waits longest is no engine."""

MODE: Final = 0o770
"""Of the socket and its directory: the agent's user and the engines' group."""
_BACKLOG: Final = 128
_CREDENTIALS: Final = struct.Struct("iII")
"""struct ucred: process, user, group."""
_ACCEPT_PAUSE_S: Final = 1.0
_log = logging.getLogger(__name__)


class ConnectionLimits(Generic[K]):
    """No I/O. Takes note of connections and returns which one has to be closed, if any."""

    def __init__(self, callers_max: int = CALLERS_MAX, unauthenticated_max: int = UNAUTHENTICATED_MAX) -> None:
        self._callers_max = callers_max
        self._unauthenticated_max = unauthenticated_max
        self._unauthenticated: dict[K, None] = {}
        """In order of arrival."""
        self._callers: FairOrder[K] = FairOrder()

    def __len__(self) -> int:
        return len(self._unauthenticated) + len(self._callers)

    def accept(self, connection: K) -> K | None:
        """Count a new connection, unauthenticated; returns the one that has to be closed for it."""
        self._unauthenticated[connection] = None
        return next(iter(self._unauthenticated)) if len(self._unauthenticated) > self._unauthenticated_max else None

    def attach(self, connection: K, tenant: str) -> K | None:
        """Count a connection as its tenant's; returns the one to be closed: the newest of the tenant with most of them.

        That may be this one.
        """
        if connection not in self._unauthenticated:
            return None  # It renews its token.
        del self._unauthenticated[connection]
        self._callers.use(tenant, connection)
        if len(self._callers) <= self._callers_max:
            return None
        largest = self._callers.largest_account()
        if self._callers.count(tenant) == self._callers.count(largest):
            return connection
        *_, newest = self._callers.of(largest)
        return newest

    def remove(self, connection: K) -> None:
        """Count a connection no more. Idempotent."""
        self._unauthenticated.pop(connection, None)
        self._callers.drop(connection)


_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """Listens on one path."""

    def __init__(self, path: Path, verbs: Verbs, limits: ConnectionLimits[Connection] | None = None) -> None:
        """`limits` bounds the connections; by default as many as a node has use for."""
        self._path = path
        self._verbs = verbs
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()
        self._limits = ConnectionLimits() if limits is None else limits
        self._last_owner = 0

    @property
    def connections(self) -> int:
        """Engine processes that are connected."""
        return len(self._connections)

    def start(self) -> None:
        """Listen. A socket that a dead agent left behind is replaced.

        Raises `UnsupportedError` when the path cannot be used, or belongs to an agent that lives.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=MODE)
            if _look_dead(self._path):
                self._path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            before = os.umask(0o777 & ~MODE)
            try:
                listener.bind(os.fspath(self._path))
            finally:
                os.umask(before)
            listener.listen(_BACKLOG)
        except OSError as e:
            raise _unusable(self._path, e) from e
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._acceptable)

    async def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        self._path.unlink(missing_ok=True)
        for connection in tuple(self._connections):
            connection.close()

    def refresh(self) -> None:
        """Take back what connections hold in scopes that they may read no more; call it now and then.

        A connection that asks for something is looked at then; one that only holds leases is looked at here.
        """
        for connection in tuple(self._connections):
            self._verbs.refresh(connection.attachment)

    def _acceptable(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            if e.errno not in _OUT_OF_RESOURCES:
                raise
            self._pause(str(e))
            return
        accepted.setblocking(False)  # noqa: FBT003  The standard library takes no keyword.
        self._last_owner += 1
        connection = Connection(self._last_owner, accepted, self._verbs, self._attached, self._closed)
        connection.attachment.uid = _user_of(accepted)
        self._connections.add(connection)
        connection.start()
        self._end(self._limits.accept(connection))

    def _attached(self, connection: Connection, tenant: str) -> bool:
        """Note who a connection is; false when the limits leave it out."""
        leaving = self._limits.attach(connection, tenant)
        if leaving is connection:
            return False
        self._end(leaving)
        return True

    def _end(self, leaving: Connection | None) -> None:
        if leaving is not None:
            _log.warning("connection ended: all places are taken", extra={"connections": len(self._connections)})
            leaving.close()

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._limits.remove(connection)

    def _pause(self, cause: str) -> None:
        """Accept nothing for a moment: the listener would be ready again at once, for nothing."""
        _log.warning("no descriptor for a connection", extra={"cause": cause})
        loop, listener = asyncio.get_running_loop(), self._listener
        assert listener is not None
        loop.remove_reader(listener)

        def resume() -> None:
            if self._listener is listener:
                loop.add_reader(listener, self._acceptable)

        loop.call_later(_ACCEPT_PAUSE_S, resume)


def _user_of(connected: socket.socket) -> int:
    """User that connected, as the kernel noted it then (SO_PEERCRED, man 7 unix): nothing that a client sends."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def check_free(path: Path) -> None:
    """Refuse a socket path that another process serves, or where something else lies. Changes nothing; never waits.

    Raises `UnsupportedError` that says what to do.
    """
    try:
        _look_dead(path)
    except OSError as e:
        raise _unusable(path, e) from e


def _unusable(path: Path, error: OSError) -> UnsupportedError:
    advice = "; stop that one, or give --socket another path" if error.errno == errno.EADDRINUSE else ""
    return UnsupportedError(f"socket {path}: {error.strerror or error}{advice}")


def _look_dead(path: Path) -> bool:
    """Return whether a socket lies there that nobody listens on. `OSError` when somebody does, or it is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except BlockingIOError:
            pass  # A full backlog is somebody's, be he stopped (man 7 unix).
    raise OSError(errno.EADDRINUSE, "another process serves it")
