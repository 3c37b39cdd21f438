"""A pool's life on real nodes, in order: it serves, is rolled under load, loses a node, and is taken away."""

import json
import re
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from node.engine import BLOCKS
from node.fleet import SHORT_S, SYSTEM, TEAMS, Fleet, is_ready
from node.manifests import DRAM_BYTES, HUGE_PAGES, PAGE_BYTES, POOL, Json

from nodes.provisioning import HUGE_PAGES as HUGE_PAGES_DIR

pytestmark = [pytest.mark.node, pytest.mark.timeout(900)]

ALPHA, BETA = TEAMS
FIRST = [str(seed) for seed in range(101, 109)]
"""Prompts that the engine on node-1 stores, and nobody asks for but to see whether they are there."""
SECOND = [str(seed) for seed in range(201, 241)]
"""Prompts of the engine on node-2: 160 MiB, more than its DRAM tier holds."""
EVENTS = "custom-columns=AT:.lastTimestamp,OBJECT:.involvedObject.name,REASON:.reason,MESSAGE:.message"
SQUEEZED_BLOCKS = 32
SQUEEZE = {"op": "replace", "path": "/spec/tiers/0/capacityPerNode", "value": "16Mi"}
HELD = len(FIRST) * BLOCKS
FLUSH: Json = {
    "apiVersion": "kvstrata.io/v1alpha1",
    "kind": "KVOperation",
    "metadata": {"name": "flush-node-2"},
    "spec": {
        "type": "Flush",
        "poolRef": POOL,
        "flush": {"nodes": {"names": ["node-2"]}, "mode": "Demote", "tier": "dram"},
    },
}


def test_the_pool_is_ready_on_huge_pages_of_the_nodes(fleet: Fleet) -> None:
    for node in ("node-1", "node-2"):
        pod = fleet.agents()[node]
        assert fleet.tier(node, "dram")["medium"] == "hugetlbfs-2Mi"
        assert fleet.tier(node, "nvme")["medium"].startswith("file-")
        assert pod["spec"]["containers"][0]["resources"]["limits"]["hugepages-2Mi"] == f"{DRAM_BYTES >> 20}Mi"
        assert "@sha256:" in pod["spec"]["containers"][0]["image"]
        assert pod["spec"]["securityContext"]["runAsUser"] == 65532
    fleet.until("nothing is degraded", lambda: fleet.condition("Degraded")["status"] == "False", SHORT_S)
    fleet.capture("real-nodes-ready")


def test_an_engine_finds_in_memory_what_it_stored(fleet: Fleet) -> None:
    assert fleet.ask(ALPHA, "node-1", "store", *FIRST)["stored"] == HELD
    assert_found(fleet, "node-1", {"dram": HELD})


def test_an_engine_on_another_node_finds_it_there(fleet: Fleet) -> None:
    places = Counter[str]()

    def finds_all() -> bool:
        told = fleet.ask(ALPHA, "node-2", "load", *FIRST)
        assert (told["attached"], told["wrong"]) == (True, 0)
        places.update(told["from"])
        return bool(told["blocks"] == HELD)

    # What a busy path cannot bring in time is a miss; what it has brought may stay.
    fleet.until("the other node's engine finds all of it", finds_all)

    assert places["remote"] > 0


def test_an_engine_of_another_tenant_finds_nothing_of_equal_prompts(fleet: Fleet) -> None:
    fleet.engine(BETA, "node-1", "node-1")
    told = fleet.ask(BETA, "node-1", "load", *FIRST)

    assert told["attached"]
    assert told["blocks"] == 0
    assert fleet.ask(BETA, "node-1", "store", FIRST[0])["stored"] == BLOCKS
    assert fleet.ask(BETA, "node-1", "load", FIRST[0])["blocks"] == BLOCKS


