"""What the children of I5 do: an engine that holds one of everything, and stops to live at a named point."""

from collections.abc import Callable
from typing import Final

from faults.raw_engine import Held, RawEngine, die
from kvstrata_api import wire
from kvstrata_api.blocks import pack_digests
from kvstrata_api.wire import Reply
from support.nursery import Channel

BLOCKS: Final = 4
PIN_S: Final = 300.0
PHASES: Final = ("before", "half sent", "unread", "answered")
"""Before the request is sent, after half of its frame, before its answer is read, after that."""

Ask = Callable[[RawEngine, Held, Held], wire.AnyRequest]
"""Makes a request from the engine, what it has leased, and what it has reserved."""

VERBS: Final[dict[str, Ask]] = {
    "open_session": lambda e, _l, _r: wire.OpenSession(e.next_id(), f"other-{e.seed}"),
    "fork_session": lambda e, _l, _r: wire.OpenSession(e.next_id(), f"second-{e.seed}", f"parent-{e.seed}"),
    "touch_session": lambda e, _l, _r: wire.TouchSession(e.next_id(), f"parent-{e.seed}", "decoding"),
    "close_session": lambda e, _l, _r: wire.CloseSession(e.next_id(), f"fork-{e.seed}", archive=False),
    "lookup": lambda e, _l, _r: wire.Lookup(e.next_id(), e.scope, _chain(e)),
    "acquire": lambda e, _l, _r: wire.Acquire(e.next_id(), e.scope, _chain(e), f"fork-{e.seed}"),
    "release": lambda e, leased, _r: wire.Release(e.next_id(), tuple(b.lease for b in leased.leases[:2])),
    "reserve": lambda e, _l, _r: wire.Reserve(e.next_id(), e.scope, b"", bytes(20 - 8) + e.seed.to_bytes(8, "big")),
    "publish": lambda e, _l, reserved: e.publish_request(reserved, e.fill(reserved, BLOCKS)),
    "abandon": lambda e, _l, r: wire.Abandon(e.next_id(), tuple(s.reservation for s in r.slots[:1])),
    "prefetch": lambda e, _l, _r: wire.Prefetch(e.next_id(), e.scope, _chain(e)),
    "pin": lambda e, _l, _r: wire.Pin(e.next_id(), e.scope, _chain(e), PIN_S),
    "unpin": lambda e, _l, _r: wire.Unpin(e.next_id(), e.scope, _chain(e)[:20]),
    "touch": lambda e, _l, _r: wire.Touch(e.next_id(), e.scope, _chain(e)),
    "retain": lambda e, _l, _r: wire.Retain(e.next_id(), f"parent-{e.seed}", PIN_S),
    "demote": lambda e, _l, _r: wire.Demote(e.next_id(), e.scope, _chain(e)),
    "fetch": lambda e, _l, _r: wire.Fetch(e.next_id(), e.scope, _chain(e)),
}
BETWEEN: Final = ("slot half filled", "slots filled", "block half copied", "blocks copied", "doing nothing")
POINTS: Final = (
    *(f"attach, {phase}" for phase in PHASES),
    *(f"{verb}, {phase}" for verb in VERBS for phase in PHASES),
    *BETWEEN,
)


def _chain(engine: RawEngine) -> bytes:
    return pack_digests(engine.keys(BLOCKS))


def live(channel: Channel, *, path: str, seed: int, point: str) -> None:
    """Take one of everything and die at `point`; with a point that is none, wait for the end that others make."""
    engine = RawEngine(path, seed)
    verb, _, phase = point.partition(", ")
    if verb == "attach":
        _die_asking(engine, engine.attach_request(), phase)
    leased, reserved = take_one_of_everything(engine)
    if verb in VERBS:
        _die_asking(engine, VERBS[verb](engine, leased, reserved), phase)
    if point in BETWEEN:
        _die_between(engine, leased, reserved, point)
    channel.say("holding")
    channel.hear(within_s=600.0)


def take_one_of_everything(engine: RawEngine) -> tuple[Held, Held]:
    """Attach; store a chain; hold a decoding fork of it, pins, leases and reservations."""
    engine.attach()
    parent, fork = f"parent-{engine.seed}", f"fork-{engine.seed}"
    engine.ask(wire.OpenSession(engine.next_id(), parent), wire.Done)
    engine.store(0, BLOCKS, parent)
    engine.ask(wire.OpenSession(engine.next_id(), fork, parent), wire.Done)
    engine.ask(wire.TouchSession(engine.next_id(), fork, "decoding"), wire.Done)
    pinned = engine.ask(wire.Pin(engine.next_id(), engine.scope, _chain(engine), PIN_S), wire.Done).count
    leased = engine.acquire(BLOCKS, fork)
    reserved = engine.reserve(BLOCKS, BLOCKS + 2, fork)
    assert (pinned, len(leased.leases), len(reserved.slots)) == (BLOCKS, BLOCKS, 2), "one of everything is held"
    return leased, reserved


def _die_asking(engine: RawEngine, request: wire.AnyRequest, phase: str) -> None:
    frame = wire.encode(request)
    if phase == "half sent":
        engine.send(frame[: max(1, len(frame) // 2)])
    elif phase != "before":
        engine.send(frame)
    if phase == "answered":
        engine.receive(Reply)
    die()


def _die_between(engine: RawEngine, leased: Held, reserved: Held, point: str) -> None:
    if point.startswith("slot"):
        slot = reserved.slots[0]
        half = engine.extents.view(slot.extent, slot.offset, 2048, is_writable=True)
        half[:] = engine.content(BLOCKS)[:2048]
        if point == "slots filled":
            engine.fill(reserved, BLOCKS)
    elif point.startswith("block"):
        stop = 2048 if point == "block half copied" else None
        copies = [bytes(engine.view(lease)[:stop]) for lease in leased.leases]
        assert copies[0] == engine.content(0)[:stop]
    die()
