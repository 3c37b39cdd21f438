"""What the program is tried against: an agent of its own (`kvstrata up`), and a client that is known to be right."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvstrata_api import wire
from kvstrata_api.blocks import BlockKey, Layout, chain_keys
from kvstrata_api.errors import UnsupportedError
from kvstrata_api.names import API_VERSION
from kvstrata_client.client import Client
from kvstrata_client.conformance.content import Ranges, tokens_of
from kvstrata_client.conformance.driver import ConformanceError, Driver
from kvstrata_client.target import Target
from kvstrata_client.verbs import calls
from kvstrata_client.verbs.calls import Operation, ReplyContext
from kvstrata_client.verbs.results import Lease

POOL: Final = "conformance"
LAYOUT: Final = Layout("kit", "1", "bf16", 16, layers=2, kv_heads=1, head_dim=64, element_bytes=2)
"""Blocks of 8 KiB."""
MEMORY_BYTES: Final = 32 << 20
TENANTS: Final = ("a", "b", "c", "d")
"""The last two share all through a trust domain."""
DOMAIN: Final = "cd"
START_S: Final = 120.0
SOON_S: Final = 20.0
"""How long something may take that a client does by itself, such as to come back to an agent."""
POLL_S: Final = 0.05
_LOG_CHARS: Final = 2000

Json = dict[str, Any]


class Stage:
    """A temporary folder with an agent that can be killed and started again, and the program's processes."""

    def __init__(self, command: Sequence[str], answer_s: float) -> None:
        """Prepare; the agent starts with the `with` block."""
        self._command = command
        self._answer_s = answer_s
        self._folder = tempfile.TemporaryDirectory(prefix="kvstrata-conformance-")
        self._agent: subprocess.Popen[bytes] | None = None
        self._home = Path(self._folder.name)
        self._next_token = 1000

    def __enter__(self) -> Self:
        for name in TENANTS:
            (self._home / name).write_text(self.token(name))
        (self._home / "pool.json").write_text("\n---\n".join(json.dumps(o) for o in _manifests()))
        try:
            self.start_agent()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def socket(self) -> Path:
        """Where the agent listens."""
        return self._home / "agent.sock"

    @staticmethod
    def token(tenant: str) -> str:
        """Token of a tenant; that of one that there is not is refused."""
        return f"token-of-{tenant}-" + tenant[0] * 16

    def fresh(self, blocks: int, *, tail: int = 0) -> Ranges:
        """Return a prompt of so many blocks, and tokens behind them, that no other one begins with."""
        first, count = self._next_token, blocks * LAYOUT.block_tokens + tail
        self._next_token += count
        return [[first, count]]

    def program(self, tenant: str = "a", layout: Layout = LAYOUT) -> Driver:
        """Start the program and attach it. Raises `ConformanceError` when it is not attached."""
        driver = self.bare_program()
        try:
            answer = self.attach(driver, tenant, layout)
            require(answer.get("attached") is True, f"attach as tenant {tenant}: {answer}, attached true wanted")
        except BaseException:
            driver.kill()
            raise
        return driver

    def bare_program(self) -> Driver:
        """Start the program and ask for nothing."""
        return Driver(self._command, self._answer_s)

    def attach(self, driver: Driver, tenant: str, layout: Layout = LAYOUT) -> Json:
        """Have the program attach as a tenant."""
        return driver.ask("attach", socket=str(self.socket), pool=POOL, token=self.token(tenant), layout=asdict(layout))

    def reference(self, tenant: str = "a") -> Client:
        """A patient client of our own that raises what goes wrong."""
        target = Target(
            self.socket, POOL, self.token(tenant), LAYOUT, timeout_s=SOON_S, move_timeout_s=SOON_S, silence_s=SOON_S
        )
        client = Client(target, strict=True)
        if not client.wait_settled(SOON_S):
            client.close()
            raise client.reason
        return client

    def start_agent(self) -> None:
        """Start it and wait until it serves. Raises `UnsupportedError` with the end of its log when it does not."""
        ready = self._home / "ready.json"
        ready.unlink(missing_ok=True)
        tokens = [f"--token={name}={self._home / name}" for name in TENANTS]
        places = ["--state-dir", str(self._home / "state"), "--socket", str(self.socket), "--ready-file", str(ready)]
        command = [sys.executable, "-m", "kvstrata_client.cli", "up", "-f", str(self._home / "pool.json")]
        with (self._home / "log").open("ab") as log:
            self._agent = subprocess.Popen([*command, *places, *tokens], stdout=subprocess.DEVNULL, stderr=log)
        ends_s = time.monotonic() + START_S
        while not ready.exists():
            if self._agent.poll() is not None or time.monotonic() > ends_s:
                log_end = (self._home / "log").read_text(errors="replace")[-_LOG_CHARS:]
                raise UnsupportedError(f"the agent did not start within {START_S:g} s: {log_end}")
            time.sleep(POLL_S)

    def signal_agent(self, number: signal.Signals) -> None:
        """Send the agent a signal; one that kills it is waited for."""
        assert self._agent is not None, "started with the stage"
        self._agent.send_signal(number)
        if number is signal.SIGKILL:
            self._agent.wait()

    def _close(self) -> None:
        if self._agent is not None:
            self.signal_agent(signal.SIGKILL)
        self._folder.cleanup()


