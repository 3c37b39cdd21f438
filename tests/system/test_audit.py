"""The audit log of a real agent process: a hostile engine's requests are in it, and their sum is in the metrics."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from threats.raw_caller import RawCaller

from controlplane import ControlPlane
from kvstrata_api import names, wire
from kvstrata_api.blocks import pack_digests
from kvstrata_api.tiers import Lookup
from support.kube.agent import LAYOUT, MIB, Agent, dram, keys_of, make_tenant, put, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ASKED = 40


def lines(agent: Agent) -> list[dict[str, Any]]:
    """The audit log so far."""
    written = (agent.home / "agent.log").read_text().splitlines()
    return [line for line in map(json.loads, written) if line["logger"] == "kvstrata.audit"]


def counted(agent: Agent, reason: str) -> float:
    found = [
        line
        for line in agent.metrics().splitlines()
        if line.startswith("kvstrata_audit_total{") and f'reason="{reason}"' in line
    ]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_who_asks_for_another_tenant_s_blocks_is_told_and_counted(
    plane: ControlPlane, kubeconfig: Path, tmp_path: Path
) -> None:
    for tenant in ("audited-a", "audited-b"):
        make_tenant(plane, tenant)
    with Agent(plane, kubeconfig, tmp_path) as agent:
        agent.declare([dram(16 * MIB)])
        agent.start()
        with agent.client("audited-a") as owner, RawCaller(agent.socket) as hostile:
            assert put(owner, 1) == 16
            keys = keys_of(owner, 1)
            token = plane.service_account_token("audited-b", "engine", names.AUDIENCE)
            assert isinstance(hostile.ask(wire.Attach(1, token, agent.pool, LAYOUT)), wire.Granted)

            for number in range(ASKED):
                found = hostile.ask(wire.Lookup(number + 2, keys[0].scope, pack_digests(keys)))
                assert isinstance(found, wire.Found)
                assert Lookup.HIT not in found.states

            denied = [line for line in lines(agent) if line["decision"] == "deny"]
            assert [denied[0][field] for field in ("verb", "requests", "blocks", "window_s")] == ["lookup", 1, 16, 0.0]
            assert (denied[0]["tenant"], denied[0]["namespace"]) == ("audited-b", "audited-b")
            assert denied[0]["scope"] == keys[0].scope
            assert counted(agent, "ScopeNotGranted") == ASKED
        until(lambda: counted(agent, "Attached") == 2)
        assert agent.stop(signal.SIGTERM) == 0

        told = [line for line in lines(agent) if line["reason"] == "ScopeNotGranted"]
        assert sum(line["requests"] for line in told) == ASKED
        assert sum(line["blocks"] for line in told) == 16 * ASKED
