"""The quickstart on real nodes that nobody has prepared: from nothing to a pool that serves, with the seconds."""

import json
import time
from collections.abc import Iterator

import pytest
import yaml
from node import manifests
from node.fleet import ARCHIVES, LONG_S, ROOT, SYSTEM, Fleet

import nodes

pytestmark = [pytest.mark.node, pytest.mark.timeout(900)]

VALUES = ROOT / "charts/kvstrata/values-quickstart.yaml"
READY_S = 180.0
"""From `helm install` to Ready besides pulls, on two busy cores."""
STATE = "/var/lib/kvstrata/demo"
SOCKETS = "/run/kvstrata/demo"


@pytest.fixture(scope="module")
def quick(cluster: nodes.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Nodes with images and nothing else: no label, no folder."""
    transcript = ROOT / "build" / "test-node-quickstart.log"
    transcript.write_text("")
    fleet = Fleet(cluster, transcript, tmp_path_factory.mktemp("quickstart"))
    clear(fleet)
    yield fleet
    fleet.kubectl("delete", "kvpool,kvtenant,kvtrustdomain", "--all", "--timeout=180s")
    fleet.helm("uninstall", "kvstrata", "-n", SYSTEM, "--wait")
    clear(fleet)


def clear(fleet: Fleet) -> None:
    """Remove what other tests have left, and what administrators keep: definitions, the namespace, folders."""
    fleet.kubectl("delete", "crd", "-l", "app.kubernetes.io/part-of=kvstrata", "--timeout=120s", is_shown=False)
    fleet.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--timeout=120s", is_shown=False)
    for node in fleet.cluster.nodes:
        fleet.cluster.run(node.name, "rm", "-rf", "/var/lib/kvstrata", "/run/kvstrata")


def install(fleet: Fleet) -> None:
    """Install with the quickstart's values alone; images by tag, as on a cluster whose registry has them."""
    images = {part: {"image": {k: v for k, v in fleet.image(part).items() if k != "digest"}} for part in ARCHIVES}
    path = fleet.folder / "images.json"
    path.write_text(json.dumps(images))
    fleet.helm(
        "install", "kvstrata", str(ROOT / "charts/kvstrata"), "-n", SYSTEM, "--create-namespace", "-f", str(VALUES),
        "-f", str(path),
    )  # fmt: skip


def test_from_nothing_to_a_pool_that_is_ready(quick: Fleet) -> None:
    began_s = time.monotonic()
    install(quick)
    installed_s = time.monotonic() - began_s
    quick.kubectl("wait", "--for=condition=Ready", "kvpool/demo", f"--timeout={READY_S:.0f}s")
    ready_s = time.monotonic() - began_s
    quick.say(f"# quickstart: helm took {installed_s:.1f} s, Ready {ready_s:.1f} s after it was started")
    quick.show()

    assert ready_s < READY_S
    assert quick.get("kvpool", "demo")["status"]["nodesReady"] == "2/2"
    told = {c["type"]: c["message"] for c in quick.get("kvpool", "demo")["status"]["conditions"]}
    assert "names no digest" in told["Provisioned"]


def test_folders_were_made_for_the_agents_user_alone(quick: Fleet) -> None:
    for node in quick.cluster.nodes:
        seen = quick.cluster.run(node.name, "stat", "-c", "%u:%g %a %n", STATE, SOCKETS).splitlines()
        quick.say(f"# {node.name}: {', '.join(seen)}")
        assert seen == [f"65532:65532 750 {STATE}", f"65532:65532 770 {SOCKETS}"]
    for pod in quick.agents().values():
        (agent,) = pod["spec"]["containers"]
        assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "hugepages-2Mi" not in agent["resources"]["limits"]


def test_the_tenant_of_the_quickstart_stores_and_loads(quick: Fleet) -> None:
    quick.kubectl("apply", "-f", "-", stdin=manifests.text(manifests.script("default")))
    image = quick.image("agent")
    pod = manifests.engine("default", "engine", "node-1", f"{image['repository']}:{image['tag']}")
    pod["spec"]["serviceAccountName"] = "default"
    quick.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(pod))
    quick.kubectl("wait", "-n", "default", "pod/engine", "--for=condition=Ready", f"--timeout={LONG_S:.0f}s")

    assert quick.ask("default", "engine", "store", "301")["stored"] > 0
    found = quick.ask("default", "engine", "load", "301")
    assert (found["wrong"], found["from"]) == (0, {"dram": found["blocks"]})
    quick.kubectl("delete", "pod", "-n", "default", "engine", "--wait=false")


