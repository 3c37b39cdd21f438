"""A KvstrataCache in an unchanged `generate` of the real package, against a real agent: greedy tokens as without it."""

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata import Client
from support.agent.doubles import FakeAuthenticator, caller, dram_tier
from support.agent.process import agent_process
from support.agent.thread import AgentThread
from support.client.attached import PATIENT_S, SLACK_S, attached, target, until

torch = pytest.importorskip("torch", reason="the transformers connector needs torch")
pytest.importorskip("transformers", reason="the transformers connector needs transformers")

from transformers import DynamicCache  # noqa: E402

from kvstrata_api.errors import InvalidInputError, UnsupportedError  # noqa: E402
from kvstrata_client.connectors import transformers_cache  # noqa: E402
from kvstrata_client.connectors.transformers import SlidingLayer, layout_of, unpacked  # noqa: E402
from kvstrata_client.connectors.transformers_cache import KvstrataCache  # noqa: E402
from support.client.tiny_models import KINDS, VOCABULARY, made  # noqa: E402
from support.client.torch_device import DEVICE  # noqa: E402

pytestmark = pytest.mark.system

NEW = 24
PROMPT = 100
_numbers = np.random.default_rng(3)
_SEEDED = _numbers.bit_generator.state


@pytest.fixture(autouse=True)
def same_prompts() -> None:
    """A test has the same prompts whichever ran before."""
    _numbers.bit_generator.state = _SEEDED


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two would wait for each other on a busy machine, and for models as small as these gain nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return made("full")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentThread]:
    party = FakeAuthenticator(a=caller("a"))
    with AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 24)], party) as running:
        yield running


def layout(model: Any) -> Any:
    return layout_of(model.config, "tiny", "r1", "fp32")


@pytest.fixture
def client(agent: AgentThread, model: Any) -> Iterator[Client]:
    with attached(agent.socket, layout=layout(model)) as made:
        yield made


@pytest.fixture
def llama_client(agent: AgentThread, llama: Any) -> Iterator[Client]:
    with attached(agent.socket, layout=layout(llama)) as made:
        yield made


def ids(*lengths: int) -> Any:
    return [_numbers.integers(1, VOCABULARY, n).tolist() for n in lengths]


def tensor(*rows: list[int]) -> Any:
    return torch.tensor(rows, device=DEVICE)


def generate(model: Any, tokens: Any, cache: Any = None, new: int = NEW, **options: Any) -> Any:
    if cache is not None:
        options["past_key_values"] = cache
    return model.generate(tokens, do_sample=False, max_new_tokens=new, min_new_tokens=new, **options)


def same(model: Any, actual: Any, expected: Any, prompt: int) -> bool:
    """Whether generated tokens agree, but for a choice between two that the uninterrupted model finds equally good.

    Such ties come down to the last bits of its sums, which depend on how many tokens are computed at a time.
    """
    if torch.equal(actual, expected):
        return True
    at = int((actual != expected).nonzero()[0, 1])
    if at < prompt or actual.shape[0] > 1:
        return False
    with torch.inference_mode():
        logits = model(actual).logits[0, prompt - 1 : -1]
    chosen = logits.gather(1, actual[0, prompt:, None])[:, 0]
    return bool((logits.max(1).values - chosen).max() < 1e-3)


def caching(model: Any, client: Client, **named: str) -> KvstrataCache:
    """A cache that waits for its agent on a busy machine."""
    return KvstrataCache(model, client, deadline_s=PATIENT_S, **named)


def hits(cache: KvstrataCache) -> int:
    return sum(cache.hit_tokens.values())


def test_a_prompt_is_restored_and_what_was_generated_too(model: Any, client: Client) -> None:
    prompt = tensor(*ids(PROMPT))
    expected = generate(model, prompt)
    first, second = caching(model, client), caching(model, client)

    assert same(model, generate(model, prompt, first), expected, PROMPT)
    assert same(model, generate(model, prompt, second), expected, PROMPT)
    assert (hits(first), hits(second)) == (0, 96)

    longer = torch.cat([expected, tensor(*ids(5))], 1)
    third = caching(model, client)
    assert same(model, generate(model, longer, third), generate(model, longer), PROMPT + NEW + 5)
    assert hits(third) == 112, "blocks that decoding filled: 123 tokens had KV, 7 blocks"
    for layer, restored in zip(first.layers, third.layers, strict=True):
        if not isinstance(layer, SlidingLayer):
            assert torch.equal(layer.keys[:, :, :112].view(torch.int32), restored.keys[:, :, :112].view(torch.int32))
            assert torch.equal(layer.values[:, :, :112], restored.values[:, :, :112])


