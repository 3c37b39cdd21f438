"""An engine under pressure: sessions that load a prompt, compare every byte, store what is missing, and end.

Blocks follow from the prompt, so everybody can tell what belongs where. Counts are told as one line of JSON at the end.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np

from bench.harness.identity import BLOCK_TOKENS, POOL, TOKEN, layout_of
from kvstrata import Client, PrefixCache, Target
from kvstrata_api.errors import BlockCorruptError
from kvstrata_client.prompt.chain import Tokens
from kvstrata_client.verbs.results import Bytes2D

PROMPT_BLOCKS: Final = 24
SESSIONS: Final = 500
"""Of one engine, each coming back now and then. An agent remembers 65,536: new ones all the time would look like
growth for hours."""
STREAM_SHARE: Final = 0.2
"""Share of loads that come layer by layer."""
ARCHIVE_SHARE: Final = 0.5


def tokens_of(prompt: int) -> Tokens:
    """Tokens of a prompt; half of each prompt's blocks it has in common with the next."""
    family, blocks = prompt // 2, PROMPT_BLOCKS // 2
    tokens = np.empty(PROMPT_BLOCKS * BLOCK_TOKENS, np.uint32)
    tokens[: blocks * BLOCK_TOKENS] = family
    tokens[blocks * BLOCK_TOKENS :] = prompt + (1 << 20)
    return tokens


def blocks_of(prompt: int, block_bytes: int) -> Bytes2D:
    """Bytes of a prompt's blocks: eight that name prompt and block, again and again."""
    names = np.arange(PROMPT_BLOCKS, dtype=np.uint64)
    half = PROMPT_BLOCKS // 2
    names[:half] += np.uint64((prompt // 2) << 16)
    names[half:] += np.uint64((prompt + (1 << 20)) << 16)
    return np.repeat(names[:, None], block_bytes // 8, axis=1).view(np.uint8)


class Engine:
    """One client, and what it has seen."""

    def __init__(self, client: Client, block_bytes: int, prompts: int, seed: int) -> None:
        self._client = client
        self._cache = PrefixCache(client)
        self._block_bytes = block_bytes
        self._prompts = prompts
        self._random = random.Random(seed)
        self._into = np.empty((PROMPT_BLOCKS, block_bytes), np.uint8)
        self._name = f"engine-{seed}"
        self.counts: Counter[str] = Counter()

    def turn(self) -> None:
        """One session: load, compare, store the rest, end."""
        prompt = int(self._random.random() ** 2 * self._prompts)  # Low numbers come more often.
        tokens, expected = tokens_of(prompt), blocks_of(prompt, self._block_bytes)
        session = f"{self._name}-{self._random.randrange(SESSIONS)}"
        self._client.open_session(session)
        self._client.touch_session(session, "decoding")
        if self._random.random() < STREAM_SHARE:
            blocks = self._stream(tokens, expected, session)
        else:
            loaded = self._cache.load(tokens, self._into, session=session)
            blocks = loaded.blocks
            self._compare(loaded.data, expected[:blocks])
            self.counts["corrupt"] += loaded.corrupt_blocks
            self.counts["lost"] += loaded.lost_blocks
        stored = self._cache.store(tokens, expected[blocks:], first_block=blocks, session=session)
        self._client.complete_session(session, archive=self._random.random() < ARCHIVE_SHARE)
        self.counts["turns"] += 1
        self.counts["wanted"] += PROMPT_BLOCKS
        self.counts["loaded"] += blocks
        self.counts["stored"] += stored.published
        self.counts["refused"] += stored.refused

    def _stream(self, tokens: Tokens, expected: Bytes2D, session: str) -> int:
        """Read layer by layer; returns how many blocks counted."""
        layers = self._client.target.layout.layers
        step = self._block_bytes // layers
        stream = self._cache.stream(tokens, session=session)
        try:
            parts = [stream.read(range(layer, layer + 1)) for layer in range(layers)]
        except BlockCorruptError:
            self.counts["corrupt"] += 1
            parts = []
        if not stream.close() or not parts:  # Nobody vouches for what was read.
            self.counts["lost"] += stream.blocks
            return 0
        for layer, part in enumerate(parts):
            self._compare(part, expected[: stream.blocks, layer * step : (layer + 1) * step])
        self.counts["streamed"] += stream.blocks
        return stream.blocks

    def _compare(self, got: Bytes2D, expected: Bytes2D) -> None:
        self.counts["compared"] += len(got)
        self.counts["wrong"] += int((got != expected).any(axis=1).sum())


def main() -> None:
    """Work until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="of the agent")
    parser.add_argument("--block-bytes", type=int, required=True, help="a multiple of 4 KiB")
    parser.add_argument("--prompts", type=int, required=True, help="different prompts")
    parser.add_argument("--seed", type=int, required=True, help="of the choices")
    parser.add_argument("--seconds", type=float, required=True, help="how long")
    chosen = parser.parse_args()
    target = Target(chosen.socket, POOL, TOKEN, layout_of(chosen.block_bytes))
    ends_s = time.monotonic() + chosen.seconds
    with Client.attach(target) as client:
        engine = Engine(client, chosen.block_bytes, chosen.prompts, chosen.seed)
        while time.monotonic() < ends_s:
            engine.turn()
        print(json.dumps({**engine.counts, "is_done": 1}), flush=True)


if __name__ == "__main__":
    main()
