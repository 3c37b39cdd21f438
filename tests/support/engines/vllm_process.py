"""vLLM on a CPU, in its environment: generates greedily and obeys verbs, lines of JSON.

    python -m support.engines.vllm_process MODEL [--connector JSON | --tier JSON] [--zeros]

The connector is ours, with that `kv_connector_extra_config`, or vLLM's own offloading with our tier below it. The
engine's own prefix cache is off, so every prompt asks the connector, unless `--prefix-cache` is given. With
`--events` its KV events are published, and heard here as a router would hear them.
"""

import argparse
import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")


def connected_by(extra: dict[str, Any], policy: str, *, zeros: bool) -> dict[str, Any]:
    """Arguments of an engine that keeps its KV with an agent; with `zeros` a connector that loads zeros."""
    from vllm.config import KVTransferConfig

    module = "support.engines.vllm_zeros" if zeros else "kvstrata_client.connectors.vllm"
    made = KVTransferConfig(
        kv_connector="KvstrataConnector",
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra,
    )
    return {"kv_transfer_config": made}


def tiered_by(tier: dict[str, Any], policy: str, *, zeros: bool) -> dict[str, Any]:
    """Arguments of an engine with vLLM's CPU offloading and our tier; with `zeros` a tier that gives zeros."""
    from vllm.config import KVTransferConfig

    from support.engines import vllm_tiering

    vllm_tiering.count_calls()
    cpu_bytes = tier.pop("cpu_bytes", 64 << 20)
    kind = {"type": "ZeroTier" if zeros else "CountedTier", "module_path": "support.engines.vllm_tiering"}
    made = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "support.engines.vllm_tiering",
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": [kind | tier],
        },
    )
    return {"kv_transfer_config": made}


class Router:
    """A subscriber of an engine's KV events."""

    def __init__(self, published: str, replayed: str) -> None:
        import zmq

        context = zmq.Context.instance()
        self._replayed = replayed
        self._heard = context.socket(zmq.SUB)
        self._heard.set_hwm(0)
        self._heard.subscribe(b"")
        self._heard.connect(published)

    def heard(self, quiet_s: float) -> list[dict[str, Any]]:
        """Batches since the last call, until none came for so long."""
        batches: list[dict[str, Any]] = []
        while self._heard.poll(quiet_s * 1000):
            _, number, payload = self._heard.recv_multipart()
            batches.append(_decoded(number, payload))
        return batches

    def replay(self, first: int) -> list[dict[str, Any]]:
        """Batches from this number on, once more."""
        import zmq

        with zmq.Context.instance().socket(zmq.DEALER) as asking:
            asking.connect(self._replayed)
            asking.send_multipart((b"", first.to_bytes(8, "big")))
            batches: list[dict[str, Any]] = []
            while asking.poll(5000):
                *_, number, payload = asking.recv_multipart()
                if not payload:
                    return batches
                batches.append(_decoded(number, payload))
        raise AssertionError(f"the replay from {first} has no end: {len(batches)} batches")


def _decoded(number: bytes, payload: bytes) -> dict[str, Any]:
    """A batch as JSON can have it: hashes as hexadecimal digits."""
    import msgspec

    batch = msgspec.msgpack.decode(payload)
    return {"number": int.from_bytes(number, "big"), "events": _plain(batch[1])}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


