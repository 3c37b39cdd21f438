"""The transformers connector against the real package: what is restored is what was computed, bit for bit."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.agent.doubles import FakeAuthenticator, caller, dict_tier, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import attached
from support.client.share_callers import named, sharing

torch = pytest.importorskip("torch", reason="the transformers connector needs torch")
pytest.importorskip("transformers", reason="the transformers connector needs transformers")

from transformers import DynamicCache, LlamaConfig  # noqa: E402

from kvstrata_agent.blocks.tier import Tier  # noqa: E402
from kvstrata_api.errors import BlockCorruptError, InvalidInputError, LeaseLostError, UnsupportedError  # noqa: E402
from kvstrata_client.cache import PrefixCache  # noqa: E402
from kvstrata_client.connectors import transformers  # noqa: E402
from kvstrata_client.connectors.transformers import Arrivals, CacheConnector, check_layout, layout_of, pack, unpack  # noqa: E402
from support.client.tiny_llama import CONFIG, PROMPT, made, run  # noqa: E402
from support.client.torch_device import DEVICE  # noqa: E402

pytestmark = pytest.mark.system

LAYOUT = layout_of(CONFIG, "test/llama", "r1", "bf16")


@pytest.fixture(scope="module")
def model() -> Any:
    return made().to(torch.bfloat16)


def test_logits_after_a_restore_equal_those_of_the_uninterrupted_run(model: Any) -> None:
    kept = DynamicCache(config=CONFIG)
    run(model, PROMPT[:96], kept)
    restored = unpack(pack(kept, LAYOUT, range(6)), CONFIG, LAYOUT, DEVICE)
    expected, actual = run(model, PROMPT[96:], kept), run(model, PROMPT[96:], restored)

    assert torch.equal(expected.view(torch.int16), actual.view(torch.int16))


def test_a_shared_system_prompt_and_a_private_rest_restore_to_the_uninterrupted_run(tmp_path: Path) -> None:
    """The prefix has 71 tokens, so what is restored may end within it: it is recognised by all of its tokens."""
    model = made()
    layout = layout_of(CONFIG, "tiny", "r1", "fp32")
    prefix = np.array(PROMPT[:71], np.uint32)
    parties = FakeAuthenticator(
        a=sharing("a", named(prefix), can_write=True), b=sharing("b", named(prefix), can_write=False)
    )
    ours, theirs = PROMPT[:84], PROMPT[:71] + PROMPT[100:120]
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], parties) as agent:
        connectors = {}
        for name in "ab":
            client = attached(agent.socket, name, strict=True, layout=layout)
            connectors[name] = CacheConnector(PrefixCache(client), CONFIG, layout, DEVICE)
        kept = DynamicCache(config=CONFIG)
        run(model, ours, kept)
        assert connectors["a"].save(ours, kept).published == 5

        restored = connectors["b"].restore(theirs)
        assert (restored.tokens, restored.loaded.shared_blocks) == (64, 4)
        whole = DynamicCache(config=CONFIG)
        expected = run(model, theirs, whole)[:, 64:]
        resumed = run(model, theirs[64:], restored.cache)
        assert torch.allclose(expected, resumed, atol=1e-5)
        assert connectors["b"].save(theirs, restored.cache, first_block=4).published == 1
        again = connectors["b"].restore(theirs)
        assert (again.tokens, again.loaded.shared_blocks) == (80, 4)
        assert np.array_equal(pack(again.cache, layout, range(5)), pack(restored.cache, layout, range(5)))
        assert connectors["b"].restore(PROMPT[:72]).tokens == 64, "the prefix is recognised by all of its tokens"
        assert connectors["b"].restore(PROMPT[:71]).tokens == 64
        for connector in connectors.values():
            connector._cache._client.close()


@contextmanager
def holding(tmp_path: Path, tiers: Callable[[], list[Tier]]) -> Iterator[tuple[Any, CacheConnector, AgentThread]]:
    """A model, a connector, and an agent that holds the first 12 blocks of the prompt."""
    model = made()
    layout = layout_of(CONFIG, "tiny", "r1", "fp32")
    party = FakeAuthenticator(a=caller("a"))
    with (
        AgentThread(tmp_path / "agent.sock", tiers, party) as agent,
        attached(agent.socket, strict=True, layout=layout) as client,
    ):
        connector = CacheConnector(PrefixCache(client), CONFIG, layout, DEVICE)
        kept = DynamicCache(config=CONFIG)
        run(model, PROMPT[:192], kept)
        saved = [connector.save(PROMPT[: 16 * n], kept, first_block=n - 1).published for n in range(1, 13)]
        assert saved == [1] * 12
        yield model, connector, agent


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[Any, CacheConnector, AgentThread]]:
    with holding(tmp_path, lambda: [dram_tier(1 << 22)]) as made:
        yield made


def test_a_prefix_that_memory_cannot_hold_at_a_time_is_restored_whole_before_computing(tmp_path: Path) -> None:
    small = 6 * layout_of(CONFIG, "tiny", "r1", "fp32").block_bytes
    with holding(tmp_path, lambda: [dram_tier(small), dict_tier("nvme", 1 << 22, 1, 2)]) as (model, connector, agent):
        restoring = connector.restore_layerwise(PROMPT)
        actual = run(model, PROMPT[192:], restoring.cache)

        assert restoring.tokens == 192
        assert set(restoring.sources) == {"dram", "nvme"}
        assert restoring.arrivals.finish().waited_s == 0.0
        expected = run(model, PROMPT[192:], connector.restore(PROMPT).cache)
        assert torch.equal(expected.view(torch.int32), actual.view(torch.int32))
        assert agent.call(lambda: len(agent.core.node.leases)) == 0


def test_a_layerwise_restore_gives_the_same_bits_as_a_whole_one(
    stored: tuple[Any, CacheConnector, AgentThread],
) -> None:
    model, connector, agent = stored
    whole = connector.restore(PROMPT)
    expected = run(model, PROMPT[192:], whole.cache)

    restoring = connector.restore_layerwise(PROMPT)
    actual = run(model, PROMPT[192:], restoring.cache)
    overlap = restoring.arrivals.finish()

    assert torch.equal(expected.view(torch.int32), actual.view(torch.int32))
    assert (restoring.tokens, restoring.sources) == (192, ("dram",) * 12)
    assert 0 < overlap.first_layer_s <= overlap.all_layers_s
    layout = connector._layout
    assert np.array_equal(pack(restoring.cache, layout, range(12)), pack(whole.cache, layout, range(12)))
    assert agent.call(lambda: len(agent.core.node.leases)) == 0


def test_a_prompt_that_goes_on_behind_what_is_stored_still_comes_layer_by_layer(
    stored: tuple[Any, CacheConnector, AgentThread],
) -> None:
    _, connector, _ = stored
    restoring = connector.restore_layerwise(PROMPT + PROMPT)

    overlap = restoring.arrivals.finish()
    assert restoring.tokens == 192
    assert 0 < overlap.first_layer_s <= overlap.all_layers_s


def test_a_layer_computes_before_the_next_one_has_arrived(stored: tuple[Any, CacheConnector, AgentThread]) -> None:
    model, connector, _ = stored
    expected = run(model, PROMPT[192:], connector.restore(PROMPT).cache)
    first_computed = threading.Event()
    stream = connector._cache.stream(PROMPT, blocks_max=12)
    read = stream.read

    def in_step(layers: range, into: Any) -> Any:
        """The second layer is not read before the first one's attention has run."""
        assert layers.start == 0 or first_computed.wait(20.0), "the engine waits for all layers"
        return read(layers, into)

    stream.read = in_step  # type: ignore[method-assign,assignment]
    connector._cache.stream = lambda *_, **__: stream  # type: ignore[method-assign]
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda *_: first_computed.set())
    restoring = connector.restore_layerwise(PROMPT)
    actual = run(model, PROMPT[192:], restoring.cache)
    hook.remove()

    assert torch.equal(expected.view(torch.int32), actual.view(torch.int32))
    assert restoring.arrivals.finish().waited_s > 0


