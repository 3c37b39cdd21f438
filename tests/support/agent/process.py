"""A real core and server in a process of its own, for tests that kill or freeze it.

`python -m support.agent.process SOCKET BYTES EPOCH` serves a memory tier of BYTES until it is killed, and prints a line
when it does. Tokens are names of tenants: `a`, `b`, and `joined`, which is `a` as a member of the domain `d`.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstrata_agent.blocks.request import Caller
from kvstrata_api.blocks import ScopeId
from kvstrata_api.trust import Access, Grants, ScopeKind
from support.agent.doubles import FakeAuthenticator, caller, dram_tier
from support.agent.thread import AgentThread
from support.runner.alone import environment

DOMAIN = ScopeId("domain/d/uid-d/v1")


def member(tenant: str, *, can_write: bool) -> Caller:
    """A tenant that has joined the domain."""
    made = caller(tenant, (DOMAIN, can_write))
    shared = Access(DOMAIN, ScopeKind.DOMAIN, "d", can_write=can_write)
    grants = Grants(tenant, (shared, *made.grants.access[1:]), DOMAIN if can_write else made.grants.write_scope)
    return Caller(made.identity, grants, made.secrets, made.expires_s)


@contextmanager
def agent_process(socket: Path, capacity_bytes: int = 1 << 22, epoch: int = 7) -> Iterator[subprocess.Popen[str]]:
    """Start an agent and wait until it serves; killed at the end, and resumed first when it is stopped."""
    command = (sys.executable, "-m", __spec__.name, str(socket), str(capacity_bytes), str(epoch))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "serving\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(socket: str, capacity_bytes: str, epoch: str) -> None:
    callers = FakeAuthenticator(a=caller("a"), b=caller("b"), joined=member("a", can_write=True))
    with AgentThread(Path(socket), lambda: [dram_tier(int(capacity_bytes))], callers) as agent:
        agent.core.node.epoch = int(epoch)
        print("serving", flush=True)  # noqa: T201  Read by whoever started this.
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
