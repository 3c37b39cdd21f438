"""Node preparation as a process at a real API server, on a made-up machine, and its pages on the real kernel."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checks import rights
from controlplane import ControlPlane, start
from kvstrata_api import names
from kvstrata_kube.api import MERGE_PATCH, Call, KubeApi
from kvstrata_node.books import open_book
from kvstrata_node.discovery import read_hugepages, read_machine
from kvstrata_node.pages_plan import PageDemand, PagePool, plan
from kvstrata_node.pages_sysfs import Machine
from support.kube.agent import GROUP, custom, until
from support.node.dax_machine import BLOCK, DaxKernel
from support.node.huge_pages import PAGE, make_machine, pages_at, pages_file, put
from support.operator.issuer import make_pod, pod_kubeconfig

pytestmark = pytest.mark.system

NODE = "worker-1"
REAL_PAGES = 16
Json = dict[str, Any]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(tmp_path_factory.mktemp("plane"), kwok=False) as plane:
        rights.prepare(plane, rights.render(**rights.NODE_PREPARATION))
        yield plane


@pytest.fixture
def kubeconfig(plane: ControlPlane, node: str, tmp_path: Path) -> Path:
    """Of a pod of the chart's DaemonSet: its rights, and policies that know its node."""
    pod = make_pod(plane, rights.SYSTEM, f"kvstrata-{node}", "kvstrata-node", node)
    return pod_kubeconfig(plane, pod, tmp_path / "node.kubeconfig")


@pytest.fixture
def node(plane: ControlPlane) -> Iterator[str]:
    plane.api.post("/api/v1/nodes", {"metadata": {"name": NODE}, "status": {"capacity": {"hugepages-2Mi": "0"}}})
    yield NODE
    plane.kubectl("delete", "kvpn", "--all", "--wait=true")
    plane.kubectl("delete", "node", NODE)


def declare(plane: ControlPlane, pool: str, pages: int, node: str = NODE, **settings: str) -> str:
    dram = {"pageSize": "2Mi", "numa": "Spread", **settings}
    tier = {"name": "dram", "type": "HostDRAM", "capacityBytes": pages * PAGE, "hostDRAM": dram}
    return declare_tier(plane, pool, tier, node)


def declare_tier(plane: ControlPlane, pool: str, tier: Json, node: str) -> str:
    name = names.pool_node_name(pool, node)
    spec = {"poolRef": pool, "nodeName": node, "tiers": [tier], "revision": "r1"}
    body = custom("KVPoolNode", name, spec)
    body["metadata"]["labels"] = {names.LABEL_NODE: names.label_value(node)}
    plane.api.post(f"{GROUP}/kvpoolnodes", body)
    return name


def advertise(plane: ControlPlane, quantity: str) -> None:
    """What a kubelet that was restarted writes."""
    body = f'{{"status": {{"capacity": {{"hugepages-2Mi": "{quantity}"}}}}}}'
    plane.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", body)


def status(plane: ControlPlane, name: str) -> Json:
    found: Json = plane.api.get(f"{GROUP}/kvpoolnodes/{name}").get("status") or {}
    return found


def reason(plane: ControlPlane, name: str, condition: str = "HugepagesReserved") -> str:
    found = [c for c in status(plane, name).get("conditions", []) if c["type"] == condition]
    return str(found[0]["reason"]) if found else ""