def test_a_sliding_layer_holds_only_its_window_and_the_block_that_is_not_full(model: Any, client: Client) -> None:
    prompt = tensor(*ids(400))
    for _ in ("computed", "restored"):
        cache = caching(model, client)
        generate(model, prompt, cache, new=4)
        for layer in cache.layers:
            if isinstance(layer, SlidingLayer):
                window = layer.sliding_window - 1
                assert layer.keys.shape[2] == window
                assert layer.keys.untyped_storage().nbytes() <= (window + 17) * 2 * 16 * 4 * 2
                assert layer.get_seq_length() - layer.first_column < 16
    assert hits(cache) == 384


def test_the_rows_of_a_batch_have_a_prefix_each_and_are_computed_from_the_first_column_that_one_lacks(
    model: Any, client: Client
) -> None:
    long, short, other = ids(PROMPT, 70, 55)
    width = PROMPT
    rows = [long, short, long[:50] + other[:5]]
    batch = tensor(*([0] * (width - len(r)) + r for r in rows))
    mask = tensor(*([0] * (width - len(r)) + [1] * len(r) for r in rows))
    expected = generate(model, batch, attention_mask=mask)
    generate(model, tensor(long), caching(model, client), new=1)

    first, second = caching(model, client), caching(model, client)
    assert torch.equal(generate(model, batch, first, attention_mask=mask), expected)
    assert torch.equal(generate(model, batch, second, attention_mask=mask), expected)
    assert hits(first) == 30, "columns before 30 are padding of the row of which nothing is known"
    # The third row has 45 of padding and 3 blocks: all are computed from column 93 on.
    assert hits(second) == 93 + (93 - 30) + (93 - 45)

    alone = caching(model, client)
    assert torch.equal(generate(model, tensor(short), alone), generate(model, tensor(short)))
    assert hits(alone) == 64


def test_the_next_turn_goes_on_and_comes_back_after_the_kv_left_memory(model: Any, client: Client) -> None:
    plain, cache = DynamicCache(config=model.config), caching(model, client, session="chat")
    history = tensor(*ids(PROMPT))
    for turn in range(3):
        expected, actual = generate(model, history, plain), generate(model, history, cache)
        assert torch.equal(expected, actual)
        cache.offload()
        assert cache.get_seq_length() == 0
        assert all(layer.keys is None for layer in cache.layers)
        assert hits(cache) == [0, 112, 112 + 160][turn]
        history = torch.cat([actual, tensor(*ids(20))], 1)


def test_kv_that_left_memory_comes_back_for_a_caller_that_gives_new_tokens_alone(model: Any, client: Client) -> None:
    prompt, new = tensor(*ids(PROMPT)), tensor(*ids(7))
    plain, cache = DynamicCache(config=model.config), caching(model, client)
    seen = generate(model, prompt, plain)
    generate(model, prompt, cache)
    cache.offload()
    mask = torch.ones(1, seen.shape[1] - 1 + 7, dtype=torch.long, device=DEVICE)
    with torch.inference_mode():
        expected = model(new, attention_mask=mask, past_key_values=plain).logits
        actual = model(new, attention_mask=mask, past_key_values=cache).logits

    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, atol=1e-3)
    assert hits(cache) == 112
    assert cache.get_seq_length() == plain.get_seq_length()


