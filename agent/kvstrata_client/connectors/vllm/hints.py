"""What vLLM's requests hint of their session and prompt, and giving it to the agent. Imports nothing of vLLM."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from kvstrata_api.wire import SESSION_CHARS_MAX
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.connectors.vllm.planner import Tokens

PARAMS: Final = "kvstrata"
"""Key of ours in `kv_transfer_params` of requests and answers."""

_SHOWN_CHARS: Final = 200
HintSeconds = Annotated[float, msgspec.Meta(ge=0, le=30 * 86_400)]
SessionName = Annotated[str, msgspec.Meta(max_length=SESSION_CHARS_MAX)]


class Hints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request says of its session and prompt: `kv_transfer_params["kvstrata"]`, and what its `kv_hints` add."""

    session: SessionName = ""
    """Its name; vLLM's `session_id` (header X-Session-ID) when empty."""
    parent: SessionName = ""
    """The session that this one forks from."""
    priority: SessionName = ""
    """Its priority class."""
    urgency: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    prefetch: bool = False
    """What this node has of the prompt comes into memory when the request arrives; the others when it has ended."""
    fetch: bool = False
    """The same of blocks wherever they are."""
    tool_wait_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """Until the next turn, which waits for a tool's answer; 0: unknown."""
    retain_s: HintSeconds = 0.0
    """The session is not finished for being idle before that."""
    pin_s: HintSeconds = 0.0
    """The prompt and its answer stay in memory for so long."""
    demote: bool = False
    """They leave memory first."""
    share: bool = False
    """They are copied to where others of the trust domain read."""
    complete: Literal["", "archive", "drop"] = ""
    """The session is over, and its prefix goes to slower tiers, or is the first to go."""


ACTION_VERSION: Final = "1"
"""Of actions in `kv_hints` that are ours; others are another component's, as are types that we do not know."""


class _NoPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing but the hint itself."""


class _ToolWait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    expected_s: float
    urgency: int | None = None


class _Retain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    for_s: float


class _Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttl_s: float


class _Complete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    archive: bool = True


ACTIONS: Final[Mapping[str, tuple[type[Any], Callable[[Any], dict[str, Any]]]]] = {
    "session_complete": (_Complete, lambda given: {"complete": "archive" if given.archive else "drop"}),
    "tool_wait": (
        _ToolWait,
        lambda given: {"tool_wait_s": given.expected_s} | ({} if given.urgency is None else {"urgency": given.urgency}),
    ),
    "retain": (_Retain, lambda given: {"retain_s": given.for_s}),
    "pin": (_Pin, lambda given: {"pin_s": given.ttl_s}),
    "demote": (_NoPayload, lambda _: {"demote": True}),
    "prefetch": (_NoPayload, lambda _: {"prefetch": True}),
    "fetch": (_NoPayload, lambda _: {"fetch": True}),
    "share": (_NoPayload, lambda _: {"share": True}),
}
"""Payload of each type of action that is ours, and the fields of `Hints` that it sets."""


def hints_of(request: Any) -> tuple[Hints, str]:
    """Read a request's hints. What is wrong with them is the second: they are none then, and the request is served."""
    given = (request.kv_transfer_params or {}).get(PARAMS) or {}
    where = f"kv_transfer_params.{PARAMS}"
    try:
        hints = msgspec.convert(given, Hints)
        where = "kv_hints"
        more = _from_actions(getattr(request, "kv_hints", None))
        hints = msgspec.convert(msgspec.structs.asdict(hints) | more, Hints)
        for name in ("tool_wait_s", "retain_s", "pin_s"):
            if not math.isfinite(getattr(hints, name)):
                return Hints(), f"{PARAMS}: {name} {getattr(hints, name)}: a finite number wanted"
        where = "session_id"
        named = hints.session or msgspec.convert(getattr(request, "session_id", None) or "", SessionName)
    except msgspec.ValidationError as e:
        return Hints(), f"{where}: {e} (given: {str(given)[:_SHOWN_CHARS]})"
    return msgspec.structs.replace(hints, session=named), ""


