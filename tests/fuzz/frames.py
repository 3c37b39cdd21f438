"""Frames of engines, of agents and of other agents.

The oracle beside the product's own decoders is `threats.frames`: what a request must be, by hand from the protocol.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec
from threats.frames import ENGINE, ENGINE_VALID, KEYS, OWN, PEER, Rules, peer_valid

from fuzz.target import Form, Target, expect, framed
from kvstrata_agent.fleet.peers import wire as peer
from kvstrata_api import failures, wire
from kvstrata_api.blocks import LAYOUT_ID_BYTES
from kvstrata_api.errors import InvalidInputError

_SUM: Final = b"c" * 16
_ID: Final = b"L" * LAYOUT_ID_BYTES
_LEASED: Final = wire.Leased(7, 1, 4096, 3, _SUM, "dram", 5, _SUM * 2)
_EXTENT: Final = wire.ExtentGrant(1, 1 << 26, is_writable=True)
_REPLIES: Final = tuple(
    wire.encode(reply)
    for reply in (
        wire.Welcome(1, 2, 1, "p.n", "n", 7),
        wire.Granted(
            2,
            2,
            "a",
            (wire.ScopeGrant(OWN, "tenant", "a", b"s" * 32, can_write=True),),
            OWN,
            4096,
            4096,
            60.0,
            ("Drop",),
        ),
        wire.Done(3, 2, 4, "accepted"),
        wire.Found(4, 2, b"\1\0", 1, b"\0", ("dram", "nvme")),
        wire.Acquired(5, 2, (_LEASED,), (_EXTENT,), 7, (2,), 0.5),
        wire.Reserved(6, 2, (wire.Slot(1, 1, 0, 4),), (_EXTENT,), 7, 30.0, (), wire.Handover("p.n", 7, "grown")),
        wire.Published(7, 2, b"\1\2\0"),
        wire.Text(8, 2, "{}"),
        wire.Failed(9, 2, "TierFullError", "no room", 5.0),
        wire.Arrived(10, 2, 2, (_SUM,)),
    )
)
_PLACE: Final = peer.ReadAddress("flash", "seg-00000001-1000-4.kv", 4096, 8192, "raw", 4096)
_QUESTIONS: Final = tuple(
    peer.encode(question)
    for question in (
        peer.Offer(9, OWN, "a", _ID, 4096, KEYS, b"", "nvme"),
        peer.Weights(10, "model", "r1"),
        peer.ReadWeights(11, "model", "r1", "sha256:00", -1, 0, 4096),
        peer.Lend(12, OWN, _ID, KEYS, 5.0, 7, ("flash",), "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),
    )
)
_ANSWERS: Final = tuple(
    peer.encode(answer)
    for answer in (
        peer.Welcome(1, 1, "p.n", 7),
        peer.Described(2, 3, b"nixl"),
        peer.Lending(
            3, 3, (peer.Loan(1, 64, 4096, 5, 7, b"", _SUM), peer.Loan(2, 0, 4096, 5, 7, KEYS[:20], _SUM, _PLACE))
        ),
        peer.Chunk(4, 1, 0, 4096),
        peer.Followed(5, 2, (_SUM,), (b"",), (4,), (b"",)),
        peer.Traced(6, _ID, 4096, KEYS, b""),
        peer.Taken(7, 2, "TierFull"),
        peer.WeightsHeld(8, "sha256:00", 100, 100),
        peer.Done(9),
        peer.Refused(10, "no"),
    )
)


def _repaired(frame: bytes) -> bytes:
    return framed(frame[4:])


def _decoded(body: bytes, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Any:
    """What a body says; None where it is refused. Writing it down again and reading that changes nothing."""
    try:
        message = decode(body)
    except InvalidInputError:
        return None
    written = encode(message)
    expect(encode(decode(written[4:])) == written, "a message that was taken is written and read again alike", message)
    return message


def _by_rules(message: Any, body: bytes, rules: Rules) -> None:
    """What was taken is a request by the rules that were written by hand; they have no opinion on some verbs."""
    if type(message).__name__ in rules.verbs:
        expect(rules.is_request(body), "only what the protocol allows is taken", message, body)


def _body(frame: bytes, size_bytes: Callable[[bytes], int]) -> bytes | None:
    """What follows a frame's length; None where that is refused."""
    try:
        return frame[4 : 4 + size_bytes(frame[:4])]
    except InvalidInputError:
        return None


def _check_request(frame: bytes) -> bool:
    body = _body(frame, wire.frame_bytes)
    if body is None:
        return False
    request = _decoded(body, wire.decode_request, wire.encode)
    if request is None:
        expect(isinstance(wire.refused_id(body), int), "an id is a number", body)
        return False
    _by_rules(request, body, ENGINE)
    return True


def _check_reply(frame: bytes) -> bool:
    reply = _decoded(frame[4:], wire.decode_reply, wire.encode)
    if isinstance(reply, wire.Failed):
        expect(str(failures.error_of(reply)) == reply.message, "a failure is the error that it was made of", reply)
    return reply is not None


def _check_question(frame: bytes) -> bool:
    body = _body(frame, peer.decode_length)
    question = _decoded(body, peer.decode_question, peer.encode) if body is not None else None
    if body is not None and question is not None:
        _by_rules(question, body, PEER)
    return question is not None


def _check_answer(frame: bytes) -> bool:
    return _decoded(frame[4:], peer.decode_answer, peer.encode) is not None


def _names(union: Any) -> tuple[bytes, ...]:
    return tuple(msgspec.msgpack.encode(kind.__name__) for kind in union.__args__)


TARGETS: Final = (
    Target(
        "engine-requests", "frames that engines send to an agent", lambda: ENGINE_VALID, _check_request, _repaired,
        _names(wire.AnyRequest), form=Form.MSGPACK,
    ),
    Target(
        "agent-replies", "frames that an agent sends to engines", lambda: _REPLIES, _check_reply, _repaired,
        _names(wire.AnyReply), form=Form.MSGPACK,
    ),
    Target(
        "peer-questions", "frames that agents ask others with", lambda: (*peer_valid("token"), *_QUESTIONS),
        _check_question, _repaired, _names(peer.Question), form=Form.MSGPACK,
    ),
    Target(
        "peer-answers", "frames that agents are answered with", lambda: _ANSWERS, _check_answer, _repaired,
        _names(peer.Answer), form=Form.MSGPACK,
    ),
)  # fmt: skip
