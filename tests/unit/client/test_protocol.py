"""Laws of framing, of one connection's state, and of the way back to an agent."""

import os
import random
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import failures, wire
from kvstrata_api.blocks import BlockKey, Layout, ScopeId
from kvstrata_api.errors import AgentAwayError, ForbiddenError, InvalidInputError, RetryableError, UnauthenticatedError
from kvstrata_client.connection.lifecycle import (
    FIRST_S,
    LAST_S,
    RENEW_RETRY_S,
    Connect,
    Down,
    Idle,
    Pause,
    Up,
    Wake,
    backoff,
    lifecycle,
)
from kvstrata_client.connection.protocol import PENDING_MAX, Protocol, ReplyReader
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.results import Answer, Prefix, Published

pytestmark = pytest.mark.unit

LAYOUT = Layout("m", "r", "bf16", 2, layers=1, kv_heads=1, head_dim=8, element_bytes=2)
TARGET = Target(socket=None, pool="p", token="t", layout=LAYOUT)  # type: ignore[arg-type]
KEYS = [BlockKey(ScopeId("tenant/a/1/v1"), bytes([i]) * 20) for i in range(3)]
GRANTED = wire.Granted(
    0, 1, "a", (wire.ScopeGrant("s", "tenant", "a", b"k" * 32, can_write=True),), "s", 64, 4096, 600.0
)
EXTENT = wire.ExtentGrant(3, 8192, is_writable=False)


def extent_fd() -> int:
    fd = os.memfd_create("extent")
    os.truncate(fd, 8192)
    return fd


def sent(protocol: Protocol, *asked: calls.Call[Any]) -> tuple[list[int], list[wire.AnyRequest]]:
    ids, data = protocol.send(asked)
    return ids, requests(data)


def requests(data: bytes) -> list[wire.AnyRequest]:
    parsed = []
    while data:
        size = wire.frame_bytes(data[:4])
        parsed.append(wire.decode_request(data[4 : 4 + size]))
        data = data[4 + size :]
    return parsed


replies = st.lists(
    st.one_of(
        st.builds(wire.Done, st.integers(0, 9), st.just(1), st.integers(0, 99)),
        st.builds(wire.Text, st.integers(0, 9), st.just(1), st.text(max_size=20)),
        st.builds(wire.Published, st.integers(0, 9), st.just(1), st.binary(max_size=8)),
    ),
    max_size=8,
)


@given(replies, st.lists(st.integers(1, 9), max_size=40))
def test_replies_come_out_whole_and_in_order_however_the_stream_is_cut(
    wanted: list[wire.AnyReply], cuts: list[int]
) -> None:
    stream = b"".join(map(wire.encode, wanted))
    reader, seen = ReplyReader(), []
    for cut in [*cuts, len(stream)]:
        seen += [a.reply for a in reader.feed(stream[:cut])]
        stream = stream[cut:]

    assert seen == wanted


def test_descriptors_go_to_the_replies_that_grant_extents_in_order() -> None:
    reader = ReplyReader()
    grants = wire.Reserved(2, 1, (), (EXTENT, EXTENT), 1, 1.0)
    stream = wire.encode(wire.Done(1, 1)) + wire.encode(grants) + wire.encode(wire.Acquired(3, 1, (), (EXTENT,), 1))
    early = list(reader.feed(stream[:40], (10, 11)))
    late = list(reader.feed(stream[40:], (12,)))

    assert [(a.reply.id, a.fds) for a in [*early, *late]] == [(1, ()), (2, (10, 11)), (3, (12,))]
    assert reader.unclaimed_fds() == []


def test_a_grant_without_its_descriptor_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="grants 1 extents, 0 descriptors came"):
        list(ReplyReader().feed(wire.encode(wire.Acquired(3, 1, (), (EXTENT,), 1))))


def test_descriptors_of_an_unfinished_reply_can_be_closed() -> None:
    reader = ReplyReader()
    assert list(reader.feed(wire.encode(wire.Acquired(3, 1, (), (EXTENT,), 1))[:7], (10,))) == []
    assert reader.unclaimed_fds() == [10]