def _from_actions(envelope: Any) -> dict[str, Any]:
    """Fields that the actions of vLLM's envelope set. Raises `msgspec.ValidationError` for a payload that is wrong."""
    found: dict[str, Any] = {}
    for action in getattr(envelope, "actions", None) or ():
        known = ACTIONS.get(action.action_type)
        if known is not None and action.action_version == ACTION_VERSION:
            kind, fields = known
            found |= fields(msgspec.convert(action.payload, kind))
    return found


def tokens_of(request: Any) -> Tokens:
    """All tokens of a request so far."""
    return np.asarray(request.all_token_ids, dtype=np.uint32)


def give_early(cache: PrefixCache, tokens: Tokens, hints: Hints) -> None:
    """Give the hints that are for when a request has arrived."""
    if hints.fetch:
        cache.fetch(tokens, session=hints.session)
    elif hints.prefetch:
        cache.prefetch(tokens, session=hints.session)


class Generating:
    """Sessions of the requests that are being worked on: several may be of one."""

    def __init__(self) -> None:
        self._sessions: dict[str, str] = {}
        """By request."""
        self._requests: Counter[str] = Counter()

    def begin(self, request_id: str, session: str) -> bool:
        """Note a request; true where it is the first one of its session."""
        if not session or request_id in self._sessions:
            return False
        self._sessions[request_id] = session
        self._requests[session] += 1
        return self._requests[session] == 1

    def end(self, request_id: str) -> bool:
        """Note its end; true where its session goes on without any."""
        session = self._sessions.pop(request_id, "")
        self._requests[session] -= 1
        is_last = self._requests[session] <= 0
        if is_last:
            del self._requests[session]
        return is_last


def give_pause(client: Client, hints: Hints) -> None:
    """Give the hints that are for when the last request of a session that went on has ended."""
    if hints.session and hints.tool_wait_s:
        client.tool_wait(hints.session, hints.tool_wait_s, urgency=hints.urgency)
    elif hints.session:
        client.touch_session(hints.session, "idle")
    if hints.session and hints.retain_s:
        client.retain_session(hints.session, hints.retain_s)


def give_late(cache: PrefixCache, tokens: Tokens, hints: Hints) -> None:
    """Give the hints that are for when a request's blocks are stored."""
    if hints.pin_s:
        cache.pin(tokens, hints.pin_s)
    if hints.share:
        cache.share(tokens)
    if hints.demote:
        cache.demote(tokens)


def give_end(client: Client, hints: Hints) -> None:
    """Give the end of a session, which is for when all its blocks are stored."""
    if hints.session and hints.complete:
        client.complete_session(hints.session, archive=hints.complete == "archive")


Note = Callable[[], object]
"""Gives hints."""


@dataclass(frozen=True, slots=True)
class _Late:
    note: Note
    saves: set[int]
    """Those that have not ended."""
    session: str
    until_s: float


class LateNotes:
    """Notes that wait for saves: of blocks that are not stored yet, nothing can be pinned. One thread.

    They are due once these have ended, once their session goes on, which may not be ended then, and when time is up.
    """

    def __init__(self) -> None:
        self._waiting: list[_Late] = []
        """As many at most as are added within the time that one waits."""

    def add(self, note: Note, saves: Iterable[int], until_s: float, session: str = "") -> None:
        """Have a note wait for saves."""
        self._waiting.append(_Late(note, set(saves), session, until_s))

    def ended(self, saves: Iterable[int]) -> list[Note]:
        """Take note that saves have ended; returns what is due."""
        ended = set(saves)
        for late in self._waiting:
            late.saves.difference_update(ended)
        return self._taken(lambda late: not late.saves)

    def goes_on(self, session: str) -> list[Note]:
        """Take note that a session has another request; returns what is due."""
        return self._taken(lambda late: late.session == session)

    def due(self, now_s: float) -> list[Note]:
        """Return what has waited for long enough."""
        return self._taken(lambda late: late.until_s <= now_s)

    @property
    def next_s(self) -> float | None:
        """When one will have; None while none waits."""
        return min((late.until_s for late in self._waiting), default=None)

    def _taken(self, is_due: Callable[[_Late], bool]) -> list[Note]:
        due = [late for late in self._waiting if is_due(late)]
        if due:
            self._waiting = [late for late in self._waiting if not is_due(late)]
        return [late.note for late in due]
