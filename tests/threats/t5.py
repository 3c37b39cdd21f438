"""T5: no caller chooses a salt or a scope, and no two inputs of a key can be taken for each other.

Two parts. Generated pairs of inputs that differ in one thing (secret, layout, where one list of tokens ends and the
next field begins, extras, parent, adapter) must have different keys, and no key may occur twice among all of them.
And every request of the protocol that names a scope, written by hand, gets for another's scope the very bytes that an
absent one gets; whatever else a caller writes into a frame (a salt, a tenant) changes no byte of the answer.
"""

import inspect
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from kvstrata import AsyncClient, Client
from kvstrata_api import wire
from kvstrata_api.blocks import KEY_BYTES, BlockKey, Layout, ScopeId, ScopeSecret, chain_keys, pack_digests
from kvstrata_client.cache import AsyncPrefixCache, PrefixCache
from kvstrata_client.target import Target
from support.agent.doubles import LAYOUT, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import attached
from support.client.share_callers import SHARE, SYSTEM_PROMPT, callers
from support.runner.outcome import Outcome, Scale
from threats import raw_caller
from threats.raw_caller import RawCaller

Derive = Callable[..., list[BlockKey]]

CHOSEN: Final = ("salt", "cache_salt", "scope", "tenant", "secret", "key_version")
"""Words by which requests elsewhere choose a cache's namespace."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that the key of one block is made of."""

    secret: bytes
    layout: Layout
    block_tokens: int
    tokens: tuple[int, ...]
    """Of one block."""
    parent: bytes = b""
    extras: tuple[bytes, ...] = ()

    def key(self, derive: Derive) -> bytes:
        """Key of the block."""
        secret = ScopeSecret(ScopeId("tenant/x/1/v1"), self.secret)
        layout_id = self.layout.layout_id()
        made = derive(secret, layout_id, self.tokens, self.block_tokens, parent=self.parent, extras=self.extras)
        return made[0].digest


def run(scale: Scale) -> Outcome:
    """Try both parts; then see that the same pairs catch derivations that lost something."""
    count = scale.of(100_000, 3_000)
    broken = compare(chain_keys, scale.first_seed, count)
    entered, ways = enter()
    caught = all(compare(lossy, scale.first_seed, min(count, 3_000)) for lossy in LOSSY)
    values = {"entry_points": float(ways)}
    return Outcome(count, "pairs", (*broken[:20], *entered), caught and _is_control_read(), values)


def compare(derive: Derive, seed: int, count: int) -> list[str]:
    """Pairs whose keys are equal, and keys that occur twice among all cases."""
    rng = random.Random(seed)
    seen: dict[bytes, Case] = {}
    broken = []
    for number in range(count):
        one = _case(rng)
        name, other = _changed(rng, one)
        for case in (one, other):
            key = case.key(derive)
            if seen.setdefault(key, case) != case:
                broken.append(f"seed {seed} pair {number} ({name}): {case} has the key of {seen[key]}")
        if number and number % 25_000 == 0:
            sys.stderr.write(f"T5: {number:,} pairs\n")
    return broken


def _case(rng: random.Random) -> Case:
    """A block of any size, with few values, so that borders between fields are easily mistaken."""
    block_tokens = rng.choice((1, 2, 4, 8, 16))
    pieces = [rng.choice((b"", b"\0", b"\0\0\0\4", b"ab", rng.randbytes(rng.randrange(40)))) for _ in range(3)]
    return Case(
        secret=rng.choice((bytes(32), b"\1" + bytes(31), bytes(31) + b"\1", rng.randbytes(32))),
        layout=replace(LAYOUT, model=rng.choice(("m", "mr", "")), revision=rng.choice(("r", "", "rfp")), dtype="fp32"),
        block_tokens=block_tokens,
        tokens=tuple(rng.choice((0, 1, 4, rng.getrandbits(32))) for _ in range(block_tokens)),
        parent=rng.choice((b"", bytes(KEY_BYTES), rng.randbytes(KEY_BYTES))),
        extras=tuple(pieces[: rng.randrange(4)]),
    )


def _changed(rng: random.Random, case: Case) -> tuple[str, Case]:
    """The case with one thing changed that some encoding would lose."""
    name = rng.choice(tuple(CHANGES))
    changed = CHANGES[name](rng, case)
    return name, changed if changed != case else replace(case, secret=rng.randbytes(32))


def _split_tokens(_: random.Random, case: Case) -> Case:
    """Hand the second half of the tokens over as an extra: the same bytes in the same order."""
    half = case.block_tokens // 2
    if not half:
        return case
    rest = b"".join(t.to_bytes(4, "little") for t in case.tokens[half:])
    return replace(case, block_tokens=half, tokens=case.tokens[:half], extras=(rest, *case.extras))


def _split_extras(rng: random.Random, case: Case) -> Case:
    """Cut the joined extras elsewhere."""
    joined = b"".join(case.extras)
    cut = rng.randrange(len(joined) + 1)
    return replace(case, extras=(joined[:cut], joined[cut:]))