def test_a_layer_that_cannot_be_had_is_raised_in_the_forward_pass_and_at_the_end(
    stored: tuple[Any, CacheConnector, AgentThread],
) -> None:
    model, connector, agent = stored
    agent.call(lambda: [agent.core.node.leases.end_where(lambda _: True)])
    stream = connector._cache.stream(PROMPT, blocks_max=12)

    def broken(*_: Any) -> Any:
        raise BlockCorruptError("layer 0 of block 3")

    stream.read = broken  # type: ignore[method-assign,assignment]
    connector._cache.stream = lambda *_, **__: stream  # type: ignore[method-assign]
    restoring = connector.restore_layerwise(PROMPT)

    with pytest.raises(BlockCorruptError):
        run(model, PROMPT[192:], restoring.cache)
    with pytest.raises(BlockCorruptError):
        restoring.arrivals.finish()
    assert agent.call(lambda: len(agent.core.node.leases)) == 0


def test_leases_that_were_lost_make_what_was_computed_void(stored: tuple[Any, CacheConnector, AgentThread]) -> None:
    model, connector, agent = stored
    node = agent.core.node
    stream = connector._cache.stream(PROMPT, blocks_max=12)
    agent.call(lambda: node.end_leases(node.leases.end_where(lambda _: True)))
    connector._cache.stream = lambda *_, **__: stream  # type: ignore[method-assign]
    restoring = connector.restore_layerwise(PROMPT)
    run(model, PROMPT[192:], restoring.cache)

    with pytest.raises(LeaseLostError):
        restoring.arrivals.finish()


