"""vLLM on a CPU with LMCache's connector, in its environment: generates greedily and obeys verbs, lines of JSON.

python -m vllm_lmcache_process MODEL [PORT OF THE LMCACHE SERVER]
"""

import argparse
import json
import os
import sys
from importlib import metadata
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

BLOCK_TOKENS = 32
"""vLLM's attention on a CPU wants a multiple of 32."""
NEW_TOKENS = 16


def connected_to(port: int) -> dict[str, Any]:
    """Arguments of an engine that keeps its KV with the LMCache server on a port."""
    import llvmlite.binding.ffi
    from vllm.config import KVTransferConfig

    # vLLM looks at the attributes of all modules; this one loads a library then, and fails. LMCache imports numba.
    llvmlite.binding.ffi._lib_fn_wrapper.get = lambda *_: None
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.mq_timeout": 60}
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="LMCacheMPConnector",
            kv_connector_module_path="lmcache.integration.vllm.lmcache_mp_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        # Every prompt asks LMCache: the engine's own cache would have the shared prefixes after the first ones.
        "enable_prefix_caching": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("port", type=int, nargs="?")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What vLLM says.
    from vllm import LLM, SamplingParams

    connector = connected_to(arguments.port) if arguments.port else {}
    engine = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        seed=0,
        block_size=BLOCK_TOKENS,
        disable_log_stats=False,
        **connector,
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    print(json.dumps({"versions": {"vllm": metadata.version("vllm-cpu")}}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts: list[Any] = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
        turns = [[p] for p in prompts] if asked["is_one_by_one"] else [prompts]
        made = [m for turn in turns for m in engine.generate(turn, greedy, use_tqdm=False)]
        answer = {
            "tokens": [list(m.outputs[0].token_ids) for m in made],
            "reasons": sorted({str(m.outputs[0].finish_reason) for m in made}),
            "external_hit_tokens": sum(
                int(m.value) for m in engine.get_metrics() if m.name == "vllm:external_prefix_cache_hits"
            ),
        }
        print(json.dumps(answer), file=answers, flush=True)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
