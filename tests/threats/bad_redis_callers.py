"""Callers with bad certificates and bad passwords at every command that Redis lets our roles run."""

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import hiredis

from kvstrata_api import names
from kvstrata_kube import tls
from kvstrata_kube.tls import Credential
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis, TlsFiles
from kvstrata_metadata.store.access import COMMANDS, Role
from support.agent.peer_certificates import Fleet
from threats.bad_peers import HOUR, Shown
from threats.credentials import SYSTEM

_ANSWER_S: Final = 10.0
HOST: Final = "127.0.0.1"
Login = tuple[str, str] | None


def classes(fleet: Fleet, right: Login) -> dict[str, tuple[Shown, Login]]:
    """Every class of bad credential: what is shown, and how it logs in."""
    uri, trust, now = names.agent_uri(SYSTEM, "pool.node-a"), fleet.authority.certificate.pem, datetime.now(UTC)
    good, stranger = fleet.agent("pool.node-a"), Fleet().agent("pool.node-a")
    return {
        "plain text": (None, right),
        "no certificate": (Credential("", "", trust), right),
        "another authority": (Credential(stranger.certificate_pem, stranger.key_pem, trust), right),
        "expired certificate": (fleet.certify(uri, began=now - 3 * HOUR, life=HOUR), right),
        "certificate of tomorrow": (fleet.certify(uri, began=now + HOUR / 2, life=HOUR), right),
        "no password": (good, None),
        "wrong password": (good, ("agent", "wrong")),
        "unknown user": (good, ("root", "wrong")),
        "default user": (good, ("default", "")),
    }


async def start(fleet: Fleet, folder: Path) -> EmbeddedRedis:
    """A server as the metadata service starts it."""
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    files.write(fleet.certify(names.service_uri(SYSTEM, "metadata"), (HOST,)))
    return await embedded.start(EmbeddedConfig(folder / "redis", tls=files))


async def attempts(fleet: Fleet, redis: EmbeddedRedis) -> tuple[int, list[str]]:
    """Try every class at every command; how many cases, and what was served."""
    access = redis.access(Role.AGENT)
    served, cases = [], 0
    for name, (shown, login) in classes(fleet, (access.username, access.password)).items():
        commands = COMMANDS[Role.AGENT]
        cases += len(commands)
        outcomes = await asyncio.gather(*(_is_served(redis.port, shown, login, command) for command in commands))
        served += [f"{command} by {name}" for command, is_served in zip(commands, outcomes, strict=True) if is_served]
    return cases, served


async def control(fleet: Fleet, redis: EmbeddedRedis) -> list[str]:
    """Commands that the good credential is not let to; none is wanted."""
    access = redis.access(Role.AGENT)
    login, good = (access.username, access.password), fleet.agent("pool.node-a")
    return [c for c in COMMANDS[Role.AGENT] if not await _is_served(redis.port, good, login, c)]


async def _is_served(port: int, shown: Shown, login: Login, command: str) -> bool:
    """Whether Redis did what it was asked, or refused for another reason than who asks."""
    words = [*command.split("|"), *_arguments(command)]
    secured: dict[str, Any] = {}
    if shown is not None:
        secured = {"ssl": tls.client_context(shown, checks_host=True), "server_hostname": HOST}
    replies: list[Any] = []
    with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(HOST, port, **secured)
            try:
                asked: list[Any] = [("AUTH", *login)] if login else []
                asked.append(tuple(words))
                for one in asked:
                    writer.write(hiredis.pack_command(one))
                parser = hiredis.Reader(notEnoughData=Ellipsis)
                while len(replies) < len(asked) and (received := await reader.read(65_536)):
                    parser.feed(received)
                    replies += _replies(parser)
            finally:
                writer.transport.abort()
    if command in ("auth", "hello"):  # What one says to log in: served only when that was good.
        return bool(replies) and not isinstance(replies[0], hiredis.ReplyError)
    is_whole = len(replies) == 1 + bool(login)
    return is_whole and not str(replies[-1]).startswith(("NOAUTH", "WRONGPASS", "NOPERM"))


def _replies(parser: Any) -> Iterator[Any]:
    with contextlib.suppress(hiredis.ProtocolError):  # An alert of TLS, to somebody who speaks without.
        while (reply := parser.gets()) is not Ellipsis:
            yield reply


def _arguments(command: str) -> tuple[str, ...]:
    """As many words as it wants: the server counts them before it asks who is there."""
    if command in ("hset", "hsetnx", "zadd"):
        return (_KEY, "1", "1")
    return _ARGUMENTS.get(command, (_KEY, "1"))


_KEY: Final = "kf:{x.0}"
_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("ping", "time", "cluster|slots"), ()),
    **dict.fromkeys(("get", "del", "exists", "llen", "lpop", "hrandfield"), (_KEY,)),
    "hello": ("3",),
    "auth": ("nobody", "x"),
    "client|setname": ("x",),
    "client|tracking": ("on",),
    "evalsha": ("0" * 40, "1", _KEY),
}
