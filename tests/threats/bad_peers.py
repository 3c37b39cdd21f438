"""Agents with bad certificates and bad tokens at every verb of their protocol, and owners that are none."""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kvstrata_agent.fleet.peers import wire
from kvstrata_agent.fleet.peers.client import open_link
from kvstrata_agent.fleet.peers.connection import HANDSHAKE_S
from kvstrata_agent.fleet.peers.server import PeerListener, VerifyPeer
from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_kube import tls
from kvstrata_kube.tls import Credential
from kvstrata_metadata.store.records import AgentRecord
from support.agent import remote_owner
from support.agent.peer_certificates import Fleet, peer_tls
from threats.credentials import GOOD_AGENT, SYSTEM, Tokens

OWNER: Final = "pool.node-a"
READER: Final = "pool.node-b"
HOUR: Final = timedelta(hours=1)
_ANSWER_S: Final = 10.0

Shown = Credential | None
"""What a caller shows; None for a plain connection."""


@dataclass(frozen=True, slots=True)
class Bad:
    """One class: what is shown, and what is said."""

    shown: Shown
    agent: str
    token: str


def classes(fleet: Fleet, tokens: Tokens) -> dict[str, Bad]:
    """Every class of bad credential for READER, towards OWNER."""
    good, token = fleet.agent(READER), tokens.by_class[GOOD_AGENT]
    certificates = {name: Bad(shown, READER, token) for name, shown in bad_certificates(fleet).items()}
    refused = {name: Bad(good, READER, bad) for name, bad in tokens.bad_for_agents().items()}
    return {
        **certificates,
        **{f"token: {name}": bad for name, bad in refused.items()},
        "name of another agent": Bad(good, "pool.node-c", token),
        "certificate of another agent": Bad(fleet.agent("pool.node-c"), READER, token),
    }


def bad_certificates(fleet: Fleet) -> dict[str, Shown]:
    """Certificates that must open nothing."""
    uri, trust = names.agent_uri(SYSTEM, READER), fleet.authority.certificate.pem
    now, stranger = datetime.now(UTC), Fleet().agent(READER)
    expired = fleet.certify(uri, began=now - 3 * HOUR, life=HOUR)
    early = fleet.certify(uri, began=now + HOUR / 2, life=HOUR)
    return {
        "plain text": None,
        "no certificate": Credential("", "", trust),
        "another authority": Credential(stranger.certificate_pem, stranger.key_pem, trust),
        "expired certificate": expired,
        "certificate of tomorrow": early,
        "the metadata service": fleet.certify(names.service_uri(SYSTEM, "metadata")),
        "an agent of another namespace": fleet.certify(names.agent_uri("elsewhere", READER)),
        "the authority's own": Credential(trust, fleet.authority.key_pem, trust),
    }


def questions() -> Iterator[wire.Question]:
    """One of each verb."""
    yield wire.Describe(2)
    yield wire.Lend(3, remote_owner.SCOPE, remote_owner.LAYOUT, remote_owner.digest_of(1), 5.0)
    yield wire.Trace(7, remote_owner.SCOPE, remote_owner.digest_of(1), 8, remote_owner.EPOCH)
    yield wire.Offer(8, remote_owner.SCOPE, "team-a", remote_owner.LAYOUT, 1 << 20, remote_owner.digest_of(1), b"", "")
    yield wire.Pull(4, (1,))
    yield wire.End(5, (1,))
    yield wire.Hello(6, wire.PROTOCOL_VERSION, READER, "x")


async def attempts(fleet: Fleet, tokens: Tokens, verify: VerifyPeer) -> tuple[int, list[str]]:
    """Try every class at every verb, with and without a greeting before; how many cases, and what was answered."""
    accepted, cases = [], 0
    async with _owner(fleet, verify) as (address, lender):
        for name, bad in classes(fleet, tokens).items():
            asked = tuple(questions())
            cases += len(asked)
            for question, answers in zip(asked, await _ask_all(address, bad, asked), strict=True):
                accepted += [f"{type(a).__name__} to {type(question).__name__} by {name}" for a in answers]
        accepted += ["a lease for nobody"] if lender.leases else []
    return cases, accepted


