"""A real core and server in a process of its own, for tests that kill or freeze it.

`python -m support.agent.process SOCKET BYTES EPOCH` serves a memory tier of BYTES until it is killed, and prints a line
when it does. Tokens are names of tenants: `a`, `b`, and `joined`, which is `a` as a member of the domain `d`. With a
fourth argument, a device such as `cpu`, an HBM tier that lends lies above it: for each line that it reads it has all
blocks there and nowhere else, and prints how many they are.
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
def agent_process(
    socket: Path, capacity_bytes: int = 1 << 22, epoch: int = 7, *, device: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Start an agent and wait until it serves; killed at the end, and resumed first when it is stopped."""
    command = [sys.executable, "-m", __spec__.name, str(socket), str(capacity_bytes), str(epoch)]
    command += [device] if device else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "serving\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def raised(process: "subprocess.Popen[str]") -> int:
    """Have a lending agent's blocks in HBM; returns how many they are."""
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdin.write("raise\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def main(socket: str, capacity_bytes: str, epoch: str, device: str = "") -> None:
    callers = FakeAuthenticator(a=caller("a"), b=caller("b"), joined=member("a", can_write=True))
    size_bytes, raise_blocks = int(capacity_bytes), None
    if device:
        from support.agent.lending import lending_tiers, raise_all

        raise_blocks = raise_all
    tiers = (
        (lambda: [dram_tier(size_bytes)])
        if raise_blocks is None
        else lambda: lending_tiers(device, dram_bytes=size_bytes)
    )
    with AgentThread(Path(socket), tiers, callers) as agent:
        agent.core.node.epoch = int(epoch)
        print("serving", flush=True)  # noqa: T201  Read by whoever started this.
        for _ in sys.stdin if raise_blocks is not None else ():
            assert raise_blocks is not None
            print(raise_blocks(agent), flush=True)  # noqa: T201  As above.
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
