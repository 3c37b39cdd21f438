"""What became of sessions, turn by turn: their states, what they read from where, wrote and waited for. No clock."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

EVENTS_MAX: Final = 65_536
"""Of all sessions together, 20 MB; the one that was heard of least lately gives way."""
PER_SESSION_MAX: Final = 64
TOGETHER_S: Final = 1.0
"""Requests of one kind so soon after each other are parts of one: a long prompt comes in batches."""


class Happened(StrEnum):
    """What happened to a session."""

    STATE = "state"
    LOAD = "load"
    STORE = "store"
    PREFETCH = "prefetch"


@dataclass(slots=True)
class SessionEvent:
    """One thing that happened to a session."""

    what: Happened
    at_s: float
    """Monotonic second at which it began."""
    until_s: float
    state: str = ""
    blocks: Counter[str] = field(default_factory=Counter)
    """By where they were, a tier or `remote`; of a store and a prefetch, where they went."""
    lacking: int = 0
    """Blocks that were asked for and not had: the engine computes them."""
    waited_s: float = 0.0
    """For blocks to come up."""
    weighed: bytes = b""
    """First block that was not in memory: what a choice to fetch or to compute is known by."""


class SessionLog:
    """A bounded memory of what happened to sessions, by tenant and name."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._max = events_max
        self._events: OrderedDict[tuple[str, str], deque[SessionEvent]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def note(self, key: tuple[str, str], event: SessionEvent) -> None:
        """Add an event, or join it with the last one that it goes on."""
        events = self._events.get(key)
        if events is None:
            events = self._events[key] = deque()
        self._events.move_to_end(key)
        if event.what is Happened.STATE and event.state == _state(events):
            return  # It is said again whenever its heads have changed.
        if events and _goes_on(events[-1], event):
            _join(events[-1], event)
            return
        events.append(event)
        self._count += 1
        if len(events) > PER_SESSION_MAX:
            events.popleft()
            self._count -= 1
        while self._count > self._max:
            self.forget(next(iter(self._events)))

    def of(self, key: tuple[str, str]) -> list[SessionEvent]:
        """What is remembered of a session, the earliest first."""
        return list(self._events.get(key, ()))

    def forget(self, key: tuple[str, str]) -> None:
        """Remember nothing of a session. Harmless when nothing is."""
        self._count -= len(self._events.pop(key, ()))


def _state(events: deque[SessionEvent]) -> str:
    """The last state that is remembered; empty where none is."""
    return next((e.state for e in reversed(events) if e.what is Happened.STATE), "")


def _goes_on(last: SessionEvent, event: SessionEvent) -> bool:
    is_part = last.what is event.what and event.what is not Happened.STATE
    return is_part and event.at_s - last.until_s < TOGETHER_S


def _join(last: SessionEvent, event: SessionEvent) -> None:
    last.until_s = event.until_s
    last.blocks.update(event.blocks)
    last.lacking += event.lacking
    last.waited_s += event.waited_s
    last.weighed = last.weighed or event.weighed
