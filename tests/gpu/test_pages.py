"""KV in pages of a CUDA device makes the blocks that it makes in host memory, and comes back on the stream."""

from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

from kvstrata_client.cache import PrefixCache  # noqa: E402
from kvstrata_client.connectors import paged  # noqa: E402
from kvstrata_client.connectors.paged import ORDER, CudaWork, PagedConnector, PagedKv  # noqa: E402
from support.agent.doubles import FakeAuthenticator, caller, dram_tier  # noqa: E402
from support.agent.thread import AgentThread  # noqa: E402
from support.client.attached import attached  # noqa: E402
from support.client.paged_kv import LAYOUT, filled, pages_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

BLOCKS = 3


@pytest.mark.parametrize("page_tokens", [16, 24])
@pytest.mark.parametrize("order", [ORDER, "page,kv,head,token,dim"])
def test_pages_of_the_device_and_of_the_host_make_the_same_blocks(order: str, page_tokens: int) -> None:
    table, work = pages_of(BLOCKS, page_tokens), CudaWork()
    here = PagedKv(filled(order, page_tokens), LAYOUT, order)
    there = PagedKv(filled(order, page_tokens, device="cuda"), LAYOUT, order)
    empty = [torch.zeros_like(t) for t in filled(order, page_tokens, device="cuda")]
    back = PagedKv(empty, LAYOUT, order)
    shape = (BLOCKS, LAYOUT.block_bytes // LAYOUT.layers)
    for layer in range(LAYOUT.layers):
        wanted = torch.zeros(shape, dtype=torch.uint8)
        here.gather(layer, here.rows(table, range(BLOCKS)), wanted)
        room = work.staging(wanted.numel()).view(shape)
        on_device = torch.empty(shape, dtype=torch.uint8, device="cuda")

        there.gather(layer, there.rows(table, range(BLOCKS)), on_device)
        work.start(partial(room.copy_, on_device, non_blocking=True))()
        assert torch.equal(room, wanted)

        back.scatter(layer, back.rows(table, range(BLOCKS)), room.to("cuda", non_blocking=True))
        found = torch.empty_like(on_device)
        back.gather(layer, back.rows(table, range(BLOCKS)), found)
        assert torch.equal(found.cpu(), wanted)
        assert int((empty[layer] != 0).sum()) == int((wanted.view(torch.int32) != 0).sum())


@pytest.mark.parametrize("order", [ORDER, "page,kv,head,token,dim"])
def test_a_prompt_saved_out_of_pages_of_the_device_lies_in_others_layer_by_layer(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "BATCH_BYTES", 3 * LAYOUT.block_bytes)
    blocks, page_tokens = 10, 32
    tokens, table = list(range(blocks * LAYOUT.block_tokens + 5)), pages_of(blocks + 1, page_tokens)
    others = list(reversed(table))
    written = [tensor.to("cuda") for tensor in filled(order, page_tokens)]
    expected = PagedKv(filled(order, page_tokens), LAYOUT, order)
    empty = [torch.zeros_like(t) for t in written]
    found = PagedKv(empty, LAYOUT, order)
    party = FakeAuthenticator(a=caller("a"))
    with (
        AgentThread(tmp_path / "agent.sock", lambda: [dram_tier(1 << 22)], party) as agent,
        attached(agent.socket, strict=True, layout=LAYOUT) as client,
    ):
        saving = PagedConnector(PrefixCache(client), PagedKv(written, LAYOUT, order))
        assert saving.save(tokens, table).published == blocks
        for tensor in written:
            tensor.zero_()

        loading = PagedConnector(PrefixCache(client), found)
        with loading.load(tokens, others) as load:
            assert load.tokens == blocks * LAYOUT.block_tokens

    for layer in range(LAYOUT.layers):
        wanted = expected.read_tokens(layer, expected.rows(table, range(blocks)))
        assert torch.equal(found.read_tokens(layer, found.rows(others, range(blocks))).cpu(), wanted)
        assert int((empty[layer] != 0).sum()) == int((wanted.view(torch.int32) != 0).sum())
