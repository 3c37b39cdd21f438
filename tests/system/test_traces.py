"""One request is one trace: from an engine's process, over the socket, through the agent, to a real OTLP receiver."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent.standalone import Up, pool
from support.client import traced_engine
from support.runner.otlp import Receiver, attributes, receiving

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as received:
        yield received


@pytest.fixture
def up(tmp_path: Path, receiver: Receiver) -> Iterator[Up]:
    with Up(tmp_path, ("--otlp-endpoint", receiver.url)) as one:
        one.declare(pool())
        one.start()
        yield one


def run_engine(up: Up, receiver: Receiver, how: str) -> str:
    """Have an engine do its work, and end; returns the lines of the agent's metrics that name a trace."""
    traced_engine.run(up, receiver.url, how)
    shown = exemplars(up)
    assert up.stop() == 0  # What an agent has not sent yet it sends when it ends.
    return shown


def exemplars(up: Up) -> str:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    address = json.loads(up.ready_file.read_text())["metrics"]
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}/metrics", headers=accept), timeout=30) as got:
        return "\n".join(line for line in got.read().decode().splitlines() if "trace_id" in line)


def test_an_engine_that_is_traced_has_the_agents_part_in_its_trace(up: Up, receiver: Receiver) -> None:
    shown = run_engine(up, receiver, "traced")

    (request,) = receiver.named("engine", "request")
    hit, missed = sorted(receiver.named("engine", "kvstrata.client.load"), key=lambda s: s.start_time_unix_nano)
    (stored,) = receiver.named("engine", "kvstrata.client.store")
    agents = receiver.spans["kvstrata-agent"]
    assert {s.parent_span_id for s in (hit, missed, stored)} == {request.span_id}
    assert {s.trace_id for s in agents if s.name.startswith("kvstrata.") and s.parent_span_id} == {request.trace_id}
    assert hit.span_id in {s.parent_span_id for s in agents if s.name == "kvstrata.acquire"}
    assert stored.span_id in {s.parent_span_id for s in agents if s.name == "kvstrata.lookup"}
    assert attributes(hit) == {"session.id": "s", "kvcache.requested_blocks": 12, "kvcache.hit_blocks": 12}
    assert attributes(missed)["kvcache.hit_blocks"] == 0
    of_acquire = [line for line in shown.splitlines() if 'verb="acquire"' in line]
    assert f'# {{trace_id="{request.trace_id.hex()}"}}' in of_acquire[0]


def test_an_engine_that_has_a_span_and_no_tracer_for_all_is_the_parent_itself(up: Up, receiver: Receiver) -> None:
    run_engine(up, receiver, "by itself")

    (request,) = receiver.named("engine", "request")
    assert [s.name for s in receiver.spans["engine"]] == ["request"]
    assert request.span_id in {s.parent_span_id for s in receiver.named("kvstrata-agent", "kvstrata.acquire")}
