"""T3: enumeration, direct fetch and stale rehydration find neither a byte nor a sign of another tenant's blocks.

A stranger with the victim's scope and keys in its hands sends every verb, for every tier, and gets byte for byte what
it gets for scopes and keys that never were. So does whoever could read once: a member that has left its domain, and
connections of a tenant that was deleted, before and after its blocks are erased and keys have moved on. Peers that
cannot show an agent's token are told the same about everything. The control asks with the right that is missing.
"""

import socket
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstrata_agent.fleet.peers import wire as peer
from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from support.agent.doubles import bytes_of
from support.agent.process import DOMAIN
from support.agent.remote_owner import LAYOUT, TOKEN, digest_of
from support.agent.remote_owner import SCOPE as LENT_SCOPE
from support.client.hostile import Hostile
from support.runner.outcome import Outcome, Scale
from threats.served import NEW_DOMAIN, PREFIX_TOKENS, SCOPE_A, SCOPE_B, TIERS, Remote, keys_of, serving
from threats.t13 import running

BLOCKS: Final = 4
SECRET: Final = 0x5EC2E7
NEVER: Final = ScopeId("tenant/never/uid-never/v1")

Asked = Callable[[str, bytes], wire.AnyRequest]
"""A verb on a scope and joined keys."""

VERBS: Final[dict[str, Asked]] = {
    "lookup": lambda s, k: wire.Lookup(1, s, k),
    "probe": lambda s, k: wire.Lookup(1, s, k, is_probe=True),
    "acquire": lambda s, k: wire.Acquire(1, s, k, deadline_s=0.2),
    "acquire_one": lambda s, k: wire.Acquire(1, s, k[-20:], deadline_s=0.2),
    "prefetch": lambda s, k: wire.Prefetch(1, s, k),
    "reserve": lambda s, k: wire.Reserve(1, s, b"", k),
    "continue": lambda s, k: wire.Reserve(1, s, k[:20], k[20:40]),
    "pin": lambda s, k: wire.Pin(1, s, k, 1.0),
    "unpin": lambda s, k: wire.Unpin(1, s, k),
    "touch": lambda s, k: wire.Touch(1, s, k),
    "drop": lambda s, k: wire.Drop(1, s, k),
    "demote": lambda s, k: wire.Demote(1, s, k),
    "fetch": lambda s, k: wire.Fetch(1, s, k),
    "explain": lambda s, k: wire.Explain(1, s, k[:20]),
    "tree": lambda s, _: wire.Explain(1, s),
    "why_miss": lambda s, k: wire.WhyMiss(1, s, k),
    "route_hint": lambda s, k: wire.RouteHint(1, s, k),
}
SESSION: Final = "chat of a"
SESSIONS: Final[dict[str, Callable[[str], wire.AnyRequest]]] = {
    "touch": lambda name: wire.TouchSession(1, name, "idle"),
    "retain": lambda name: wire.Retain(1, name, 60.0),
    "close": lambda name: wire.CloseSession(1, name),
    "explain_session": lambda name: wire.Explain(1, session=name),
}
NUMBERS: Final[dict[str, Callable[[int], wire.AnyRequest]]] = {
    "release": lambda n: wire.Release(1, (n,), (n,)),
    "publish": lambda n: wire.Publish(1, (n,), (b"0" * 16,)),
    "abandon": lambda n: wire.Abandon(1, (n,)),
    "close_extents": lambda n: wire.CloseExtents(1, (n,)),
}


def _keys(scope: ScopeId, seed: int) -> list[bytes]:
    return keys_of(scope, [seed * 1_000 + i for i in range(BLOCKS * PREFIX_TOKENS)])


@dataclass
class Comparison:
    """Answers about what is there, beside answers about what never was."""

    count: int = 0
    differences: list[str] = field(default_factory=list)

    def expect_equal(self, what: str, answers: Iterable[bytes]) -> None:
        """Note a difference between answers to questions that must look alike."""
        self.count += 1
        if len(set(answers)) > 1:
            self.differences.append(what)

    def compare(self, who: str, client: Hostile, scope: ScopeId, seed: int) -> None:
        """Send every verb about blocks of a scope that this client may not read, about absent ones, and to no scope."""
        there, absent = b"".join(_keys(scope, seed)), b"".join(_keys(scope, seed + 500_000))
        for name, verb in VERBS.items():
            asked = (verb(scope, there), verb(scope, absent), verb(NEVER, there), verb(NEVER, absent))
            self.expect_equal(f"{who}: {name} in {scope}", [client.raw(request) for request in asked])
        for name, about in SESSIONS.items():
            self.expect_equal(f"{who}: {name}", [client.raw(about(s)) for s in (SESSION, "never opened")])
        if client.granted:
            self.differences.append(f"{who} was granted {len(client.granted)} extents")

    def compare_numbers(self, who: str, client: Hostile, live: Iterable[int]) -> None:
        """Send the verbs on leases and reservations with numbers that somebody else holds."""
        for number in live:
            for name, verb in NUMBERS.items():
                answers = [client.raw(verb(n)) for n in (number, number + 10**9)]
                self.expect_equal(f"{who}: {name} of another connection's {number}", answers)

    def compare_own(self, who: str, client: Hostile, scope: ScopeId, seed: int) -> None:
        """Ask in the client's own scope for a prompt that somebody else has, and for one that nobody has."""
        there, absent = b"".join(_keys(scope, seed)), b"".join(_keys(scope, seed + 500_000))
        for name in (
            "lookup",
            "probe",
            "acquire",
            "acquire_one",
            "prefetch",
            "pin",
            "unpin",
            "touch",
            "drop",
            "explain",
        ):
            answers = [client.raw(VERBS[name](scope, keys)) for keys in (there, absent)]
            self.expect_equal(f"{who}: {name} of another tenant's prompt", answers)


