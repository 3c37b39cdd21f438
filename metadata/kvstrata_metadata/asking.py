"""Asks the API server and the directory and takes silence for an answer: unknown is a state that decisions know."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from kvstrata_api.errors import DirectoryAwayError, ForbiddenError, RetryableError, UnauthenticatedError

T = TypeVar("T")

ASK_TIMEOUT_S: Final = 4.0
"""Of one question: rounds must come around while the API server hangs. 5,000 Leases take about a second."""

_log = logging.getLogger(__name__)


async def ask(read: Callable[[], Awaitable[T]], what: str) -> T | None:
    """Return what `read` returns; None when the API server does not answer in time or refuses."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await read()
    except (RetryableError, UnauthenticatedError, ForbiddenError, TimeoutError) as e:
        _log.warning("api server gives no answer", extra={"what": what, "error": f"{type(e).__name__}: {e}"})
        return None


@contextlib.contextmanager
def partly() -> Iterator[None]:
    """Go on with the rest where only a part of the directory is away; the next round takes up what was left."""
    try:
        yield
    except DirectoryAwayError as e:
        if not e.is_partial:
            raise
        _log.warning("a part of the directory is away", extra={"error": str(e)})
