"""The connection to Redis: runs transitions, ends every Redis error. The only import of redis.

A store may be used by many tasks at once. Nothing here retries: the callers know what a repetition means.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio as redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AskError, MovedError, NoScriptError, OutOfMemoryError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig

from kvstrata_api.errors import DirectoryAwayError, DirectoryFullError, KvStrataError
from kvstrata_metadata.store.access import RedisAccess
from kvstrata_metadata.store.scripts import Script, loaded, sources
from kvstrata_metadata.store.servers import Address, SlotRange, Topology

CONNECTIONS_MAX: Final = 8
"""Pipelines that may be under way at once from one process to one server; more wait."""

CONNECT_TIMEOUT_S: Final = 5.0
TIMEOUT_S: Final = 5.0
"""Longest silence of the server within one call; transitions are cut so that each takes milliseconds."""

AWAY_DELAY_S: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One transition to run."""

    script: Script
    key: bytes
    """Prefix of the keys that it touches; decides the slot in a Redis Cluster."""
    args: tuple[bytes | str | int | float, ...] = ()

    @property
    def command(self) -> tuple[bytes | str | int | float, ...]:
        """As Redis takes it."""
        return ("EVALSHA", sources()[self.script].sha, 1, self.key, *self.args)


@dataclass(frozen=True, slots=True)
class Redirect:
    """Answer of a server of a Redis Cluster that does not serve a slot."""

    slot: int
    to: Address
    is_final: bool
    """False while the slot is on its way there: its keys lie on two servers."""


class Store:
    """Runs transitions on one Redis. Every method raises `DirectoryAwayError` when Redis does not do its part."""

    breaks = 0
    """Times that the server at the other end may have become another one while the store was open, or a part of a
    cluster came back or moved: what was written to it may be gone. A connection of the pool that was closed while
    nobody used it is replaced without an error, so every connection counts, even the first ones."""

    def __init__(self, access: RedisAccess, *, timeout_s: float = TIMEOUT_S) -> None:
        self._redis = _client(access, timeout_s, self._connected)
        self._timeout_s = timeout_s

    @property
    def is_partial(self) -> bool:
        """True when some part of the directory is known to be away while others answer; never for one server."""
        return False

    async def install(self) -> None:
        """Load every transition, and what agents of the release before call. Needs the role `metadata`; idempotent."""
        _raise_first(await self.ask([("SCRIPT LOAD", source.text) for source in loaded()]))

    async def is_installed(self) -> bool:
        """True when every transition is loaded. Needs the role `metadata`."""
        (there,) = _raise_first(await self.ask([("SCRIPT EXISTS", *(s.sha for s in loaded()))]))
        return all(there)

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run transitions in one round trip, in order; the reply of each. They are atomic one by one."""
        return _raise_first(await self.ask([call.command for call in calls]))

    async def run_each(self, calls: Sequence[Call], *, within_s: float | None = None) -> list[Any]:
        """Run transitions like `run`; an error stands in the place of each reply that could not be had.

        Raises none, unless `within_s` is over: that is an error in place of what has not been answered.
        """
        try:
            async with asyncio.timeout(within_s):
                return await self.run(calls)
        except DirectoryAwayError as e:
            return [e] * len(calls)
        except TimeoutError:
            return [DirectoryAwayError(f"redis: no answer in {within_s} s", delay_s=AWAY_DELAY_S)] * len(calls)

    async def run_one(self, call: Call) -> Any:
        """Run one transition."""
        return (await self.run((call,)))[0]

    async def memory_bytes(self) -> tuple[int, int]:
        """Bytes that the server uses now, and those it used when it started."""
        (facts,) = _raise_first(await self.ask([("INFO", "memory")]))
        return int(facts["used_memory"]), int(facts["used_memory_startup"])

    async def describe(self) -> list[dict[str, Any]]:
        """What each server reports of itself. Needs the role `metadata`."""
        return _raise_first(await self.ask([("INFO",)]))

    async def topology(self) -> Topology:
        """The cluster that this server is part of, as it sees it."""
        (found,) = _raise_first(await self.ask([("CLUSTER SLOTS",)]))
        return Topology(
            SlotRange(first, last, _address(primary), tuple(_address(replica) for replica in replicas))
            for first, last, primary, *replicas in found
        )

    async def ask(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one round trip; for each its reply, a `Redirect`, or the error that it was refused with.

        Raises `DirectoryAwayError` when the server does not answer: then any of them may have been done.
        """
        if not commands:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        async with self._guard():
            replies = await pipeline.execute(raise_on_error=False)
        return [_refusal(reply) if isinstance(reply, Exception) else reply for reply in replies]

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()
        # asyncio frees the socket of an aborted TLS connection a few steps after it was closed.
        for _ in range(16):
            await asyncio.sleep(0)

    async def _connected(self, connection: Any) -> None:
        await connection.on_connect()
        self.breaks += 1

    @contextlib.asynccontextmanager
    async def _guard(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s + CONNECT_TIMEOUT_S):
                yield
        except (RedisError, OSError, TimeoutError) as e:
            raise DirectoryAwayError(f"redis: {type(e).__name__}: {e}", delay_s=AWAY_DELAY_S) from e