def _parent_as_tokens(_: random.Random, case: Case) -> Case:
    """Put the parent's bytes before the tokens."""
    if not case.parent:
        return case
    words = tuple(int.from_bytes(case.parent[i : i + 4], "little") for i in range(0, KEY_BYTES, 4))
    return replace(case, parent=b"", tokens=words + case.tokens, block_tokens=case.block_tokens + len(words))


def _other_adapter(rng: random.Random, case: Case) -> Case:
    return replace(case, layout=replace(case.layout, adapter=rng.choice(("lora", "lor", "a"))))


def _shifted_layout(_: random.Random, case: Case) -> Case:
    """Move a letter from one field of the layout to the next."""
    model = case.layout.model
    return replace(case, layout=replace(case.layout, model=model[:-1], revision=model[-1:] + case.layout.revision))


def _other_token(rng: random.Random, case: Case) -> Case:
    at = rng.randrange(case.block_tokens)
    changed = case.tokens[at] ^ (1 << rng.randrange(32))
    return replace(case, tokens=(*case.tokens[:at], changed, *case.tokens[at + 1 :]))


CHANGES: Final[dict[str, Callable[[random.Random, Case], Case]]] = {
    "another secret": lambda rng, case: replace(case, secret=rng.randbytes(32)),
    "one bit of the secret": lambda rng, case: replace(case, secret=_flip(rng, case.secret)),
    "another adapter": _other_adapter,
    "a letter of the layout shifted": _shifted_layout,
    "one bit of a token": _other_token,
    "tokens split differently": _split_tokens,
    "extras split differently": _split_extras,
    "no extras": lambda _, case: replace(case, extras=()),
    "an empty extra": lambda _, case: replace(case, extras=(*case.extras, b"")),
    "extras swapped": lambda _, case: replace(case, extras=case.extras[::-1]),
    "the parent as tokens": _parent_as_tokens,
    "no parent": lambda _, case: replace(case, parent=b""),
    "a parent of zeros": lambda _, case: replace(case, parent=bytes(KEY_BYTES)),
    "the secret as parent": lambda _, case: replace(case, parent=case.secret[:KEY_BYTES]),
}


def _flip(rng: random.Random, value: bytes) -> bytes:
    at = rng.randrange(len(value))
    return value[:at] + bytes([value[at] ^ (1 << rng.randrange(8))]) + value[at + 1 :]


def _no_secret(secret: ScopeSecret, *arguments: Any, **more: Any) -> list[BlockKey]:
    """The commonest real failure: the salt is lost."""
    return chain_keys(ScopeSecret(secret.scope, bytes(32)), *arguments, **more)


def _no_layout(secret: ScopeSecret, _: bytes, *arguments: Any, **more: Any) -> list[BlockKey]:
    return chain_keys(secret, LAYOUT.layout_id(), *arguments, **more)


def _no_lengths(
    secret: ScopeSecret, layout_id: Any, tokens: Sequence[int], size: int, *, parent: bytes, extras: tuple[bytes, ...]
) -> list[BlockKey]:
    """Extras joined without their lengths."""
    return chain_keys(secret, layout_id, tokens, size, parent=parent, extras=(b"".join(extras),))


def _no_parent(*arguments: Any, parent: bytes, extras: tuple[bytes, ...]) -> list[BlockKey]:
    del parent
    return chain_keys(*arguments, extras=extras)


LOSSY: Final[tuple[Derive, ...]] = (_no_secret, _no_layout, _no_lengths, _no_parent)
"""Controls: the same pairs must find equal keys in each of these."""


def enter() -> tuple[list[str], int]:
    """Try every entry point; returns what chose something, and how many were tried."""
    broken = [f"{where} takes {name!r}" for where, name in _parameters() if name in CHOSEN]
    tried = len(list(_parameters()))
    with tempfile.TemporaryDirectory(prefix="kvstrata-t5-") as folder:
        path = Path(folder) / "agent.sock"
        with AgentThread(path, lambda: [dram_tier(1 << 22)], callers()) as agent:
            owned = _stored(path)
            for request in _requests(owned):
                tried += 1
                broken += _differs_from_absent(path, request)
            for told, told_more in _overfull():
                tried += 1
                broken += _is_heard(path, told, told_more)
            held = agent.call(lambda: len(agent.core.node.reservations) + len(agent.core.node.leases))
            if held:
                broken.append(f"{held} leases and reservations were given to hand-written requests")
    return broken, tried


def _parameters() -> Iterator[tuple[str, str]]:
    """Every parameter of what the client offers for prompts: no name by which a caller could choose a scope."""
    for kind in (PrefixCache, AsyncPrefixCache, Target, Client, AsyncClient):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") or name == "__init__":
                yield from ((f"{kind.__name__}.{name}", word) for word in inspect.signature(member).parameters)
    for request in get_args(wire.AnyRequest):
        if request in (wire.Attach, wire.Hello, wire.OpenSession):
            yield from ((request.__name__, field) for field in request.__struct_fields__)
    yield from (("Layout", field.name) for field in fields(Layout))


