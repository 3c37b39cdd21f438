"""What the map says of a fleet."""

import re

import pytest

from kvstrata_api.errors import InvalidInputError
from kvstrata_telemetry.catalog import BY_NAME
from kvstrata_ui import fleet
from kvstrata_ui.fleet import NODES_MAX, QUERIES, Samples, fleet_map

pytestmark = pytest.mark.unit


def at(node: str, **labels: str) -> dict[str, str]:
    return {"pool": "p", "node": node, **labels}


def answers(**more: Samples) -> dict[str, Samples]:
    base: dict[str, Samples] = {
        "agents": [(at("n1", version="1"), 1.0), (at("n2", version="1"), 1.0)],
        "capacity_bytes": [(at(n, tier=t), 100.0) for n in ("n1", "n2") for t in ("nvme", "zzz", "fast", "dram")],
        "used_bytes": [(at("n1", tier="dram"), 90.0)],
        "speed": [({"tier": "fast"}, 9e9), ({"tier": "zzz"}, 1e6)],
        "pools": [({"pool": "p"}, 1.0), ({"pool": "empty"}, 0.0)],
    }
    return base | more


def test_its_queries_ask_for_metrics_that_exist() -> None:
    for expr in QUERIES.values():
        names = set(re.findall(r"kvstrata_[a-z0-9_]+", expr))
        assert names <= set(BY_NAME)


def test_tiers_stand_from_fast_to_slow_and_sum_up() -> None:
    pool = fleet_map(answers(), None)["pools"][1]

    assert [tier["tier"] for tier in pool["nodes"][0]["tiers"]] == ["dram", "nvme", "fast", "zzz"]
    dram = next(tier for tier in pool["tiers"] if tier["tier"] == "dram")
    assert (dram["used_bytes"], dram["capacity_bytes"]) == (90.0, 200.0)


def test_a_pool_without_nodes_is_shown() -> None:
    assert fleet_map(answers(), None)["pools"][0] == {
        "pool": "empty", "is_ready": False, "node_count": 0, "troubled_count": 0, "tiers": [], "flows": [], "nodes": [],
    }  # fmt: skip


def test_flows_of_nodes_sum_up_in_their_pool() -> None:
    moves: Samples = [(at(n, source="dram", target="nvme"), 5.0) for n in ("n1", "n2")]
    pool = fleet_map(answers(flows=moves), None)["pools"][1]

    assert pool["flows"] == [{"source": "dram", "target": "nvme", "bytes_per_second": 10.0}]


def test_what_is_wrong_is_said_of_its_node() -> None:
    found = fleet_map(
        answers(
            directory_up=[(at("n1"), 0.0), (at("n2"), 1.0)],
            pathology=[(at("n1", kind="Thrashing"), 1.0)],
            corrupt=[(at("n1", tier="dram"), 2.0)],
            devices_down=[(at("n1", tier="nvme"), 1.0)],
            alerts=[
                ({"alertname": "KvstrataX", "severity": "critical", **at("n1")}, 1.0),
                ({"alertname": "KvstrataY", "severity": "warning", "alertstate": "firing"}, 1.0),
            ],
        ),
        None,
    )
    first, second = found["pools"][1]["nodes"]

    assert {one["degree"] for one in first["troubles"]} == {"bad", "warn"}
    assert len(first["troubles"]) == 5
    assert second["troubles"] == []
    assert found["pools"][1]["troubled_count"] == 1
    assert [alert["alertname"] for alert in found["alerts"]] == ["KvstrataX", "KvstrataY"]


def test_an_agent_that_no_longer_reports_is_known_from_the_directory() -> None:
    agents: list[dict[str, object]] = [
        {"pool": "p", "node": "n1", "state": "live", "silence_s": 0.1},
        {"pool": "p", "node": "n9", "state": "silent", "silence_s": 40.4},
        {"pool": "p", "node": "n8", "state": "fenced", "silence_s": None},
    ]
    nodes = {node["node"]: node for node in fleet_map(answers(), agents)["pools"][1]["nodes"]}

    assert nodes["n1"]["troubles"] == []
    assert nodes["n9"]["troubles"] == [{"degree": "bad", "words": "agent silent for 40 s"}]
    assert nodes["n8"]["troubles"] == [{"degree": "bad", "words": "agent fenced"}]


def test_of_a_large_fleet_those_in_trouble_are_shown() -> None:
    names = [f"n{i:04}" for i in range(NODES_MAX + 50)]
    pool = fleet_map(
        {"agents": [(at(n), 1.0) for n in names], "directory_up": [(at(names[-1]), 0.0)]},
        None,
    )["pools"][0]

    assert (pool["node_count"], len(pool["nodes"])) == (NODES_MAX + 50, NODES_MAX)
    assert pool["nodes"][-1]["node"] == names[-1]


def test_without_an_answer_on_agents_there_is_no_map() -> None:
    with pytest.raises(InvalidInputError, match="agents"):
        fleet.fleet_map({}, None)