async def impostors(fleet: Fleet) -> tuple[int, list[str]]:
    """Ask owners that are not who the directory named: nobody may get our token."""
    told: list[str] = []

    async def take(token: str, agent: str) -> Any:
        told.append(token)
        return await remote_owner.verify(remote_owner.TOKEN, agent)

    bad = {name: shown for name, shown in bad_certificates(fleet).items() if shown and shown.certificate_pem}
    bad["another agent"] = fleet.agent("pool.node-c")
    accepted = []
    for name, shown in bad.items():
        async with _owner(fleet, take, shown) as (address, _):
            hello = wire.Hello(0, wire.PROTOCOL_VERSION, READER, "our token")
            try:
                link = await open_link(address, OWNER, hello, peer_tls(fleet.agent(READER)))
            except KvStrataError:
                continue
            await link.close()
            accepted.append(f"an owner with {name}")
    return len(bad), accepted + [f"our token was told to {len(told)} impostors" for _ in told[:1]]


async def control(fleet: Fleet, tokens: Tokens, verify: VerifyPeer) -> list[str]:
    """Verbs that do not serve the good credential; none is wanted."""
    refused = []
    async with _owner(fleet, verify) as (address, _):
        hello = wire.Hello(0, wire.PROTOCOL_VERSION, READER, tokens.by_class[GOOD_AGENT])
        link = await open_link(address, OWNER, hello, peer_tls(fleet.agent(READER)))
        await link.describe()
        lending = await link.lend(remote_owner.SCOPE, remote_owner.LAYOUT, [remote_owner.digest_of(1)], 5.0, 0)
        target = memoryview(bytearray(lending.loans[0].size_bytes))
        await link.pull({lending.loans[0].lease: target})
        await link.end((lending.loans[0].lease,))
        if bytes(target) != remote_owner.content_of(1, len(target)):
            refused.append("Pull")
        await link.close()
    return refused


@contextlib.asynccontextmanager
async def _owner(fleet: Fleet, verify: Callable[[str, str], Awaitable[Any]], shown: Shown = None) -> Any:
    """An owner of blocks on a real socket, under its own certificate or another."""
    lender = remote_owner.MemoryLender(2, 4096)
    listener = PeerListener("127.0.0.1")
    record = AgentRecord(OWNER, remote_owner.EPOCH, listener.address)
    await listener.serve(record, lender, verify, None, tls=peer_tls(shown or fleet.agent(OWNER)))
    try:
        yield listener.address, lender
    finally:
        await listener.close()


async def _ask_all(address: str, bad: Bad, asked: Sequence[wire.Question]) -> list[list[wire.Answer]]:
    """Ask each on a connection of its own, all at once."""
    return await asyncio.gather(*(_ask(address, bad, question) for question in asked))


async def _ask(address: str, bad: Bad, question: wire.Question) -> list[wire.Answer]:
    """Greet and ask in one go, as somebody does who does not wait to be let in; what came back that is no refusal."""
    hello = wire.Hello(1, wire.PROTOCOL_VERSION, bad.agent, bad.token[: wire.TOKEN_CHARS_MAX])
    host, _, port = address.rpartition(":")
    secured: Mapping[str, Any] = {}
    if bad.shown is not None:
        secured = {"ssl": tls.client_context(bad.shown, checks_host=False), "server_hostname": ""}
    received = b""
    with contextlib.suppress(OSError, ssl.SSLError, asyncio.IncompleteReadError, TimeoutError, UnicodeEncodeError):
        async with asyncio.timeout(_ANSWER_S + HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, int(port), **secured)
            try:
                writer.write(wire.encode(hello) + wire.encode(question))
                while more := await reader.read(65_536):
                    received += more
                    if _served(received):
                        break
            finally:
                writer.transport.abort()
    return _served(received)


def _served(received: bytes) -> list[wire.Answer]:
    return [answer for answer in _answers(received) if not isinstance(answer, wire.Refused)]


def _answers(received: bytes) -> Iterator[wire.Answer]:
    while len(received) >= wire.LENGTH_BYTES:
        try:
            size = wire.decode_length(received[: wire.LENGTH_BYTES])
            yield wire.decode_answer(received[wire.LENGTH_BYTES : wire.LENGTH_BYTES + size])
        except KvStrataError:
            return  # Alerts of TLS, to somebody who speaks without.
        received = received[wire.LENGTH_BYTES + size :]