@contextmanager
def preparation(home: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    state = ["--state-dir", home / "state", "--root", home / "host", "--kubeconfig", home / "node.kubeconfig"]
    command = [sys.executable, "-m", "kvstrata_node.main", "--node", NODE, *map(str, state), *options]
    with (home / "node.log").open("ab") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("kubeconfig")
def test_pages_of_all_pools_are_reserved_told_and_given_back(plane: ControlPlane, node: str, tmp_path: Path) -> None:
    host = make_machine(tmp_path / "host", pages=4)
    first, second = declare(plane, "one", 20, node), declare(plane, "two", 6, node, numa="Local")
    declare(plane, "elsewhere", 50, "worker-2")

    with preparation(tmp_path, "--take-back-s=0.5"):
        until(lambda: (pages_at(host, 0), pages_at(host, 1)) == (16, 10))
        until(lambda: reason(plane, first) == reason(plane, second) == "KubeletStale")
        told = status(plane, first)["node"]
        (size,) = told["hugePages"]
        assert "kubernetes#111757" in size["message"]
        assert [(n["total"], n["wanted"], n["added"]) for n in size["numaNodes"]] == [(16, 16, 12), (10, 10, 6)]
        assert [n["cpus"] for n in told["numa"]] == [1, 1]

        advertise(plane, f"{26 * 2}Mi")
        until(lambda: reason(plane, first) == reason(plane, second) == "Reserved")
        for numa in (0, 1):
            put(host, str(pages_file(host, numa, "free_hugepages").relative_to(host)), pages_at(host, numa))
        plane.kubectl("delete", "kvpn", first)
        until(lambda: (pages_at(host, 0), pages_at(host, 1)) == (6, 4))
    assert "worker-2" not in (tmp_path / "node.log").read_text()


@pytest.mark.usefixtures("kubeconfig")
def test_kill_9_and_a_restart_change_nothing_that_was_not_asked_for(
    plane: ControlPlane, node: str, tmp_path: Path
) -> None:
    host = make_machine(tmp_path / "host", nodes=1, pages=0)
    name = declare(plane, "one", 8, node)
    with preparation(tmp_path) as process:
        until(lambda: reason(plane, name) == "KubeletStale")
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    put(host, str(pages_file(host).relative_to(host)), 11)  # Somebody reserves three more meanwhile.
    put(host, str(pages_file(host, name="free_hugepages").relative_to(host)), 11)
    plane.kubectl("delete", "kvpn", name)

    with preparation(tmp_path, "--take-back-s=0"):
        until(lambda: pages_at(host) == 3)


@pytest.mark.usefixtures("kubeconfig")
def test_while_an_agent_is_there_its_condition_stands_and_the_inventory_is_told(
    plane: ControlPlane, node: str, tmp_path: Path
) -> None:
    make_machine(tmp_path / "host", nodes=1)
    name = declare(plane, "one", 8, node)
    conditions = [
        {"type": "AgentConnected", "status": "True", "reason": "Serving", "lastTransitionTime": "2026-11-23T00:00:00Z"},
        {
            "type": "HugepagesReserved",
            "status": "True",
            "reason": "Agents",
            "lastTransitionTime": "2026-11-23T00:00:00Z",
        },
    ]
    applied = {**custom("KVPoolNode", name, {}), "status": {"conditions": conditions, "epoch": 7}}
    del applied["spec"]
    text = json.dumps(applied)
    agent = ("apply", "--server-side", "--subresource=status", "--field-manager=kvstrata-agent", "--force-conflicts")
    plane.kubectl(*agent, "-f", "-", stdin=text)

    with preparation(tmp_path):
        until(lambda: "node" in status(plane, name))
        assert reason(plane, name) == "Agents"
        assert status(plane, name)["epoch"] == 7

        plane.kubectl(
            *agent,
            "-f",
            "-",
            stdin=text.replace('"AgentConnected", "status": "True"', '"AgentConnected", "status": "False"'),
        )
        until(lambda: reason(plane, name) == "KubeletStale")
        plane.kubectl(*agent, "-f", "-", stdin=text)
        assert reason(plane, name) == "Agents"
        assert status(plane, name)["node"]["hugePages"][0]["reason"] == "KubeletStale"


@pytest.mark.usefixtures("kubeconfig")
def test_a_preparation_that_may_only_report_leaves_the_machine_alone(
    plane: ControlPlane, node: str, tmp_path: Path
) -> None:
    host = make_machine(tmp_path / "host", nodes=1)
    name = declare(plane, "one", 8, node)

    with preparation(tmp_path, "--huge-pages=Report") as process:
        until(lambda: reason(plane, name) == "NotPrepared")
        assert pages_at(host) == 0
        version = plane.api.get(f"{GROUP}/kvpoolnodes/{name}")["metadata"]["resourceVersion"]
        plane.kubectl("label", "node", NODE, "touched=yes", "--overwrite")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert plane.api.get(f"{GROUP}/kvpoolnodes/{name}")["metadata"]["resourceVersion"] == version


@pytest.mark.usefixtures("kubeconfig")
def test_a_dax_device_in_another_mode_is_told_of_and_left_alone_unless_it_is_declared(
    plane: ControlPlane, node: str, tmp_path: Path
) -> None:
    host = DaxKernel(tmp_path / "host")
    device = host.add(0, 4, "device_dax")
    name = declare_tier(plane, "one", {"name": "cxl", "type": "CXL", "capacityBytes": BLOCK, "cxl": {}}, node)

    with preparation(tmp_path):
        until(lambda: reason(plane, name, "DevicePresent") == "WrongMode")
        assert status(plane, name)["node"]["cxl"][0]["mode"] == "NumaNode"
    assert host.driver(device) == "device_dax"
    (host.root / "sys/bus/dax/drivers/kmem").rename(tmp_path / "not loaded")
    with preparation(tmp_path, "--dax-device=dax0.*"):
        until(lambda: reason(plane, name, "DevicePresent") == "NotPermitted")


OBSERVED: tuple[tuple[str, Json, str], ...] = (
    ("worker-1", {"node": {"memoryBytes": 1}}, ""),
    ("worker-1", {"conditions": [{"type": "HugepagesReserved", "status": "False", "reason": "Fragmented"}]}, ""),
    ("worker-1", {"conditions": [{"type": "DevicePresent", "status": "False", "reason": "Busy"}]}, ""),
    ("worker-2", {"node": {"memoryBytes": 1}}, "of its own node alone"),
    ("worker-1", {"epoch": 8}, "nothing that an agent observes"),
    ("worker-1", {"erased": [{"uid": "u", "keyVersion": 2}]}, "nothing that an agent observes"),
    ("worker-1", {"tiers": [{"name": "dram", "type": "HostDRAM"}]}, "nothing that an agent observes"),
    (
        "worker-1",
        {"conditions": [{"type": "Ready", "status": "True", "reason": "Lie"}]},
        "HugepagesReserved and DevicePresent alone",
    ),
)


async def test_a_stolen_token_speaks_of_its_own_machine_alone(plane: ControlPlane, node: str, kubeconfig: Path) -> None:
    for name in (node, "worker-2"):
        declare(plane, "one", 1, name)
    api = await KubeApi.connect("test", kubeconfig)

    async def refusal(name: str, told: Json) -> str:
        for condition in told.get("conditions", ()):
            condition["lastTransitionTime"] = "2026-11-23T00:00:00Z"
        path = f"{GROUP}/kvpoolnodes/one.{name}/status"
        answer = await api.call(Call("PATCH", path, body={"status": told}, content_type=MERGE_PATCH))
        return "" if answer.is_success else answer.message

    lie = {"epoch": 8}
    while not await refusal(node, lie):  # The API server takes a policy up a moment after it is stored.
        lie["epoch"] += 1
        await asyncio.sleep(0.1)
    said = [(await refusal(name, told), words) for name, told, words in OBSERVED]
    await api.close()

    assert [what for what in said if bool(what[0]) != bool(what[1]) or what[1] not in what[0]] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may reserve huge pages")
def test_the_real_kernel_adds_pages_and_takes_them_back(tmp_path: Path) -> None:
    machine, place = Machine(), PagePool(0, PAGE)

    def pages() -> int:
        return next((p.total for p in read_hugepages(Path("/")) if PagePool(p.node, p.page_bytes) == place), -1)

    before = pages()
    if before < 0:
        pytest.skip("this kernel has no pages of 2 MiB")
    book = open_book(tmp_path, machine.boot_id())
    try:
        demand = PageDemand({place: before + REAL_PAGES})
        assert machine.carry_out(plan(demand, read_machine(), book.added, {}), book) == []
        assert book.added == {place: REAL_PAGES}
        assert pages() == before + REAL_PAGES
    finally:
        machine.carry_out(plan(PageDemand(), read_machine(), book.added, {PAGE: machine.promised(PAGE)}), book)
        book.close()
    assert pages() == before
