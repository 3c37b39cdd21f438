"""Released memory that clients still hold: emptied again and again until they let go of it.

Such a client gets pages anew by touching its old mapping: zeros, which its own memory limit pays for, but huge pages
come out of everybody's. The kernel knows who is left (`openings.is_held`), so nothing here has to be believed.
"""

import asyncio
import logging
from concurrent.futures import Executor, Future
from typing import Final

from kvstrata_agent.backends.memory.mapping import Remains

EMPTY_S: Final = 1.0
"""Between looks at memory that is held."""
HELD_MAX: Final = 4096
"""Descriptors kept for it; beyond, the oldest is let go of and costs only the client that holds it."""

_log = logging.getLogger(__name__)


class Withheld:
    """All such memory of one arena. Methods run in the event loop, looks at the memory in `worker`."""

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._held: list[Remains] = []
        self._look: Future[tuple[int, list[Remains]]] | None = None
        self._looked_at_s = 0.0
        self.touched_bytes = 0
        """What the last look found in it and took back."""

    def __len__(self) -> int:
        return len(self._held)

    def add(self, remains: Remains | None) -> None:
        """Take over what a release has left."""
        if remains is None:
            return
        self._held.append(remains)
        if len(self._held) > HELD_MAX and self._look is None:
            self._held.pop(0).close()

    def tend(self) -> None:
        """Look after it when it is time to. Returns at once."""
        if self._look is not None:
            if not self._look.done():
                return
            self._finish(*self._look.result())
        now_s = asyncio.get_running_loop().time() if self._held else 0.0
        if self._held and now_s - self._looked_at_s >= EMPTY_S:
            self._looked_at_s = now_s
            self._look = self._worker.submit(_look, tuple(self._held))

    def empty(self) -> None:
        """Take back now what was touched, for somebody who needs the pages."""
        for remains in self._held:
            remains.empty()

    def close(self) -> None:
        """Forget all of it; after `worker` has ended."""
        self._look = None
        while self._held:
            self._held.pop().close()

    def _finish(self, touched_bytes: int, free: list[Remains]) -> None:
        self._look = None
        if touched_bytes and not self.touched_bytes:
            _log.warning("clients use memory that was taken back", extra={"bytes": touched_bytes})
        self.touched_bytes = touched_bytes
        for remains in free:
            self._held.remove(remains)
            remains.close()


def _look(held: tuple[Remains, ...]) -> tuple[int, list[Remains]]:
    """Bytes that were touched since, and what nobody holds any more."""
    return sum(remains.empty() for remains in held), [remains for remains in held if not remains.is_held]
