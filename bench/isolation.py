"""What isolation and traces cost on one node's data path: the same agent with and without them, in turns.

`none`: one tenant with one scope and no rules. `tenant`: hard quotas of the tenant and 64 others. `domain`: a trust
domain besides, whose scope is looked into before the tenant's own, with the audit of reads across tenants. `traced`:
as `none`, and all spans are sent to a receiver in this process; `sampled`: those of one trace in a hundred are.
Identity, keys, verified reads and metrics are part of all. Encryption at rest is measured by `bench.encryption`, reuse
by `bench.reuse`.
"""

import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from bench.harness import common
from bench.harness.cases import Case
from bench.harness.common import Result, Sample, publish, table, time_ratio
from bench.harness.drivers import Command, Driver
from kvstrata_api import __version__

KIB: Final = 1 << 10
MIB: Final = 1 << 20
CASES: Final = (Case(4 * KIB, 512, 1, 15), Case(256 * KIB, 256, 1, 15), Case(2 * MIB, 64, 1, 15))
CASES_QUICK: Final = (Case(4 * KIB, 256, 1, 7), Case(2 * MIB, 32, 1, 7))
CAPACITY_BYTES: Final = 1 << 30
LOOKUPS: Final = 20
"""Of the whole set, in one measurement."""
SIDES: Final = ("none", "tenant", "domain", "traced", "sampled")
RATIOS: Final = {"traced": "1", "sampled": "0.01"}
"""Of traces that are sent."""
WORKS: Final = ("put", "get", "lookup")


@dataclass(slots=True)
class Side:
    """An agent and its one client."""

    agent: Driver
    client: Driver
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Of each repeat, by work and size of the blocks."""

    def turn(self, case: Case, generation: int, *, is_counted: bool) -> None:
        """Store, look up and load a set under new keys. Raises `FailedError`, and `ValueError` for other bytes."""
        at = {"generation": generation}
        self.client.ask("prepare", **at)
        taken = {work: self.client.ask(work, **at)["seconds"] for work in ("put", "get")}
        if not self.client.ask("check", **at)["is_same"]:
            raise ValueError("what was loaded is not what was stored")
        found = self.client.ask("lookup", **at, rounds=LOOKUPS)
        if found["hits"] != case.blocks:
            raise ValueError(f"{found['hits']} of {case.blocks} blocks found")
        self.agent.ask("clear", keep=True)
        for work, seconds in {**taken, "lookup": found["seconds"]}.items():
            if is_counted:
                self.seconds.setdefault((work, case.size), []).append(seconds)


class _Receiver(BaseHTTPRequestHandler):
    """Takes spans and throws them away."""

    spans_bytes = 0

    def do_POST(self) -> None:
        """Read it, and be content."""
        _Receiver.spans_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """Address of an OTLP receiver."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        finally:
            server.shutdown()


@contextlib.contextmanager
def started(name: str, endpoint: str) -> Iterator[Side]:
    """Start an agent and a client; stop them at the end."""
    traces = ("--otlp-endpoint", endpoint, "--trace-ratio", RATIOS[name]) if name in RATIOS else ()
    isolation = "none" if name in RATIOS else name
    python = Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as directory:
        socket = ("--socket", str(Path(directory) / "agent.sock"))
        arguments = (*socket, "--capacity-bytes", str(CAPACITY_BYTES), "--isolation", isolation, *traces)
        with (
            Driver(Command(f"agent {name}", python, "bench.harness.agent_process", arguments)) as agent,
            Driver(Command(name, python, "bench.peers.ours", (*socket, "--tokens"))) as client,
        ):
            agent.read()
            client.versions()
            yield Side(agent, client)


def measure(cases: tuple[Case, ...], sides: dict[str, Side]) -> None:
    """Take turns in every repeat, beginning with the other one each time."""
    generation = 0
    for case in cases:
        print(f"[bench.isolation] {case.blocks} blocks of {case.size}", file=sys.stderr, flush=True)
        for side in sides.values():
            work = case.work
            side.client.ask("open", block_bytes=work.block_bytes, blocks=work.blocks, batch=work.batch, client=0)
        for repeat in range(-1, case.repeats):
            first = repeat % len(SIDES)
            for name in SIDES[first:] + SIDES[:first]:
                generation += 1
                sides[name].turn(case, generation, is_counted=repeat >= 0)


def main() -> int:
    """Measure, print the table and the last line."""
    given = common.parser(__doc__).parse_args()
    cases = CASES_QUICK if given.quick else CASES
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(receiver())
        sides = {name: stack.enter_context(started(name, endpoint)) for name in SIDES}
        measure(cases, sides)
    if not _Receiver.spans_bytes:
        raise SystemExit("no spans came: what traces cost was not measured")
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, float | None] = {}
    values: dict[str, float] = {}
    for case in cases:
        for work in WORKS:
            scale = 1e6 / case.blocks / (LOOKUPS if work == "lookup" else 1)
            taken = {name: Sample(tuple(side.seconds[work, case.size])) for name, side in sides.items()}
            for name, sample in taken.items():
                values[f"{work}_{case.size}_{name}_us_per_block"] = sample.spread[1] * scale
            for name in SIDES[1:]:
                ratios[f"{work}_{case.size}_{name}_vs_none"] = time_ratio(taken[name], taken["none"])
            each_us = (f"{sample.spread[1] * scale:.2f}" for sample in taken.values())
            against = (f"{ratios[f'{work}_{case.size}_{name}_vs_none']:.3f}" for name in SIDES[1:])
            rows.append((f"{work} {case.size}", *each_us, *against))
    print(table(("us/block", *SIDES, *(f"{name} vs none" for name in SIDES[1:])), rows))
    publish(Result("isolation", given.quick, {"kvstrata": __version__}, ratios, values), given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