def _stored(path: Path) -> dict[ScopeId, bytes]:
    """Blocks of `a` in the share and in its own scope; their digests by scope."""

    tokens = np.concatenate([SYSTEM_PROMPT, np.arange(64, dtype=np.uint32)])
    with attached(path, "a") as client:
        rows = np.zeros((len(tokens) // 16, LAYOUT.block_bytes), np.uint8)
        assert PrefixCache(client).store(tokens, rows).published == len(rows)
        grants = client.grants
        assert grants is not None
        own, share = grants.own, grants.shares[0]
        assert own is not None
        shared = chain_keys(share.secret, LAYOUT.layout_id(), SYSTEM_PROMPT, 16)
        rest = chain_keys(own.secret, LAYOUT.layout_id(), tokens[80:], 16, parent=shared[-1].digest)
    return {share.id: pack_digests(shared), own.id: pack_digests(rest)}


def _requests(owned: dict[ScopeId, bytes]) -> Iterator[tuple[Any, ...]]:
    """Every verb that names a scope, for each scope of another: (kind of request, scope, the other fields)."""
    for scope, digests in owned.items():
        yield wire.Lookup, scope, (digests,)
        yield wire.Lookup, scope, (digests, "s", True)
        yield wire.Acquire, scope, (digests,)
        yield wire.Reserve, scope, (b"", digests)
        yield wire.Reserve, scope, (digests[:KEY_BYTES], bytes(KEY_BYTES))
        yield wire.Prefetch, scope, (digests,)
        yield wire.Pin, scope, (digests, 60.0)
        yield wire.Unpin, scope, (digests,)
        yield wire.Touch, scope, (digests,)
        yield wire.Drop, scope, (digests,)
        yield wire.Demote, scope, (digests,)
        yield wire.Fetch, scope, (digests,)
        yield wire.Explain, scope, (digests[:KEY_BYTES],)
        yield wire.WhyMiss, scope, (digests,)
        yield wire.RouteHint, scope, (digests,)


def _differs_from_absent(path: Path, request: tuple[Any, ...]) -> list[str]:
    """Ask as `c`, who may read nothing of it, for the scope and for names of no scope; the bytes must be equal."""
    kind, scope, rest = request
    with RawCaller(path) as caller:
        caller.attach("c")
        answer = caller.tell(raw_caller.fields(kind(7, scope, *rest)))
        absent = (scope[:-1] + "9", "tenant/nobody/uid/v1", "", "*", scope.upper(), scope + "/", "tenant/c/../a/v1")
        answers = {name: caller.tell(raw_caller.fields(kind(7, name, *rest))) for name in absent}
    differing = (name for name, other in answers.items() if other != answer)
    return [f"{kind.__name__} of {scope}: another answer than for {name!r}" for name in differing]


def _overfull() -> Iterator[tuple[list[Any], list[Any]]]:
    """Requests, and the same with something chosen by the caller."""
    attach = raw_caller.fields(wire.Attach(7, "c", "pool", LAYOUT))
    lookup = raw_caller.fields(wire.Lookup(7, "tenant/c/uid-c/v1", bytes(KEY_BYTES)))
    session = raw_caller.fields(wire.OpenSession(7, "s"))
    layout = next(at for at, value in enumerate(attach) if isinstance(value, dict))
    for name in CHOSEN:
        for chosen in ("a", str(SHARE), b"\0" * 32):
            for plain in (attach, lookup, session):
                yield plain, [*plain, name, chosen]
                yield plain, [*plain, {name: chosen}]
            yield attach, [*attach[:layout], {**attach[layout], name: chosen}, *attach[layout + 1 :]]


def _is_heard(path: Path, plain: list[Any], more: list[Any]) -> list[str]:
    """Tell both on connections of `c`; the answers must be equal, or the second refused."""
    answers = []
    for message in (plain, more):
        with RawCaller(path) as caller:
            caller.attach("c")
            answers.append(_timeless(caller.tell(message)))
    is_refused = isinstance(answers[1], wire.Failed)
    return [] if is_refused or answers[0] == answers[1] else [f"{more} is answered otherwise than {plain}"]


def _timeless(answer: bytes) -> object:
    """An answer without the time that it was given at."""
    reply = wire.decode_reply(answer)
    return (reply.tenant, reply.scopes, reply.write_scope) if isinstance(reply, wire.Granted) else reply


def _is_control_read() -> bool:
    """The same requests by whoever may read the scope: they are answered otherwise than for an absent one."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-t5-") as folder:
        path = Path(folder) / "agent.sock"
        with AgentThread(path, lambda: [dram_tier(1 << 22)], callers()):
            shared = _stored(path)[SHARE]
            client = attached(path, "b")
            keys = [BlockKey(SHARE, shared[i : i + KEY_BYTES]) for i in range(0, len(shared), KEY_BYTES)]
            with client:
                return client.lookup(keys).blocks == len(keys)
