"""One operator process, and what an administrator does and sees."""

import itertools
import os
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from controlplane import ApiError, ControlPlane
from controlplane.waiting import wait_until
from kvstrata_api import names
from kvstrata_telemetry import ready
from support.nursery import Program, run_program
from support.operator.fleet import condition, pool_spec

SYSTEM = names.SYSTEM_NAMESPACE
KVSTRATA = f"/apis/{names.API_VERSION}"
LEADER_LEASE_S = 2
CONVERGED_S = 90.0
"""Bound of every wait; what is waited for takes about a second on idle cores. Who waits for ever fails all the same."""

NEXT_CHANGE_S = 25.0
"""After an outage: lists come every 2 s, leadership within its Lease; the rest is for busy cores."""

RESIZE = [{"op": "replace", "path": "/spec/tiers/0/capacityPerNode", "value": "2Gi"}]

ARGUMENTS = "KVSTRATA_OPERATOR_ARGUMENTS"
"""Where the operator finds its command line when it is started by kopf's own command."""

_numbers = itertools.count(1)


class Replica:
    """One operator process."""

    def __init__(self, kubeconfig: Path, folder: Path, *more: str, by_kopf: bool = False) -> None:
        """`by_kopf` starts it by kopf's own command."""
        self.identity = f"replica-{next(_numbers)}"
        self._ready_file = folder / f"{self.identity}.json"
        self.log = folder / f"{self.identity}.log"
        arguments = ["--kubeconfig", str(kubeconfig), "--metrics-port", "0", "--ready-file", str(self._ready_file)]
        timing = ["--lease-duration-s", str(LEADER_LEASE_S), "--heartbeat-s", "1", "--identity", self.identity]
        options = [*arguments, *timing, *more]
        self.process: Program | subprocess.Popen[bytes]
        if by_kopf:
            command = [sys.executable, "-m", "kopf", "run", "-m", "kvstrata_operator", "--all-namespaces"]
            with self.log.open("wb") as log:
                environment = {**os.environ, ARGUMENTS: shlex.join(options)}
                self.process = subprocess.Popen(command, stderr=log, env=environment)
        else:
            self.process = run_program("kvstrata_operator.app.main", options, self.log)
        try:
            assert wait_until(self.is_up, CONVERGED_S), self.log.read_text()
        except BaseException:
            self.process.kill()  # Or it would lead, and act on what the next tests make.
            self.process.wait()
            raise

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self._ready_file.exists() and self.page("readyz") == "ok\n"

    def page(self, name: str) -> str:
        address = (ready.read(self._ready_file) or {})["metrics"]
        try:
            with urllib.request.urlopen(f"http://{address}/{name}", timeout=30) as answer:
                return str(answer.read().decode())
        except OSError as e:
            return str(e)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = (line for line in self.page("metrics").splitlines() if line.split("{")[0].split(" ")[0] == name)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(timeout=60)


@contextmanager
def running(kubeconfigs: dict[str, Path], folder: Path, *more: str, by_kopf: bool = False) -> Iterator[Replica]:
    replica = Replica(kubeconfigs[names.FIELD_MANAGER_OPERATOR], folder, *more, by_kopf=by_kopf)
    try:
        yield replica
    finally:
        replica.process.kill()
        replica.process.wait()


class Cluster:
    """What the administrator does and sees. Pools and nodes of a test have names of their own."""

    def __init__(self, plane: ControlPlane, log: Path | None = None) -> None:
        self.plane = plane
        self._log = log
        self.mark = f"t{next(_numbers)}"
        self._made: list[str] = []

    def told(self) -> str:
        """Last words of the operator, for a failure's message."""
        return self._log.read_text()[-4000:] if self._log else ""

    def node(self, name: str) -> str:
        made = f"{self.mark}-{name}"
        meta = {"name": made, "labels": {"test": self.mark}}
        self.plane.api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})
        self._made.append(f"/api/v1/nodes/{made}")
        return made

    def make(self, plural: str, kind: str, name: str, spec: Any, namespace: str = "") -> str:
        body = {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        inside = f"/namespaces/{namespace}" if namespace else ""
        self.plane.api.post(f"{KVSTRATA}{inside}/{plural}", body)
        self._made.append(f"{KVSTRATA}{inside}/{plural}/{name}")
        return name

    def pool(self, name: str = "", **spec: Any) -> str:
        """Declare a pool on this test's nodes; drains take a second at most unless told otherwise."""
        quick = {"updateStrategy": {"drain": {"timeoutSeconds": 1}}}
        return self.make(
            "kvpools", "KVPool", name or self.mark, pool_spec(selector={"test": self.mark}, **quick | spec)
        )

    def tenant(self, name: str, **spec: Any) -> str:
        account = {"serviceAccounts": [{"namespace": self.mark, "name": name}]}
        return self.make("kvtenants", "KVTenant", f"{self.mark}-{name}", account | spec)

    def get(self, path: str) -> Any:
        """Return an object, or None when there is none."""
        try:
            return self.plane.api.get(path)
        except ApiError as e:
            if e.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def kv(self, plural: str, name: str) -> Any:
        return self.get(f"{KVSTRATA}/{plural}/{name}")

    def labels(self, node: str) -> dict[str, str]:
        """Labels of a Node."""
        found: dict[str, str] = self.get(f"/api/v1/nodes/{node}")["metadata"]["labels"]
        return found

    def pool_nodes(self, pool: str) -> dict[str, Any]:
        found = self.get(f"{KVSTRATA}/kvpoolnodes?labelSelector={names.LABEL_POOL}={pool}")["items"]
        return {item["spec"]["nodeName"]: item for item in found}

    def secret(self, kind: str, name: str) -> Any:
        return self.get(f"/api/v1/namespaces/{SYSTEM}/secrets/{names.scope_secret_name(kind, name)}")

    def events(self, name: str) -> set[str]:
        found = self.get(f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={name}")["items"]
        return {event["reason"] for event in found}

    def says(self, plural: str, name: str, type_: str, expected: str, reason: str = "") -> None:
        """Wait for a condition."""

        def holds() -> bool:
            status, why = condition(self.kv(plural, name) or {}, type_)
            return status == expected and reason in ("", why)

        assert wait_until(holds, CONVERGED_S), (self.kv(plural, name) or {}).get("status")

    def sees(self, holds: Callable[[], Any]) -> None:
        """Wait until something holds."""
        assert wait_until(lambda: bool(holds()), CONVERGED_S), self.plane.kubectl("get", "kvstrata", "-o", "yaml")

    def remove_all(self) -> None:
        for path in reversed(self._made):
            try:
                self.plane.api.delete(path)
            except ApiError as e:
                if e.status != HTTPStatus.NOT_FOUND:
                    raise