def _manifests() -> list[Json]:
    compatibility = {"model": "*", "revision": "*", "dtype": "bf16", "blockTokens": LAYOUT.block_tokens}
    tier = {
        "name": "dram", "type": "HostDRAM", "capacityPerNode": str(MEMORY_BYTES), "hostDRAM": {"pageSize": "4Ki"},
    }  # fmt: skip
    joined = {name: {"trustDomain": DOMAIN} for name in TENANTS[2:]}
    accounts = {name: [{"namespace": "token", "name": name}] for name in TENANTS}
    declared = [
        ("KVPool", POOL, {"compatibility": compatibility, "tiers": [tier]}),
        ("KVTrustDomain", DOMAIN, {"tenants": list(TENANTS[2:]), "sharing": "All"}),
        *(("KVTenant", name, {"serviceAccounts": accounts[name], **joined.get(name, {})}) for name in TENANTS),
    ]
    return [{"apiVersion": API_VERSION, "kind": k, "metadata": {"name": n}, "spec": s} for k, n, s in declared]


def require(fact: bool, said: str) -> None:  # noqa: FBT001  As `assert`.
    """Raise `ConformanceError` unless it is so."""
    if not fact:
        raise ConformanceError(said)


def within(seconds: float, ask: Callable[[], Any], wanted: Any, what: str) -> None:
    """Ask again and again. Raises `ConformanceError` when the answer is not the wanted one in time."""
    ends_s = time.monotonic() + seconds
    while (found := ask()) != wanted:
        require(time.monotonic() < ends_s, f"{what}: {found} after {seconds:g} s, {wanted} wanted")
        time.sleep(POLL_S)


def keys_of(client: Client, ranges: Ranges) -> list[BlockKey]:
    """Keys of a prompt where the client writes."""
    grants = client.grants
    scope = grants.scope(grants.write_scope) if grants is not None else None
    assert scope is not None, "an attached client has a write scope"
    return chain_keys(scope.secret, LAYOUT.layout_id(), tokens_of(ranges), LAYOUT.block_tokens)


def spoil(client: Client, keys: Sequence[BlockKey]) -> None:
    """Turn one byte of the last block of a chain round, in the memory that its tenant may write."""
    client.run(_spoil(client.target, keys))


def _spoil(target: Target, keys: Sequence[BlockKey]) -> Operation[None]:
    plain = calls.acquire(target, keys, "", SOON_S, SOON_S)

    def read(reply: wire.AnyReply, context: ReplyContext) -> tuple[Lease, ...]:
        leases = plain.read(reply, context)
        assert isinstance(reply, wire.Acquired)
        require(len(leases) == len(keys), f"{len(leases)} blocks of {len(keys)} are there to be spoilt")
        last = reply.blocks[-1]
        view = context.extents.view(last.extent, last.offset, context.block_bytes, is_writable=True)
        view[0] ^= 0xFF
        return leases

    leases = (yield (replace(plain, read=read),))[0].value
    yield (calls.release(target, leases),)
