"""A stream that is longer than the cache: sinks, window and anchors are stored and loaded, whatever left between."""

from pathlib import Path

import numpy as np
import pytest

from kvstrata import PrefixCache
from support.agent.doubles import BLOCK_BYTES, FakeAuthenticator, bytes_of, caller, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import attached

SLOTS, STREAMED, WINDOW, APART = 16, 48, 3, 12
TOKENS = np.arange(STREAMED * 16, dtype=np.uint32)


@pytest.mark.parametrize("eviction", ["ReuseAware", "LeafLRU"])
def test_a_stream_that_is_longer_than_the_cache_keeps_sinks_window_and_anchors(tmp_path: Path, eviction: str) -> None:
    tiers, policy = lambda: [dram_tier(SLOTS * BLOCK_BYTES)], {"type": eviction}
    serving = AgentThread(tmp_path / "a", tiers, FakeAuthenticator(a=caller("a")), eviction=policy)
    with serving as agent, attached(agent.socket, strict=True) as client:
        client.open_session("stream", sink_tokens=4, window_tokens=WINDOW * 16, anchor_tokens=APART * 16)
        cache = PrefixCache(client)
        for block in range(STREAMED):
            row = np.frombuffer(bytes_of(block), np.uint8)[np.newaxis]
            stored = cache.store(TOKENS[: (block + 1) * 16], row, first_block=block, session="stream", may_gap=True)
            assert stored.published == 1, f"block {block}: {stored.error}"
        assert cache.load(TOKENS, blocks_max=1).blocks == 1
        window = cache.load(TOKENS, first_block=STREAMED - WINDOW, session="stream")
        expected = [bytes_of(n) for n in range(STREAMED - WINDOW, STREAMED)]
        assert [bytes(row) for row in window.data] == expected
        for anchor in range(APART, STREAMED - WINDOW, APART):
            loaded = cache.load(TOKENS, first_block=anchor, blocks_max=anchor + 1, session="stream")
            assert [bytes(row) for row in loaded.data] == [bytes_of(anchor)]
        assert cache.lookup(TOKENS).blocks < STREAMED - WINDOW, "what is between them has left"
        row = np.frombuffer(bytes_of(0), np.uint8)[np.newaxis]
        longer = np.append(TOKENS, TOKENS[:16])
        assert cache.store(longer, row, first_block=STREAMED).published == 0, "nobody asked for what has a gap"
