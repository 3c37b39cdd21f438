"""What a client counts about itself."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstrata_api.errors import UnauthenticatedError
from kvstrata_client.verbs.leases import warn
from kvstrata_client.verbs.results import Answer, Loaded, Stored


class Renewable(Protocol):
    """A connection that can present its token again."""

    def ask_for_renewal(self) -> None:
        """Have it presented as soon as somebody works on the connection."""


@dataclass(slots=True)
class Counters:
    """Monotonic counts since the client was made; any thread may add."""

    calls: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Calls that answered absence, by the name of the error."""
    busy: int = 0
    """Answers with less than was asked for because the agent's path to the rest is congested."""
    loaded_blocks: Counter[str] = field(default_factory=Counter)
    """Verified blocks by where they were: a tier name, or `remote`."""
    wanted_blocks: int = 0
    """Blocks of prompts that were asked for."""
    shared_blocks: int = 0
    corrupt_blocks: int = 0
    """Copies that failed their checksum: misses, and never handed out."""
    lost_blocks: int = 0
    """Blocks read under leases that were over before the reader was done, or that nobody vouches for: void."""
    published_blocks: int = 0
    copied_blocks: int = 0
    refused_blocks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, answer: Answer[Any]) -> None:
        """Count one call."""
        with self._lock:
            self.calls += 1
            self.busy += answer.busy_s > 0
            if answer.error is not None:
                self.errors[type(answer.error).__name__] += 1

    def settle(self, answers: Iterable[Answer[Any]], link: Renewable | None, *, is_strict: bool) -> None:
        """Count answers; have a refused token presented again. Raises the first error for a strict client."""
        for answer in answers:
            self.note(answer)
            if isinstance(answer.error, UnauthenticatedError) and link is not None:
                link.ask_for_renewal()
            if is_strict and answer.error is not None:
                raise answer.error

    def judge(self, leases: int, lived: int) -> bool:
        """Count and log leases that did not live until their release; true when all of them did."""
        if lived == leases:
            return True
        with self._lock:
            self.lost_blocks += leases
        warn(leases)
        return False

    def note_blocks(self, wanted_blocks: int, sources: Sequence[str]) -> None:
        """Count blocks that were asked for, and where those were that came."""
        with self._lock:
            self.wanted_blocks += wanted_blocks
            self.loaded_blocks.update(sources)

    def note_load(self, wanted_blocks: int, loaded: Loaded) -> None:
        """Count one load."""
        self.note_blocks(wanted_blocks, loaded.sources)
        with self._lock:
            self.shared_blocks += loaded.shared_blocks
            self.corrupt_blocks += loaded.corrupt_blocks
            self.lost_blocks += loaded.lost_blocks
        if loaded.lost_blocks:
            warn(loaded.lost_blocks)

    def note_store(self, stored: Stored) -> None:
        """Count one store."""
        with self._lock:
            self.published_blocks += stored.published
            self.copied_blocks += stored.copied
            self.refused_blocks += stored.refused
