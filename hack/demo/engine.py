"""What an inference engine does with kvfleet, in small: restore, compute the rest, save; timed and checked."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from demo import model
from demo.model import Logits, Model
from demo.rows import TurnResult
from demo.transcripts import Turn
from kvfleet_api.blocks import Layout
from kvfleet_client import Client, PrefixCache
from kvfleet_client.connectors.transformers import CacheConnector, pack
from kvfleet_client.results import Bytes2D, Loaded


@dataclass(frozen=True, slots=True)
class Uninterrupted:
    """What the run without kvfleet gave for one session: the truth that everything is compared with."""

    turns: Sequence[Turn]
    logits: Sequence[Logits]
    """Of each turn."""
    blocks: Bytes2D
    """KV of all full blocks of the last turn's prompt; those of earlier turns are its first rows."""

    def wrong_blocks(self, loaded: Loaded) -> int:
        """Count restored blocks whose bytes differ from the truth."""
        return int((loaded.data != self.blocks[: loaded.blocks]).any(axis=1).sum())


class Engine:
    """One engine process of one tenant on one node."""

    def __init__(self, llama: Model, client: Client) -> None:
        """Serve `llama` with the cache behind `client`."""
        self._llama = llama
        self.client = client
        self._connector = CacheConnector(PrefixCache(client), model.CONFIG, client.target.layout)

    def serve(self, turn: Turn, truth: Uninterrupted) -> TurnResult:
        """Take a prompt: restore what is cached, compute the rest, save what is new; then compare."""
        session, client = turn.session, self.client
        client.open_session(session)
        begin_s = time.perf_counter()
        restored = self._connector.restore(turn.tokens, session=session)
        client.touch_session(session, "decoding", urgency=100)
        have = model.usable(turn, restored.tokens)
        logits = self._llama.run(turn, model.crop(restored.cache, have), have)
        first_token_s = time.perf_counter() - begin_s
        client.touch_session(session, "idle")
        stored = self._connector.save(turn.tokens, restored.cache, session=session)
        client.touch_session(session, "tool", expected_return_s=8.0)
        loaded = restored.loaded
        return TurnResult(
            turn=turn,
            sources=Counter(loaded.sources),
            shared_blocks=loaded.shared_blocks,
            first_token_s=first_token_s,
            saved_blocks=stored.published,
            moved_bytes=(loaded.blocks + stored.published) * client.target.layout.block_bytes,
            wrong_blocks=truth.wrong_blocks(loaded) + loaded.corrupt_blocks,
            is_equal=model.is_equal(logits, truth.logits[turn.number - 1]),
        )


def run_uninterrupted(llama: Model, turns: Sequence[Turn], layout: Layout) -> Uninterrupted:
    """Run a session with its KV in this process's own memory from turn to turn, without kvfleet.

    Like every engine with a prefix cache it goes on from the last full block of the turn before.
    """
    cache, have, logits = model.new_cache(), 0, []
    for turn in turns:
        logits.append(llama.run(turn, model.crop(cache, have), have))
        have = model.usable(turn, len(turn.tokens))
    blocks = pack(cache, layout, 0, len(turns[-1].tokens) // layout.block_tokens)
    return Uninterrupted(turns, logits, blocks)
