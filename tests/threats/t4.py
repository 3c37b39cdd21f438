"""T4: a dump of Redis gives no way to guess prompts.

Two real agents of four tenants announce real blocks of known prompts, their sessions and an erased scope to a real
server. The attacker has every byte of it, guesses the right prompts, knows every name and the secret of a tenant of its
own, and looks for what it can compute in the dump. Whoever holds a scope's secret finds everything in the same way.
"""

import asyncio
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.sessions import SessionState
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.fleet.directory.client import RedisDirectory
from kvstrata_api.blocks import ScopeId, ScopeSecret, chain_keys
from kvstrata_api.checksum import checksum
from kvstrata_api.units import MIB
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.keys import session_digest
from kvstrata_metadata.store.records import AgentRecord, Announcement
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments
from support.agent.doubles import BLOCK_BYTES, LAYOUT, LAYOUT_ID, TestCodecs, dram_tier, make_node
from support.metadata.directory_fleet import until
from support.runner.outcome import Outcome, Scale
from threats.redis_caller import RedisCaller

TOKENS: Final = LAYOUT.block_tokens
PROMPTS: Final = 12
"""Of each tenant."""
PROMPT_BLOCKS: Final = 8
TENANTS: Final = ("canary-acme", "canary-globex", "canary-initech", "canary-attacker")
ATTACKER: Final = TENANTS[-1]
VOCABULARY: Final = (1 << 16, 1 << 17)
"""Token ids, above those that lengths and counts in a dump look like."""
_WINDOW_BYTES: Final = 8
"""Of a digest, compared with every place of the dump: 1e6 guesses at 1 MB meet by chance once in 10^7 runs."""
_HASHES: Final = ("sha256", "sha1", "md5", "blake2b", "blake2s", "sha3_256")
OWN: Final = "its own secret"
_ADMIN: Final = "user admin on >admin allkeys allchannels +@all"

Prompt = npt.NDArray[np.uint32]
Step = Callable[[bytes, bytes], bytes]
"""From the digest before and the packed tokens of a block to its digest."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is true: secrets and prompts of every tenant."""

    secrets: dict[str, ScopeSecret]
    prompts: dict[str, list[Prompt]]

    @property
    def sessions(self) -> list[str]:
        """Names of all sessions; each tenant has one for each prompt."""
        return [f"canary-session-{i}" for i in range(PROMPTS)]


@dataclass(slots=True)
class Dump:
    """Every byte that the server holds, searchable."""

    content: bytes
    windows: set[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Cut the content at every offset."""
        size = len(self.content) - _WINDOW_BYTES + 1
        self.windows = {self.content[i : i + _WINDOW_BYTES] for i in range(size)}

    def has(self, digest: bytes) -> bool:
        """Whether a digest stands somewhere; its first two bytes may be in the name of a key."""
        return digest[2 : 2 + _WINDOW_BYTES] in self.windows

    def tells(self, words: bytes) -> bool:
        """Whether words stand somewhere as they are."""
        return words in self.content


def run(scale: Scale) -> Outcome:
    """Guess; then the two controls: with the secrets, and at a fleet whose secrets were lost."""
    rng = np.random.default_rng(scale.first_seed)
    right = _fleet(rng, lambda _: rng.bytes(32))
    lost = _fleet(rng, lambda _: bytes(32))
    dump, weak = asyncio.run(_dump(right)), asyncio.run(_dump(lost))
    count = scale.of(1_000_000, 60_000)
    found = [f"{how}: {what}" for how, what in islice(_matches(right, dump, count, rng), 20)]
    guessed = [(how, secret.tag()) for how, secret in _secrets(right) if not how.startswith(OWN)]
    found += [f"tag under {how}" for how, tag in guessed if dump.tells(tag.encode())]
    found += [f"in the dump as it is: {what}" for what, words in _canaries(right) if dump.tells(words)]
    known = sum(dump.has(d) for tenant in TENANTS for p in right.prompts[tenant] for d in _keys(right, tenant, p))
    sessions = sum(dump.has(session_digest(s, n)) for s in right.secrets.values() for n in right.sessions)
    all_blocks = len(TENANTS) * PROMPTS * PROMPT_BLOCKS
    tags = sum(dump.tells(secret.tag().encode()) for secret in right.secrets.values())
    is_found = (
        tags == len(TENANTS)
        and (known, sessions) == (all_blocks, len(TENANTS) * PROMPTS)
        and dump.tells(b"pool.node-0")
    )
    is_seen = next(_matches(lost, weak, count, rng), None) is not None
    values = {"blocks_found_with_secret": known, "blocks": all_blocks, "dump_bytes": len(dump.content)}
    return Outcome(count, "guesses", tuple(found), is_found and is_seen, values)


def _fleet(rng: np.random.Generator, secret: Callable[[str], bytes]) -> Fleet:
    scopes = {t: ScopeId(f"tenant/{t}/{hashlib.md5(t.encode()).hexdigest()}/v1") for t in TENANTS}  # noqa: S324  A uid.
    secrets = {t: ScopeSecret(scope, secret(t)) for t, scope in scopes.items()}
    shared = [rng.integers(*VOCABULARY, PROMPT_BLOCKS * TOKENS, dtype=np.uint32) for _ in range(PROMPTS // 2)]
    own = {
        t: [rng.integers(*VOCABULARY, PROMPT_BLOCKS * TOKENS, dtype=np.uint32) for _ in range(PROMPTS - len(shared))]
        for t in TENANTS
    }
    return Fleet(secrets, {t: shared + own[t] for t in TENANTS})


def _keys(fleet: Fleet, tenant: str, prompt: Prompt) -> list[bytes]:
    return [key.digest for key in chain_keys(fleet.secrets[tenant], LAYOUT_ID, prompt, TOKENS)]


async def _dump(fleet: Fleet) -> Dump:
    """Run a fleet until the directory was told everything, and take what the server holds."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-t4-") as folder:
        config = EmbeddedConfig(
            Path(folder) / "redis", other_users=(_ADMIN,), other_settings=("rdbcompression no", "dbfilename dump.rdb")
        )
        server = await embedded.start(config)
        nodes = [_AgentOfTenants(fleet, i, server.access(Role.AGENT)) for i in range(2)]
        try:
            for node, tenants in zip(nodes, (TENANTS[:2], TENANTS[2:]), strict=True):
                await node.fill(tenants)
            for node in nodes:
                await until(partial(_is_settled, node), "the directory was never told everything", 60.0)
            assert await nodes[0].directory.claim_erased(ScopeSecret(ScopeId("tenant/canary-gone/uid-9/v1"), b"g" * 32))
            return Dump(_everything(server.port, config.state_dir / "dump.rdb"))
        finally:
            for node in nodes:
                await node.close()
            await server.stop()


