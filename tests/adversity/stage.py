"""A real control plane, a proxy in front of it, fake agents, and an operator that is started again when it ends."""

import os
import signal
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

from adversity.proxy import Proxy
from controlplane import ApiError, ControlPlane, start
from controlplane.waiting import wait_until
from kvstrata_api import names
from kvstrata_api.schema_kinds import KINDS
from support.kube.chart_rights import install_kinds, render_rights
from support.nursery import Nursery
from support.operator.agents import FakeAgents

SYSTEM: Final = names.SYSTEM_NAMESPACE
OPERATOR: Final = ("adversity.defects", "kvstrata_operator.app.main", "kvstrata_kube.connection")
"""Modules that are loaded before an operator is forked, with what the first connection would load in each."""
LEASE_S: Final = 10
"""Of the operator and of agents: long enough that a busy machine loses none."""
STOP_S: Final = 60.0
"""Bound of waiting for the end of a process that is killed again and again."""


class Keeper:
    """Keeps one operator running, as a kubelet does: whoever kills it finds a new one. A context manager."""

    def __init__(self, kubeconfig: Path, folder: Path, defect: str = "") -> None:
        self.log = folder / "operator.log"
        self.starts = 0
        self.pid = 0
        self._defect = defect
        self._argv = ["--kubeconfig", str(kubeconfig), "--metrics-port", "0", "--lease-duration-s", str(LEASE_S)]
        # A pod keeps its name over restarts of its container, and so the operator its identity.
        self._argv += ["--heartbeat-s", "1", "--identity", "operator-0", "--resync-s", "10"]
        self._may_run = threading.Event()
        self._is_over = False
        self._is_down = threading.Event()
        self._is_down.set()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        self._nursery = Nursery(OPERATOR)
        self._nursery.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.stop()
        self._may_run.set()
        self._thread.join()
        self._nursery.__exit__(None, None, None)

    def run(self) -> None:
        """Let the operator run, now and again after each end."""
        self._may_run.set()

    def stop(self) -> None:
        """End the operator by SIGKILL and leave it ended."""
        self._may_run.clear()
        # One that is just being started has no process id yet, so that the first kill may miss it.
        assert wait_until(self._is_ended, STOP_S), f"process {self.pid} does not end"

    def _is_ended(self) -> bool:
        self.kill()
        return self._is_down.is_set()

    def kill(self) -> None:
        """End the operator by SIGKILL; it is started again unless it is to be stopped."""
        pid = self.pid
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _keep(self) -> None:
        while not self._is_over:
            self._is_down.set()
            self._may_run.wait()
            self._is_down.clear()
            if not self._may_run.is_set() or self._is_over:  # Told to stop while it began.
                continue
            operator = self._nursery.run(
                "adversity.defects:operate", argv=self._argv, log=str(self.log), defect=self._defect
            )
            self.starts += 1
            self.pid = operator.pid
            operator.wait()
            self.pid = 0
        self._is_down.set()


class Stage:
    """Everything that a proof needs. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._kubeconfig = Path()
        self.plane: ControlPlane
        self.proxy: Proxy
        self.agents: FakeAgents

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-adversity-")))
            self.plane = stack.enter_context(start(self.folder / "plane", kwok=False))
            install_kinds(self.plane, render_rights())
            assert wait_until(self._is_serving, 30.0)
            operator, agent = (
                self.plane.service_account_kubeconfig(SYSTEM, name, self.folder / name, expiration_s=6 * 3600)
                for name in (names.FIELD_MANAGER_OPERATOR, names.AGENT_SERVICE_ACCOUNT)
            )
            self.proxy = stack.enter_context(Proxy(self.plane.server, self.plane.ca_file, self.folder))
            self._kubeconfig = self.proxy.kubeconfig(operator)
            self.agents = stack.enter_context(FakeAgents(agent, SYSTEM, LEASE_S))
            self.agents.manners.obeys = True
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _is_serving(self) -> bool:
        """Whether every kind can be listed: fresh CRDs answer 429 for a while."""
        try:
            for kind in KINDS:
                self.plane.api.get(f"/apis/{names.API_VERSION}/{kind.plural}")
        except ApiError:
            return False
        return True

    def operator(self, defect: str = "") -> Keeper:
        """Make the operator's keeper; it runs nothing yet."""
        return Keeper(self._kubeconfig, self.folder, defect)