def _control(path: Path, token: str, scope: ScopeId, seed: int) -> bool:
    """True when someone with the right is told by these verbs whether blocks are there, and gets their bytes."""
    there, absent = b"".join(_keys(scope, seed)), b"".join(_keys(scope, seed + 500_000))
    with Hostile(path, token) as reader:
        content = reader.load(scope, _keys(scope, seed))
    with Hostile(path, token) as asking:
        pairs = [
            [asking.raw(VERBS[n](scope, keys)) for keys in (there, absent)] for n in ("lookup", "acquire", "explain")
        ]
    return content == [bytes_of(SECRET)] * BLOCKS and all(first != second for first, second in pairs)


@dataclass
class Stage:
    """One tier with the victim's blocks in it."""

    agent: Remote
    seeds: range
    found: Comparison
    controls: list[bool]

    def run(self, tier: str) -> None:
        """Before, between and after: strangers, a member that leaves, a tenant that is deleted and comes again."""
        path = self.agent.path
        with Hostile(path, "a") as victim, Hostile(path, "c") as member, Hostile(path, "d") as stranger:
            held = self._store(victim, tier)
            for seed in self.seeds:
                self._as_strangers(tier, stranger, seed)
            self.found.compare_numbers(f"{tier} stranger", stranger, held)
            member.load(DOMAIN, _keys(DOMAIN, self.seeds[0]))
            self.controls += [_control(path, t, s, self.seeds[0]) for t, s in (("c", DOMAIN), ("a", SCOPE_A))]
            self.agent.tell("rotate")
            self._as_former_member(tier, member)
            self.agent.tell("delete a")
            self._as_deleted(tier, victim)
            with Hostile(path, "b") as other:
                self._after(tier, other)
            self.agent.tell("recreate a")
            with Hostile(path, "a") as again:
                self._after(f"{tier} again", again)

    def _store(self, victim: Hostile, tier: str) -> list[int]:
        """Returns numbers of leases and reservations that the victim holds."""
        victim.ask(wire.OpenSession(1, SESSION))
        for seed in self.seeds:
            for scope in (SCOPE_A, DOMAIN):
                assert len(victim.store(scope, _keys(scope, seed), bytes_of(SECRET))) == BLOCKS
        if tier != "dram":
            self.agent.tell("down")
        acquired = victim.ask(wire.Acquire(1, SCOPE_A, _keys(SCOPE_A, self.seeds[0])[0], lease_s=300.0))
        reserved = victim.ask(wire.Reserve(1, SCOPE_A, b"", _keys(SCOPE_A, 777)[0]))
        assert isinstance(acquired, wire.Acquired)
        assert isinstance(reserved, wire.Reserved)
        return [*(b.lease for b in acquired.blocks), *(s.reservation for s in reserved.slots)]

    def _as_strangers(self, tier: str, stranger: Hostile, seed: int) -> None:
        for scope in (SCOPE_A, DOMAIN):
            self.found.compare(f"{tier} stranger", stranger, scope, seed)
        self.found.compare_own(f"{tier} stranger", stranger, ScopeId("tenant/d/uid-d/v1"), seed)

    def _as_former_member(self, tier: str, member: Hostile) -> None:
        member.granted.clear()  # What it was lent while it had the right.
        for seed in self.seeds:
            for scope in (DOMAIN, NEW_DOMAIN):
                self.found.compare(f"{tier} former member", member, scope, seed)

    def _as_deleted(self, tier: str, victim: Hostile) -> None:
        victim.granted.clear()
        for seed in self.seeds:
            self.found.compare(f"{tier} deleted tenant", victim, SCOPE_A, seed)

    def _after(self, tier: str, client: Hostile) -> None:
        for seed in self.seeds:
            self.found.compare(f"{tier} after deletion", client, SCOPE_A, seed)
            self.found.compare(f"{tier} after rotation", client, DOMAIN, seed)


def _peer_says(address: tuple[str, int], token: str, digest: bytes) -> bytes:
    """What a peer answers to somebody who asks for a block, with or without a word of introduction."""
    hello = peer.encode(peer.Hello(1, peer.PROTOCOL_VERSION, "p.stranger", token)) if token else b""
    lend = peer.encode(peer.Lend(2, LENT_SCOPE, LAYOUT, digest, 5.0))
    said = bytearray()
    with socket.create_connection(address, 60.0) as connected, suppress(ConnectionResetError, BrokenPipeError):
        connected.sendall(hello + lend)
        while b"Lending" not in said and (chunk := connected.recv(1 << 16)):
            said += chunk
    return bytes(said)


def _ask_peers(found: Comparison, controls: list[bool]) -> None:
    """Ask another agent directly, as nobody and with a token that is none; the control has an agent's token."""
    there, absent = digest_of(1), digest_of(10**6)
    with running() as owner:
        for token in ("", "not a token of an agent"):
            found.expect_equal(
                f"peer without token {token!r}", [_peer_says(owner.peers, token, d) for d in (there, absent)]
            )
        controls.append(_peer_says(owner.peers, TOKEN, there) != _peer_says(owner.peers, TOKEN, absent))


def run(scale: Scale) -> Outcome:
    """Ask for everything in every tier."""
    found, controls = Comparison(), list[bool]()
    seeds = range(1, 1 + scale.of(50, 1))
    with tempfile.TemporaryDirectory(prefix="kvstrata-t3-") as directory:
        for tier in TIERS:
            with serving(Path(directory), tier) as agent:
                Stage(agent, seeds, found, controls).run(tier)
    _ask_peers(found, controls)
    return Outcome(found.count, "comparisons", tuple(found.differences), all(controls))


assert SCOPE_B, "the second tenant of `served`"
