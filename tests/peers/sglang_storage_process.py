"""SGLang's side of the storage backend without an engine: makes it as SGLang does and calls it, by lines of JSON.

The host pools are plain memory with SGLang's page addresses: a real one needs a model's device pool. Real ones are in
`test_sglang.py`'s engines.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGES = 128
PAGE_TOKENS = 32


class HostPages:
    """K's of all pages, then V's; what they mean is of no importance here."""

    layout = "page_first"
    dtype = torch.float32

    def __init__(self, tokens: int, page_bytes: int) -> None:
        self.page_size = tokens
        self.kv_buffer = torch.zeros((2, PAGES, page_bytes // 2), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        numbers = [int(i) // self.page_size for i in indices[:: self.page_size]]
        size = self.kv_buffer.shape[2]
        return [self.kv_buffer[side, n].data_ptr() for n in numbers for side in (0, 1)], [size] * (2 * len(numbers))

    def fill(self, numbers: list[int]) -> None:
        for n in numbers:
            self.kv_buffer[:, n] = wanted(n, self.kv_buffer.shape[2])

    def clear(self) -> None:
        self.kv_buffer.zero_()

    def right(self, numbers: list[int]) -> list[bool]:
        return [bool((self.kv_buffer[:, n] == wanted(n, self.kv_buffer.shape[2])).all()) for n in numbers]

    def indices(self, numbers: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(n * self.page_size, (n + 1) * self.page_size) for n in numbers])


def wanted(number: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def keys(numbers: list[int]) -> list[str]:
    return [f"{n:064x}" for n in numbers]


class Called:
    """One backend with a pool of KV and a pool of states, and how long each call took."""

    def __init__(
        self, extra: dict[str, Any], page_bytes: int, tp_rank: int = 0, tp_size: int = 1, *, is_mla: bool = False
    ) -> None:
        config = HiCacheStorageConfig(
            tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=is_mla, enable_storage_metrics=True, is_page_first_layout=True, model_name="tiny",
            extra_config=extra,
        )  # fmt: skip
        self.pools = {PoolName.KV: HostPages(PAGE_TOKENS, page_bytes), PoolName.MAMBA: HostPages(1, 4 << 10)}
        self.backend = StorageBackendFactory.create_backend("dynamic", config, self.pools[PoolName.KV])
        self.backend.register_mem_pool_host(self.pools[PoolName.KV])
        for name, pool in self.pools.items():
            self.backend.register_mem_host_pool_v2(pool, name)

    def exists(self, numbers: list[int]) -> dict[str, Any]:
        started_s = time.monotonic()
        found = self.backend.batch_exists(keys(numbers))
        return {"result": found, "took_s": time.monotonic() - started_s}

    def set(self, numbers: list[int]) -> dict[str, Any]:
        pool = self.pools[PoolName.KV]
        pool.fill(numbers)
        started_s = time.monotonic()
        done = self.backend.batch_set_v1(keys(numbers), pool.indices(numbers))
        return {"result": done, "took_s": time.monotonic() - started_s}

    def get(self, numbers: list[int]) -> dict[str, Any]:
        """1 for a page that came, 0 for a miss, `wrong` for one that came with other bytes than were stored."""
        pool = self.pools[PoolName.KV]
        pool.clear()
        started_s = time.monotonic()
        done = self.backend.batch_get_v1(keys(numbers), pool.indices(numbers))
        took_s = time.monotonic() - started_s
        return {"result": marks(done, pool.right(numbers)), "took_s": took_s}

    def set_named(self, numbers: list[int]) -> dict[str, Any]:
        """Store more pages than the host pool has: the first ones hold those of any number."""
        pool = self.pools[PoolName.KV]
        places = list(range(len(numbers)))
        pool.fill(places)
        return {"result": self.backend.batch_set_v1(keys(numbers), pool.indices(places))}

    def get_named(self, numbers: list[int]) -> dict[str, Any]:
        pool = self.pools[PoolName.KV]
        places = list(range(len(numbers)))
        pool.clear()
        done = self.backend.batch_get_v1(keys(numbers), pool.indices(places))
        return {"result": marks(done, pool.right(places))}

    def _states(self, numbers: list[int], policy: str = "trailing_pages", window: int = 1) -> PoolTransfer:
        pool = self.pools[PoolName.MAMBA]
        named = keys(numbers)[-window:] if window else keys(numbers)
        return PoolTransfer(PoolName.MAMBA, pool.indices(numbers), None, named, PoolHitPolicy(policy))

    def set_states(self, numbers: list[int]) -> dict[str, Any]:
        self.pools[PoolName.MAMBA].fill(numbers)
        return {"result": self.backend.batch_set_v2([self._states(numbers, window=0)])[PoolName.MAMBA]}

    def get_states(self, numbers: list[int]) -> dict[str, Any]:
        pool = self.pools[PoolName.MAMBA]
        pool.clear()
        done = self.backend.batch_get_v2([self._states(numbers, window=0)])[PoolName.MAMBA]
        return {"result": marks(done, pool.right(numbers))}

    def exists_with_states(self, numbers: list[int], policy: str, window: int) -> dict[str, Any]:
        found = self.backend.batch_exists_v2(keys(numbers), [self._states(numbers, policy, window)])
        hits = {str(name): pages for name, pages in found.extra_pool_hit_pages.items()}
        return {"pages": found.kv_hit_pages, "hits": hits, "stops": found.restorable_prefix_pages}

    def stats(self) -> dict[str, Any]:
        metrics = self.backend.get_stats()
        speeds = (*metrics.prefetch_bandwidth, *metrics.backup_bandwidth)
        are_positive = all(speed > 0 for speed in speeds)
        return {"read": metrics.prefetch_pgs, "written": metrics.backup_pgs, "are_speeds_positive": are_positive}

    def close(self) -> dict[str, Any]:
        self.backend.close()
        return {}


def marks(done: list[bool], right: list[bool]) -> list[Any]:
    return [("wrong", 1)[is_right] if is_there else 0 for is_there, is_right in zip(done, right, strict=True)]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What SGLang says.
    print(json.dumps({"versions": {}}), file=answers, flush=True)
    called: Called | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        verb = asked.pop("verb")
        answer: dict[str, Any] = {}
        if verb == "open":
            try:
                called = Called(**asked)
            except Exception as e:  # noqa: BLE001  SGLang tells it to its user.
                answer = {"refused": str(e)}
        else:
            answer = getattr(called, verb)(**asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