def test_a_folder_that_is_somebody_s_is_named_with_its_node_and_left_alone(quick: Fleet) -> None:
    quick.cluster.run("node-2", "install", "-d", "-o", "1000", "/var/lib/kvstrata/taken")
    spec = quick.get("kvpool", "demo")["spec"]
    nvme = {**spec["tiers"][1], "nvme": {"path": "/var/lib/kvstrata/taken/nvme"}}
    taken = {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "taken"},
        "spec": {**spec, "nodeSelector": {"kubernetes.io/hostname": "node-2"}, "tiers": [spec["tiers"][0], nvme]},
    }
    quick.kubectl("apply", "-f", "-", stdin=json.dumps(taken))

    def is_told() -> bool:
        conditions = quick.get("kvpool", "taken").get("status", {}).get("conditions", ())
        words = next((c["message"] for c in conditions if c["type"] == "Provisioned"), "")
        return "node-2" in words and "folder /var/lib/kvstrata/taken belongs to user 1000" in words

    quick.until("the pool names node and folder", is_told)
    quick.kubectl("get", "kvpool", "taken", "-o", "jsonpath={.status.conditions[1].message}")
    assert quick.cluster.run("node-2", "stat", "-c", "%u", "/var/lib/kvstrata/taken").strip() == "1000"
    quick.kubectl("delete", "kvpool", "taken", "--timeout=120s")
    quick.cluster.run("node-2", "rm", "-rf", "/var/lib/kvstrata/taken")


def test_huge_pages_that_no_kubelet_offers_are_memory_instead(quick: Fleet) -> None:
    spec = quick.get("kvpool", "demo")["spec"]
    dram = {**spec["tiers"][0], "capacityPerNode": "1Gi", "hostDRAM": {"pageSize": "2Mi"}}
    pages = {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "pages"},
        "spec": {**spec, "tiers": [dram]},
    }
    quick.kubectl("apply", "-f", "-", stdin=json.dumps(pages))
    began_s = time.monotonic()
    quick.kubectl("wait", "--for=condition=Ready", "kvpool/pages", f"--timeout={READY_S:.0f}s")
    quick.say(
        f"# a pool that wants 1Gi of hugepages-2Mi on nodes with less: Ready after {time.monotonic() - began_s:.1f} s"
    )
    told = quick.kubectl(
        "get", "kvpool", "pages", "-o", "jsonpath={.status.conditions[?(@.type=='Provisioned')].message}"
    )
    quick.kubectl("get", "daemonsets", "-n", SYSTEM)

    assert "2 of 2 nodes have pages of 4Ki in place of huge ones; node-1: its kubelet offers" in told
    for node in quick.cluster.nodes:
        tier = next(t for t in quick.get("kvpoolnode", f"pages.{node.name}")["status"]["tiers"] if t["name"] == "dram")
        assert tier["medium"].endswith("-4Ki")
        reasons = {
            c["type"]: c["reason"] for c in quick.get("kvpoolnode", f"pages.{node.name}")["status"]["conditions"]
        }
        assert reasons["HugepagesReserved"] == "NotReserved"
    quick.kubectl("delete", "kvpool", "pages", "--timeout=120s")


def test_a_folder_that_is_never_made_is_named_with_its_node(quick: Fleet) -> None:
    spec = quick.get("kvpool", "demo")["spec"]
    flash = {"name": "flash", "type": "RemoteFlash", "capacity": "1Gi", "remoteFlash": {"path": "/mnt/flash/absent"}}
    absent = {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "KVPool",
        "metadata": {"name": "absent"},
        "spec": {**spec, "tiers": [spec["tiers"][0], flash]},
    }
    quick.kubectl("apply", "-f", "-", stdin=json.dumps(absent))

    def words() -> str:
        conditions = quick.get("kvpool", "absent").get("status", {}).get("conditions", ())
        return next((c["message"] for c in conditions if c["type"] == "Provisioned"), "")

    quick.until("the pool names nodes and folder", lambda: words().startswith("2 of 2 nodes; node-1: "))
    quick.say(f"# {words()}")
    assert "one of /mnt/flash/absent is missing there" in words()
    for node in quick.cluster.nodes:
        assert quick.cluster.run(node.name, "find", "/mnt", "-name", "absent") == ""
    quick.kubectl("delete", "kvpool", "absent", "--timeout=120s")