def test_layers_that_do_not_come_make_what_was_computed_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "ARRIVE_S", 0.05)
    may_come = threading.Event()
    stream = SimpleNamespace(blocks=1, read=lambda *_: may_come.wait(), close=lambda: True)
    arrivals = Arrivals(stream, LAYOUT, torch.device("cpu"), LAYOUT.layers)  # type: ignore[arg-type]

    with pytest.raises(LeaseLostError, match="was not there after"):
        arrivals.finish()
    may_come.set()


def test_a_layerwise_restore_of_nothing_is_an_empty_cache(stored: tuple[Any, CacheConnector, AgentThread]) -> None:
    _, connector, _ = stored
    restoring = connector.restore_layerwise([5] * 64)

    assert (restoring.tokens, restoring.cache.get_seq_length()) == (0, 0)
    assert restoring.arrivals.finish().all_layers_s == 0


def test_packing_what_was_unpacked_gives_the_same_bytes(model: Any) -> None:
    cache = DynamicCache(config=CONFIG)
    run(model, PROMPT[:64], cache)
    blocks = pack(cache, LAYOUT, range(4))

    assert np.array_equal(pack(unpack(blocks, CONFIG, LAYOUT, DEVICE), LAYOUT, range(4)), blocks)
    assert np.array_equal(pack(cache, LAYOUT, range(1, 3)), blocks[1:3])
    assert not np.array_equal(blocks[0], blocks[1])


def test_a_block_is_contiguous_by_layer_kv_head_token_and_dim(model: Any) -> None:
    cache = DynamicCache(config=CONFIG)
    run(model, PROMPT[:32], cache)
    block = pack(cache, LAYOUT, range(1, 2))[0].view(np.int16).reshape(3, 2, 2, 16, 16)
    values = cache.layers[2].values[0, 1, 16:32].view(torch.int16).cpu().numpy()

    assert np.array_equal(block[2, 1, 1], values)


def test_no_blocks_make_an_empty_cache() -> None:
    cache = unpack(np.empty((0, LAYOUT.block_bytes), np.uint8), CONFIG, LAYOUT, DEVICE)

    assert cache.get_seq_length() == 0


def test_saving_more_than_the_cache_holds_is_refused(model: Any) -> None:
    cache = DynamicCache(config=CONFIG)
    run(model, PROMPT[:31], cache)
    with pytest.raises(InvalidInputError, match="holds 31 tokens, 32 are to be saved"):
        pack(cache, LAYOUT, range(2))


def test_sliding_layers_are_refused() -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    cache = DynamicCache(config=CONFIG)
    cache.layers[0] = DynamicSlidingWindowLayer(sliding_window=8)
    with pytest.raises(UnsupportedError, match="DynamicSlidingWindowLayer"):
        pack(cache, LAYOUT, range(1))


def test_a_layout_of_another_geometry_is_refused() -> None:
    other = LlamaConfig(num_hidden_layers=4, hidden_size=128, num_attention_heads=8, num_key_value_heads=2)
    with pytest.raises(InvalidInputError, match=r"model has .* \(4, 2, 16\), the layout \(3, 2, 16\)"):
        check_layout(other, LAYOUT)


def test_other_rope_parameters_are_another_layout() -> None:
    other = LlamaConfig(**{**CONFIG.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})

    assert layout_of(other, "test/llama", "r1", "bf16").layout_id() != LAYOUT.layout_id()