@given(st.binary(min_size=1, max_size=64))
def test_a_stream_that_is_none_of_ours_is_refused_or_waited_for(noise: bytes) -> None:
    reader = ReplyReader()
    try:
        arrivals = list(reader.feed(noise))
    except InvalidInputError:
        return
    assert arrivals == [] or len(noise) > 4


def test_answers_find_their_callers_in_any_order() -> None:
    protocol = Protocol(64, 1)
    asked = (calls.stats(TARGET), calls.lookup(TARGET, KEYS, ""))
    ids, _ = sent(protocol, *asked)
    protocol.receive(wire.encode(wire.Found(ids[1], 1, b"\1\1\0", 2, b"\0\0", ("dram",))))
    assert not protocol.is_answered(ids)
    protocol.receive(wire.encode(wire.Text(ids[0], 1, '{"a": 1}')))

    assert protocol.is_answered(ids)
    assert [a.value for a in protocol.take(ids, asked)] == ['{"a": 1}', Prefix(2, b"\1\1\0", b"\0\0", ("dram",))]


def test_a_failure_reply_is_the_absent_answer_with_its_error() -> None:
    protocol, asked = Protocol(64, 1), (calls.lookup(TARGET, KEYS, ""),)
    ids, _ = sent(protocol, *asked)
    protocol.receive(wire.encode(failures.failure(ids[0], 1, ForbiddenError("no"))))
    (answer,) = protocol.take(ids, asked)

    assert answer.value == Prefix()
    assert isinstance(answer.error, ForbiddenError)


def test_a_reply_of_the_wrong_kind_is_a_malformed_stream() -> None:
    protocol = Protocol(64, 1)
    ids, _ = sent(protocol, calls.stats(TARGET))
    with pytest.raises(InvalidInputError, match="is Done, Text wanted"):
        protocol.receive(wire.encode(wire.Done(ids[0], 1)))


def test_an_overdue_answer_makes_the_connection_suspect_until_it_comes() -> None:
    protocol, asked = Protocol(64, 1), (calls.stats(TARGET),)
    ids, _ = sent(protocol, *asked)
    (answer,) = protocol.take(ids, asked)
    assert (answer.value, type(answer.error), protocol.is_suspect) == ("{}", AgentAwayError, True)
    protocol.receive(wire.encode(wire.Text(ids[0], 1, "{}")))

    assert not protocol.is_suspect


def test_leases_that_come_too_late_are_released_and_late_slots_abandoned() -> None:
    protocol = Protocol(64, 1)
    asked = (calls.acquire(TARGET, KEYS, "", 30, 1), calls.reserve(TARGET, b"", KEYS, ""))
    ids, _ = sent(protocol, *asked)
    protocol.take(ids, asked)
    leased = wire.Acquired(ids[0], 1, (wire.Leased(8, 3, 0, 1, b"c" * 16, "dram"),), (EXTENT,), 1)
    slots = wire.Reserved(ids[1], 1, (wire.Slot(0, 0, 0, 0), wire.Slot(9, 3, 64, 1)), (), 1, 30.0)
    undone = requests(protocol.receive(wire.encode(leased), (extent_fd(),)) + protocol.receive(wire.encode(slots)))

    assert [type(u) for u in undone] == [wire.Release, wire.Abandon]
    assert (undone[0].leases, undone[1].reservations) == ((8,), (9,))  # type: ignore[union-attr]


def test_answers_of_a_cancelled_caller_are_undone_whether_they_came_or_not() -> None:
    protocol = Protocol(64, 1)
    leased = (wire.Leased(8, 3, 0, 1, b"c" * 16, "dram"),)
    here, _ = sent(protocol, calls.acquire(TARGET, KEYS, "", 30, 1))
    protocol.receive(wire.encode(wire.Acquired(here[0], 1, leased, (EXTENT,), 1)), (extent_fd(),))
    to_come, _ = sent(protocol, calls.acquire(TARGET, KEYS, "", 30, 1))
    now = requests(protocol.discard([*here, *to_come]))
    later = requests(protocol.receive(wire.encode(wire.Acquired(to_come[0], 1, leased, (), 1))))

    assert [type(r) for r in (*now, *later)] == [wire.Release, wire.Release]
    assert not protocol.is_suspect


