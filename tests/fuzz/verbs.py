"""Requests of an engine to a real agent's verbs: each is answered with its reply or an error of ours.

An input is frames, one behind the other, on a connection of a tenant that has stored three blocks. Time is virtual.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Final

from threats.frames import ENGINE_VALID

from fuzz.target import Form, Target, expect, framed
from kvstrata_api import failures, wire
from kvstrata_api.errors import InvalidInputError, KvStrataError
from support.agent.doubles import SCOPE, digest
from support.agent.engine import Engine, close_clean
from support.runner.virtual_loop import run_virtually

_REQUESTS_MAX: Final = 16
_KEYS: Final = b"".join(map(digest, (1, 2, 3, 4)))
_KNOWN: Final = (
    wire.OpenSession(2, "s"),
    wire.Lookup(3, SCOPE, _KEYS, "s"),
    wire.Acquire(4, SCOPE, _KEYS, "s", 5.0, 0.1, 1024),
    wire.Reserve(5, SCOPE, digest(3), digest(4), "s"),
    wire.Publish(6, (4,), (b"c" * 16,)),
    wire.Release(7, (1, 2), (1,)),
    wire.Pin(8, SCOPE, _KEYS, 5.0),
    wire.Demote(9, SCOPE, _KEYS),
    wire.Drop(10, SCOPE, _KEYS),
    wire.WhyMiss(11, SCOPE, _KEYS),
    wire.RouteHint(12, SCOPE, _KEYS),
    wire.CloseSession(13, "s"),
)


def _frames(stream: bytes) -> Iterator[bytes]:
    while len(stream) > 4:
        size = int.from_bytes(stream[:4], "big")
        yield stream[4 : 4 + size]
        stream = stream[4 + size :]


def _seeds() -> list[bytes]:
    known = [wire.encode(request) for request in _KNOWN]
    pairs = (b"".join(pair) for pair in itertools.pairwise(known))
    return [b"".join(known), *pairs, b"".join(ENGINE_VALID[4:20])]


def _repaired(stream: bytes) -> bytes:
    return b"".join(framed(body) for body in list(_frames(stream))[:_REQUESTS_MAX] if body)


async def _ask(stream: bytes) -> bool:
    engine = await Engine().attach()
    await engine.store(1, 2, 3)
    answered = False
    for body in list(_frames(stream))[:_REQUESTS_MAX]:
        try:
            request = wire.decode_request(body)
        except InvalidInputError:
            continue
        try:
            reply = await engine.ask(request)
        except KvStrataError as e:
            wire.encode(failures.failure(request.id, engine.verbs.grants_version, e))
            continue
        expect(isinstance(reply, wire.REPLIES[type(request)]), "a request has its own kind of reply", request, reply)
        expect(reply.id == request.id, "which repeats its id", request, reply)
        wire.decode_reply(wire.encode(reply)[4:])
        engine.clock.now_s += 0.5
        answered = True
    await close_clean(engine)
    return answered


def _check(stream: bytes) -> bool:
    random.seed(0)
    return run_virtually(_ask(stream))


TARGETS: Final = (
    Target(
        "engine-verbs", "requests of an engine to the verbs behind them", _seeds, _check, _repaired, form=Form.FRAMES,
        is_slow=True,
    ),
)  # fmt: skip