def test_agents_are_rolled_under_load_without_a_wrong_byte_and_come_back_warm(fleet: Fleet) -> None:
    before = fleet.agents()
    with_load(fleet)
    fleet.upgrade("--set-json", 'agent.extraArgs=["--log-level=debug"]')
    fleet.until("the first agent is another pod", lambda: is_rolling(fleet, before))
    fleet.capture("real-nodes-roll")
    fleet.until("every agent is another pod and Ready", lambda: is_rolled(fleet, before))
    fleet.show()
    fleet.kubectl("get", "events", "-n", SYSTEM, "--sort-by=.lastTimestamp", "-o", EVENTS)
    told = fleet.ask(ALPHA, "node-1", "load", *FIRST)
    fleet.say(f"# hit ratio after the roll: {told['blocks']}/{HELD}, from {told['from']}")
    rounds_after = {node: len(fleet.rounds(ALPHA, f"load-{node}")) for node in before}
    fleet.until("both engines under load go on", lambda: all(goes_on(fleet, n, at) for n, at in rounds_after.items()))

    assert told["wrong"] == 0
    assert told["from"] == {"dram": HELD}
    assert fleet.tier("node-1", "dram")["recoveredBlocks"] >= HELD
    for node in before:
        tell_rounds(fleet, node)
        assert fleet.rounds(ALPHA, f"load-{node}")[-1]["hits"] == fleet.rounds(ALPHA, f"load-{node}")[-1]["asked"]


def test_an_operation_takes_a_node_s_memory_down_to_its_disk_and_says_when_it_is_done(fleet: Fleet) -> None:
    with_load(fleet)
    assert fleet.tier("node-2", "dram")["blocks"] > 0
    fleet.kubectl("apply", "-f", "-", stdin=json.dumps(FLUSH))
    fleet.kubectl("wait", "--for=condition=Complete", f"kvoperation/{FLUSH['metadata']['name']}", "--timeout=120s")
    fleet.capture("real-nodes-operation")

    assert fleet.get("kvoperation", FLUSH["metadata"]["name"])["status"]["progress"]["blocksDone"] > 0
    tell_rounds(fleet, "node-2")


def test_a_node_that_loses_power_costs_its_own_blocks_alone_and_comes_back_with_its_disk(fleet: Fleet) -> None:
    with_load(fleet)
    fleet.ask(ALPHA, "node-1", "store", *FIRST)
    assert fleet.ask(ALPHA, "node-2", "store", *SECOND)["attached"]
    # What is in memory goes with the power, so nearly all goes down before.
    fleet.kubectl("patch", "kvpool", POOL, "--type=json", "-p", json.dumps([SQUEEZE]))
    low = len(SECOND) * BLOCKS - 2 * SQUEEZED_BLOCKS
    fleet.until("blocks of node-2 went down to its disk", lambda: fleet.tier("node-2", "nvme")["blocks"] >= low)

    fleet.say("# node-2 loses its power: every process of it is killed, its network is gone")
    fleet.cluster.kill_node("node-2")
    try:
        assert_alone(fleet)
    finally:
        fleet.say("# node-2 has power again")
        fleet.cluster.return_node("node-2")
    fleet.until("the pool is whole again", lambda: fleet.condition("Ready")["status"] == "True")
    fleet.kubectl("wait", "-n", ALPHA, "pod/node-2", "--for=condition=Ready", "--timeout=120s")
    fleet.show()
    recovered = fleet.tier("node-2", "nvme")["recoveredBlocks"]
    fleet.say(f"# blocks that node-2 found on its disk: {recovered}")
    assert recovered >= BLOCKS
    told = fleet.ask(ALPHA, "node-2", "load", *SECOND)
    assert told["attached"]
    assert told["wrong"] == 0
    fleet.say(f"# hit ratio after the loss of power: {told['blocks']}/{len(SECOND) * BLOCKS}, from {told['from']}")
    tell_rounds(fleet, "node-1")


def test_an_uninstalled_fleet_leaves_on_the_nodes_what_retain_promises_and_nothing_else(fleet: Fleet) -> None:
    for namespace in TEAMS:
        fleet.kubectl("delete", "pod", "-n", namespace, "--all", "--wait=false")
    fleet.kubectl("delete", "kvpool", POOL, "--timeout=180s")
    fleet.helm("uninstall", "kvstrata", "-n", SYSTEM, "--wait")
    fleet.until("no pod is left", lambda: not fleet.get("pods", "-n", SYSTEM)["items"])

    for node in fleet.cluster.nodes:
        left = files(fleet, node.name, "/run/kvstrata", "/run/kvstrata-memory", HUGE_PAGES_DIR)
        kept = files(fleet, node.name, "/var/lib/kvstrata")
        fleet.say(f"# {node.name} keeps {len(kept)} files below /var/lib/kvstrata, and elsewhere {sorted(left)}")
        assert not left, "memory is given back, and sockets go with their agents"
        assert any("/nvme/" in path for path in kept)
    assert free_huge_pages() + huge_pages_of_others() >= HUGE_PAGES