def test_leases_are_views_of_the_granted_extent_and_cannot_be_written_through() -> None:
    protocol, asked = Protocol(64, 1), (calls.acquire(TARGET, KEYS, "", 30, 1),)
    fd = extent_fd()
    os.pwrite(fd, b"B" * 64, 4096)
    ids, _ = sent(protocol, *asked)
    block = wire.Leased(8, 3, 4096, 5, b"c" * 16, "nvme")
    protocol.receive(wire.encode(wire.Acquired(ids[0], 1, (block,), (EXTENT,), 2)), (fd,))
    ((lease,),) = (a.value for a in protocol.take(ids, asked))

    assert (bytes(lease.view), lease.view.readonly) == (b"B" * 64, True)
    assert (lease.digest, lease.epoch, lease.stamp, lease.source) == (KEYS[0].digest, 2, 5, "nvme")


def test_a_read_only_extent_is_never_handed_out_for_writing() -> None:
    protocol = Protocol(64, 1)
    ids, _ = sent(protocol, calls.reserve(TARGET, b"", KEYS, ""))
    slots = wire.Reserved(ids[0], 1, (wire.Slot(9, 3, 0, 1),), (EXTENT,), 1, 30.0)
    with pytest.raises(InvalidInputError, match="not granted for writing"):
        protocol.receive(wire.encode(slots), (extent_fd(),))


def test_what_was_leased_on_one_connection_means_nothing_on_another() -> None:
    first, second = Protocol(64, 1), Protocol(64, 2)
    asked = (calls.reserve(TARGET, b"", KEYS[:1], ""),)
    ids, _ = sent(first, *asked)
    grant = wire.ExtentGrant(3, 8192, is_writable=True)
    first.receive(wire.encode(wire.Reserved(ids[0], 1, (wire.Slot(9, 3, 0, 1),), (grant,), 1, 30.0)), (extent_fd(),))
    slots = first.take(ids, asked)[0].value

    for call in (calls.publish(TARGET, slots, [b""]), calls.abandon(TARGET, slots)):
        with pytest.raises(AgentAwayError, match="ended with its connection"):
            second.send((call,))


def test_after_a_loss_every_call_has_its_absent_answer_and_nothing_is_open() -> None:
    protocol = Protocol(64, 1)
    asked = (calls.lookup(TARGET, KEYS, ""), calls.publish(TARGET, [], []))
    ids, _ = sent(protocol, *asked)
    unfinished, other_end = os.pipe()
    os.close(other_end)
    protocol.receive(wire.encode(wire.Acquired(7, 1, (), (EXTENT,), 1))[:6], (unfinished,))
    left = protocol.lose(AgentAwayError("gone"))
    for fd in left:
        os.close(fd)

    assert left == [unfinished]
    assert protocol.is_answered(ids)
    assert [a.value for a in protocol.take(ids, asked)] == [Prefix(), ()]
    with pytest.raises(AgentAwayError, match="gone"):
        protocol.send(asked)


UNMAPPABLE = wire.ExtentGrant(4, 1 << 60, is_writable=False)
FRAMES_THAT_FAIL = {
    "cannot be mapped": wire.encode(wire.Acquired(1, 1, (), (UNMAPPABLE,), 1)),
    "malformed": b"\0\0\0\2\xc1\xc1",
}


