"""LMCache's side of the adapter, in its environment: makes it as LMCache does and obeys verbs, lines of JSON."""

import functools
import json
import os
import select
import sys
import time
from argparse import Namespace
from importlib import metadata
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

MODEL = "bench-model"
ABSENT = 1 << 64
"""An object that nobody stores."""
IS_FLAT = not hasattr(api, "PrefetchTaskSpec")
"""LMCache 0.5.5: a prefetch names keys without groups, and its result is one bitmap."""


def key(number: int, model: str = MODEL) -> ObjectKey:
    return ObjectKey(number.to_bytes(32, "big"), model, kv_rank=0x01000100)


@functools.cache
def wanted(number: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def held(data: torch.Tensor) -> TensorMemoryObj:
    about = MemoryObjMetadata(
        shape=data.shape, dtype=data.dtype, address=0, phy_size=len(data), fmt=MemoryFormat.KV_2LTD, ref_count=1
    )
    return TensorMemoryObj(raw_data=data, metadata=about, parent_allocator=None)


class Deletions(L2AdapterListener):  # type: ignore[misc]  # LMCache has no types for us.
    """Hears which objects have gone."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        """Not of interest."""

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Not of interest."""

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.numbers += [int.from_bytes(k.chunk_hash, "big") for k in keys]


class Held:
    """One adapter, the tasks that are under way, and how often each descriptor was rung."""

    def __init__(self, spec: dict[str, Any], size: int) -> None:
        config = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(spec)])).adapters[0]
        self.adapter = create_l2_adapter(config)
        self.size = size
        self.fds = {
            "store": self.adapter.get_store_event_fd(),
            "lookup": self.adapter.get_lookup_and_lock_event_fd(),
            "load": self.adapter.get_load_event_fd(),
        }
        assert len(set(self.fds.values())) == 3
        self.tasks: dict[str, list[tuple[int, list[int], list[torch.Tensor]]]] = {what: [] for what in self.fds}

    def submit(self, what: str, numbers: list[int], size: int = 0, model: str = MODEL) -> dict[str, Any]:
        size = size or self.size
        keys = [key(n, model) for n in numbers]
        tensors = [wanted(n, size) if what == "store" else torch.zeros(size, dtype=torch.uint8) for n in numbers]
        started_s = time.monotonic()
        if what == "store":
            task = self.adapter.submit_store_task(keys, [held(t) for t in tensors])
        elif what == "load":
            task = self.adapter.submit_load_task(keys, [held(t) for t in tensors])
        else:
            layout = MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
            task = self.adapter.submit_lookup_and_lock_task(keys, {0: layout})
        took_s = time.monotonic() - started_s
        self.tasks[what].append((task, numbers, tensors))
        return {"took_s": took_s}

    def collect(self, wait_s: float) -> dict[str, Any]:
        """Wait for all tasks; for each kind the results, how often it was announced, and loads with wrong bytes."""
        ends_s = time.monotonic() + wait_s
        answer: dict[str, Any] = {}
        for what, tasks in self.tasks.items():
            rung = 0
            while rung < len(tasks) and select.select([self.fds[what]], [], [], max(0, ends_s - time.monotonic()))[0]:
                rung += os.eventfd_read(self.fds[what])
            answer[what] = {"announced": rung, "results": self.results(what, tasks)}
            tasks.clear()
        time.sleep(0.05)
        answer["late"] = [what for what, fd in self.fds.items() if select.select([fd], [], [], 0)[0]]
        return answer

    def results(self, what: str, tasks: list[tuple[int, list[int], list[torch.Tensor]]]) -> list[Any]:
        stores = self.adapter.pop_completed_store_tasks() if what == "store" else {}
        found = []
        for task, numbers, tensors in tasks:
            if what == "store":
                found.append(stores[task].is_successful() if task in stores else None)
                continue
            query = self.adapter.query_load_result if what == "load" else self.adapter.query_lookup_and_lock_result
            bits, again = query(task), query(task)
            assert again is None, "a result is fetched once"
            found.append(None if bits is None else self.judged(what, bits, numbers, tensors))
        return found

    def judged(self, what: str, bits: Bitmap, numbers: list[int], tensors: list[torch.Tensor]) -> list[Any]:
        """1 for what is there, 0 for a miss, `wrong` for a load that brought other bytes than were stored."""
        marks: list[Any] = [int(bits.test(i)) for i in range(len(numbers))]
        if what == "load":
            for i, tensor in enumerate(tensors):
                if marks[i] and not torch.equal(tensor, wanted(numbers[i], len(tensor))):
                    marks[i] = "wrong"
        return marks

    def unlock(self, numbers: list[int]) -> dict[str, Any]:
        """Take locks back; returns when the agent has heard of it: a lookup behind it is answered."""
        self.adapter.submit_unlock([key(n) for n in numbers])
        self.submit("lookup", [ABSENT])
        return self.collect(30.0)

    def lookup_and_unlock(self, numbers: list[int]) -> dict[str, Any]:
        """Look objects up, and take locks of them back before that has been answered."""
        self.submit("lookup", numbers)
        return self.unlock(numbers)

    def delete(self, numbers: list[int]) -> dict[str, Any]:
        """Have objects deleted; the numbers of those that LMCache's listeners heard of within a second."""
        heard = Deletions()
        self.adapter.register_listener(heard)
        self.adapter.delete([key(n) for n in numbers])
        ends_s = time.monotonic() + 1.0
        while len(heard.numbers) < len(numbers) and time.monotonic() < ends_s:
            time.sleep(0.01)
        return {"deleted": sorted(heard.numbers)}

    def touch(self, numbers: list[int]) -> dict[str, Any]:
        self.adapter.submit_touch([key(n) for n in numbers])
        return {}

    def decide(self, configs: dict[str, Any], tokens: int, asked: dict[str, Any]) -> dict[str, Any]:
        """Ask our load policy as LMCache's server does."""
        from lmcache.v1.multiprocess.kv_load_policy import KVLoadContext, create_kv_load_policy

        name = "kvstrata_client.connectors.lmcache_policy:KvstrataLoadPolicy"
        try:
            policy = create_kv_load_policy(name, configs)
        except Exception as e:  # noqa: BLE001  LMCache tells it to its user.
            return {"refused": str(e)}
        return {"loads": policy.should_load(KVLoadContext("request", MODEL, 64, tokens, asked or None))}

    def usage(self) -> dict[str, Any]:
        """Usage as LMCache sees it once it has asked twice."""
        self.adapter.get_usage()
        time.sleep(1.5)
        self.adapter.get_usage()
        time.sleep(0.5)
        usage = self.adapter.get_usage()
        salts = dict(usage.bytes_by_cache_salt)
        return {"used": usage.total_bytes_used, "capacity": usage.total_capacity_bytes, "salts": salts}

    def status(self) -> dict[str, Any]:
        return dict(self.adapter.report_status())

    def close(self) -> dict[str, Any]:
        started_s = time.monotonic()
        self.adapter.close()
        self.adapter.close()
        return {"took_s": time.monotonic() - started_s}


