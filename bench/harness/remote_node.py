"""One of two nodes: a real agent with core, HostDRAM tier, unix socket, peer listener (mutual TLS) and NIXL.

Stand-ins: the authenticator of `bench.harness.agent_process`, and a directory that knows one other agent and says of
every key that it is there. What a directory costs is measured by `bench.directory`. Verbs come as lines on stdin
(`meet`, `clear`, `facts`); the process ends with stdin.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry

from bench.harness.agent_process import EPOCH, OneIdentity, clear, make_node
from bench.harness.identity import POOL
from bench.peer_tls import Holder
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_agent.fleet.peers.connection import PeerTls
from kvstrata_agent.fleet.peers.nixl import NixlReader
from kvstrata_agent.fleet.peers.peers import RemotePeers
from kvstrata_agent.fleet.peers.server import PeerListener
from kvstrata_agent.policy.recompute import LOCATE_S_MIN
from kvstrata_agent.serve.authorization import Attaching
from kvstrata_agent.serve.server import Server
from kvstrata_agent.serve.session_verbs import SessionVerbs
from kvstrata_agent.serve.verbs import Verbs
from kvstrata_api import names
from kvstrata_api.blocks import ScopeSecret
from kvstrata_api.errors import UnsupportedError
from kvstrata_api.trust import Identity
from kvstrata_kube.tls import Credential
from kvstrata_metadata.store.records import AgentRecord, Announcement, Location, SessionRecord
from kvstrata_telemetry.catalog import AGENT
from kvstrata_telemetry.metrics import Instruments

HOST: Final = "127.0.0.1"
OWNER: Final = "owner"
READER: Final = "reader"
FETCHED: Final = "kvstrata_peer_fetched_blocks_total"


@dataclass(slots=True)
class OneOther:
    """The directory of a fleet of two: every block that is not here is with the other, once that is known."""

    other: AgentRecord | None = None
    is_up: bool = True
    owes_all: bool = False

    async def locate(
        self, secret: ScopeSecret, digests: Sequence[bytes], *, within_s: float = LOCATE_S_MIN
    ) -> list[tuple[Location, ...]]:
        """Say that the other has all of them."""
        del secret, within_s
        if self.other is None:
            return [()] * len(digests)
        return [(Location(self.other.agent, self.other.epoch, "HostDRAM", 1, 0),)] * len(digests)

    def peer(self, agent: str, epoch: int) -> AgentRecord | None:
        """Where an agent is."""
        return self.other if self.other and (agent, epoch) == (self.other.agent, self.other.epoch) else None

    def announce(self, secret: ScopeSecret, changes: Sequence[Announcement]) -> None:
        """Nobody asks."""

    def note_session(self, secret: ScopeSecret, session: str, record: SessionRecord | None) -> None:
        """Nobody asks."""

    async def find_session(self, secret: ScopeSecret, session: str) -> SessionRecord | None:
        """Nothing is known."""
        del secret, session
        return None


class BenchNode:
    """Everything of one node."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Make the parts; listens from here on."""
        agent = names.pool_node_name(POOL, arguments.name)
        held = msgspec.json.decode(arguments.credential.read_bytes(), type=Credential)
        self._tls = PeerTls(names.SYSTEM_NAMESPACE, Holder(held))
        self.nixl, self.why_not = _nixl(agent)
        self.directory = OneOther()
        self._registry = CollectorRegistry()
        metrics = Instruments(AGENT, self._registry)
        self.peers = RemotePeers(agent, self.directory.peer, _token, self.nixl, metrics, tls=self._tls)
        self.listener = PeerListener(HOST)
        self.me = AgentRecord(agent, EPOCH, self.listener.address)
        self.node = make_node(arguments.capacity_bytes, "2Mi", arguments.name)
        self.core = AgentParts(self.node, CodecRegistry(), self.directory, self.peers)
        self.authenticator = OneIdentity()
        attaching = Attaching(self.node, self.authenticator)
        self.server = Server(
            arguments.socket, Verbs(self.core.cache, attaching, SessionVerbs(self.core.cache, attaching))
        )

    async def run(self) -> None:
        """Serve until stdin ends."""
        self.server.start()
        await self.listener.serve(
            self.me, self.core.lender, _verify, self.nixl, tls=self._tls, handovers=self.core.handovers
        )
        sweeping = asyncio.create_task(Sweeper(self.core.cache, self.authenticator).run())
        _say({"versions": {}, "address": self.me.address, "nixl": self.why_not or "on"})
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            _say(self._answer(json.loads(line)))
        sweeping.cancel()
        await asyncio.wait([sweeping])
        await self.server.close()
        await self.listener.close()
        await self.peers.close()
        await self.core.close()
        await self.node.tiers[0].backend.close()

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["verb"] == "meet":
            self.directory.other = AgentRecord(names.pool_node_name(POOL, asked["name"]), EPOCH, asked["address"])
        elif asked["verb"] == "clear":
            return {"cleared": clear(self.node, keep=asked["keep"])}
        return {"fetched": self._fetched()}

    def _fetched(self) -> dict[str, float]:
        """Blocks that came from the other node, by transport and result."""
        samples = (s for m in self._registry.collect() for s in m.samples if s.name == FETCHED)
        return {f"{s.labels['transport']} {s.labels['result']}": s.value for s in samples}


def _nixl(agent: str) -> tuple[NixlReader | None, str]:
    try:
        return NixlReader(agent, HOST), ""
    except UnsupportedError as e:
        return None, str(e)


async def _token() -> str:
    return "bench"


async def _verify(_token: str, _agent: str) -> Identity:
    return Identity(names.SYSTEM_NAMESPACE, names.AGENT_SERVICE_ACCOUNT)


def _say(fact: dict[str, Any]) -> None:
    print(json.dumps(fact), flush=True)


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", choices=(OWNER, READER), required=True, help="which of the two")
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to listen on")
    parser.add_argument("--capacity-bytes", type=int, required=True, help="size of the memory tier")
    parser.add_argument("--credential", type=Path, required=True, help="certificate, key and authority as JSON")
    asyncio.run(BenchNode(parser.parse_args()).run())


if __name__ == "__main__":
    main()
