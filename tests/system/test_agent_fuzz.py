"""Random and mutated frames at the agent's socket: none is accepted as what it is not, none harms anybody else."""

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from threats.frames import ENGINE_VALID, KEYS, OWN

from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.serve.connection import IN_FLIGHT_MAX
from kvstrata_api import wire
from support.agent.doubles import BLOCK_BYTES, LAYOUT, FakeAuthenticator, caller, dict_tier, dram_tier
from support.agent.thread import AgentThread

pytestmark = pytest.mark.system

ATTACH = wire.encode(wire.Attach(1, "a", "pool", LAYOUT))
VALID = [*ENGINE_VALID, *map(wire.encode, (wire.Prefetch(11, OWN, KEYS), wire.Explain(16, OWN, KEYS[:20])))]


def tiers() -> list[Tier]:
    return [dram_tier(16 * BLOCK_BYTES), dict_tier("nvme", 64 * BLOCK_BYTES, 1, 2)]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentThread]:
    path = tmp_path_factory.mktemp("fuzz") / "agent.sock"
    with AgentThread(path, tiers, FakeAuthenticator(a=caller("a"))) as served:
        yield served


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid frame with bytes flipped, cut, doubled or put in; the header right again or not."""
    frame = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame) - 1))
        match draw(st.sampled_from(["flip", "cut", "insert", "double"])):
            case "flip":
                frame[at] ^= draw(st.integers(1, 255))
            case "cut":
                del frame[max(1, at) :]
            case "insert":
                frame[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "double":
                frame += frame[at:]
    if draw(st.booleans()) and len(frame) > 4:
        frame[:4] = (len(frame) - 4).to_bytes(4, "big")
    return bytes(frame)


def conversation(agent: AgentThread, sent: bytes) -> bytes:
    """Send, say that nothing more comes, and return all that the agent answers before it closes."""
    received = b""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(os.fspath(agent.socket))
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            while chunk := client.recv(1 << 16):
                received += chunk
        except (BrokenPipeError, ConnectionResetError):
            return received
    return received


def replies(received: bytes) -> list[wire.AnyReply]:
    """Decode whole frames; what the agent sends is always well-formed."""
    found = []
    while len(received) >= 4:
        end = 4 + wire.frame_bytes(received[:4])
        if len(received) < end:
            break
        found.append(wire.decode_reply(received[4:end]))
        received = received[end:]
    return found


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(frames=st.lists(st.one_of(mutated(), st.binary(max_size=64)), min_size=1, max_size=4), attached=st.booleans())
def test_whatever_comes_the_agent_answers_in_its_protocol_and_serves_the_next_one(
    agent: AgentThread, frames: list[bytes], *, attached: bool
) -> None:
    for reply in replies(conversation(agent, (ATTACH if attached else b"") + b"".join(frames))):
        assert not isinstance(reply, wire.Failed) or "internal error" not in reply.message

    (welcome,) = replies(conversation(agent, VALID[0]))
    assert isinstance(welcome, wire.Welcome)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(VALID[2:]), min_size=1, max_size=8))
def test_without_an_attach_every_verb_is_refused(agent: AgentThread, frames: list[bytes]) -> None:
    answers = replies(conversation(agent, b"".join(frames)))
    assert all(isinstance(a, wire.Failed) and a.code == "UnauthenticatedError" for a in answers)


def test_nothing_is_left_over_after_all_that(agent: AgentThread) -> None:
    def left() -> tuple[int, int, int]:
        node = agent.core.node
        return len(node.leases), len(node.reservations), len(node.pins)

    conversation(agent, VALID[0])
    assert agent.call(left) == (0, 0, 0)
    assert agent.call(lambda: agent.server.connections) <= 1


def test_a_client_with_many_requests_under_way_is_not_read_further(agent: AgentThread) -> None:
    """Requests beyond the bound wait in the socket, and are answered when others are done."""
    count = 3 * IN_FLIGHT_MAX
    asked = b"".join(wire.encode(wire.Attach(i, "a", "pool", LAYOUT)) for i in range(1, count + 1))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(os.fspath(agent.socket))
        client.sendall(asked)
        received = b""
        while len(replies(received)) < count:
            received += client.recv(1 << 16)
    assert sorted(r.id for r in replies(received)) == list(range(1, count + 1))


def test_frames_that_decode_are_the_ones_that_were_meant() -> None:
    """The decoder takes no message of another kind for its own: tags tell them apart."""
    for frame in VALID:
        body = msgspec.msgpack.decode(frame[4:])
        assert type(wire.decode_request(frame[4:])).__name__ == body[0]