class Manager:
    """LMCache's own storage manager: its memory, its controllers and one adapter below."""

    LAYOUT = MemoryLayoutDesc([torch.Size([2, 2, 64, 128])], [torch.bfloat16])
    SIZE = 64 << 10

    def __init__(self, spec: dict[str, Any]) -> None:
        adapters = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(spec)]))
        memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
        self.manager = StorageManager(StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), adapters))
        ((_, self.adapter),) = self.manager.l2_adapters()

    def write(self, numbers: list[int]) -> dict[str, Any]:
        """Write objects as an engine's worker does, wait until they are below, and empty the memory above."""
        keys = [key(n) for n in numbers]
        for k, made in self.manager.reserve_write(keys, self.LAYOUT, *(("new",) if IS_FLAT else ())).items():
            made.raw_data.view(torch.uint8).copy_(wanted(numbers[keys.index(k)], self.SIZE))
        self.manager.finish_write(keys)
        ends_s = time.monotonic() + 60
        while self.adapter.get_usage().total_bytes_used < len(keys) * self.SIZE and time.monotonic() < ends_s:
            time.sleep(0.02)
        deleted, _ = self.manager.delete_l1_keys(keys, force=True)
        return {"below_bytes": self.adapter.get_usage().total_bytes_used, "deleted": deleted}

    def prefetch(self, numbers: list[int]) -> dict[str, Any]:
        """Have a prompt's objects brought up; how many leading ones came, and how many of them are right."""
        keys = [key(n) for n in numbers]
        started_s = time.monotonic()
        if IS_FLAT:
            spec = api.PrefetchRequestSpec(keys, {0: self.LAYOUT})
        else:
            spec = api.PrefetchTaskSpec([api.GroupedObjectKeys(keys, 0, self.LAYOUT)])
        handle = self.manager.submit_prefetch_task(spec)
        self.manager.wait_prefetch_status(handle, 60)
        result = self.manager.query_prefetch_status(handle)
        took_s = time.monotonic() - started_s
        hits = 0 if result is None else (result if IS_FLAT else result.hit_cells[0]).popcount()
        if not hits:
            return {"hits": 0, "right": 0, "took_s": took_s}
        owners = () if IS_FLAT else (result.l1_owners,)
        _, found = self.manager.unsafe_read(keys[:hits], *owners)
        right = sum(bytes(o.byte_array) == bytes(wanted(n, self.SIZE).numpy()) for n, o in zip(numbers, found))  # noqa: B905
        self.manager.finish_read_prefetched(keys[:hits], 1, *owners)
        return {"hits": hits, "right": right, "took_s": took_s}

    def close(self) -> dict[str, Any]:
        started_s = time.monotonic()
        self.manager.close()
        return {"took_s": time.monotonic() - started_s}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What LMCache says.
    print(json.dumps({"versions": {"lmcache": metadata.version("lmcache")}}), file=answers, flush=True)
    adapter: Held | Manager | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        verb = asked.pop("verb")
        answer: dict[str, Any] = {}
        if verb in {"open", "manage"}:
            try:
                adapter = Held(**asked) if verb == "open" else Manager(**asked)
            except Exception as e:  # noqa: BLE001  LMCache tells it to its user.
                answer = {"refused": str(e)}
        else:
            answer = getattr(adapter, verb)(**asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
