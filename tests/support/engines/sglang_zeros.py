"""A storage backend that is wrong, for a control: it answers as ours does, and its pages are zeros."""

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kvstrata_client.connectors.sglang import KvstrataStorage


class ZeroStorage(KvstrataStorage):
    """Fills pages with zeros where ours fills them with what was stored."""

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        is_there = super().batch_get_v1(keys, host_indices, extra_info)
        for kv in self.mem_pool_host.kv_buffer:
            kv[host_indices[:: self.mem_pool_host.page_size] // self.mem_pool_host.page_size] = 0
        return is_there
