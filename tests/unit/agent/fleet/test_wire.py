"""The protocol between agents: what comes out went in, and everything else is refused by name and limit."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata_agent.fleet.peers import wire
from kvstrata_api.errors import InvalidInputError

pytestmark = pytest.mark.unit

ids = st.integers(0, 2**31)
questions = st.one_of(
    st.builds(wire.Hello, ids, st.integers(0, 9), st.text(max_size=40), st.text(max_size=200)),
    st.builds(wire.Describe, ids),
    st.builds(
        wire.Lend,
        ids,
        st.text(max_size=100),
        st.binary(min_size=16, max_size=16),
        st.integers(1, 50).map(lambda n: b"k" * 20 * n),
        st.floats(0, 100),
    ),
    st.builds(
        wire.Trace,
        ids,
        st.text(max_size=100),
        st.binary(min_size=20, max_size=20),
        st.integers(1, wire.KEYS_MAX),
        st.integers(0, 2**63),
    ),
    st.builds(
        wire.Offer,
        ids,
        st.text(max_size=100),
        st.text(min_size=1, max_size=wire.TIER_CHARS_MAX),
        st.binary(min_size=16, max_size=16),
        st.integers(1, wire.BLOCK_BYTES_MAX),
        st.integers(1, 50).map(lambda n: b"k" * 20 * n),
        st.sampled_from([b"", b"p" * 20]),
        st.text(max_size=wire.TIER_CHARS_MAX),
    ),
    st.builds(wire.Pull, ids, st.lists(st.integers(0, 2**62), max_size=50).map(tuple)),
    st.builds(wire.End, ids, st.lists(st.integers(0, 2**62), max_size=50).map(tuple)),
)
loans = st.one_of(
    st.just(wire.Loan()),
    st.builds(
        wire.Loan,
        st.integers(1, 2**62),
        st.integers(0, 2**63),
        st.integers(0, 2**40),
        st.integers(0, 2**48),
        st.integers(0, 2**63),
        st.sampled_from([b"", b"p" * 20]),
        st.binary(min_size=16, max_size=16),
    ),
)
answers = st.one_of(
    st.builds(wire.Welcome, ids, st.integers(0, 9), st.text(max_size=40), st.integers(0, 2**63)),
    st.builds(wire.Described, ids, st.integers(0, 99), st.binary(max_size=500)),
    st.builds(wire.Lending, ids, st.integers(0, 99), st.lists(loans, max_size=20).map(tuple)),
    st.builds(wire.Chunk, ids, st.integers(0, 2**62), st.integers(0, 2**40), st.integers(1, wire.CHUNK_BYTES_MAX)),
    st.builds(wire.Taken, ids, st.integers(0, wire.KEYS_MAX), st.text(max_size=wire.REASON_CHARS_MAX)),
    st.builds(
        wire.Traced,
        ids,
        st.binary(min_size=16, max_size=16),
        st.integers(1, 2**40),
        st.integers(0, 50).map(lambda n: b"k" * 20 * n),
        st.sampled_from([b"", b"p" * 20]),
    ),
    st.builds(wire.Done, ids),
    st.builds(wire.Refused, ids, st.text(max_size=100)),
)


def body_of(frame: bytes) -> bytes:
    assert wire.decode_length(frame[: wire.LENGTH_BYTES]) == len(frame) - wire.LENGTH_BYTES
    return frame[wire.LENGTH_BYTES :]


@given(questions)
def test_questions_come_out_as_they_went_in(question: wire.Question) -> None:
    assert wire.decode_question(body_of(wire.encode(question))) == question


@given(answers)
def test_answers_come_out_as_they_went_in(answer: wire.Answer) -> None:
    assert wire.decode_answer(body_of(wire.encode(answer))) == answer


@given(st.binary(max_size=300))
@example(b"\x91\xa2\x00\x80")  # A tag that is no text.
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    for decode in (wire.decode_question, wire.decode_answer):
        try:
            decode(noise)
        except InvalidInputError:
            continue


@given(st.one_of(questions, answers), st.data())
def test_a_cut_frame_is_refused(message: wire.Question | wire.Answer, data: st.DataObject) -> None:
    body = body_of(wire.encode(message))
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    decode = wire.decode_question if isinstance(message, wire.Question) else wire.decode_answer

    with pytest.raises(InvalidInputError):
        decode(cut)


@pytest.mark.parametrize("size", [0, wire.FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_a_frame_of_a_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(InvalidInputError, match=str(size)):
        wire.decode_length(size.to_bytes(4, "big"))


@pytest.mark.parametrize(
    "message",
    [
        wire.Lend(1, "s", b"L" * 16, b"", 1.0),
        wire.Lend(1, "s", b"L" * 16, b"k" * 19, 1.0),
        wire.Lend(1, "s", b"L" * 16, b"k" * 20 * (wire.KEYS_MAX + 1), 1.0),
        wire.Lend(1, "s", b"L" * 15, b"k" * 20, 1.0),
        wire.Lend(1, "s" * (wire.SCOPE_CHARS_MAX + 1), b"L" * 16, b"k" * 20, 1.0),
        wire.Lend(1, "s", b"L" * 16, b"k" * 20, 1.0, 0, ("t",) * (wire.TIERS_MAX + 1)),
        wire.Lend(1, "s", b"L" * 16, b"k" * 20, 1.0, 0, ("t" * (wire.TIER_CHARS_MAX + 1),)),
        wire.Hello(1, 1, "a", "t" * (wire.TOKEN_CHARS_MAX + 1)),
        wire.Pull(1, (1,) * (wire.KEYS_MAX + 1)),
        wire.Offer(1, "s", "", b"L" * 16, 4096, b"k" * 20, b"", ""),
        wire.Offer(1, "s", "a" * (wire.TIER_CHARS_MAX + 1), b"L" * 16, 4096, b"k" * 20, b"", ""),
        wire.Offer(1, "s", "a", b"L" * 16, 4096, b"k" * 20, b"", "t" * (wire.TIER_CHARS_MAX + 1)),
        wire.Offer(1, "s", "a", b"L" * 16, 0, b"k" * 20, b"", ""),
        wire.Offer(1, "s", "a", b"L" * 16, wire.BLOCK_BYTES_MAX + 1, b"k" * 20, b"", ""),
        wire.Offer(1, "s", "a", b"L" * 16, 4096, b"", b"", ""),
        wire.Offer(1, "s", "a", b"L" * 16, 4096, b"k" * 20, b"p", ""),
        wire.Offer(1, "s", "a", b"L" * 15, 4096, b"k" * 20, b"", ""),
        wire.Trace(1, "s", b"k" * 19, 1, 7),
        wire.Trace(1, "s" * (wire.SCOPE_CHARS_MAX + 1), b"k" * 20, 1, 7),
        wire.Trace(1, "s", b"k" * 20, 0, 7),
        wire.Trace(1, "s", b"k" * 20, wire.KEYS_MAX + 1, 7),
    ],
)
def test_questions_over_a_limit_are_refused(message: wire.Question) -> None:
    with pytest.raises(InvalidInputError):
        wire.decode_question(body_of(wire.encode(message)))


@pytest.mark.parametrize(
    "message",
    [
        wire.Chunk(1, 1, 0, 0),
        wire.Chunk(1, 1, 0, wire.CHUNK_BYTES_MAX + 1),
        wire.Taken(1, -1, ""),
        wire.Taken(1, wire.KEYS_MAX + 1, ""),
        wire.Taken(1, 0, "R" * (wire.REASON_CHARS_MAX + 1)),
        wire.Traced(1, b"L" * 16, 4096, b"k" * 19, b""),
        wire.Traced(1, b"L" * 15, 4096, b"k" * 20, b""),
        wire.Traced(1, b"L" * 16, 0, b"k" * 20, b""),
        wire.Traced(1, b"L" * 16, 4096, b"k" * 20, b"p" * 19),
        wire.Traced(1, b"L" * 16, 4096, b"k" * 20 * (wire.KEYS_MAX + 1), b""),
        wire.Lending(1, 0, (wire.Loan(1, 2, 3, 4, 5, b"", b"short"),)),
        wire.Lending(1, 0, (wire.Loan(1, 2, 3, 4, 5, b"parent", b"c" * 16),)),
        wire.Lending(
            1, 0, (wire.Loan(1, 2, 3, 4, 5, b"", b"c" * 16, wire.ReadAddress("t", "f" * 129, 0, 1, "raw", 1)),)
        ),
        wire.Lending(1, 0, (wire.Loan(1, 2, 3, 4, 5, b"", b"c" * 16, wire.ReadAddress("t", "f", 0, 1, "c" * 129, 1)),)),
    ],
)
def test_answers_over_a_limit_are_refused(message: wire.Answer) -> None:
    with pytest.raises(InvalidInputError):
        wire.decode_answer(body_of(wire.encode(message)))


def test_agents_that_know_nothing_of_shared_tiers_are_understood() -> None:
    """Both fields stand at the end of their messages, where older agents leave them out and newer ones are not read."""
    asked, loan = ["Lend", 7, "s", b"L" * 16, b"k" * 20, 1.0, 3], [1, 0, 4096, 5, 3, b"", b"c" * 16]

    question = wire.decode_question(msgspec.msgpack.encode(asked))
    answer = wire.decode_answer(msgspec.msgpack.encode(["Lending", 7, 1, [loan]]))

    assert isinstance(question, wire.Lend)
    assert question.tiers == ()
    assert isinstance(answer, wire.Lending)
    assert answer.loans[0].place is None
    newer = wire.decode_question(msgspec.msgpack.encode([*asked, ["flash"], "of a later build"]))
    assert isinstance(newer, wire.Lend)
    assert newer.tiers == ("flash",)


def follow(part_bytes: int = 4096, have: int = 0, most: int = 4, name: str = "n") -> wire.Follow:
    return wire.Follow(1, "s", b"L" * 16, b"k" * 40, 7, name, part_bytes, have, most, 0.5)


def test_a_question_for_growing_blocks_is_read_as_it_was_asked() -> None:
    assert wire.decode_question(wire.encode(follow())[wire.LENGTH_BYTES :]) == follow()


@pytest.mark.parametrize(
    "asked", [follow(part_bytes=0), follow(have=-1), follow(most=-1), follow(name="n" * 129)], ids=str
)
def test_a_question_for_growing_blocks_that_makes_no_sense_is_refused(asked: wire.Follow) -> None:
    with pytest.raises(InvalidInputError, match="part_bytes"):
        wire.decode_question(wire.encode(asked)[wire.LENGTH_BYTES :])


def test_a_frame_that_is_nested_too_deeply_behind_its_fields_is_malformed() -> None:
    behind = b"\x91" * 20_000
    with pytest.raises(InvalidInputError, match="malformed question"):
        wire.decode_question(b"\x93\xa8Describe\x01" + behind)
    with pytest.raises(InvalidInputError, match="malformed answer"):
        wire.decode_answer(b"\x93\xa4Done\x01" + behind)
