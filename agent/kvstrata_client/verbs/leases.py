"""Leases as a context: what was acquired is released, and what was read in place is confirmed or raised about.

The owner of the bytes may take a lease back when its reader sleeps past its time. So the end of a lease is a question:
only an owner that answers "it lived until now" makes what was read under it good.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from kvstrata_api.errors import LeaseLostError
from kvstrata_client.verbs.results import Lease

_log: Final = logging.getLogger(__name__)


class _Held(Sequence[Lease]):
    """Leases of leading blocks. May be empty."""

    def __init__(self, leases: Sequence[Lease], busy_s: float) -> None:
        self._leases = tuple(leases)
        self.busy_s = busy_s
        """Not 0.0 where there are fewer only because the agent's path to the next block is congested: estimated seconds
        until it is free."""

    def __len__(self) -> int:
        return len(self._leases)

    def __getitem__(self, index: int) -> Lease:  # type: ignore[override]
        return self._leases[index]

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    def _taken(self) -> tuple[Lease, ...]:
        leases, self._leases = self._leases, ()
        return leases


class Leases(_Held):
    """Leases of a blocking client; leaving the `with` block releases them.

    The exit raises `LeaseLostError` when one of them did not live until then, unless another error is on its way: all
    that was read from the views in the block, or is still being read by a device, is void. The views themselves raise
    `ValueError` from then on, unless something like an array still uses them.
    """

    def __init__(self, leases: Sequence[Lease], end: Callable[[Sequence[Lease]], bool], busy_s: float = 0.0) -> None:
        """Hold `leases` until `end` is called with them, which returns whether all of them lived."""
        super().__init__(leases, busy_s)
        self._end = end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        count = len(self)
        if not self.release() and error is None:
            raise lost(count)

    def release(self) -> bool:
        """End the leases now, when the reader and its devices are done; the views are void from here on.

        True when all of them lived until now, so that what was read in place is good. Again, it returns True: there is
        nothing left to end.
        """
        leases = self._taken()
        is_valid = not leases or self._end(leases)
        void(leases)
        return is_valid


class AsyncLeases(_Held):
    """The same for an asyncio client, in an `async with` block."""

    def __init__(
        self, leases: Sequence[Lease], end: Callable[[Sequence[Lease]], Awaitable[bool]], busy_s: float = 0.0
    ) -> None:
        """Hold `leases` until `end` is called with them, which returns whether all of them lived."""
        super().__init__(leases, busy_s)
        self._end = end

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        count = len(self)
        if not await self.release() and error is None:
            raise lost(count)

    async def release(self) -> bool:
        """See `Leases.release`."""
        leases = self._taken()
        is_valid = not leases or await self._end(leases)
        void(leases)
        return is_valid


def lost(count: int) -> LeaseLostError:
    """Make the error for leases that did not live until they were released."""
    return LeaseLostError(f"a lease among {count} was over before its reader was done; what was read is void")


def warn(count: int) -> None:
    """Log that reads are void."""
    _log.warning("%d leased blocks are void: their reader was too late or their agent went away", count)


def void(leases: Sequence[Lease]) -> None:
    """Make views useless, as far as nobody uses them."""
    for lease in leases:
        try:  # noqa: SIM105  A context for each of them takes longer than the release.
            lease.view.release()
        except BufferError:
            pass
