"""An agent with tiers below memory, in a process of its own, for threats that ask it things.

`python -m threats.served SOCKET DIRECTORY [cxl|nvme|flash]` serves tenants `a`, `b` and `c` on SOCKET until it is
killed. `a` and `b` write in a domain, `c` reads there. A line on its standard input is a command; it answers with one.
"""

import asyncio
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvstrata_agent.app import periodic
from kvstrata_agent.backends.registry import Place, make_backend
from kvstrata_agent.blocks.index import Index
from kvstrata_agent.blocks.request import Caller, RequestContext
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.movement.path import Priority
from kvstrata_agent.serve.verbs import Verbs
from kvstrata_api.blocks import ScopeId, ScopeSecret, chain_keys, unpack_digests
from kvstrata_api.errors import ForbiddenError, UnauthenticatedError
from kvstrata_api.models.pool import CxlEmulation, CxlTier, NvmeTier, RemoteFlashTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import CxlMode, TierType
from kvstrata_api.trust import Access, Grants, Identity, ScopeKind
from kvstrata_kube.tasks import repeat
from kvstrata_node.discovery import NodeFacts
from support.agent.doubles import LAYOUT_ID, FakeAuthenticator, caller, dram_tier, secret
from support.agent.process import DOMAIN, member
from support.agent.thread import AgentThread

SCOPE_A: Final = ScopeId("tenant/a/uid-a/v1")
SCOPE_B: Final = ScopeId("tenant/b/uid-b/v1")
NEW_DOMAIN: Final = ScopeId("domain/d/uid-d/v2")
TIERS: Final = ("dram", "cxl", "nvme", "flash")
CAPACITY_BYTES: Final = 64 << 20
PREFIX_TOKENS: Final = 16
LEAK_S: Final = 1e-4
"""By which the seeded defect is longer for each request, at least."""


def keys_of(scope: ScopeId, tokens: list[int]) -> list[bytes]:
    """Digests of the blocks of a prompt under the secret of a scope."""
    return [key.digest for key in chain_keys(secret(scope), LAYOUT_ID, tokens, PREFIX_TOKENS)]


class Callers(FakeAuthenticator):
    """Tenants that can be deleted and scopes whose key moves on."""

    def __init__(self) -> None:
        super().__init__(
            a=member("a", can_write=True), b=member("b", can_write=True), c=member("c", can_write=False), d=caller("d")
        )
        self.gone: set[ScopeId] = set()

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        return None if scope in self.gone else secret(scope)

    def authorize(self, identity: Identity) -> Caller:
        """See `Authenticator`: nobody claims an identity whose tenant is gone."""
        try:
            return super().authorize(identity)
        except UnauthenticatedError as e:
            raise ForbiddenError(str(e)) from e

    def delete(self, tenant: str) -> None:
        """The KVTenant is gone, and the Secret of its scope with it."""
        del self.callers[tenant]
        self.gone.add(ScopeId(f"tenant/{tenant}/uid-{tenant}/v1"))
        self.grants_version += 1

    def recreate(self, tenant: str) -> None:
        """A KVTenant of the same name, which is another tenant."""
        own = ScopeId(f"tenant/{tenant}/again/v1")
        access = (Access(own, ScopeKind.TENANT, tenant, can_write=True),)
        self.callers[tenant] = Caller(Identity("ns", tenant), Grants(tenant, access, own), (secret(own),), 3600.0)
        self.grants_version += 1

    def rotate(self) -> None:
        """`c` left the domain: its key moves on for those who stay."""
        self.gone.add(DOMAIN)
        self.callers["c"] = caller("c")
        for tenant in set(self.callers) & {"a", "b"}:
            self.callers[tenant] = caller(tenant, (NEW_DOMAIN, True))
        self.grants_version += 1


def _below(kind: str, directory: Path) -> NodeTier:
    common, path = {"name": kind, "capacity_bytes": CAPACITY_BYTES}, os.fspath(directory)
    match kind:
        case "cxl":
            emulated = CxlEmulation(path=path, latency_ns=0)
            return NodeTier(type=TierType.CXL, cxl=CxlTier(mode=CxlMode.EMULATED, emulated=emulated), **common)
        case "nvme":
            return NodeTier(type=TierType.NVME, nvme=NvmeTier(path=path, io="Posix"), **common)
        case _:
            return NodeTier(type=TierType.REMOTE_FLASH, remote_flash=RemoteFlashTier(path=path), **common)


