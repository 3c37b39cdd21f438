"""A conversation of three turns with a tiny random model: what each turn restores, and that its tokens are the same.

    python chat.py --socket /run/kvstrata/tiny/agent.sock --pool tiny --token-file /var/run/secrets/kvstrata.io/token

Leave `--token-file` out where the agent is one of `kvstrata up`. Run it twice: the second time even turn 1 is there.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstrata import NO_TOKEN, Client, Target
from kvstrata_client.connectors.transformers import layout_of
from kvstrata_client.connectors.transformers_cache import KvstrataCache

SYSTEM, QUESTION, ANSWER = 600, 40, 60
"""Tokens of the system prompt, of a question and of an answer."""


def tiny() -> Any:
    """A seeded model of 4 layers, in place of `AutoModelForCausalLM.from_pretrained(MODEL, revision=REVISION)`."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def question(turn: int, count: int) -> Any:
    """Token ids that stand for text, (1, count)."""
    return torch.randint(1, 512, (1, count), generator=torch.Generator().manual_seed(turn))


def chat(model: Any, client: Client) -> bool:
    """Three turns, each with a cache of its own as after a restart; whether all tokens were those of a run without."""
    history, is_same = question(0, SYSTEM), True
    for turn in range(1, 4):
        history = torch.cat([history, question(turn, QUESTION)], 1)
        cache = KvstrataCache(model, client, session="example", deadline_s=4 * client.target.timeout_s)
        answer = model.generate(history, past_key_values=cache, do_sample=False, max_new_tokens=ANSWER)
        cache.hint("idle", expected_return_s=30.0)
        is_same &= torch.equal(answer, model.generate(history, do_sample=False, max_new_tokens=ANSWER))
        restored = ", ".join(f"{n} from {tier}" for tier, n in cache.hit_tokens.items()) or "none"
        print(f"turn {turn}: {history.shape[1]} tokens of prompt, restored {restored}")
        history = answer
    print("the same tokens as without kvstrata" if is_same else "other tokens than without kvstrata")
    return is_same


def main() -> int:
    """Attach, talk, and return 0 when every token was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", type=Path, required=True, help="of the node's agent of the pool")
    parser.add_argument("--pool", required=True)
    parser.add_argument("--token-file", type=Path, default=NO_TOKEN, help="of the pod's projected token")
    parser.add_argument("--timeout-s", type=float, default=0.5, help="how long a call waits for the agent")
    given = parser.parse_args()
    model = tiny()
    layout = layout_of(model.config, "demo/tiny", "seed-7", "fp32")
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
        print(f"attached to {given.socket}" if client.is_attached else f"no agent ({client.reason}): all is computed")
        return 0 if chat(model, client) else 1


if __name__ == "__main__":
    sys.exit(main())