@pytest.mark.parametrize("failing", FRAMES_THAT_FAIL.values(), ids=FRAMES_THAT_FAIL)
@pytest.mark.parametrize("is_first", [True, False])
def test_every_descriptor_of_a_chunk_is_closed_or_handed_over_when_one_of_its_frames_fails(
    failing: bytes, *, is_first: bool
) -> None:
    protocol, good = Protocol(64, 1), wire.encode(wire.Acquired(2, 1, (), (EXTENT,), 1))
    fds = [extent_fd() for _ in range(2)]
    with pytest.raises(InvalidInputError) as refused:
        protocol.receive(failing + good if is_first else good + failing, fds)
    for fd in protocol.lose(refused.value):
        os.close(fd)

    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_an_answer_counts_that_came_in_one_chunk_with_a_malformed_frame_behind_it() -> None:
    protocol, asked = Protocol(64, 1), (calls.stats(TARGET),)
    ids, _ = sent(protocol, *asked)
    with pytest.raises(InvalidInputError) as refused:
        protocol.receive(wire.encode(wire.Text(ids[0], 1, '{"a": 1}')) + FRAMES_THAT_FAIL["malformed"])
    protocol.lose(refused.value)

    assert [a.value for a in protocol.take(ids, asked)] == ['{"a": 1}']


def test_descriptors_that_were_read_while_the_connection_ended_are_handed_over_as_well() -> None:
    protocol = Protocol(64, 1)
    protocol.lose(AgentAwayError("gone"))
    with pytest.raises(AgentAwayError, match="gone"):
        protocol.receive(wire.encode(wire.Acquired(1, 1, (), (EXTENT,), 1))[:6], (10,))

    assert protocol.lose(AgentAwayError("later")) == [10]


def test_requests_under_way_are_bounded() -> None:
    protocol = Protocol(64, 1)
    protocol.send([calls.stats(TARGET)] * PENDING_MAX)
    with pytest.raises(AgentAwayError, match=f"limit {PENDING_MAX}"):
        protocol.send([calls.stats(TARGET)])


def test_a_newer_version_in_any_reply_makes_the_grants_stale_until_they_come() -> None:
    protocol = Protocol(64, 1)
    protocol.receive(wire.encode(GRANTED))
    assert protocol.grants is not None
    assert not protocol.is_stale
    protocol.receive(wire.encode(wire.Done(99, 2)))
    assert protocol.is_stale
    protocol.receive(wire.encode(wire.Granted(0, 2, "a", (), "s", 64, 4096, 600.0)))

    assert not protocol.is_stale


def test_keys_of_two_scopes_do_not_travel_in_one_call() -> None:
    other = BlockKey(ScopeId("tenant/b/1/v1"), b"x" * 20)
    with pytest.raises(InvalidInputError, match="2 scopes"):
        calls.lookup(TARGET, [*KEYS, other], "")
    with pytest.raises(InvalidInputError, match="0 keys"):
        calls.lookup(TARGET, [], "")


def test_results_of_a_publish_that_was_not_answered_are_refusals() -> None:
    assert calls.publish(TARGET, [], []).absent == ()
    reservation: Any = type("R", (), {"reservation": 1, "connection": 1})
    assert calls.publish(TARGET, [reservation] * 2, [b""] * 2).absent == (Published.REFUSED,) * 2


@given(st.integers(0, 2**32))
def test_waits_double_up_to_their_bound_and_are_shortened_by_half_at_most(seed: int) -> None:
    waits = list(islice(backoff(random.Random(seed)), 20))

    ideal = [min(FIRST_S * 2**i, LAST_S) for i in range(20)]
    assert all(i / 2 <= w <= i for w, i in zip(waits, ideal, strict=True))


def run(outcomes: list[Any]) -> list[Any]:
    """Steps that the life cycle takes when they turn out like this."""
    steps = lifecycle(TARGET, random.Random(0))
    seen = [next(steps)]
    seen += [steps.send(outcome) for outcome in outcomes]
    return seen


def answer(value: Any = None, error: Any = None) -> list[Any]:
    return [Answer(value, error)]


WELCOME = answer(wire.Welcome(1, 1, wire.PROTOCOL_VERSION, "agent", "node", 1))
GRANTS = answer(calls.read_grants(GRANTED))


def kinds(steps: list[Any]) -> list[str]:
    return ["ask" if isinstance(s, tuple) else type(s).__name__ for s in steps]


def test_a_client_greets_attaches_and_then_waits_until_its_token_is_due() -> None:
    steps = run([None, WELCOME, GRANTS, None])

    assert kinds(steps) == ["Connect", "ask", "ask", "Up", "Idle"]
    assert steps[-1] == Idle(480.0)
    assert isinstance(steps[2][0].request(5), wire.Attach)


