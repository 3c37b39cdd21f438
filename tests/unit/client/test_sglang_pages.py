"""Laws of the SGLang backend's keys, page formats and configuration, without SGLang and without sockets."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.blocks import Layout
from kvstrata_api.errors import InvalidInputError
from kvstrata_client.connectors.object_keys import BLOCKS_MAX
from kvstrata_client.connectors.sglang_pages import (
    ELEMENT_BYTES,
    Identity,
    PageFormat,
    PageNamer,
    Shard,
    layout_of,
    parse,
)
from support.client.model import OTHER, OWN

pytestmark = pytest.mark.unit

IDENTITY = Identity(model="llama", revision="r", dtype="bf16", block_tokens=16)
PIECE = 4 * 64 * 2 * 32 * 2
"""K or V of one page: 4 layers, 64 tokens, 2 heads of 32, bf16."""
PAGE = PageFormat("kv", "meta/llama", "page_first", 64, (PIECE, PIECE), Shard(1, 2), is_replicated=False,
                  layers=4, kv_heads=2, head_dim=32)  # fmt: skip
EXTRA: dict[str, Any] = {
    "backend_name": "kvstrata", "module_path": "kvstrata_client.connectors.sglang", "class_name": "KvstrataStorage",
    "interface_v1": 1, "socket": "/run/kvstrata/p/agent.sock", "pool": "p", "token_file": "/token", "model": "llama",
    "revision": "r", "dtype": "bf16", "block_tokens": 16,
}  # fmt: skip


def key(name: str = "ab", page: PageFormat = PAGE, identity: Identity = IDENTITY, scope: Any = OWN) -> bytes:
    namer = PageNamer(layout_of(identity, page), page)
    return namer.keys(scope.secret, name, page.size_bytes)[0].digest


# Keys


def test_whoever_disagrees_in_one_thing_finds_nothing() -> None:
    pages = [
        replace(PAGE, **change)
        for change in (
            {"pool": "draft"}, {"model_name": "other"}, {"order": "page_head"}, {"order": "page_first:flat"},
            {"tokens": 32}, {"pieces": (2 * PIECE,)}, {"is_replicated": True}, {"kv_heads": 1, "head_dim": 64},
        )
    ]  # fmt: skip
    pages += [replace(PAGE, shard=replace(PAGE.shard, **{f.name: 7})) for f in fields(Shard)]
    changes = ({"model": "x"}, {"revision": "x"}, {"dtype": "fp16"}, {"block_tokens": 32}, {"rope_theta": "1"},
               {"rope_scaling": "{}"}, {"quantization": "fp8:1"}, {"adapter": "x"})  # fmt: skip
    known = {"model": "llama", "revision": "r", "dtype": "bf16", "block_tokens": 16}
    identities = [Identity(**{**known, **change}) for change in changes]  # type: ignore[arg-type]

    keys = [key(), key("ac"), key(scope=OTHER), *(key(page=p) for p in pages), *(key(identity=i) for i in identities)]

    assert len(set(keys)) == len(keys)


def test_ranks_share_the_pages_that_are_the_same_on_all_of_them() -> None:
    first, second = (replace(PAGE, shard=Shard(rank, 8, pp_rank=1, pp_size=2), is_replicated=True) for rank in (0, 5))

    assert key(page=first) == key(page=second)
    assert key(page=first) != key(page=replace(first, shard=replace(first.shard, pp_rank=0)))


# Blocks of a page


@given(
    block_tokens=st.sampled_from((1, 8, 16, 32)), blocks=st.integers(1, 8), layers=st.integers(1, 6),
    heads=st.integers(1, 4), dim=st.sampled_from((16, 64, 128)), dtype=st.sampled_from(sorted(ELEMENT_BYTES)),
)  # fmt: skip
def test_a_page_of_kv_is_one_block_for_every_block_tokens(
    block_tokens: int, blocks: int, layers: int, heads: int, dim: int, dtype: str
) -> None:
    identity = Identity(model="m", revision="r", dtype=dtype, block_tokens=block_tokens)
    piece = layers * blocks * block_tokens * heads * dim * ELEMENT_BYTES[dtype]
    page = PageFormat("kv", "m", "page_first", blocks * block_tokens, (piece, piece), Shard(), is_replicated=False,
                      layers=layers, kv_heads=heads, head_dim=dim)  # fmt: skip

    layout = layout_of(identity, page)

    assert layout.block_bytes * blocks == page.size_bytes
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (layers, heads, dim)
    assert (layout.block_tokens, layout.dtype, layout.element_bytes) == (block_tokens, dtype, ELEMENT_BYTES[dtype])
    assert len(PageNamer(layout, page).keys(OWN.secret, "a", page.size_bytes)) == blocks


def test_pages_of_one_latent_and_of_states_are_cut_evenly_whatever_their_geometry() -> None:
    latent = replace(PAGE, pieces=(64 * 576 * 2,) * 5, layers=5, kv_heads=0, head_dim=0)
    state = replace(PAGE, pool="mamba", tokens=1, pieces=(4096, 1024))

    assert layout_of(IDENTITY, latent).block_bytes * 4 == latent.size_bytes
    assert layout_of(IDENTITY, state).block_bytes == state.size_bytes


@pytest.mark.parametrize("order", ["page_first", "layer_first", "page_first:flat"])
def test_blocks_of_pages_are_never_taken_for_blocks_of_prompts(order: str) -> None:
    ours = Layout("llama", "r", "bf16", 16, 4, 2, 32, 2, 1, 2)

    assert layout_of(IDENTITY, replace(PAGE, order=order)).order != ours.order


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 24}, "page-size: 24, a multiple of block_tokens 16 wanted"),
        ({"tokens": 8}, "page-size: 8, a multiple of block_tokens 16 wanted"),
        ({"pieces": (1001,)}, "kv: pages of 1001 B, 4 blocks of a multiple of 64 B wanted"),
        (
            {"pool": "mamba", "tokens": 1, "pieces": (100,)},
            "mamba: pages of 100 B, 1 blocks of a multiple of 64 B wanted",
        ),
    ],
)
def test_pages_that_are_not_whole_blocks_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as e:
        layout_of(IDENTITY, replace(PAGE, **change))
    assert str(e.value) == said


def test_pages_of_too_many_blocks_are_refused() -> None:
    tokens = 16 * (BLOCKS_MAX + 1)
    page = replace(PAGE, tokens=tokens, pieces=(tokens * 64,))
    namer = PageNamer(layout_of(IDENTITY, page), page)

    with pytest.raises(InvalidInputError, match=f"1 to {BLOCKS_MAX} whole blocks"):
        namer.keys(OWN.secret, "a", page.size_bytes)


# Configuration


def test_the_configuration_of_the_documentation_is_taken() -> None:
    options = parse(EXTRA)
    target = options.target(layout_of(options.params, PAGE))

    assert options.is_zero_copy
    assert (str(target.socket), target.pool, str(target.token)) == ("/run/kvstrata/p/agent.sock", "p", "/token")
    assert (target.timeout_s, target.move_timeout_s) == (1.0, 10.0)
    assert not parse({**EXTRA, "interface_v1": 0}).is_zero_copy


def without(name: str) -> dict[str, Any]:
    return {n: value for n, value in EXTRA.items() if n != name}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (without("socket"), "missing required field `socket`"),
        ({**EXTRA, "sockets": "x"}, "unknown field `sockets`"),
        ({**EXTRA, "block_tokens": "16"}, "Expected `int`, got `str` - at `$.block_tokens`"),
        ({**EXTRA, "pool": ""}, ".pool: is empty"),
        ({**EXTRA, "revision": ""}, ".revision: is empty"),
        (
            {**EXTRA, "dtype": "bfloat16"},
            ".dtype: 'bfloat16', one of bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8 wanted",
        ),
        ({**EXTRA, "block_tokens": 0}, ".block_tokens: 0, at least 1 wanted"),
        ({**EXTRA, "lookup_timeout_s": 0}, ".lookup_timeout_s: 0.0, more than 0 to 60.0 wanted"),
        ({**EXTRA, "move_timeout_s": 61}, ".move_timeout_s: 61.0, more than 0 to 60.0 wanted"),
    ],
)
def test_bad_configuration_names_field_value_and_limit(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as e:
        parse(extra)
    assert said in str(e.value)
    assert str(e.value).startswith("hicache-storage-backend-extra-config")
