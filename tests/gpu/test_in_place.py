"""Blocks of an HBM tier of a real GPU are read by another process, through CUDA's handles."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

from kvstrata_client.cache import PrefixCache  # noqa: E402
from kvstrata_client.client import Client  # noqa: E402
from kvstrata_client.connectors.device_blocks import CudaDevices  # noqa: E402
from kvstrata_client.connectors.paged import LoadedPages, PagedConnector, PagedKv  # noqa: E402
from kvstrata_native.devices import allocate_cuda, block_sum, packed, uuid_of  # noqa: E402
from support.agent.process import agent_process, raised  # noqa: E402
from support.client.attached import PATIENT_S, target  # noqa: E402
from support.client.paged_kv import LAYOUT, filled, pages_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@contextmanager
def attached(socket: Path, **more: object) -> Iterator[Client]:
    wanted = replace(target(socket, **more), devices=CudaDevices())  # type: ignore[arg-type]
    with Client.attach(wanted, wait_s=PATIENT_S) as client:
        assert client.is_attached, client.reason
        yield client


def test_the_device_and_the_processor_make_one_sum_of_a_block() -> None:
    block = torch.from_numpy(np.random.default_rng(5).integers(0, 256, 2 << 20, dtype=np.uint8))

    assert packed(block_sum(block.to("cuda"))) == packed(block_sum(block))


def test_an_allocation_names_its_device_and_goes_back_to_the_driver() -> None:
    torch.cuda.init()
    before_bytes, _ = torch.cuda.mem_get_info()
    made = allocate_cuda(0, 64 << 20)
    assert made.device == uuid_of(0)
    assert os.fstat(made.fd)
    made.memory.fill_(7)
    assert int(made.memory[-1]) == 7
    assert torch.cuda.mem_get_info()[0] < before_bytes

    del made

    assert torch.cuda.mem_get_info()[0] >= before_bytes - (8 << 20)


def test_pages_of_an_engine_are_filled_on_the_device(tmp_path: Path) -> None:
    blocks, order, page_tokens = 6, "kv,page,token,head,dim", 32
    tokens, table = list(range(blocks * LAYOUT.block_tokens + 5)), pages_of(blocks + 1, page_tokens)
    written = [t.to("cuda") for t in filled(order, page_tokens)]
    empty = [torch.zeros_like(t) for t in written]
    with agent_process(tmp_path / "s", device="cuda") as agent, attached(tmp_path / "s", layout=LAYOUT) as client:
        saving = PagedConnector(PrefixCache(client), PagedKv(written, LAYOUT, order))
        assert saving.save(tokens, table).published == blocks
        assert raised(agent) == blocks

        with PagedConnector(PrefixCache(client), PagedKv(empty, LAYOUT, order)).load(tokens, table) as load:
            assert isinstance(load, LoadedPages)
            assert load.in_place_blocks == blocks

    for one, other in zip(written, empty, strict=True):
        rows = PagedKv([one] * LAYOUT.layers, LAYOUT, order).rows(table, range(blocks))
        left, right = (PagedKv([t] * LAYOUT.layers, LAYOUT, order).read_tokens(0, rows) for t in (one, other))
        assert torch.equal(left, right)
