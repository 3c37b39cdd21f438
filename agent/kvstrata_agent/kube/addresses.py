"""Where an agent of another pool is, as its KVPoolNode says: the directory tells only who holds what was asked for."""

from typing import Final

import msgspec

from kvstrata_api import names
from kvstrata_kube.api import KubeApi
from kvstrata_kube.watch import Source, list_objects
from kvstrata_metadata.records import AgentRecord

_PATH: Final = f"/apis/{names.API_VERSION}/kvpoolnodes"


class _Meta(msgspec.Struct):
    name: str


class _Status(msgspec.Struct, rename="camel"):
    epoch: int = 0
    peer_address: str = ""


class _PoolNode(msgspec.Struct):
    metadata: _Meta
    status: _Status = msgspec.field(default_factory=_Status)


async def find_agent(api: KubeApi, agent: str) -> AgentRecord | None:
    """How to reach the agent of this name now; None while it has not said so. Changes nothing.

    Raises like `list_objects`. Who answers there still has to show a certificate of that name.
    """
    source = Source(_PATH, msgspec.json.Decoder(_PoolNode).decode, {"fieldSelector": f"metadata.name={agent}"})
    found, _ = await list_objects(api, source)
    told = [n.status for n in found if n.metadata.name == agent and n.status.peer_address and n.status.epoch]
    return AgentRecord(agent, told[0].epoch, told[0].peer_address) if told else None