def _everything(port: int, file: Path) -> bytes:
    """The server's own snapshot, uncompressed, and the names of all keys."""
    with RedisCaller(port, "admin", "admin") as admin:
        names: list[bytes] = admin.ask("KEYS", "*")
        assert admin.ask("SAVE") == b"OK"
    return b"\n".join([*names, file.read_bytes()])


class _AgentOfTenants:
    """A real core with blocks in real memory and a real directory."""

    def __init__(self, fleet: Fleet, number: int, access: RedisAccess) -> None:
        self._fleet = fleet
        by_scope = {secret.scope: secret for secret in fleet.secrets.values()}
        node = make_node([dram_tier(16 * MIB)])

        async def reach() -> RedisAccess:
            return access

        record = AgentRecord(f"pool.node-{number}", 7, "127.0.0.1:1")
        instruments = Instruments(AGENT, CollectorRegistry())
        self.directory = RedisDirectory(record, reach, self._holdings, instruments, jitter_s=0.1)
        node.announcer = Announcer(node.index, self.directory, by_scope.get)
        self.core = AgentParts(node, TestCodecs(), self.directory)

    def _holdings(self) -> Iterable[tuple[ScopeSecret, list[Announcement]]]:
        return self.core.lender.holdings()

    @property
    def is_settled(self) -> bool:
        """True once the directory knows blocks and sessions."""
        return self.directory.is_settled and not self.directory.waiting_sessions

    async def fill(self, tenants: Iterable[str]) -> None:
        """Store every prompt of these tenants under a session, and tell of it."""
        for tenant in tenants:
            secret = self._fleet.secrets[tenant]
            for name, prompt in zip(self._fleet.sessions, self._fleet.prompts[tenant], strict=True):
                session = self.core.cache.life.open(1, tenant, secret, name, parent="", priority="")
                place = RequestContext(1, tenant, secret, LAYOUT_ID, BLOCK_BYTES, session)
                await self._store(place, _keys(self._fleet, tenant, prompt))
                self.core.cache.life.touch(session, SessionState.IDLE, 0, 0.0, 1)
        self.core.node.announcer.flush()
        self.directory.start()

    async def _store(self, place: RequestContext, digests: list[bytes]) -> None:
        made, *_ = await self.core.cache.writer.reserve(place, b"", digests)
        sums = []
        for digest, reservation in zip(digests, made, strict=True):
            assert reservation is not None
            mappable = reservation.tier.backend.mappable
            assert mappable is not None
            view = mappable.view(reservation.slot)[:BLOCK_BYTES]
            sums.append(checksum(view, digest, self.core.node.epoch, reservation.slot.stamp))
        self.core.cache.writer.publish_now(1, [r.id for r in made if r is not None], sums)

    async def close(self) -> None:
        await self.directory.close()
        await self.core.close()
        for tier in self.core.node.tiers:
            await tier.backend.close()


def _is_settled(node: _AgentOfTenants) -> bool:
    return node.is_settled


