"""Laws of requests that the wire lets through and no sane client sends: they are answered, and leave nothing behind."""

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata_api import wire
from kvstrata_api.errors import KvStrataError
from support.agent.doubles import LAYOUT, SCOPE, digest
from support.agent.engine import Engine, close_clean
from support.runner.virtual_loop import run_virtually

pytestmark = pytest.mark.unit

INTEGERS = st.integers(-(2**63), 2**64 - 1)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "id": INTEGERS,
    "version": INTEGERS,
    "scope": st.sampled_from(["", SCOPE, "tenant/b/uid-b/v1", "a/b"]),
    "digests": st.lists(st.integers(0, 6).map(digest), max_size=40).map(b"".join),
    "parent": st.sampled_from([b"", digest(1), digest(2), digest(9), b"short"]),
    "session": st.sampled_from(["", "s", "t", "\0", "x" * wire.SESSION_CHARS_MAX]),
    "state": st.sampled_from(["decoding", "idle", "tool", "archived", ""]),
    "urgency": INTEGERS | st.integers(0, 100),
    "layout": st.just(LAYOUT)
    | st.builds(partial(replace, LAYOUT), layers=INTEGERS, tp_size=INTEGERS, tp_rank=INTEGERS),
    "pool": st.just("pool"),
    "token": st.sampled_from(["a", "", "x"]),
}
SECONDS = st.sampled_from([-1e9, -0.0, 0.0, 1e-300, 30.0, 1e9])
NUMBERS = st.lists(INTEGERS | st.integers(0, 9), max_size=20).map(tuple)
BY_TYPE: dict[object, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    str: st.text(max_size=8),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    tuple[int, ...]: NUMBERS,
    tuple[bytes, ...]: st.lists(st.binary(max_size=17), max_size=20).map(tuple),
}


def asked(kind: type) -> st.SearchStrategy[Any]:
    """Any request of a verb, as far as its types go."""
    made = {}
    for field in msgspec.structs.fields(kind):
        made[field.name] = FIELDS.get(field.name, BY_TYPE.get(field.type, SECONDS))
    if kind is wire.OpenSession:
        made = (
            {"id": FIELDS["id"]}
            | {f: st.sampled_from(["", "s", "t", "u"]) for f in ("session", "parent", "priority")}
            | {f: st.sampled_from([-1, 0, 16, 32]) for f in ("sink_tokens", "window_tokens", "anchor_tokens")}
        )
    return st.builds(kind, **made)


def requests() -> st.SearchStrategy[Any]:
    return st.one_of([asked(kind) for kind in get_args(wire.AnyRequest)])


async def ask_all(every: list[Any]) -> None:
    engine = await Engine().attach()
    await engine.store(1, 2, 3)
    for request in every:
        body = wire.encode(request)[4:]
        try:
            await engine.ask(wire.decode_request(body))
        except KvStrataError:
            continue
    await close_clean(engine)


@given(st.lists(requests(), max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_absurd_requests_are_answered_and_leave_nothing_behind(every: list[Any]) -> None:
    run_virtually(ask_all(every))
