"""The story: one agent session, turn by turn, through everything that may happen to its KV."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from demo.engine import Engine, Uninterrupted
from demo.errors import CheckError
from demo.model import REVISION, Model, is_equal, new_cache
from demo.rows import AFTER_KILL, Answer, Row
from demo.vllm_act import VllmAct
from demo.world import NODES, World
from kvstrata import Client
from kvstrata_api.blocks import BlockKey, Layout, chain_keys
from kvstrata_api.units import MIB, parse_quantity

SQUEEZED: Final = {"dram": "8Mi", "cxl": "2Mi"}
ROOMY: Final = {"dram": "256Mi", "cxl": "64Mi"}
"""As in examples/01-quickstart/10-pool.yaml."""
LINK_BYTES_PER_S: Final = 125e6
"""1 Gbit/s, towards where an engine without staged weights has its model from."""
PATIENCE_S: Final = 30.0
"""Bound of waits for something that the agents do by themselves."""


@dataclass(slots=True)
class Story:
    """Plays the acts in order. Each checks its promise and raises `CheckError` when it is broken."""

    world: World
    llama: Model
    truth: Uninterrupted
    layout: Layout
    say: Callable[[str], None]
    vllm: VllmAct | None = None
    """Servers of vLLM that take part."""
    rows: list[Row] = field(default_factory=list)
    engines: dict[tuple[str, str], Engine] = field(default_factory=dict)

    def play(self) -> Iterator[Row | Answer]:
        """Play all acts; yields each prompt as it is served."""
        acts = (
            self.turn_by_turn,
            self.squeezed_to_nvme,
            self.from_the_other_node,
            self.after_a_kill,
            self.another_tenant,
            self.vllm_apart,
            self.in_a_trust_domain,
            self.vllm_joined,
            self.a_cold_model,
        )
        for act in acts:
            for row in act():
                if isinstance(row, Row):
                    _check_turn(row)
                    self.rows.append(row)
                yield row

    def agents(self) -> list[dict[str, Any]]:
        """`stats` of every agent that an engine is attached to now."""
        told = (json.loads(engine.client.stats()) for engine in self.engines.values())
        return list({agent["agent"]: agent for agent in told if agent}.values())

    def turn_by_turn(self) -> Iterator[Row]:
        """Turn n+1 finds the KV of turn n in memory."""
        for turn in self.truth.turns[:3]:
            row = self._serve("turn by turn", "alpha", NODES[0], turn.number)
            _expect(
                row, turn.number == 1 or row.result.sources["dram"] == self._cached_blocks(turn.number), "from dram"
            )
            yield row

    def squeezed_to_nvme(self) -> Iterator[Row]:
        """The memory tiers shrink; the blocks go to NVMe, compressed without loss, and come back."""
        self._squeeze("dram", "cxl")
        self._squeeze("cxl", "nvme")
        row = self._serve("squeezed to NVMe", "alpha", NODES[0], 4)
        _expect(row, row.result.sources["nvme"] > 0, "some from nvme")
        _expect(row, row.result.hit_blocks == self._cached_blocks(4), "all blocks")
        yield row
        self.world.resize(**ROOMY)

    def _squeeze(self, tier: str, below: str) -> None:
        """Shrink a tier on node 1 until most of the session's blocks have moved to the one below."""
        client, wanted = self._engine("alpha", NODES[0]).client, self._cached_blocks(4)
        self.world.resize(**{tier: SQUEEZED[tier]})
        self._wait(f"most blocks lie in {below}", lambda: self._places(client, 4)[below] > wanted // 2)
        places = ", ".join(f"{count} in {name}" for name, count in sorted(self._places(client, 4).items()))
        self.say(f"kubectl patch kvpool: {tier} {ROOMY[tier]} -> {SQUEEZED[tier]}; the blocks lie now: {places}")

    def _is_roomy(self) -> bool:
        """True once every agent has made its tiers as large as they are declared."""
        tiers = [tier for agent in self.agents() for tier in agent["tiers"] if tier["name"] in ROOMY]
        sizes = [(tier["capacity_bytes"], parse_quantity(ROOMY[tier["name"]])) for tier in tiers]
        return len(sizes) == len(ROOMY) * len(NODES) and all(found == wanted for found, wanted in sizes)

    def from_the_other_node(self) -> Iterator[Row]:
        """The session moves to the other node, whose agent fetches the blocks from the first."""
        engine, wanted = self._engine("alpha", NODES[1]), self._cached_blocks(5)
        self._wait("both nodes have their memory back", self._is_roomy)
        self._wait("the directory knows the blocks", lambda: self._places(engine.client, 5)["remote"] == wanted)
        row = self._serve("from the other node", "alpha", NODES[1], 5)
        _expect(row, row.result.hit_blocks == wanted, "all from the other node")
        if ahead := wanted - row.result.sources["remote"]:
            self.say(
                f"{ahead} of the {wanted} blocks came as soon as the session had moved, before they were asked for"
            )
        # This node had none of them, as the lookup said: those that lie in its memory now have come over the network.
        yield replace(row, result=replace(row.result, sources=Counter({"remote": wanted})))

    def after_a_kill(self) -> Iterator[Row]:
        """The agent dies by `kill -9`; the engine goes on without, and finds its blocks again after the restart."""
        engine = self._engine("alpha", NODES[0])
        keys, held = self._keys(engine.client, 4), self._places(engine.client, 4)["nvme"]
        self.world.kill_agent(NODES[0])
        begin_s = time.monotonic()
        absent = engine.client.lookup(keys)
        took_s = time.monotonic() - begin_s
        if absent.blocks or took_s > engine.client.target.timeout_s + 1.0:
            raise CheckError(
                f"a dead agent: {absent.blocks} blocks after {took_s:.2f} s; at once and none were promised"
            )
        self.say(f"kill -9 of the agent on {NODES[0]}: the engine is told 'nothing cached' after {took_s * 1e3:.1f} ms")
        if not engine.client.wait_attached(PATIENCE_S):
            raise CheckError(f"no attach within {PATIENCE_S:.0f} s after the restart: {engine.client.reason}")
        self._wait("the restarted agent has its NVMe blocks", lambda: self._places(engine.client, 4)["nvme"] > 0)
        row = self._serve(AFTER_KILL, "alpha", NODES[0], 6)
        # Memory died with the agent: what lies there now came up from NVMe before it was asked for.
        _expect(row, row.result.sources["nvme"] + row.result.sources["dram"] > 0, f"some of nvme, which held {held}")
        yield row

    def another_tenant(self) -> Iterator[Row]:
        """The prompt that the first tenant has just sent, sent by another one, finds nothing."""
        row = self._serve("another tenant", "beta", NODES[0], 6)
        _expect(row, row.result.hit_blocks == 0, "none")
        yield row

    def in_a_trust_domain(self) -> Iterator[Row]:
        """Once a KVTrustDomain joins the two, the second finds what the first has stored."""
        self.world.join_domain()
        self.say("kubectl apply -f examples/02-trust-domain/")
        alpha, beta = self._engine("alpha", NODES[0]), self._engine("beta", NODES[0])
        self._wait("both tenants are granted the domain", lambda: _is_member(alpha.client) and _is_member(beta.client))
        yield self._serve("joined: first tenant stores", "alpha", NODES[0], 7)
        row = self._serve("joined: second tenant reads", "beta", NODES[0], 7)
        _expect(row, row.result.shared_blocks == row.result.hit_blocks > self._cached_blocks(7), "all, from the domain")
        yield row

    def vllm_apart(self) -> Iterator[Answer]:
        """Real vLLM servers, where there are some, find what their own tenant has stored."""
        if self.vllm is not None:
            self.vllm.wait()
            yield from self.vllm.apart(self.truth.turns[:3])

    def vllm_joined(self) -> Iterator[Answer]:
        """In the domain they find each other's."""
        if self.vllm is not None:
            yield from self.vllm.joined(self.truth.turns[3], own=self.truth.turns[0])

    def a_cold_model(self) -> Iterator[Row]:
        """A node is to serve the model too: its files come when the engine starts, or were staged before."""
        with TemporaryDirectory(prefix="kvstrata-models-") as folder:  # What is below the agents' own is no source.
            source, pulled = Path(folder, "source"), Path(folder, "pulled")
            self.llama.save(source)
            begin_s = time.monotonic()
            _pull(source, pulled)
            pulled_s = time.monotonic() - begin_s
            without_s = self._first_token_of(pulled, begin_s)
            begin_s = time.monotonic()
            staged = self.world.stage(REVISION, source, NODES[0])
            staged_s = time.monotonic() - begin_s
        with_s = self._first_token_of(staged, time.monotonic())
        self.say(
            f"a cold model on {NODES[0]}: first token after {without_s * 1e3:.0f} ms, {pulled_s * 1e3:.0f} of them to "
            f"pull its files over 1 Gbit/s (emulated); after {with_s * 1e3:.0f} ms from files that a KVModelCache had "
            f"staged before, in {staged_s:.1f} s"
        )
        yield from ()

    def _first_token_of(self, folder: Path, begin_s: float) -> float:
        """Load a model from files and serve the first turn; seconds since `begin_s`. Raises `CheckError`."""
        turn = self.truth.turns[0]
        logits = Model(folder).run(turn, new_cache(), 0)
        took_s = time.monotonic() - begin_s
        if not is_equal(logits, self.truth.logits[0]):
            raise CheckError(f"weights of {folder}: the logits of turn 1 differ from the uninterrupted run")
        return took_s

    def _serve(self, act: str, tenant: str, node: str, number: int) -> Row:
        result = self._engine(tenant, node).serve(self.truth.turns[number - 1], self.truth)
        return Row(act, tenant, node, result)

    def _engine(self, tenant: str, node: str) -> Engine:
        if (tenant, node) not in self.engines:
            client = self.world.client(tenant, node, self.layout)
            self.engines[tenant, node] = Engine(self.llama, client)
        return self.engines[tenant, node]

    def _cached_blocks(self, number: int) -> int:
        """Blocks of a turn's prompt that the turn before has stored."""
        return len(self.truth.turns[number - 2].tokens) // self.layout.block_tokens

    def _keys(self, client: Client, number: int) -> list[BlockKey]:
        """Keys of a turn's cached blocks in the tenant's own scope; none while the agent is away."""
        grants = client.grants
        if grants is None or grants.own is None:
            return []
        tokens = self.truth.turns[number - 2].tokens
        return chain_keys(grants.own.secret, self.layout.layout_id(), tokens, self.layout.block_tokens)

    def _places(self, client: Client, number: int) -> Counter[str]:
        """Where the leading blocks of a turn's prompt lie now, by tier or `remote`."""
        keys = self._keys(client, number)
        if not keys:
            return Counter()
        prefix = client.lookup(keys)
        places = (prefix.place(i) for i in range(prefix.blocks))
        return Counter("remote" if is_remote else tier for tier, is_remote in places)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for something that the agents do by themselves. Raises `CheckError`."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end_s:
                raise CheckError(f"{what}: not within {PATIENCE_S:.0f} s")
            time.sleep(0.1)

    def close(self) -> None:
        """End the engines' connections, and the servers of vLLM."""
        if self.vllm is not None:
            self.vllm.close()
        for engine in self.engines.values():
            engine.client.close()


def _pull(source: Path, into: Path) -> None:
    """Copy files as a link of `LINK_BYTES_PER_S` would carry them."""
    into.mkdir()
    begin_s, carried_bytes = time.monotonic(), 0
    for path in sorted(source.iterdir()):
        with path.open("rb") as read, (into / path.name).open("wb") as written:
            while piece := read.read(MIB):
                written.write(piece)
                carried_bytes += len(piece)
                time.sleep(max(0.0, begin_s + carried_bytes / LINK_BYTES_PER_S - time.monotonic()))


def _is_member(client: Client) -> bool:
    client.stats()  # Any answer tells whether the grants have changed.
    grants = client.refresh_grants() if client.is_stale else client.grants
    return grants is not None and bool(grants.domains)


def _check_turn(row: Row) -> None:
    result = row.result
    if result.refusal:
        raise CheckError(f"{row.act}: of turn {result.turn.number} {result.refusal}")
    if result.wrong_blocks:
        raise CheckError(f"{row.act}: {result.wrong_blocks} of {result.hit_blocks} restored blocks are wrong")
    if not result.is_equal:
        raise CheckError(f"{row.act}: the logits of turn {result.turn.number} differ from the uninterrupted run")


def _expect(row: Row, holds: bool, wanted: str) -> None:  # noqa: FBT001  A fact and its name.
    if not holds:
        found = dict(row.result.sources) or "none"
        raise CheckError(f"{row.act}, turn {row.result.turn.number}: restored blocks wanted: {wanted}; found: {found}")
