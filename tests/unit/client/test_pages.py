"""KV in pages and the same KV in blocks: no bit changes on the way, and no page that was not named."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

from kvstrata_api.errors import InvalidInputError  # noqa: E402
from kvstrata_client.connectors.paged import ORDER, PagedKv  # noqa: E402
from support.client.paged_kv import LAYOUT, filled, pages_of  # noqa: E402

pytestmark = pytest.mark.unit

ORDERS = (ORDER, "page,kv,token,head,dim", "page,kv,head,token,dim", "kv,page,head,token,dim")
BLOCKS = 3


def gathered(kv: PagedKv, table: list[int], blocks: range) -> Any:
    rows = kv.rows(table, blocks)
    into = torch.zeros(LAYOUT.layers, len(blocks), LAYOUT.block_bytes // LAYOUT.layers, dtype=torch.uint8)
    for layer in range(LAYOUT.layers):
        kv.gather(layer, rows, into[layer])
    return into


@pytest.mark.parametrize("page_tokens", [4, 16, 24, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_hold_what_lies_at_each_token_in_the_layouts_order(order: str, page_tokens: int) -> None:
    tensors, table = filled(order, page_tokens), pages_of(BLOCKS, page_tokens)
    kv = PagedKv(tensors, LAYOUT, order)

    found = gathered(kv, table, range(1, BLOCKS)).view(torch.int32)

    shaped = found.view(LAYOUT.layers, BLOCKS - 1, 2, LAYOUT.kv_heads, LAYOUT.block_tokens, LAYOUT.head_dim)
    ordered = [order.split(",").index(name) for name in ("page", "token", "kv", "head", "dim")]
    for token in (16, 17, 30, 31, 32, 47):
        page, row = table[token // page_tokens], token % page_tokens
        for layer, tensor in enumerate(tensors):
            wanted = tensor.permute(ordered)[page, row].view(torch.int32)
            assert torch.equal(shaped[layer, token // 16 - 1, :, :, token % 16], wanted)


@pytest.mark.parametrize("page_tokens", [4, 16, 24, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_scattered_is_gathered_again_and_no_other_row_is_touched(order: str, page_tokens: int) -> None:
    source = PagedKv(filled(order, page_tokens), LAYOUT, order)
    blocks = gathered(source, pages_of(BLOCKS, page_tokens), range(BLOCKS))
    tensors = [torch.full_like(t, 7.0) for t in filled(order, page_tokens)]
    kv, table = PagedKv(tensors, LAYOUT, order), list(reversed(pages_of(BLOCKS, page_tokens)))

    rows = kv.rows(table, range(BLOCKS))
    for layer in range(LAYOUT.layers):
        kv.scatter(layer, rows, blocks[layer])

    assert torch.equal(gathered(kv, table, range(BLOCKS)), blocks)
    elements = BLOCKS * LAYOUT.block_bytes // LAYOUT.layers // LAYOUT.element_bytes
    assert [int((t != 7.0).sum()) for t in tensors] == [elements] * LAYOUT.layers


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0, 1, 14], "pages 0 to 14 in a table: 0 to 13 are there"),
        ([0, -1, 2], "pages -1 to 2"),
        ([3, 1, 3], "twice"),
        ([1, 2], "a table of 2 pages of 16 tokens, 48 tokens wanted"),
        ([0.5, 1, 2], "float64"),
        ([[0, 1, 2]], "one row"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: Any, message: str) -> None:
    kv = PagedKv(filled(ORDER, 16), LAYOUT)

    with pytest.raises(InvalidInputError, match=message):
        kv.rows(table, range(BLOCKS))


def test_pages_behind_those_that_are_used_may_hold_anything() -> None:
    kv = PagedKv(filled(ORDER, 16), LAYOUT)

    assert kv.rows([4, 5, -1, -1], range(2)).pages.tolist() == [4] * 16 + [5] * 16


def test_tensors_of_another_model_are_refused() -> None:
    good = filled(ORDER, 16)
    for tensors, order, message in (
        (good[:1], ORDER, "tensors of 1 layers, the layout has 5"),
        (good, "kv,page,token,dim,head", r"\(kv, heads, dim\) \(2, 8, 3\), the layout has \(2, 3, 8\)"),
        (good, "kv,page,token,head", "each of page,token,kv,head,dim wanted once"),
        ([t.bfloat16() for t in good], ORDER, "layer 0: 5 dimensions of 2 B"),
        ([*good[:4], good[4][:, :5]], ORDER, "differ in pages"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            PagedKv(tensors, LAYOUT, order)