@contextlib.contextmanager
def partly() -> Iterator[None]:
    """Go on with the rest where only a part of the directory is away; the next round takes up what was left."""
    try:
        yield
    except DirectoryAwayError as e:
        if not e.is_partial:
            raise
        _log.warning("a part of the directory is away", extra={"error": str(e)})


def _refusal(error: Exception) -> DirectoryAwayError | Redirect:
    """What an answer of Redis means that is no reply."""
    if isinstance(error, AskError):
        return Redirect(int(error.slot_id), Address(error.host, int(error.port)), isinstance(error, MovedError))
    if isinstance(error, OutOfMemoryError):
        return DirectoryFullError(f"redis has no memory left: {error}", delay_s=AWAY_DELAY_S)
    if isinstance(error, NoScriptError):
        message = "redis lacks the transitions: the metadata service has not loaded them yet"
        return DirectoryAwayError(message, delay_s=AWAY_DELAY_S)
    return DirectoryAwayError(f"redis: {type(error).__name__}: {error}", delay_s=AWAY_DELAY_S)


def _raise_first(replies: list[Any]) -> list[Any]:
    """Raise the first error among replies, or return them."""
    for reply in replies:
        if isinstance(reply, DirectoryAwayError):
            raise reply
        if isinstance(reply, Redirect):
            raise DirectoryAwayError(
                f"redis at slot {reply.slot} is a cluster: its url must begin with redis+cluster://"
            )
    return replies


def _address(node: Sequence[Any]) -> Address:
    """Host and port of an element of CLUSTER SLOTS; the host is empty when the server does not know it."""
    return Address((node[0] or b"").decode(), int(node[1]))


class _CancellableSend(AbstractConnection):
    """Lets a cancellation through while a command is sent, and the end of a bound likewise.

    redis-py bounds the sending of a command with `asyncio.wait_for`, which before Python 3.12 loses a cancellation
    that comes when the command has just been sent: a task that was to end would go on for ever. `Store._guard` bounds
    the sending here.
    """

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        timeout_s, self.socket_timeout = self.socket_timeout, None
        try:
            await super().send_packed_command(*args, **kwargs)
        finally:
            self.socket_timeout = timeout_s


def _secured(access: RedisAccess) -> type[redis.Connection]:
    """Connections that each ask for the context which is right when they are opened."""

    class Secured(_CancellableSend, redis.SSLConnection):
        def _connection_arguments(self) -> Any:
            try:
                return {**super(redis.SSLConnection, self)._connection_arguments(), "ssl": access.context()}
            except KvStrataError as e:
                raise RedisConnectionError(str(e)) from e

        async def disconnect(self, *args: Any, **kwargs: Any) -> None:
            writer = self._writer
            await super().disconnect(*args, **kwargs)
            if writer is not None:
                writer.transport.abort()  # Or a TLS farewell waits for a server that has nothing more to send.

    return Secured


def _client(access: RedisAccess, timeout_s: float, connected: Callable[[Any], Awaitable[None]]) -> "redis.Redis":
    pool = redis.BlockingConnectionPool.from_url(
        access.url,
        username=access.username or None,
        password=access.password or None,
        protocol=3,
        max_connections=CONNECTIONS_MAX,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        redis_connect_func=connected,
        # Repeating is our callers' decision, and the handshake sends no command that the ACL would have to allow.
        retry=Retry(NoBackoff(), 0),
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        lib_name=None,
        lib_version=None,
    )
    # Whatever the url sets about certificates, it cannot switch them off.
    given = pool.connection_class
    pool.connection_class = _secured(access) if access.is_tls else type("Plain", (_CancellableSend, given), {})
    return redis.Redis.from_pool(pool)  # Which the client then owns and closes.
