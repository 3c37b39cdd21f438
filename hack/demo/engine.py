"""What an inference engine does with kvstrata, in small: restore, compute the rest, save; timed and checked."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transformers import DynamicCache

from demo import model
from demo.model import Logits, Model
from demo.rows import TurnResult
from demo.transcripts import Turn
from kvstrata import Client, PrefixCache
from kvstrata_api.blocks import Layout
from kvstrata_api.errors import KvStrataError
from kvstrata_client.connectors.transformers import CacheConnector, Overlap, pack
from kvstrata_client.verbs.results import Bytes2D, Stored

NOTHING: Final = Overlap(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Uninterrupted:
    """What the run without kvstrata gave for one session: the truth that everything is compared with."""

    turns: Sequence[Turn]
    logits: Sequence[Logits]
    """Of each turn."""
    blocks: Bytes2D
    """KV of all full blocks of the last turn's prompt; those of earlier turns are its first rows."""

    def wrong_blocks(self, blocks: Bytes2D) -> int:
        """Count leading blocks whose bytes differ from the truth."""
        return int((blocks != self.blocks[: len(blocks)]).any(axis=1).sum())


@dataclass(frozen=True, slots=True)
class _Computed:
    """What came of one prompt."""

    logits: Logits
    cache: DynamicCache
    sources: tuple[str, ...] = ()
    shared_blocks: int = 0
    overlap: Overlap = NOTHING


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
        computed = self._compute(turn)
        first_token_s = time.perf_counter() - begin_s
        client.touch_session(session, "idle")
        stored = self._connector.save(turn.tokens, computed.cache, session=session)
        client.tool_wait(session, 8.0)
        layout, restored_blocks = client.target.layout, len(computed.sources)
        return TurnResult(
            turn=turn,
            sources=Counter(computed.sources),
            shared_blocks=computed.shared_blocks,
            first_token_s=first_token_s,
            overlap=computed.overlap,
            saved_blocks=stored.published,
            refusal=_refusal(stored),
            moved_bytes=(restored_blocks + stored.published) * layout.block_bytes,
            wrong_blocks=truth.wrong_blocks(pack(computed.cache, layout, range(restored_blocks))),
            is_equal=model.is_equal(computed.logits, truth.logits[turn.number - 1]),
        )

    def _compute(self, turn: Turn) -> _Computed:
        """Compute with the first layers while the others are copied; without any of them when they cannot be had."""
        restoring = self._connector.restore_layerwise(turn.tokens, session=turn.session)
        self.client.touch_session(turn.session, "decoding", urgency=100)
        try:
            have = model.usable(turn, restoring.tokens)
            logits = self._llama.run(turn, model.crop(restoring.cache, have), have)
            overlap = restoring.arrivals.finish()
        except KvStrataError:
            cache = model.new_cache()
            return _Computed(self._llama.run(turn, cache, 0), cache)
        return _Computed(logits, restoring.cache, restoring.sources, restoring.shared_blocks, overlap)


def _refusal(stored: Stored) -> str:
    """Why blocks of a prompt were not stored; empty when all were."""
    if not stored.refused:
        return ""
    return f"{stored.refused} blocks were refused: {stored.error or 'the agent gave no reason'}"


def run_uninterrupted(llama: Model, turns: Sequence[Turn], layout: Layout) -> Uninterrupted:
    """Run a session with its KV in this process's own memory from turn to turn, without kvstrata.

    Like every engine with a prefix cache it goes on from the last full block of the turn before.
    """
    cache, have, logits = model.new_cache(), 0, []
    for turn in turns:
        logits.append(llama.run(turn, model.crop(cache, have), have))
        have = model.usable(turn, len(turn.tokens))
    blocks = pack(cache, layout, range(len(turns[-1].tokens) // layout.block_tokens))
    return Uninterrupted(turns, logits, blocks)