@pytest.mark.parametrize("is_copy", [False, True], ids=["fork", "deepcopy"])
def test_continuations_of_one_conversation_go_on_by_themselves(model: Any, client: Client, *, is_copy: bool) -> None:
    start, *tails = ids(PROMPT, 20, 9, 33)
    trunk = caching(model, client, session="trunk")
    generate(model, tensor(start), trunk, new=1)
    twins = [copy.deepcopy(trunk) if is_copy else trunk.fork(f"fork-{n}") for n in range(3)]
    if not is_copy:
        assert twins[0].layers[-1].keys.data_ptr() == trunk.layers[-1].keys.data_ptr(), "no copy"

    for tail, twin in zip(tails, twins, strict=True):
        prompt = tensor(start + tail)
        assert torch.equal(generate(model, prompt, twin), generate(model, prompt))
    assert trunk.get_seq_length() == PROMPT
    if not is_copy:
        assert json.loads(client.explain(session="fork-1"))["parent"] == "trunk"
    again = caching(model, client)
    prompt = tensor(start + tails[2])
    assert torch.equal(generate(model, prompt, again), generate(model, prompt))
    assert hits(again) == 128, "each saves what it adds"


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 5}, {"prefill_chunk_size": 48}, {"num_return_sequences": 1}],
    ids=lambda o: next(iter(o)),
)
def test_other_ways_of_decoding_are_as_without(model: Any, client: Client, options: dict[str, Any]) -> None:
    prompt = tensor(ids(PROMPT)[0] * 2)
    expected = generate(model, prompt, **options)
    for _ in range(2):
        cache = caching(model, client)
        assert torch.equal(generate(model, prompt, cache, **options), expected)
    assert hits(cache) > 96


def test_an_agent_that_is_away_or_killed_or_comes_back_costs_misses(model: Any, tmp_path: Path) -> None:
    socket = tmp_path / "agent.sock"
    history = tensor(*ids(PROMPT))
    with Client(target(socket, layout=layout(model))) as client:
        plain, cache = DynamicCache(config=model.config), caching(model, client, session="s")

        def turn(streamer: Any = None) -> None:
            nonlocal history
            expected = generate(model, history, plain)
            begin_s = time.monotonic()
            assert torch.equal(generate(model, history, cache, streamer=streamer), expected)
            assert time.monotonic() - begin_s < 3 * SLACK_S
            history = torch.cat([expected, tensor(*ids(20))], 1)

        turn()
        cache.offload()
        with agent_process(socket, 1 << 24) as agent:
            assert client.wait_attached(PATIENT_S)
            turn()
            assert hits(cache) == 0, "computed again: nobody had it"
            turn(Killer(agent.kill))
            agent.wait()
        until(lambda: not client.is_attached)
        turn()
        cache.offload()
        turn()
        with agent_process(socket, 1 << 24, epoch=8):
            assert client.wait_attached(PATIENT_S)
            cache.offload()
            turn()
            cache.offload()
            before = hits(cache)
            turn()
            assert hits(cache) - before > 300, "saved and restored once more"


