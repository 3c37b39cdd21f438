"""A simulated Redis: the product's own Lua transitions over a keyspace that can be emptied or lose its last writes."""

import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from lupa.lua51 import LuaRuntime

from kvstrata_metadata.store.scripts import sources
from kvstrata_metadata.store.store import Call

UNIX_S: Final = 1_760_000_000
"""What the server's clock shows when virtual time is 0."""


class RefusedError(Exception):
    """The server answers with an error; nothing was changed."""


@cache
def _runtime() -> Any:
    """One interpreter for each process; `flush` makes it new."""
    lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
    lua.execute((Path(__file__).with_name("lua_keyspace.lua")).read_bytes())
    sim = lua.globals().SIM
    sim.double = lambda number: struct.pack(">d", number)
    sim.undouble = lambda packed: struct.unpack(">d", packed)[0]
    for source in sources().values():
        sim.load(source.sha.encode(), _lua(source.text).encode())
    return sim


class SimRedis:
    """The server. Everything here is one atomic step."""

    def __init__(self) -> None:
        self._sim = _runtime()
        self._sim.flush()
        self._shas = {script: source.sha.encode() for script, source in sources().items()}
        self.is_up = True
        self.has_scripts = False
        self.skew_s = 0.0
        """How much the clock of the present server is off."""
        self.calls = 0

    def install(self) -> None:
        """Load the transitions."""
        self.has_scripts = True

    def run(self, calls: Sequence[Call], now_s: float) -> list[Any]:
        """Run transitions in order. Raises `RefusedError` where one is not loaded; those before it have been run."""
        unix_s = UNIX_S + now_s + self.skew_s
        self._sim.seconds = b"%d" % int(unix_s)
        self._sim.microseconds = b"%d" % int(unix_s % 1 * 1e6)
        replies = []
        for call in calls:
            if not self.has_scripts:
                raise RefusedError("NOSCRIPT")
            self.calls += 1
            replies.append(_value(self._sim.run(self._shas[call.script], call.key, *map(_text, call.args))))
        return replies

    def empty(self) -> None:
        """Start anew with nothing: no data, no transitions."""
        self._sim.flush()
        self.has_scripts = False

    def fail_over(self, lost: int) -> int:
        """Let a replica take over that has not heard of the last `lost` transitions; returns how many effects went."""
        return int(self._sim.lose(lost))

    def names(self) -> list[bytes]:
        """All keys, for checks."""
        return [bytes(key) for key in self._sim.names().values()]

    def command(self, name: str, *args: bytes) -> Any:
        """A plain command, for checks."""
        return _value(self._sim.command(name.encode(), *args))


def _lua(text: str) -> str:
    """The part of a transition that is Lua: a first line with flags is for Redis."""
    return text.partition("\n")[2] if text.startswith("#!") else text


def _text(value: bytes | str | float) -> bytes:
    """As the client encodes arguments."""
    if isinstance(value, bytes):
        return value
    return str(value).encode() if isinstance(value, str) else repr(value).encode()


def _value(reply: Any) -> Any:
    """As the client decodes replies."""
    if isinstance(reply, bytes) or reply is None:
        return reply
    if isinstance(reply, bool):
        return 1 if reply else None
    if isinstance(reply, int | float):
        return int(reply)
    return [_value(reply[i]) for i in range(1, len(reply) + 1)]