class Engine:
    """One engine in this process."""

    def __init__(self, given: argparse.Namespace) -> None:
        from vllm import LLM

        extra = json.loads(given.connector) if given.connector else None
        connector = connected_by(extra, given.policy, zeros=given.zeros) if extra else {}
        if given.transfer:
            from vllm.config import KVTransferConfig

            named = json.loads(given.transfer)
            if named["kv_connector"].startswith("LMCache"):
                import llvmlite.binding.ffi

                # vLLM looks at the attributes of all modules; this one loads a library then, and fails. LMCache
                # imports numba.
                llvmlite.binding.ffi._lib_fn_wrapper.get = lambda *_: None
            connector = {"kv_transfer_config": KVTransferConfig(**named)}
        if given.tier:
            connector = tiered_by(json.loads(given.tier), given.policy, zeros=given.zeros)
        self._turns = 0
        self.is_tiered = bool(given.tier) or "OffloadingConnector" in given.transfer
        self.router: Router | None = None
        if given.events:
            from vllm.config import KVEventsConfig

            published, replayed = given.events.split(",")
            connector["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=published, replay_endpoint=replayed
            )
            self.router = Router(published, replayed)
        self.llm = LLM(
            given.model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=given.dtype,
            max_model_len=given.max_tokens,
            max_num_seqs=8,
            max_num_batched_tokens=given.step_tokens,
            seed=0,
            block_size=given.block_size,
            disable_log_stats=False,
            enable_prefix_caching=given.prefix_cache,
            **connector,
        )
        if self.is_tiered:
            from support.engines import vllm_tiering

            vllm_tiering.listen()

    def run(self, prompts: list[list[int]], new_tokens: int = 16, salt: str = "", hints: Any = None) -> dict[str, Any]:
        """Generate; tokens, why each ended, tokens that came from outside by then, and seconds."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"kvstrata": hints}} if hints is not None else None
        chosen = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        before, started_s = self._external(), time.monotonic()
        salted = {"cache_salt": salt} if salt else {}
        outputs = self.llm.generate([{"prompt_token_ids": p, **salted} for p in prompts], chosen, use_tqdm=False)
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "reasons": sorted({str(o.outputs[0].finish_reason) for o in outputs}),
            "external": self._external() - before,
            "params": [o.kv_transfer_params for o in outputs],
            "took_s": time.monotonic() - started_s,
        }

    def converse(
        self, session: str, prompt: list[int], new_tokens: int = 16, actions: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Generate one turn of a session, with `kv_hints` of these actions; tokens and why it ended.

        `LLM.generate` takes neither.
        """
        from vllm import SamplingParams

        engine, chosen = self.llm.llm_engine, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        hinted: dict[str, Any] = {}
        if actions is not None:
            from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

            made = [KvHintAction(action_id=str(i), action_version="1", **action) for i, action in enumerate(actions)]
            hinted = {"kv_hints": KvHintsEnvelope(protocol_version="1", message_id="m", actions=made)}
        self._turns += 1
        engine.add_request(f"turn-{self._turns}", {"prompt_token_ids": prompt}, chosen, session_id=session, **hinted)
        ended = [o for _ in iter(engine.has_unfinished_requests, False) for o in engine.step() if o.finished]  # noqa: FBT003
        return {"tokens": list(ended[-1].outputs[0].token_ids), "reason": str(ended[-1].outputs[0].finish_reason)}

    def reset(self, *, keeps_tier: bool = False, resets_connector: bool = False) -> dict[str, Any]:
        """Forget what the engine itself has cached, in its CPU tier too unless that is kept, or by its connector."""
        is_whole = resets_connector or (self.is_tiered and not keeps_tier)
        return {"is_reset": bool(self.llm.reset_prefix_cache(reset_connector=is_whole))}

    def counts(self) -> dict[str, Any]:
        """Since the last call: exchanges with the agent by thread, steps, warnings; and chunks by outcome."""
        from support.engines import vllm_tiering

        calls = dict(vllm_tiering.CALLS)
        vllm_tiering.CALLS.clear()
        named = (m for m in self.llm.get_metrics() if m.name == "vllm:kv_offload_kvstrata_chunks")
        chunks = {f"{m.labels['operation']} {m.labels['outcome']}": int(m.value) for m in named}
        said, vllm_tiering.SAID[:] = list(vllm_tiering.SAID), []
        return {"steps": calls.pop(vllm_tiering.STEPS, 0), "calls": calls, "chunks": chunks, "said": said}

    def memory(self) -> dict[str, Any]:
        """Resident memory of this process: its own, and what it has mapped of others."""
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        kib = {words[0]: int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:")}
        return {"own_bytes": kib["RssAnon:"] << 10, "shared_bytes": kib["RssShmem:"] << 10}

    def regions(self) -> dict[str, Any]:
        """This process, and the files of the CPU tier that it has mapped."""
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
        return {"pid": os.getpid(), "paths": sorted(path for path in mapped if "/vllm_offload_" in path)}

    def heard(self, quiet_s: float = 0.5) -> dict[str, Any]:
        """What a router has heard since the last call; makes one step first, in which late events are published."""
        assert self.router is not None
        self.run([[1, 2, 3]], new_tokens=2)
        return {"batches": self.router.heard(quiet_s)}

    def replay(self, first: int) -> dict[str, Any]:
        """What is replayed to a router that asks."""
        assert self.router is not None
        return {"batches": self.router.replay(first)}

    def _external(self) -> int:
        named = (m for m in self.llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")
        return int(sum(m.value for m in named))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--connector", default="", help="kv_connector_extra_config; none: an engine by itself")
    parser.add_argument("--tier", default="", help="our entry of vLLM's secondary_tiers, and cpu_bytes")
    parser.add_argument("--transfer", default="", help="any other kv_transfer_config, whole")
    parser.add_argument("--step-tokens", type=int, default=512, help="that one step computes at most")
    parser.add_argument("--policy", default="fail", help="kv_load_failure_policy")
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a page; CPU attention wants 32 n")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a prompt and its answer")
    parser.add_argument("--dtype", default="float32", help="of weights and KV")
    parser.add_argument("--prefix-cache", action="store_true", help="with the engine's own prefix cache")
    parser.add_argument("--events", default="", help="ENDPOINT,REPLAY where KV events are published, both ipc://")
    parser.add_argument("--zeros", action="store_true", help="load zeros: what a test has to notice")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What vLLM says.
    from vllm import __version__

    engine = Engine(given)
    versions = {"vllm": __version__}
    if "LMCache" in given.transfer:
        versions["lmcache"] = metadata.version("lmcache")
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(getattr(engine, asked.pop("verb"))(**asked)), file=answers, flush=True)
    finally:  # Also where nobody reads the answer any more.
        engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
