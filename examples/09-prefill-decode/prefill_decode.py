"""One prompt computed on one node and decoded on another, which reads the KV while it is still being computed.

    python prefill_decode.py prefill --port 8100 --socket SOCKET --pool POOL --token-file FILE
    python prefill_decode.py decode --port 8200 --socket SOCKET --pool POOL --token-file FILE --prefill prefill:8100
    python prefill_decode.py ask --decode decode:8200

The prefill side answers with the name of the hand-over before it computes; the decode side follows it layer by layer.
Whatever goes wrong between them, the decode side computes the prompt itself.
"""

import argparse
import json
import sys
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvstrata import NO_TOKEN, Client, PrefixCache, Target
from kvstrata_api.errors import KvStrataError
from kvstrata_api.wire import Handover
from kvstrata_client.connectors.transformers import CacheConnector, layout_of

BLOCK = 16
TIMEOUT_S = 60.0


def tiny() -> Any:
    """A seeded model of 4 layers, the same on both sides."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def computed(model: Any, tokens: list[int], cache: DynamicCache) -> int:
    """Compute tokens behind what the cache holds; returns the next one."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def decoded(model: Any, token: int, cache: DynamicCache, count: int) -> list[int]:
    """Greedy tokens from `token` on."""
    tokens = [token]
    while len(tokens) < count:
        tokens.append(computed(model, tokens[-1:], cache))
    return tokens


class Prefill:
    """Computes prompts for others."""

    def __init__(self, model: Any, connector: CacheConnector) -> None:
        self._model = model
        self._connector = connector

    def answer(self, asked: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
        """Reply where the KV grows, then compute it. The last token is left to the decode side, for its logits."""
        tokens = asked["tokens"]
        tokens = tokens[: (len(tokens) - 1) // BLOCK * BLOCK]
        prefill = self._connector.prefill(tokens)
        handover = prefill.handover
        reply({"handover": [handover.agent, handover.epoch, handover.name] if handover else None})
        try:
            computed(self._model, tokens, prefill.cache)
        except BaseException:
            prefill.abandon()
            raise
        prefill.finish()


class Decode:
    """Has prompts computed elsewhere and goes on with them here."""

    def __init__(self, model: Any, connector: CacheConnector, prefill: str) -> None:
        self._model = model
        self._connector = connector
        self._prefill = prefill

    def answer(self, asked: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
        """Reply with greedy tokens, and how many of the prompt's came from the other node."""
        tokens, count = asked["tokens"], asked["count"]
        try:
            named = post(self._prefill, {"tokens": tokens})["handover"]
            restoring = self._connector.restore_layerwise(tokens, handover=Handover(*named) if named else None)
            first = computed(self._model, tokens[restoring.tokens :], restoring.cache)
            restoring.arrivals.finish()
        except (KvStrataError, OSError) as e:
            print(f"computed here: {e}", file=sys.stderr)
            cache = DynamicCache(config=self._model.config)
            reply({"tokens": decoded(self._model, computed(self._model, tokens, cache), cache, count), "restored": 0})
            return
        reply({"tokens": decoded(self._model, first, restoring.cache, count), "restored": restoring.tokens})


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask a server, `HOST:PORT`. Raises `OSError`."""
    connection = HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/", json.dumps(body).encode())
        answer: dict[str, Any] = json.load(connection.getresponse())
    except (HTTPException, ValueError) as e:
        raise ConnectionError(f"{address}: {e!r}") from e
    finally:
        connection.close()
    return answer


def serve(port: int, side: Prefill | Decode) -> None:
    """Serve one side until the process ends; one request at a time."""
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({"ready": True})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with turn:
                side.answer(asked, self._reply)

        def _reply(self, body: dict[str, Any]) -> None:
            made = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(made)))
            self.end_headers()
            self.wfile.write(made)
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("", port), Handler) as server:
        print(f"serving on {server.server_address[1]}", flush=True)
        server.serve_forever()


def ask(decode: str, prompt: int, count: int) -> int:
    """Ask the decode side, and compare with a model of our own."""
    tokens = torch.randint(1, 512, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    answer = post(decode, {"tokens": tokens, "count": count})
    model = tiny()
    cache = DynamicCache(config=model.config)
    is_same = answer["tokens"] == decoded(model, computed(model, tokens, cache), cache, count)
    verdict = "right" if is_same else "wrong"
    print(f"{answer['restored']} of {prompt} tokens came from the prefill node; the answer is {verdict}")
    return 0 if is_same else 1


def main() -> int:
    """Be one of the sides, or ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    roles = parser.add_subparsers(dest="role", required=True)
    for role in ("prefill", "decode"):
        side = roles.add_parser(role)
        side.add_argument("--port", type=int, required=True)
        side.add_argument("--socket", type=Path, required=True, help="of this node's agent of the pool")
        side.add_argument("--pool", required=True)
        side.add_argument("--token-file", type=Path, default=NO_TOKEN, help="of the pod's projected token")
        side.add_argument("--model", default="demo/tiny", help="as in the pool's compatibility")
        side.add_argument("--revision", default="seed-7", help="likewise")
        side.add_argument("--timeout-s", type=float, default=0.5, help="how long a call waits for the agent")
        if role == "decode":
            side.add_argument("--prefill", required=True, help="HOST:PORT of the prefill side")
    asking = roles.add_parser("ask")
    asking.add_argument("--decode", required=True, help="HOST:PORT of the decode side")
    asking.add_argument("--prompt", type=int, default=500, help="tokens of the prompt")
    asking.add_argument("--count", type=int, default=32, help="tokens to be generated")
    given = parser.parse_args()
    if given.role == "ask":
        return ask(given.decode, given.prompt, given.count)
    model = tiny()
    layout = layout_of(model.config, given.model, given.revision, "fp32", BLOCK)
    wait_s = given.timeout_s
    target = Target(
        given.socket,
        given.pool,
        given.token_file,
        layout,
        timeout_s=wait_s,
        move_timeout_s=10 * wait_s,
        silence_s=4 * wait_s,
    )
    with Client.attach(target, wait_s=4 * wait_s) as client:
        connector = CacheConnector(PrefixCache(client), model.config, layout, model.device)
        is_decode = given.role == "decode"
        serve(given.port, Decode(model, connector, given.prefill) if is_decode else Prefill(model, connector))
    return 0


if __name__ == "__main__":
    sys.exit(main())
