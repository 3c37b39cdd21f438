"""Node preparation from start to stop: observe the machine and what pools want of it, decide, apply, report."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Final

from kvstrata_api import names
from kvstrata_api.errors import KvStrataError
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_kube.api import APPLY_PATCH, Call, KubeApi
from kvstrata_kube.signal import Signal
from kvstrata_kube.tasks import Task, cancel, supervise
from kvstrata_kube.typed_store import Known
from kvstrata_kube.watch import Source, Watch
from kvstrata_node import config, pool_node
from kvstrata_node import dax_plan as dax
from kvstrata_node import pages_plan as pages
from kvstrata_node.books import Book, open_book, read_dax_book
from kvstrata_node.config import Config
from kvstrata_node.dax import DaxKeeper
from kvstrata_node.dax_plan import Rules
from kvstrata_node.dax_sysfs import DaxMachine
from kvstrata_node.discovery import NodeFacts, read_machine, read_pci_gpus
from kvstrata_node.pages_plan import PageDemand, PagePool
from kvstrata_node.pages_sysfs import Machine
from kvstrata_node.pool_node import Observation, PoolNode, Urgency
from kvstrata_telemetry import logs, ready

POLL_INTERVAL_S: Final = 30.0
"""Polling interval of the machine when no event comes: devices come and go, and others reserve pages too."""
AGAIN_S: Final = 300.0
"""Retry interval for pages that the kernel did not find: each try has it compact the memory."""

_log = logging.getLogger(__name__)


class Preparer:
    """All parts of node preparation."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._machine = Machine(config.root)
        self._signal = Signal()
        self._dax: DaxKeeper | None = None
        self._pool_nodes = Known("KVPoolNode", pool_node.parse, self._signal.fire)
        self._nodes: Known[Mapping[int, int]] = Known("Node", pool_node.advertised, self._signal.fire)
        self._tasks: list[Task] = []
        self._not_before_s: dict[tuple[PagePool, int], float] = {}
        """When pages that the kernel did not find may be asked for again, and when others may be taken back."""
        self._written: dict[str, tuple[PoolNode, NodeReport, float]] = {}
        """By KVPoolNode: how the watch had it before our last write, what was written, and when."""

    async def run(self) -> None:
        """Prepare the node until cancelled; what was reserved stays.

        Raises `UnsupportedError` for credentials and `OSError` for a state directory that cannot be used.
        """
        book = await asyncio.to_thread(open_book, self._config.state_dir, self._machine.boot_id())
        async with AsyncExitStack() as stack:
            stack.callback(book.close)
            self._dax = await asyncio.to_thread(self._keeper, book)
            api = await KubeApi.connect(names.FIELD_MANAGER_NODE, self._config.kubeconfig)
            stack.push_async_callback(api.close)
            stack.push_async_callback(cancel, self._tasks)
            self._follow(api)
            while not (self._pool_nodes.is_synced and self._nodes.is_synced):
                await self._signal.wait()
            while True:
                await self._round(api, book)
                if self._config.ready_file is not None:
                    ready.write(self._config.ready_file, {})
                await self._signal.wait(self._pause_s())

    def _pause_s(self) -> float:
        """Until something is due."""
        due_s = (*self._not_before_s.values(), *(self._dax.due_s if self._dax is not None else ()))
        return max(0.0, min([POLL_INTERVAL_S, *(at_s - time.monotonic() for at_s in due_s)]))

    def _keeper(self, book: Book) -> DaxKeeper:
        config = self._config
        rules = Rules(config.dax_devices, gives_back=config.gives_dax_back)
        dax_book = read_dax_book(config.state_dir, book.boot)
        return DaxKeeper(DaxMachine(config.root), dax_book, rules, config.take_back_s)

    def _follow(self, api: KubeApi) -> None:
        label = f"{names.LABEL_NODE}={names.label_value(self._config.node)}"
        path = f"/apis/{names.API_VERSION}/kvpoolnodes"
        self._watch(api, self._pool_nodes, path, {"labelSelector": label})
        self._watch(api, self._nodes, "/api/v1/nodes", {"fieldSelector": f"metadata.name={self._config.node}"})

    def _watch(self, api: KubeApi, known: Known[Any], path: str, query: Mapping[str, str]) -> None:
        watch = Watch(api, Source(path, known.read, query), known)
        self._tasks.append(supervise(f"watch {path}", watch.run))

    async def _round(self, api: KubeApi, book: Book) -> None:
        ours = [one for one in self._pool_nodes if one.node == self._config.node]
        self._written = {one.name: self._written[one.name] for one in ours if one.name in self._written}
        tiers = tuple(tier for one in ours for tier in one.tiers)
        is_complete = all(seen.value is not None for seen in self._pool_nodes.items.values())
        advertised = self._nodes.get(self._config.node)
        report = await asyncio.to_thread(self._prepare, tiers, advertised, book, is_complete=is_complete)
        for one in ours:
            try:
                await self._write(api, one, report)
            except KvStrataError as e:
                _log.warning("status not written", extra={"pool_node": one.name, "cause": str(e)})

    def _prepare(
        self, tiers: Sequence[NodeTier], advertised: Mapping[int, int] | None, book: Book, *, is_complete: bool
    ) -> NodeReport:
        """Bring the machine as near to what is wanted as it can be now, and report on it. Blocking."""
        modes = {} if self._dax is None else self._dax.round(dax.wanted(tiers, is_complete=is_complete))
        facts = read_machine(self._config.root)
        demand = PageDemand(pages.wanted(tiers, facts.cpu_nodes), self._config.others, is_complete)
        if self._config.reserves and self._reserve(demand, facts, book):
            facts = read_machine(self._config.root)
        gpus = read_pci_gpus(self._config.root)
        return pool_node.report(Observation(facts, gpus, demand, book.added, advertised, self._config.reserves, modes))

    def _reserve(self, demand: PageDemand, facts: NodeFacts, book: Book) -> bool:
        """Set pages where that is due; True when the kernel was asked for anything."""
        promised = {pool.page_bytes: self._machine.promised(pool.page_bytes) for pool in facts.hugepages}
        steps = {(s.pool, s.target): s for s in pages.plan(demand, facts, book.added, promised)}
        now_s = time.monotonic()
        self._not_before_s = {goal: at_s for goal, at_s in self._not_before_s.items() if goal in steps}
        for goal, step in steps.items():
            if not step.is_growth:
                self._not_before_s.setdefault(goal, now_s + self._config.take_back_s)
        due = [step for goal, step in steps.items() if now_s >= self._not_before_s.get(goal, 0.0)]
        for step in self._machine.carry_out(due, book):
            self._not_before_s[step.pool, step.target] = now_s + AGAIN_S
        return bool(due)

    async def _write(self, api: KubeApi, ours: PoolNode, report: NodeReport) -> None:
        """Write one KVPoolNode's status where that is due. Raises what a refusal means."""
        before, written, at_s = self._written.get(ours.name, (None, None, 0.0))
        need, now_s = pool_node.urgency(ours, report), time.monotonic()
        if need is Urgency.NONE or (before, written) == (ours, report):
            return
        if need is Urgency.FREE and now_s - at_s < pool_node.FREE_INTERVAL_S:
            return
        body = pool_node.document(ours, report, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        path = f"/apis/{names.API_VERSION}/kvpoolnodes/{ours.name}/status"
        # Forced: an agent that is gone has left its condition.
        query = {"fieldManager": names.FIELD_MANAGER_NODE, "force": "true"}
        answer = await api.call(Call("PATCH", path, query, body, APPLY_PATCH))
        answer.content()
        self._written[ours.name] = (ours, report, now_s)


def main(argv: list[str] | None = None) -> int:
    """Prepare the node until SIGTERM or SIGINT; return the exit status."""
    given = config.parse(argv)
    logs.configure(given.log_level, "node")
    try:
        asyncio.run(_run_until_signal(given))
    except (KvStrataError, OSError) as e:
        print(f"kvstrata-node: {e}", file=sys.stderr)  # noqa: T201  The reason, for whoever reads no logs.
        return 1
    return 0


async def _run_until_signal(given: Config) -> None:
    working = asyncio.ensure_future(Preparer(given).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        _log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())
