"""Laws of the local protocol: what is sent is what is read, and anything else is refused with a reason."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import failures, wire
from kvstrata_api.blocks import KEY_BYTES
from kvstrata_api.errors import AgentAwayError, InvalidInputError, TierFullError, UnsupportedError

pytestmark = pytest.mark.unit


@given(st.integers(0, 2**31), st.text(max_size=20), st.integers(0, 40))
def test_a_request_survives_the_wire(id_: int, session: str, keys: int) -> None:
    request = wire.Acquire(id_, "scope", b"k" * KEY_BYTES * keys, session)
    frame = wire.encode(request)

    assert wire.frame_bytes(frame[:4]) == len(frame) - 4
    assert wire.decode_request(frame[4:]) == request


@given(st.binary(max_size=200))
def test_noise_is_refused_with_a_reason(noise: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"malformed|digests|session"):
        wire.decode_request(noise)


@pytest.mark.parametrize("size", [0, wire.FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_a_frame_outside_the_limits_is_refused_before_it_is_read(size: int) -> None:
    with pytest.raises(InvalidInputError, match=str(wire.FRAME_BYTES_MAX)):
        wire.frame_bytes(size.to_bytes(4, "big"))


def test_half_a_digest_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=f"multiple of {KEY_BYTES}"):
        wire.decode_request(wire.encode(wire.Lookup(1, "s", b"half"))[4:])


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(InvalidInputError, match="limit"):
        wire.encode(wire.Text(1, 0, "x" * (wire.FRAME_BYTES_MAX + 1)))


def test_errors_keep_their_meaning_over_the_wire() -> None:
    sent = failures.failure(7, 1, TierFullError("need 4096 B, 512 B free", delay_s=0.5))
    back = failures.error_of(wire.decode_reply(wire.encode(sent)[4:]))  # type: ignore[arg-type]

    assert type(back) is TierFullError
    assert str(back) == "need 4096 B, 512 B free"
    assert back.delay_s == 0.5
    assert type(failures.error_of(wire.Failed(1, 0, "Newer", "m"))) is UnsupportedError
    assert type(failures.error_of(failures.failure(1, 0, AgentAwayError("x")))) is AgentAwayError


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), 1e10])
@pytest.mark.parametrize(
    "request_of",
    [
        lambda s: wire.Acquire(1, "s", b"", lease_s=s),
        lambda s: wire.Acquire(1, "s", b"", deadline_s=s),
        lambda s: wire.Pin(1, "s", b"", s),
        lambda s: wire.TouchSession(1, "s", "idle", 0, s),
        lambda s: wire.CloseSession(1, "s", deadline_s=s),
    ],
)
def test_a_duration_that_cannot_be_compared_is_refused(
    request_of: Callable[[float], wire.AnyRequest], seconds: float
) -> None:
    """No lease of it would ever end."""
    with pytest.raises(InvalidInputError):
        wire.decode_request(wire.encode(request_of(seconds))[4:])


@pytest.mark.parametrize(
    "request_",
    [
        wire.Hello(1, wire.PROTOCOL_VERSION, "c" * (wire.CLIENT_CHARS_MAX + 1)),
        wire.Release(1, (7,) * (wire.LEASES_MAX + 1)),
        wire.Release(1, (), (7,) * (wire.LEASES_MAX + 1)),
        wire.Publish(1, (7,) * (wire.KEYS_MAX + 1), ()),
        wire.Publish(1, (), (b"",) * (wire.KEYS_MAX + 1)),
        wire.Abandon(1, (7,) * (wire.KEYS_MAX + 1)),
    ],
)
def test_no_request_names_more_than_its_verb_may_take(request_: wire.AnyRequest) -> None:
    body = wire.encode(request_)[4:]
    with pytest.raises(InvalidInputError, match="limit"):
        wire.decode_request(body)


@pytest.mark.parametrize("behind", [b"\x91" * 20_000, b"\x81\xa1a" * 20_000])
def test_a_frame_that_is_nested_too_deeply_behind_its_fields_is_malformed(behind: bytes) -> None:
    with pytest.raises(InvalidInputError, match="malformed request"):
        wire.decode_request(b"\x93\xa5Stats\x01" + behind)
    assert wire.refused_id(b"\x93\xa5Stats\x01" + behind) == 0
    with pytest.raises(InvalidInputError, match="malformed reply"):
        wire.decode_reply(b"\x96\xa4Done\x01\x01\x01\xa0" + behind)