def assert_alone(fleet: Fleet) -> None:
    """The pool says that node-2 is away, and an engine on node-1 goes on: with its own blocks, and misses."""
    fleet.until("the pool names the node", lambda: "node-2" in fleet.condition("Ready")["message"], SHORT_S)
    fleet.until("the pool says that it is degraded", lambda: fleet.condition("Degraded")["status"] == "True", SHORT_S)
    fleet.kubectl(
        "get", "kvpool", POOL, "-o", "jsonpath={range .status.conditions[*]}{.type} {.status} {.message}\n{end}"
    )
    fleet.capture("real-nodes-loss")
    told = fleet.ask(ALPHA, "node-1", "load", *FIRST)
    assert told["wrong"] == 0
    assert told["blocks"] > 0  # What a busy disk cannot bring in time is a miss.
    lost = fleet.ask(ALPHA, "node-1", "load", *SECOND[:4])
    assert (lost["attached"], lost["wrong"]) == (True, 0)
    at = len(fleet.rounds(ALPHA, "load-node-1"))
    fleet.until("the engine on node-1 goes on", lambda: goes_on(fleet, "node-1", at), SHORT_S)
    fleet.show()


def assert_found(fleet: Fleet, node: str, places: dict[str, int]) -> None:
    """What the first engine stored comes from these places, every byte of it right."""
    told = fleet.ask(ALPHA, node, "load", *FIRST)
    assert (told["wrong"], told["from"]) == (0, places)


def with_load(fleet: Fleet) -> None:
    """Have an engine on each node that goes round, and wait until it finds all it asks for."""
    for number, node in enumerate(("node-1", "node-2"), start=1):
        seeds = [str(seed) for seed in range(number * 1000, number * 1000 + 4)]
        fleet.engine(ALPHA, f"load-{node}", node, "serve", *seeds)
        fleet.until(f"the engine under load on {node} finds all", partial(goes_on, fleet, node, 0), SHORT_S)


def goes_on(fleet: Fleet, node: str, after: int) -> bool:
    """Whether an engine under load has had a round in which everything was found, after so many rounds."""
    return any(told["hits"] == told["asked"] for told in fleet.rounds(ALPHA, f"load-{node}")[after:])


def tell_rounds(fleet: Fleet, node: str) -> None:
    """No byte was wrong in any round of an engine under load, which never ended."""
    rounds = fleet.rounds(ALPHA, f"load-{node}")
    asked, hits = sum(told["asked"] for told in rounds), sum(told["hits"] for told in rounds)
    slowest_s = max(told["slowest_s"] for told in rounds)
    wrong = sum(told["wrong"] for told in rounds)
    found = f"{hits} of {asked} blocks found, {wrong} wrong, slowest load {slowest_s:.2f} s"
    fleet.say(f"# load-{node}: {len(rounds)} rounds, {found}")
    pod = fleet.get("pod", "-n", ALPHA, f"load-{node}")
    assert wrong == 0
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def is_rolling(fleet: Fleet, before: dict[str, Json]) -> bool:
    """Whether some node has an agent that it did not have before."""
    uids = {pod["metadata"]["uid"] for pod in before.values()}
    return any(pod["metadata"]["uid"] not in uids for pod in fleet.agents().values())


def is_rolled(fleet: Fleet, before: dict[str, Json]) -> bool:
    """Whether every node has a Ready agent, and none that it had before."""
    now = fleet.agents()
    uids = {pod["metadata"]["uid"] for pod in before.values()}
    return now.keys() == before.keys() and all(is_ready(p) and p["metadata"]["uid"] not in uids for p in now.values())


def files(fleet: Fleet, node: str, *folders: str) -> set[str]:
    """Files below directories of a node."""
    return set(fleet.cluster.run(node, "find", *folders, "-not", "-type", "d").splitlines())


def free_huge_pages() -> int:
    """Huge pages of the machine that nobody holds."""
    found = re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found.group(1))


def huge_pages_of_others() -> int:
    """Huge pages that processes outside the nodes hold: other work on the machine takes what is free."""
    ours = Path("/proc/self/ns/pid").readlink()
    held_kib = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It may have ended.
            if (process / "ns/pid").readlink() == ours:
                lines = re.findall(r"_Hugetlb:\s+(\d+) kB", (process / "smaps_rollup").read_text())
                held_kib += sum(map(int, lines))
    return held_kib * 1024 // PAGE_BYTES


assert PAGE_BYTES * HUGE_PAGES > 2 * DRAM_BYTES, "both agents have their memory from one machine"
