"""SGLang on a CPU in its own environment: makes an engine and obeys verbs, lines of JSON (`bench.harness.drivers`)."""

import importlib.util
import json
import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

from support.engines.tiny_model import make

PAGE_TOKENS = 32
TOKENS_MAX = 8192
"""Size of the pool in the device's place: all prompts of a test fit."""


class Served:
    """One engine in processes of its own."""

    def __init__(
        self,
        folder: str,
        storage: dict[str, Any] | None,
        layout: str,
        backend: str = "dynamic",
        max_tokens: int = 512,
    ) -> None:
        """Start an engine with the model in `folder`, made when it is not there; without `storage` no HiCache.

        `storage` is the extra configuration of HiCache's backend. A prompt and its answer have `max_tokens` at most.
        """
        import sglang

        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(_other_models())
        if not (Path(folder) / "config.json").exists():
            make(Path(folder))
        tiers: dict[str, Any] = {}
        if storage is not None:
            tiers = {
                "enable_hierarchical_cache": True,
                "hicache_ratio": 2.0,
                "hicache_write_policy": "write_through",
                "hicache_io_backend": "direct",
                "hicache_mem_layout": layout,
                "hicache_storage_backend": backend,
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": json.dumps(storage),
            }
        self.engine = sglang.Engine(
            model_path=folder,
            skip_tokenizer_init=True,
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            skip_server_warmup=True,
            dtype="float32",
            mem_fraction_static=0.05,
            max_total_tokens=TOKENS_MAX,
            context_length=max_tokens,
            page_size=PAGE_TOKENS,
            max_running_requests=8,
            random_seed=0,
            log_level="info",
            sleep_on_idle=True,  # Else each engine that has nothing to do takes a core.
            **tiers,
        )

    def run(self, prompts: list[list[int]], new_tokens: int = 16) -> dict[str, Any]:
        """Answer prompts greedily: tokens of each, how many prompt tokens came from storage, and seconds."""
        started_s = time.monotonic()
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        details = [a["meta_info"].get("cached_tokens_details") or {} for a in answers]
        return {
            "tokens": [list(a["output_ids"])[-new_tokens:] for a in answers],
            "external": sum(d.get("storage") or 0 for d in details),
            "took_s": time.monotonic() - started_s,
        }

    def reset(self) -> dict[str, Any]:
        """Forget all KV of the engine's own; waits until nothing is under way."""
        ends_s = time.monotonic() + 60
        while not (answer := self.engine.flush_cache()).success:
            if time.monotonic() > ends_s:
                return {"is_reset": False, "why": str(answer)}
            time.sleep(0.1)
        return {"is_reset": True}

    def close(self) -> dict[str, Any]:
        self.engine.shutdown()
        return {}


def _other_models() -> list[str]:
    """SGLang's modules of other models than ours: importing them all is most of an engine's start."""
    found = importlib.util.find_spec("sglang.srt.models")
    assert found is not None
    return [m.name for m in pkgutil.iter_modules(found.submodule_search_locations) if m.name != "llama"]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What SGLang says.
    import sglang

    print(json.dumps({"versions": {"sglang": sglang.__version__}}), file=answers, flush=True)
    served: Served | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        verb = asked.pop("verb")
        answer: dict[str, Any] = {}
        if verb == "open":
            served = Served(**asked)
        else:
            answer = getattr(served, verb)(**asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
