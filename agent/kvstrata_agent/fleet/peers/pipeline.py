"""One batch of reads on its way through landing buffers: pieces move while those that have landed are verified.

Its steps run on NIXL's thread and on those that verify, each as the one before it ends. The event loop hears of the
end alone: where it was asked for each piece, its thread took more of two cores than the verification (measured).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Final, Generic, TypeVar

from kvstrata_agent.fleet.peers.nixl import Landed

P = TypeVar("P")
"""A piece: what is read at a time."""
R = TypeVar("R")
"""What became of a piece."""

MOVING: Final = 6
"""Pieces of one batch that NIXL has at a time: what sockets hold (8 MiB on both sides), and more for as long as one of
both sides waits for a core. With all asked for at once the owner took a quarter less of it than with two."""

LANES: Final = 8
"""Landing buffers of one batch, those included whose piece is verified: the wire does not wait for that."""


@dataclass(frozen=True, slots=True)
class Steps(Generic[P, R]):
    """What is done with a piece and the offset of its landing buffer. Called from any thread."""

    read: Callable[[P, int], Landed]
    """Start to read into the buffer."""
    take_over: Callable[[P, int], R]
    """Verify the buffer and copy it to where it belongs."""
    give_back: Callable[[int], None]
    """The buffer is not used any more, by NIXL neither."""


class Pipeline(Generic[P, R]):
    """Reads pieces in their order, as many at a time as there are buffers, until all are there or one is not."""

    def __init__(self, steps: Steps[P, R], pieces: Iterable[P], buffers: Sequence[int], verifiers: Executor) -> None:
        """`buffers` are offsets of landing buffers, one at least, each large enough for every piece."""
        assert buffers, "a batch without a buffer never ends"
        self._steps = steps
        self._verifiers = verifiers
        self._lock = Lock()
        self._waiting = deque(pieces)
        self._free = list(buffers)
        self._moving = 0
        self._verifying = 0
        self._is_stopped = False
        self._is_told = False
        self.is_broken = False
        """A read has failed."""
        self.error: BaseException | None = None
        """Of a verification that failed in an unforeseen way."""
        self.results: list[R] = []
        """Of the pieces that arrived."""
        self.quiet: Future[None] = Future()
        """Done when no piece is taken over now or later. Reads may be under way; they hold their own buffers."""
        self.quiet.set_running_or_notify_cancel()

    def start(self) -> None:
        """Begin; call it once."""
        self._advance()
        self._settle()

    def stop(self) -> None:
        """Start nothing more; `quiet` is done as soon as what is verified now has ended. Idempotent."""
        with self._lock:
            self._is_stopped = True
        self._settle()

    def _advance(self) -> None:
        """Start the reads that may start."""
        while (chosen := self._next()) is not None:
            piece, buffer = chosen
            self._steps.read(piece, buffer).add_done_callback(partial(self._landed, piece, buffer))

    def _next(self) -> tuple[P, int] | None:
        with self._lock:
            if self._is_stopped or not self._waiting or not self._free or self._moving == MOVING:
                return None
            self._moving += 1
            return self._waiting.popleft(), self._free.pop()

    def _landed(self, piece: P, buffer: int, flight: Landed) -> None:
        """Have a piece verified, unless its read has failed or nobody waits for it."""
        is_broken = flight.exception() is not None
        with self._lock:
            self._moving -= 1
            self.is_broken |= is_broken
            self._is_stopped |= is_broken
            is_wanted = not self._is_stopped
            if is_wanted:
                self._verifying += 1
            else:
                self._free.append(buffer)
        if is_wanted:
            self._advance()
            self._verifiers.submit(self._verify, piece, buffer)
        else:
            self._settle()

    def _verify(self, piece: P, buffer: int) -> None:
        result, error = None, None
        try:
            result = self._steps.take_over(piece, buffer)
        except BaseException as e:  # noqa: BLE001  Whoever waits for the batch is told; nothing must wait for ever.
            error = e
        with self._lock:
            self._verifying -= 1
            self._free.append(buffer)
            if result is not None:
                self.results.append(result)
            self.error = self.error or error
            self._is_stopped |= error is not None
        self._advance()
        self._settle()

    def _settle(self) -> None:
        """Give back what no piece needs any more; tell when the last is taken over."""
        with self._lock:
            is_last = self._is_stopped or not self._waiting
            unused, self._free = (self._free, []) if is_last else ([], self._free)
            is_quiet = is_last and not self._verifying and (self._is_stopped or not self._moving)
            is_first, self._is_told = is_quiet and not self._is_told, self._is_told or is_quiet
        for buffer in unused:
            self._steps.give_back(buffer)
        if is_first:
            self.quiet.set_result(None)
