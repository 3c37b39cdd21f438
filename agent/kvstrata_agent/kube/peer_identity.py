"""The token by which this agent proves itself to others: a projected file, or one asked of the API server.

Where an agent of another pool is, as its KVPoolNode states: the directory knows only who holds what was asked for.
"""

import asyncio
import time
from pathlib import Path
from typing import Final

import msgspec

from kvstrata_api import names
from kvstrata_api.errors import UnauthenticatedError
from kvstrata_kube.api import Call, KubeApi
from kvstrata_kube.watch import Source, list_objects
from kvstrata_metadata.store.records import AgentRecord

LIFE_S: Final = 3600
"""Asked for; the API server grants no less than 600 s."""
RENEW_AFTER: Final = 0.8
"""Part of its life after which a token is asked for again, as kubelets do with projected ones."""


class OwnToken:
    """Returns a current token of audience `kvstrata`. A file is read again each time, because kubelets rotate it."""

    def __init__(self, api: KubeApi, namespace: str, file: Path | None) -> None:
        self._api = api
        self._namespace = namespace
        self._file = file
        self._token = ""
        self._renew_at_s = 0.0
        self._asking = asyncio.Lock()

    async def get(self) -> str:
        """Return the token.

        Raises `UnauthenticatedError` when the file cannot be read, and what the API server answers otherwise.
        """
        if self._file is not None:
            return _read(self._file)
        async with self._asking:
            if time.monotonic() >= self._renew_at_s:
                await self._ask()
        return self._token

    async def _ask(self) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{names.AGENT_SERVICE_ACCOUNT}/token"
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [names.AUDIENCE], "expirationSeconds": LIFE_S},
        }
        answer = await self._api.call(Call("POST", path, body=body))
        self._token = answer.content()["status"]["token"]
        self._renew_at_s = time.monotonic() + LIFE_S * RENEW_AFTER


def _read(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except OSError as e:
        raise UnauthenticatedError(f"token file {file}: {e.strerror}") from e
    if not token:
        raise UnauthenticatedError(f"token file {file} is empty")
    return token


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
    """How to reach the agent of this name now; None while it has not reported it. Changes nothing.

    Raises like `list_objects`. Who answers there still has to show a certificate of that name.
    """
    source = Source(_PATH, msgspec.json.Decoder(_PoolNode).decode, {"fieldSelector": f"metadata.name={agent}"})
    found, _ = await list_objects(api, source)
    known = [n.status for n in found if n.metadata.name == agent and n.status.peer_address and n.status.epoch]
    return AgentRecord(agent, known[0].epoch, known[0].peer_address) if known else None
