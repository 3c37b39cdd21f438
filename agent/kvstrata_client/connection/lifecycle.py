"""How a client comes to an agent, stays attached and comes back: one generator for every kind of client. Sans-I/O.

It yields steps and is sent their outcomes; a thread or a task carries them out (`client`, `async_client`).
"""

import logging
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from kvstrata_api.errors import AgentAwayError, InvalidInputError, KvStrataError, RetryableError, UnsupportedError
from kvstrata_api.wire import PROTOCOL_VERSION
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.results import Grants

_log: Final = logging.getLogger(__name__)

FIRST_S: Final = 0.05
LAST_S: Final = 5.0
"""Bound of the wait, and so of the time a returned agent stays unused."""
ATTACH_WAIT_S: Final = 5.0
"""How long `attach` waits for the first connection before it goes on in the background."""

RENEW_AT: Final = 0.8
"""Share of a token's life after which the client attaches again; kubelets rotate projected tokens at the same share."""
RENEW_RETRY_S: Final = 5.0
"""Wait after a refused renewal: the file may still hold the old token."""
RENEW_S_MAX: Final = 86_400.0


def backoff(rng: random.Random) -> Iterator[float]:
    """Yield waits in seconds: doubling from 50 ms to 5 s, each shortened by up to half.

    The jitter keeps the engines of a node from returning to a restarted agent all at once.
    """
    wait_s = FIRST_S
    while True:
        yield wait_s * rng.uniform(0.5, 1.0)
        wait_s = min(wait_s * 2, LAST_S)


class Wake(Enum):
    """Why a client that had nothing to do goes on."""

    DUE = auto()
    RENEW = auto()
    """The agent refused a verb for want of a valid token."""
    LOST = auto()


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection; the outcome is None or the error."""


@dataclass(frozen=True, slots=True)
class Up:
    """Let verbs use the connection."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Wait until time is up or something happens; the outcome is a `Wake`."""

    timeout_s: float
    is_patient: bool = False
    """Whether verbs that were refused for want of a token are no reason to go on."""


@dataclass(frozen=True, slots=True)
class Down:
    """Close the connection, if any; verbs answer as if the agent were away, for this reason."""

    reason: KvStrataError


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next attempt."""

    wait_s: float


LifecycleStep = Connect | Up | Idle | Down | Pause | calls.Calls

Ending = tuple[KvStrataError, bool]
"""Why a connection is over, and whether it had been attached."""


def lifecycle(target: Target, rng: random.Random) -> Generator[LifecycleStep, Any, None]:
    """Attach again and again, for ever; the waits start over once an attach has succeeded.

    An exception that a step ended with is thrown in here: it ends the connection as well.
    """
    waits = backoff(rng)
    while True:
        try:
            reason, was_attached = yield from _connection(target)
        except Exception as e:  # noqa: BLE001  The root of what keeps the client: it would never come back.
            _log.exception("the connection to the agent is given up, and tried again")
            reason, was_attached = AgentAwayError(f"{type(e).__name__}: {e}"), False
        yield Down(reason)
        if was_attached:
            waits = backoff(rng)
        yield Pause(next(waits))


def _connection(target: Target) -> Generator[LifecycleStep, Any, Ending]:
    """Live one connection from connecting to its loss."""
    error = yield Connect()
    if error is not None:
        return error, False
    greeted = yield from _greet(target)
    if greeted is not None:
        return greeted, False
    grants = yield from _attach(target)
    if isinstance(grants, KvStrataError):
        return grants, False
    yield Up()
    return (yield from _stay(target, grants)), True


def _stay(target: Target, grants: Grants) -> Generator[LifecycleStep, Any, KvStrataError]:
    """Keep an attached connection alive; returns why it ended."""
    idle = Idle(renewal_s(grants))
    while True:
        wake = yield idle
        if wake is Wake.LOST:
            return RetryableError("the agent closed the connection")
        renewed = yield from _attach(target)
        if isinstance(renewed, RetryableError):
            return renewed
        idle = Idle(renewal_s(renewed)) if isinstance(renewed, Grants) else Idle(RENEW_RETRY_S, is_patient=True)


def renewal_s(grants: Grants) -> float:
    """Seconds until the next attach; never less than one, whatever the agent answers."""
    return min(max(grants.token_expires_s * RENEW_AT, 1.0), RENEW_S_MAX)


def _greet(target: Target) -> Generator[LifecycleStep, Any, KvStrataError | None]:
    answer = (yield (calls.hello(target),))[0]
    if answer.error is not None:
        return answer.error  # type: ignore[no-any-return]
    if answer.value.version != PROTOCOL_VERSION:
        return UnsupportedError(f"agent speaks protocol {answer.value.version}, this client {PROTOCOL_VERSION}")
    return None


def _attach(target: Target) -> Generator[LifecycleStep, Any, Grants | KvStrataError]:
    """Present the token as it is now; returns the grants, or why there are none."""
    try:
        token = target.read_token()
    except KvStrataError as e:
        return e
    answer = (yield (calls.attach(target, token),))[0]
    if answer.error is not None:
        return answer.error  # type: ignore[no-any-return]
    grants: Grants = answer.value
    if grants.block_bytes != target.layout.block_bytes:
        return InvalidInputError(f"agent's blocks have {grants.block_bytes} B, ours {target.layout.block_bytes} B")
    return grants