class Killer:
    """A streamer that does something with the tenth token."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._puts = 0

    def put(self, _: Any) -> None:
        self._puts += 1
        if self._puts == 10:
            self._strike()

    def end(self) -> None:
        assert self._puts >= 10


def test_a_tier_that_is_full_costs_misses(llama: Any, tmp_path: Path) -> None:
    few = 3 * layout(llama).block_bytes
    prompt = tensor(*ids(PROMPT))
    party = FakeAuthenticator(a=caller("a"))
    with (
        AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(few)], party) as agent,
        attached(agent.socket, layout=layout(llama)) as client,
    ):
        for _ in range(2):
            cache = caching(llama, client)
            assert torch.equal(generate(llama, prompt, cache), generate(llama, prompt))
    assert hits(cache) <= 48


def test_zeros_in_place_of_blocks_are_noticed(model: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tensor(*ids(PROMPT)) for _ in range(3)]
    for prompt in prompts:
        generate(model, prompt, caching(model, client), new=1)
    monkeypatch.setattr(transformers_cache, "unpacked", lambda *a: tuple(torch.zeros_like(s) for s in unpacked(*a)))
    equal = [same(model, generate(model, p, caching(model, client)), generate(model, p), PROMPT) for p in prompts]

    assert equal == [False] * 3


def test_a_pass_that_breaks_off_leaves_what_was_there_before(model: Any, client: Client) -> None:
    cache = caching(model, client)
    prompt = tensor(*ids(PROMPT))
    history = torch.cat([generate(model, prompt, cache), tensor(*ids(20))], 1)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        generate(model, history, cache)
    handle.remove()

    assert torch.equal(generate(model, history, cache), generate(model, history))
    assert hits(cache) > 0


@pytest.mark.parametrize("what", ["embeddings", "positions", "hole", "inner"])
def test_kv_that_does_not_follow_from_tokens_is_neither_saved_nor_restored(
    llama: Any, llama_client: Client, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tensor(*ids(PROMPT))
    generate(llama, prompt, caching(llama, llama_client))
    options: dict[str, Any] = {
        "embeddings": {"inputs_embeds": llama.model.embed_tokens(prompt)},
        "positions": {"input_ids": prompt, "position_ids": torch.arange(7, 7 + PROMPT, device=DEVICE)[None]},
        "hole": {"input_ids": prompt, "attention_mask": tensor([1] * 40 + [0] * 9 + [1] * 51)},
        "inner": {"input_ids": prompt},
    }[what]
    run = llama.model if what == "inner" else llama
    with torch.inference_mode():
        expected = run(**options, past_key_values=DynamicCache(config=llama.config))[0]
        cache = caching(llama, llama_client)
        assert torch.equal(run(**options, past_key_values=cache)[0], expected)
    assert torch.equal(generate(llama, torch.cat([prompt, tensor(*ids(3))], 1), cache, new=2)[:, :PROMPT], prompt)
    assert hits(cache) == 0
    assert "neither restored nor saved" in caplog.text
    cache.offload()
    assert cache.get_seq_length() > PROMPT, "what nobody has stays in memory"
    cache.reset()
    assert torch.equal(generate(llama, prompt, cache), generate(llama, prompt))
    assert hits(cache) == 96


def test_logits_that_are_wanted_are_computed(llama: Any, llama_client: Client) -> None:
    prompt = tensor(*ids(PROMPT))
    generate(llama, prompt, caching(llama, llama_client), new=1)
    with torch.inference_mode():
        whole = llama(prompt, past_key_values=caching(llama, llama_client)).logits
        some = llama(prompt, past_key_values=caching(llama, llama_client), logits_to_keep=30).logits

    assert torch.equal(whole, llama(prompt).logits)
    assert torch.allclose(some, whole[:, -30:], atol=1e-3)


def test_what_does_not_fit_is_refused(llama: Any, llama_client: Client) -> None:
    with pytest.raises(InvalidInputError, match=r"model computes in torch.bfloat16, the layout has fp32"):
        KvstrataCache(copy.deepcopy(llama).to(torch.bfloat16), llama_client)
    with pytest.raises(InvalidInputError, match="session is empty"):
        caching(llama, llama_client).hint()
    cache = caching(llama, llama_client)
    prompt = tensor(*ids(PROMPT))
    generate(llama, prompt, cache)
    cache.offload()
    with pytest.raises(InvalidInputError, match="left memory"):
        llama(prompt[:, :3], attention_mask=torch.ones(1, 300, dtype=torch.long, device=DEVICE), past_key_values=cache)


def test_layers_of_another_kind_are_refused(llama_client: Client) -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, num_experts=2, vocab_size=64,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="LinearAttention"):
        KvstrataCache(Qwen3NextForCausalLM(config), llama_client)


def test_a_rotation_that_changes_with_the_length_is_refused(llama_client: Client) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, vocab_size=64, rope_parameters=rope,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="rope_type dynamic"):
        KvstrataCache(LlamaForCausalLM(config), llama_client)


def test_columns_that_are_taken_back_while_the_kv_is_away_are_computed_no_more(
    llama: Any, llama_client: Client
) -> None:
    prompt, new = tensor(*ids(PROMPT)), tensor(*ids(3))
    cache = caching(llama, llama_client)
    generate(llama, prompt, cache, new=20)
    cache.offload()
    mask = torch.ones(1, PROMPT + 3, dtype=torch.long, device=DEVICE)
    with torch.inference_mode():
        actual = llama(new, attention_mask=mask, past_key_values=cache).logits
        expected = llama(torch.cat([prompt, new], 1)).logits[:, -3:]

    assert torch.allclose(actual, expected, atol=1e-3)


def test_a_hint_reaches_the_agent(llama: Any, llama_client: Client) -> None:
    cache = caching(llama, llama_client, session="s", priority="high")
    generate(llama, tensor(*ids(PROMPT)), cache, new=1)
    assert json.loads(llama_client.explain(session="s"))["state"] == "decoding"
    cache.hint("tool", urgency=3, expected_return_s=20.0)

    told = json.loads(llama_client.explain(session="s"))
    assert (told["state"], told["priority"]) == ("idle", "high")
    assert 0 < told["expected_return_s"] <= 20.0
