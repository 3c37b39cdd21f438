"""How much KV a model makes, against figures that others have published or that follow from a model's own paper."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.cli import main
from kvstrata_client.commands.capacity import attention_of, dtype_of, figures

pytestmark = pytest.mark.unit

LLAMA_3_70B = {
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_3_405B = {"num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "hidden_size": 16384}
QWEN_25_72B = {
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
    "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 80,
}  # fmt: skip
DEEPSEEK_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GPT_2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}


@pytest.mark.parametrize(
    ("config", "bytes_of_token"),
    [(LLAMA_3_70B, 327_680), (LLAMA_3_405B, 516_096), (QWEN_25_72B, 327_680), (DEEPSEEK_V3, 70_272), (GPT_2, 36_864)],
    ids=["Llama-3-70B", "Llama-3-405B", "Qwen-2.5-72B", "DeepSeek-V3", "GPT-2"],
)
def test_bytes_of_a_token_are_those_that_are_known(config: dict[str, Any], bytes_of_token: int) -> None:
    assert attention_of(config).bytes_of(1, 2) == bytes_of_token


def test_a_context_of_128k_tokens_of_llama_3_70b_has_42_9_gb() -> None:
    assert round(attention_of(LLAMA_3_70B).bytes_of(131_072, 2) / 1e9, 1) == 42.9


def test_a_block_of_the_layout_has_the_bytes_of_its_tokens() -> None:
    layout = Layout("m", "r", "bf16", 16, layers=80, kv_heads=8, head_dim=128, element_bytes=2)
    latent = Layout("m", "r", "bf16", 16, layers=61, kv_heads=1, head_dim=576, element_bytes=2, kv_parts=1)

    assert layout.block_bytes == attention_of(LLAMA_3_70B).bytes_of(16, 2)
    assert latent.block_bytes == attention_of(DEEPSEEK_V3).bytes_of(16, 2)


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"sliding_window": 4096}, 80 * 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, 80 * 10_000),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 60}, 60 * 10_000 + 20 * 4096),
        ({"sliding_window": 1024, "sliding_window_pattern": 8}, 10 * 10_000 + 70 * 1024),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 40}, 40 * 10_512),
        ({"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 20}, 200_000),
        ({"layers_block_type": ["mamba"] * 70 + ["attention"] * 10}, 100_000),
    ],
)
def test_layers_keep_their_window_or_nothing(more: dict[str, Any], kept: int) -> None:
    assert attention_of({**LLAMA_3_70B, **more}).bytes_of(10_000, 2) == kept * 4096


def test_a_tier_holds_so_many_contexts_and_a_rank_its_heads() -> None:
    found = figures(attention_of(LLAMA_3_70B), "fp8", 131_072, 16, ["64Gi"])

    assert found["bytesPerContextOfRank"] * 8 == found["bytesPerContext"] == 131_072 * 163_840
    assert found["tiers"] == [{"capacity": "64Gi", "contexts": 3, "tokens": (64 << 30) // 163_840}]
    assert figures(attention_of(DEEPSEEK_V3), "bf16", 1, 8, [])["bytesPerContextOfRank"] == 70_272


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "num_hidden_layers, num_attention_heads, hidden_size"),
        ({**LLAMA_3_70B, "num_key_value_heads": 0}, "num_key_value_heads: 0, a number from 1 wanted"),
        ({**LLAMA_3_70B, "num_hidden_layers": "80"}, "num_hidden_layers: '80'"),
        ({**LLAMA_3_70B, "layer_types": ["sliding_attention"]}, "sliding_window is missing"),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        attention_of(config)


def test_the_type_of_the_cache_is_the_models_own_unless_it_has_none() -> None:
    assert [dtype_of(c) for c in (LLAMA_3_70B, {"dtype": "float16"}, {"torch_dtype": "int4"}, {})] == [
        "bf16", "fp16", "bf16", "bf16",
    ]  # fmt: skip


@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_it_is_printed_in_three_shapes(capsys: pytest.CaptureFixture[str], tmp_path: Path, output: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA_3_70B, "vision_config": {"num_layers": 3}}))
    with pytest.raises(SystemExit) as end:
        main(["capacity", str(tmp_path), "-o", output, "--capacity", "512Gi"])

    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert "327680" in printed
    if output == "table":
        assert "42.9 GB" in printed
        assert "12 such contexts" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("/nowhere",), 1, "/nowhere: a config.json wanted"),
        ((".", "--tokens", "0"), 2, "a number of tokens from 1 to 100000000 wanted"),
    ],
)
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["capacity", *arguments])

    assert end.value.code == code
    assert said in capsys.readouterr().err