def test_a_lost_connection_is_taken_down_and_made_anew_after_a_pause() -> None:
    steps = run([None, WELCOME, GRANTS, None, Wake.LOST, None, None])

    assert kinds(steps)[5:] == ["Down", "Pause", "Connect"]
    assert steps[6].wait_s <= FIRST_S


@pytest.mark.parametrize(
    "outcomes",
    [
        [AgentAwayError("no socket")],
        [None, answer(error=AgentAwayError("silent"))],
        [None, answer(wire.Welcome(1, 1, 99, "agent", "node", 1))],
        [None, WELCOME, answer(error=UnauthenticatedError("no"))],
        [None, WELCOME, answer(calls.read_grants(wire.Granted(0, 1, "a", (), "s", 128, 4096, 600.0)))],
    ],
)
def test_whatever_goes_wrong_on_the_way_is_tried_again_later(outcomes: list[Any]) -> None:
    steps = run([*outcomes, None, None])

    assert kinds(steps)[-3:] == ["Down", "Pause", "Connect"]
    assert not any(isinstance(s, Up) for s in steps)


@pytest.mark.parametrize("outcomes", [[], [None], [None, WELCOME], [None, WELCOME, GRANTS, None]])
def test_a_step_that_fails_as_nobody_foresaw_ends_the_connection_and_not_the_life_cycle(
    outcomes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    steps = lifecycle(TARGET, random.Random(0))
    next(steps)
    for outcome in outcomes:
        steps.send(outcome)
    down = steps.throw(RuntimeError("a defect"))

    assert isinstance(down, Down)
    assert isinstance(down.reason, AgentAwayError)
    assert str(down.reason) == "RuntimeError: a defect"
    assert kinds([steps.send(None), steps.send(None)]) == ["Pause", "Connect"]
    assert "a defect" in caplog.text


def test_waits_grow_while_the_agent_is_away_and_start_over_after_an_attach() -> None:
    away = [AgentAwayError("x"), None, None]
    steps = run([*away * 6, None, WELCOME, GRANTS, None, Wake.LOST, None])
    pauses = [s.wait_s for s in steps if isinstance(s, Pause)]

    assert pauses[5] > 8 * FIRST_S
    assert pauses[-1] <= FIRST_S


def test_a_refused_renewal_keeps_the_connection_and_waits_patiently() -> None:
    steps = run([None, WELCOME, GRANTS, None, Wake.RENEW, answer(error=UnauthenticatedError("old token"))])

    assert steps[-1] == Idle(RENEW_RETRY_S, is_patient=True)


def test_an_agent_that_goes_away_during_a_renewal_is_left() -> None:
    steps = run([None, WELCOME, GRANTS, None, Wake.DUE, answer(error=RetryableError("gone"))])

    assert isinstance(steps[-1], Down)


def test_a_token_file_is_read_anew_at_every_attach(tmp_path: Any) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    steps = lifecycle(Target(tmp_path / "s", "p", file, LAYOUT), random.Random(0))
    assert isinstance(next(steps), Connect)
    steps.send(None)
    first = steps.send(WELCOME)
    file.write_text("two\n")
    for outcome in (GRANTS, None):
        steps.send(outcome)
    second = steps.send(Wake.DUE)
    tokens = [step[0].request(1).token for step in (first, second) if isinstance(step, tuple)]  # type: ignore[union-attr]

    assert tokens == ["one", "two"]


def test_a_missing_or_empty_token_file_is_an_error_of_the_attempt(tmp_path: Any) -> None:
    target = Target(tmp_path / "s", "p", tmp_path / "token", LAYOUT)
    with pytest.raises(AgentAwayError, match="token file"):
        target.read_token()
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(UnauthenticatedError, match="is empty"):
        target.read_token()


def test_a_token_is_not_shown_when_a_target_is_printed() -> None:
    assert "secret" not in repr(Target(TARGET.socket, "p", "secret", LAYOUT))