class Served(AgentThread):
    """Memory and one tier below it, swept."""

    def __init__(self, socket: Path, directory: Path, below: str) -> None:
        self.authorities = Callers()
        super().__init__(socket, list, self.authorities)
        self._below = (below, directory)

    async def _start(self) -> None:
        made = [dram_tier(CAPACITY_BYTES)]
        kind, directory = self._below
        if kind in TIERS[1:]:
            spec = _below(kind, directory)
            made.append(Tier(spec, 1, await make_backend(spec, Place("pool", "node", NodeFacts(0, ()))), 2))
        self._tiers = lambda: made
        await super()._start()
        sweeper = periodic.Sweeper(self.core.cache, self.authorities)
        self._sweeping = asyncio.create_task(repeat("expire", 0.05, sweeper._expire))

    async def _stop(self) -> None:
        self._sweeping.cancel()
        await super()._stop()

    async def down(self) -> None:
        """Bring every block to the tier below."""
        node, demote_to = self.core.node, self.core.cache.demoter.demote_to
        memory, below = node.tiers
        entries = list(node.contents(memory).residents())
        # At once: thousands of blocks one by one would each wait for the disk. A busy disk may refuse some.
        while left := [entry for entry in entries if entry.residence(below) is None]:
            await asyncio.gather(*(demote_to(entry, memory, below, Priority.DEMOTE) for entry in left))
        while node.contents(memory).blocks:
            leaving = [entry for entry in node.contents(memory).residents() if node.index.may_leave(entry)]
            assert leaving, "the tier below has no room for all"
            node.evict(leaving, memory, "threat")

    async def erased(self) -> None:
        """Wait until nothing is left of scopes that are gone, as the agent's periodic duties bring it about."""
        self.server.refresh()
        while self.authorities.gone & set(self.core.node.index.scopes()):  # noqa: ASYNC110  No bell rings.
            await asyncio.sleep(0.02)

    def obey(self, command: str) -> None:
        """Carry out one line."""
        match command.split():
            case ["down"]:
                self.wait(self.down())
            case ["delete", tenant]:
                self.call(lambda: self.authorities.delete(tenant))
                self.wait(self.erased())
            case ["recreate", tenant]:
                self.call(lambda: self.authorities.recreate(tenant))
            case ["leak"]:
                _leak(self.core.node.index)
            case ["rotate"]:
                self.call(self.authorities.rotate)
                self.wait(self.erased())


def _leak(index: Index) -> None:
    """Have the agent look for blocks before it asks whether the caller may read them, and be longer for those it finds.

    From inside the scope a hit in memory takes as long as a miss, give or take some microseconds.
    """
    begin: Callable[..., RequestContext | None] = Verbs._begin

    def leaking(verbs: Verbs, at: Any, request: Any, session: str = "") -> RequestContext | None:
        if any(index.find(ScopeId(request.scope), digest) for digest in unpack_digests(request.digests)):
            time.sleep(LEAK_S)
        return begin(verbs, at, request, session)

    Verbs._begin = leaking  # type: ignore[method-assign, assignment]


class Remote:
    """The process as seen from outside."""

    def __init__(self, process: "subprocess.Popen[str]", path: Path) -> None:
        self.path = path
        self._process = process

    def tell(self, command: str) -> None:
        """Have a command carried out."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@contextmanager
def serving(directory: Path, below: str) -> Iterator[Remote]:
    """Start a process, and kill it at the end."""
    path = directory / f"{below}.sock"
    folder = directory / below
    folder.mkdir()
    command = (sys.executable, "-m", "threats.served", os.fspath(path), os.fspath(folder), below)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "done\n"
        yield Remote(process, path)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main(socket: str, directory: str, below: str) -> None:
    """Serve and obey."""
    periodic.ERASE_GRACE_S = 0.1  # type: ignore[misc]
    with Served(Path(socket), Path(directory), below) as agent:
        agent.core.node.clock = time.monotonic
        print("done", flush=True)  # noqa: T201  Read by whoever started this.
        for line in sys.stdin:
            agent.obey(line)
            print("done", flush=True)  # noqa: T201


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:  # noqa: BLE001  Whatever it is, the thread of the agent would wait for ever.
        traceback.print_exc()
        os._exit(1)
