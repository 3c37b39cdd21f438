"""One connection to Redis on which anything may be asked, for tests that play somebody who holds a password."""

import socket
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import hiredis

_TIMEOUT_S: Final = 30.0


class RedisCaller:
    """A connection of one user. Errors are answers here."""

    def __init__(self, port: int, user: str = "", password: str = "") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        self._parser = hiredis.Reader(notEnoughData=Ellipsis)
        if user:
            answer = self.ask("AUTH", user, password)
            assert answer == b"OK", answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, *command: str | bytes | int) -> Any:
        """Send one command and return its answer."""
        return self.ask_all([command])[0]

    def ask_all(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Send commands in one go and return their answers in order. Raises `OSError` when the server hangs up."""
        sent = [hiredis.pack_command(tuple(command)) for command in commands]
        self._socket.sendall(b"".join(sent))
        return [self._answer() for _ in sent]

    def _answer(self) -> Any:
        while (answer := self._parser.gets()) is Ellipsis:
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionResetError("the server hung up")
            self._parser.feed(received)
        return answer


def text(answer: Any) -> str:
    """An answer as text; errors with their code first."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
