"""T2: a prompt cannot be recovered token by token by replaying guesses (PromptPeek) from another scope.

The attacker knows all of a victim's prompt but one token in each block, and has a list of 64 words with the right one
among them: more than any attacker has. It asks in three ways whether a guess is there: look it up, lease it, or offer
to store it (which is refused where it exists), each with keys of its own and with the victim's. From inside the scope
the same guesses recover the prompt, which is the control.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from kvstrata_api.tiers import Lookup
from support.agent.doubles import bytes_of
from support.agent.process import DOMAIN
from support.client.hostile import Hostile
from support.runner.outcome import Outcome, Scale
from threats.served import PREFIX_TOKENS, SCOPE_A, SCOPE_B, keys_of, serving

WORDS: Final = 64
"""Tokens that may stand at the end of a block."""
SECRET_AT: Final = PREFIX_TOKENS - 1

Oracle = Callable[[Hostile, str, Sequence[bytes]], bool]
"""Whether the last key of a chain seems to be there."""


def _by_lookup(client: Hostile, scope: str, keys: Sequence[bytes]) -> bool:
    found = client.ask(wire.Lookup(1, scope, b"".join(keys)))
    assert isinstance(found, wire.Found), found
    return any(state != Lookup.MISS for state in found.states[len(keys) - 1 :])


def _by_acquire(client: Hostile, scope: str, keys: Sequence[bytes]) -> bool:
    acquired = client.ask(wire.Acquire(1, scope, keys[-1], deadline_s=0.1))
    assert isinstance(acquired, wire.Acquired), acquired
    client.ask(wire.Release(2, tuple(b.lease for b in acquired.blocks)))
    return bool(acquired.blocks)


def _by_reserve(client: Hostile, scope: str, keys: Sequence[bytes]) -> bool:
    """A block that exists must not be written again, and the agent says so to whoever may write the scope."""
    reserved = client.ask(wire.Reserve(1, scope, keys[-2] if len(keys) > 1 else b"", keys[-1]))
    if not isinstance(reserved, wire.Reserved):
        return False
    client.ask(wire.Abandon(2, tuple(s.reservation for s in reserved.slots if s.reservation)))
    return any(not s.reservation for s in reserved.slots)


ORACLES: Final[tuple[Oracle, ...]] = (_by_lookup, _by_acquire, _by_reserve)


class Peek:
    """One attack on one prompt."""

    def __init__(self, prompt: list[int], client: Hostile) -> None:
        self._prompt = prompt
        self._client = client
        self.probes = 0

    def confirmed(self, ask_in: str, keyed_by: ScopeId, oracle: Oracle, blocks: Sequence[int]) -> list[int]:
        """Blocks whose secret token was confirmed: one guess, and one only, seemed to be there."""
        return [b for b in blocks if len(self._guessed(ask_in, keyed_by, oracle, b)) == 1]

    def _guessed(self, ask_in: str, keyed_by: ScopeId, oracle: Oracle, block: int) -> list[int]:
        known = self._prompt[: (block + 1) * PREFIX_TOKENS]
        hits = []
        for word in range(WORDS):
            keys = keys_of(keyed_by, [*known[:-1], word])
            self.probes += 1
            if oracle(self._client, ask_in, keys):
                hits.append(word)
        return hits


def _prompt(blocks: int, rng: random.Random) -> list[int]:
    """Tokens of a prompt whose last one in each block is the secret."""
    tokens = [rng.randrange(1000, 30_000) for _ in range(blocks * PREFIX_TOKENS)]
    for block in range(blocks):
        tokens[block * PREFIX_TOKENS + SECRET_AT] = rng.randrange(WORDS)
    return tokens


def run(scale: Scale) -> Outcome:
    """Guess from other scopes, and from inside."""
    blocks = scale.of(160, 12)
    prompt = _prompt(blocks, random.Random(scale.first_seed))
    leaked: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvstrata-t2-") as directory, serving(Path(directory), "dram") as agent:
        with Hostile(agent.path, "a") as victim, Hostile(agent.path, "b") as attacker:
            assert len(victim.store(SCOPE_A, keys_of(SCOPE_A, prompt), bytes_of(1))) == blocks
            peek = Peek(prompt, attacker)
            ways = ((SCOPE_B, SCOPE_B), (SCOPE_A, SCOPE_A), (SCOPE_B, SCOPE_A), (DOMAIN, SCOPE_A))
            for i, (ask_in, keyed_by) in enumerate(ways):
                for j, oracle in enumerate(ORACLES):
                    turn = range((i * len(ORACLES) + j) % 12, blocks, 12)
                    found = peek.confirmed(ask_in, keyed_by, oracle, turn)
                    leaked += [f"block {b} by {oracle.__name__} in {ask_in} with keys of {keyed_by}" for b in found]
        with Hostile(agent.path, "a") as insider:
            inside = Peek(prompt, insider)
            recovered = [
                len(inside.confirmed(SCOPE_A, SCOPE_A, oracle, range(i, blocks, 3))) for i, oracle in enumerate(ORACLES)
            ]
    ratio = sum(recovered) / blocks
    values = {"control_recovered_ratio": ratio, "tokens_confirmed": float(len(leaked))}
    return Outcome(peek.probes, "probes", tuple(leaked), ratio >= 0.9 and all(recovered), values)