def _matches(fleet: Fleet, dump: Dump, count: int, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Guess `count` digests of sessions and blocks; what stands in the dump."""
    guesses = chain(_guessed_sessions(fleet), _guessed_blocks(fleet, rng))
    for i, (how, what, digest) in enumerate(islice(guesses, count)):
        if i % 100_000 == 99_999:
            sys.stderr.write(f"T4: {i + 1:,} guesses\n")
        if dump.has(digest):
            yield how, what


def _guessed_sessions(fleet: Fleet) -> Iterator[tuple[str, str, bytes]]:
    """The right names of all sessions, by every function and under every secret that one would try."""
    for name in fleet.sessions:
        for how in _HASHES:
            yield how, name, hashlib.new(how, name.encode()).digest()
        for how, secret in _secrets(fleet):
            if not how.startswith(OWN):
                yield f"our function under {how}", name, session_digest(secret, name)


def _guessed_blocks(fleet: Fleet, rng: np.random.Generator) -> Iterator[tuple[str, str, bytes]]:
    """Without end: the right prompts of all other tenants in every way, then others."""
    ways = dict(_ways(fleet))
    prompts = [p for tenant in TENANTS if tenant != ATTACKER for p in fleet.prompts[tenant]]
    own = {digest for p in fleet.prompts[ATTACKER] for digest in _keys(fleet, ATTACKER, p)}
    which = "a right"
    while True:
        for prompt in prompts:
            for how, step in ways.items():
                digest = b""
                for start in range(0, len(prompt), TOKENS):
                    digest = step(digest, prompt[start : start + TOKENS].tobytes())
                    if digest not in own:  # What the attacker has put there itself tells it nothing.
                        yield how, f"block {start // TOKENS} of {which} prompt", digest
        which = "another"
        prompts = [rng.integers(*VOCABULARY, PROMPT_BLOCKS * TOKENS, dtype=np.uint32) for _ in range(64)]


def _ways(fleet: Fleet) -> Iterator[tuple[str, Step]]:
    """Everything that somebody without the scope's secret can compute of a block."""
    for name in _HASHES:
        yield f"{name} of parent and tokens", partial(_hashed, name, b"")
        yield f"{name} of layout, parent and tokens", partial(_hashed, name, LAYOUT_ID)
    yield "our function without a key", _unkeyed
    for how, secret in _secrets(fleet):
        yield f"our function under {how}", partial(_ours, secret)


def _secrets(fleet: Fleet) -> Iterator[tuple[str, ScopeSecret]]:
    """Secrets that an attacker would try with the right scopes: constants, names, tags, and the one it holds."""
    own = fleet.secrets[ATTACKER]
    constants = {
        "zeros": bytes(32),
        "ones": b"\xff" * 32,
        "the product's name": b"kvstrata",
        "its own tag": own.tag().encode(),
    }
    for tenant in TENANTS[:-1]:
        scope = fleet.secrets[tenant].scope
        guesses = constants | {
            OWN: own.secret,
            "the tenant's name": tenant.encode(),
            "the scope's id": scope.encode(),
            "the tenant's uid": scope.split("/")[2].encode(),
            "a digest of the scope's id": hashlib.sha256(scope.encode()).digest(),
        }
        for how, secret in guesses.items():
            yield f"{how} for {tenant}", ScopeSecret(scope, secret[:32].ljust(32, b"\0"))


def _hashed(name: str, seed: bytes, before: bytes, packed: bytes) -> bytes:
    return hashlib.new(name, seed + before + packed).digest()


def _ours(secret: ScopeSecret, before: bytes, packed: bytes) -> bytes:
    tokens = np.frombuffer(packed, dtype=np.uint32)
    return chain_keys(secret, LAYOUT_ID, tokens, TOKENS, parent=before)[0].digest


def _unkeyed(before: bytes, packed: bytes) -> bytes:
    mac = hashlib.blake2b(LAYOUT_ID, digest_size=20, person=b"kvstrata.block")
    mac.update(len(before).to_bytes(1, "big") + before + len(packed).to_bytes(4, "big") + packed)
    return mac.digest()


def _canaries(fleet: Fleet) -> Iterator[tuple[str, bytes]]:
    """What must not stand in the dump as it is."""
    for tenant in TENANTS:
        secret = fleet.secrets[tenant]
        yield f"name of tenant {tenant}", tenant.encode()
        yield f"uid of tenant {tenant}", secret.scope.split("/")[2].encode()
        yield f"secret of tenant {tenant}", secret.secret
        yield f"secret of tenant {tenant} in hex", secret.secret.hex().encode()
        for prompt in fleet.prompts[tenant]:
            yield from (("tokens", prompt[i : i + 4].tobytes()) for i in range(0, len(prompt), TOKENS))
    yield from ((f"name of session {name}", name.encode()) for name in fleet.sessions)
    yield "the word canary", b"canary"
    for words in (LAYOUT.model, LAYOUT.dtype, LAYOUT_ID.hex()):
        yield f"layout: {words}", words.encode()
    yield "layout id", LAYOUT_ID
