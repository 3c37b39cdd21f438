"""Every alert is made to fire by a real fault on real processes, and is quiet again once the fault is gone.

The rules are those of `dashboards/alerts.yaml` with all durations and counts divided by `FACTOR`, on a real Prometheus.
"""

import asyncio
import itertools
import re
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from threats.raw_caller import RawCaller

from controlplane import ControlPlane
from controlplane.ports import free_ports
from controlplane.s3_gateway import s3_gateway
from drawing import prometheus_server
from kvstrata import Client, PrefixCache
from kvstrata_agent.fleet.directory.client import AccessProvider, Holdings, RedisDirectory
from kvstrata_agent.policy.reuse_curve import SAME_USE_S
from kvstrata_api import names, wire
from kvstrata_api.blocks import ScopeId, ScopeSecret, pack_digests
from kvstrata_metadata.store.access import Role
from kvstrata_metadata.store.keys import REGISTRY_KEY
from kvstrata_metadata.store.records import AgentRecord
from kvstrata_telemetry import http
from kvstrata_telemetry.metrics import Instruments
from support.agent import standalone
from support.agent.machine import BUCKET, EIGHTH, Machine, chain, devices_fail, object_store_refuses
from support.agent.standalone import Json, Up, content, tokens
from support.backends.s3_faults import faulty_s3
from support.kube.agent import (
    GROUP,
    LAYOUT,
    MIB,
    SYSTEM,
    Agent,
    custom,
    declare_tenant,
    dram,
    keys_of,
    make_tenant,
    nvme,
    until,
)
from support.metadata import replicas
from support.metadata.directory_fleet import DirectoryFleet
from support.metadata.redis_cluster import RedisCluster
from support.metadata.replicas import Redis
from support.operator import operated_fleet
from support.operator.process import Replica
from support.runner.drills import WAIT_S, Alerts, Drill, carry_out, quickened, repeating

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RULES = Path(__file__).resolve().parents[2] / "dashboards" / "alerts.yaml"
FACTOR = 120
"""10 minutes become 5 s, and an hour 30 s."""
SCRAPE_S = 0.6
"""As long as a scrape may take on a busy machine, and several of them lie within each range."""
DAY_FACTOR, DAY_SCRAPE_S = 1800, 0.3
"""A day becomes 48 s, and half an hour 1 s."""
POOL = "drilled"
NODES = ("drilled-a", "drilled-b")
FIRST, SECOND = ({"pool": POOL, "node": node} for node in NODES)
AN_HOUR_AGO = f"count(kvstrata_agent_info offset {3600 * 1000 // FACTOR}ms) == {len(NODES)}"
TENANT, OTHER = "team-a", "team-b"
"""Namespaces with one engine each, which their tenants claim."""
QUEUE_MAX = 1000
"""Changes that wait for the directory, of agents in this process."""
QUICK = ("--authority-settle-s", "1", "--resync-s", "1")
"""An operator signs at once, and lists all that it follows once a second."""


@contextmanager
def watched(folder: Path, ports: dict[str, int], factor: int = FACTOR, scrape_s: float = SCRAPE_S) -> Iterator[Alerts]:
    """A Prometheus with the quick rules that scrapes these ports, whoever listens there."""
    rules = folder / "alerts.yaml"
    rules.write_text(quickened(RULES.read_text(), factor))
    targets = {job: [f"127.0.0.1:{port}"] for job, port in ports.items()}
    with prometheus_server.start(folder, targets, rules, scrape_s) as server:
        yield Alerts(server, RULES)


@dataclass
class Fleet:
    """Two agents of one pool, an operator, a metadata service and its Redis. Each listens on a port of its own."""

    plane: ControlPlane
    folder: Path
    redis: Redis
    agents: list[Agent]
    configs: dict[str, Path]
    ports: dict[str, int]
    stack: ExitStack
    operator: Replica = field(init=False)
    metadata: replicas.Replica = field(init=False)

    def start_operator(self, *more: str) -> None:
        port = ("--metrics-port", str(self.ports["operator"]))
        self.operator = Replica(self.configs["operator"], self.folder, *port, *QUICK, *more)
        self.stack.callback(self.operator.process.wait)
        self.stack.callback(self.operator.process.kill)

    def start_metadata(self) -> None:
        self.metadata = replicas.launch(
            "metadata", self.configs["metadata"], self.redis, self.folder,
            "--metrics-port", str(self.ports["metadata"]), lease_s=2.0,
        )  # fmt: skip
        self.stack.callback(self.metadata.end)


@pytest.fixture(scope="module")
def fleet(
    plane: ControlPlane, kubeconfig: Path, operator_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    account = plane.service_account_kubeconfig(SYSTEM, "kvstrata-metadata", folder / "metadata.kubeconfig")
    ports = dict(zip(("operator", "metadata", *NODES), free_ports(4), strict=True))
    agents = []
    for node in NODES:
        (folder / node).mkdir()
        agents.append(Agent(plane, kubeconfig, folder / node, POOL, node, metrics_port=ports[node]))
        operated_fleet.make_node(agents[-1])
    for tenant in (TENANT, OTHER):
        make_tenant(plane, tenant)
    redis = Redis(folder)
    asyncio.run(redis.start())
    with ExitStack() as stack:
        stack.callback(lambda: asyncio.run(redis.server.stop()))
        operated_fleet.join_redis(plane, redis)
        operated_fleet.declare(plane, agents[0], [dram(16 * MIB), nvme(folder / "nvme", 64 * MIB)])
        configs = {"operator": operator_config, "metadata": account}
        made = Fleet(plane, folder, redis, agents, configs, ports, stack)
        made.start_metadata()
        made.start_operator()
        for agent in agents:
            stack.enter_context(agent).launch()
        for agent in agents:
            until(agent.is_serving)
            until(agent.says("Ready", "True"))
        until(lambda: made.metadata.is_up and made.metadata.leads)
        yield made


@pytest.fixture(scope="module")
def alerts(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alerts]:
    with watched(tmp_path_factory.mktemp("prometheus"), fleet.ports) as watch:
        assert watch.server.wait(lambda: watch.server.healthy_targets() == len(fleet.ports))
        yield watch


@contextmanager
def agents_and_metadata_are_killed(fleet: Fleet) -> Iterator[None]:
    fleet.metadata.end()
    for agent in fleet.agents:
        agent.stop(signal.SIGKILL)
    yield
    fleet.start_metadata()
    for agent in fleet.agents:
        agent.ready_file.unlink()
        agent.launch()
    for agent in fleet.agents:
        until(agent.is_serving)


@contextmanager
def operator_is_killed_and_an_agent_starts(fleet: Fleet) -> Iterator[None]:
    """Nobody signs the agent's certificate."""
    fleet.operator.end(signal.SIGKILL)
    fleet.agents[0].stop(signal.SIGKILL)
    fleet.agents[0].start()
    yield
    fleet.start_operator()


@contextmanager
def agent_leaves(fleet: Fleet) -> Iterator[None]:
    """It says so, so that the operator need not wait for its Lease to end."""
    fleet.agents[1].stop(signal.SIGTERM)
    yield
    fleet.agents[1].start()


@contextmanager
def api_server_hangs(fleet: Fleet) -> Iterator[None]:
    fleet.plane.pause_apiserver(4 * WAIT_S)
    yield
    fleet.plane.resume_apiserver()


@contextmanager
def without_role(fleet: Fleet, account: str) -> Iterator[None]:
    binding = fleet.plane.kubectl("get", "clusterrolebinding", account, "-o", "json")
    fleet.plane.kubectl("delete", "clusterrolebinding", account)
    yield
    fleet.plane.kubectl("apply", "-f", "-", stdin=binding)


@contextmanager
def operator_loses_its_role(fleet: Fleet) -> Iterator[None]:
    with without_role(fleet, names.FIELD_MANAGER_OPERATOR):
        yield


@contextmanager
def redis_is_killed(fleet: Fleet) -> Iterator[None]:
    fleet.redis.kill()
    yield
    asyncio.run(fleet.redis.start())


@contextmanager
def redis_has_no_memory_left(fleet: Fleet) -> Iterator[None]:
    limit = fleet.redis.cli("CONFIG", "GET", "maxmemory").split()[-1]
    fleet.redis.cli("CONFIG", "SET", "maxmemory", "1mb")
    yield
    fleet.redis.cli("CONFIG", "SET", "maxmemory", limit)


@contextmanager
def tenant_leaves_while_the_service_may_not_see_it(fleet: Fleet) -> Iterator[None]:
    """The service erases nothing on the word of an agent alone."""
    uid = declare_tenant(fleet.plane, "leaving")["metadata"]["uid"]
    secret = ScopeSecret(ScopeId(f"tenant/leaving/{uid}/v1"), b"l" * 32)

    async def claim() -> None:
        async with replicas.agent(fleet.redis, "elsewhere", replicas.blocks(1), secret=secret) as directory:
            assert await directory.claim_erased(secret)

    with without_role(fleet, names.FIELD_MANAGER_METADATA):
        fleet.plane.kubectl("delete", "kvtenant", "leaving", "--wait=false")
        asyncio.run(claim())
        yield


@contextmanager
def engine_shows_a_wrong_token(fleet: Fleet) -> Iterator[None]:
    first = fleet.agents[0]

    def knock() -> None:
        with RawCaller(first.socket) as stranger:
            assert isinstance(stranger.ask(wire.Attach(1, "not a token", POOL, LAYOUT)), wire.Failed)

    with repeating(knock, 0.1):
        yield


@contextmanager
def engine_asks_for_blocks_of_another_tenant(fleet: Fleet) -> Iterator[None]:
    first = fleet.agents[0]
    token = fleet.plane.service_account_token(OTHER, "engine", names.AUDIENCE)
    with first.client(TENANT) as owner, RawCaller(first.socket) as hostile:
        keys = keys_of(owner, 1)
        assert isinstance(hostile.ask(wire.Attach(1, token, POOL, LAYOUT)), wire.Granted)
        numbers = itertools.count(2)
        ask = lambda: hostile.ask(wire.Lookup(next(numbers), keys[0].scope, pack_digests(keys)))  # noqa: E731
        with repeating(ask, 0.1):
            yield


@contextmanager
def weights_have_no_source(fleet: Fleet) -> Iterator[None]:
    source = {"url": f"file://{fleet.folder}/absent"}
    spec = {"poolRef": POOL, "source": source, "revision": "v1", "deadlineSeconds": 1}
    fleet.plane.api.post(f"{GROUP}/kvmodelcaches", custom("KVModelCache", "weights", spec))
    yield
    fleet.plane.kubectl("delete", "kvmodelcache", "weights")


@contextmanager
def redis_answers_slowly(fleet: Fleet) -> Iterator[None]:
    """While engines ask for what is not on their node."""
    with ExitStack() as stack:
        client = stack.enter_context(fleet.agents[0].client(TENANT))
        seeds = itertools.count(1000)
        stack.enter_context(repeating(lambda: fleet.redis.cli("CLIENT", "PAUSE", "150"), 0.05))
        stack.enter_context(repeating(lambda: client.lookup(keys_of(client, next(seeds))), 0.05))
        yield


LEFT = Drill(agent_leaves, {"KvstrataAgentsLost": {"pool": POOL}, "KvstrataPoolNotReady": {"pool": POOL}}, AN_HOUR_AGO)
FLEET_DRILLS = {
    "api-server": [
        Drill(api_server_hangs, {"KvstrataOperatorWithoutLeader": {}, "KvstrataMetadataWithoutLeader": {}}),
    ],
    "refused": [
        Drill(tenant_leaves_while_the_service_may_not_see_it, {"KvstrataEraseWaits": {}}),
        Drill(redis_has_no_memory_left, {"KvstrataRedisNearlyFull": {}}),
        Drill(operator_loses_its_role, {"KvstrataRequestsRefused": {"verb": "GET"}}),
        Drill(redis_answers_slowly, {"KvstrataLookupsSlow": FIRST}),
        Drill(engine_shows_a_wrong_token, {"KvstrataAttachRefused": FIRST}),
        Drill(engine_asks_for_blocks_of_another_tenant, {"KvstrataScopesRefused": FIRST}),
    ],
    "weights": [Drill(weights_have_no_source, {"KvstrataModelNotStaged": {"model": "weights"}})],
    "operator": [
        Drill(
            operator_is_killed_and_an_agent_starts, {"KvstrataOperatorAbsent": {}, "KvstrataCertificateEnding": FIRST}
        ),
    ],
    "redis": [Drill(redis_is_killed, {"KvstrataRedisDown": {}, "KvstrataDirectoryDown": FIRST}), LEFT],
    "agents": [
        Drill(
            agents_and_metadata_are_killed,
            {"KvstrataAgentsAbsent": {}, "KvstrataMetadataAbsent": {}, "KvstrataAgentsLost": {"pool": POOL}},
            AN_HOUR_AGO,
        ),
    ],
}


@pytest.mark.parametrize("name", FLEET_DRILLS)
def test_alerts_of_a_fleet_fire_and_clear(name: str, fleet: Fleet, alerts: Alerts) -> None:
    carry_out(FLEET_DRILLS[name], fleet, alerts)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Alerts]]:
    folder = tmp_path_factory.mktemp("machine")
    ports = dict(zip(("memory", "disks", "archive"), free_ports(3), strict=True))
    with ExitStack() as stack:
        store = stack.enter_context(faulty_s3(stack.enter_context(s3_gateway(folder / "s3", BUCKET))))
        made = Machine(folder, ports, store)
        for up in (made.memory, made.disks, made.archive):
            stack.enter_context(up).start()
        stack.enter_context(made.stack)
        yield made, stack.enter_context(watched(folder, ports))


@contextmanager
def engine_keeps_what_it_reserves(machine: Machine) -> Iterator[None]:
    """All of the memory, and fills none of it."""
    client = machine.memory.client()
    with client, repeating(lambda: client.reserve(chain(client, next(machine.seeds), 8 * EIGHTH)), 0.2):
        yield


@contextmanager
def nobody_reads_what_is_stored(machine: Machine) -> Iterator[None]:
    """Until engines read again what they store."""
    with machine.memory.client() as client:
        cache = PrefixCache(client)
        for _ in range(32):
            machine.store(cache)
        with repeating(lambda: machine.store(cache), 0.5):
            yield

    def read_again(cache: PrefixCache) -> None:
        stored = [machine.store(cache) for _ in range(6)]
        time.sleep(SAME_USE_S)  # A load that follows at once is no other use.
        for seed in stored:
            cache.load(tokens(seed, EIGHTH))

    machine.go_on(machine.memory, read_again)


MACHINE_DRILLS = {
    "media": [
        Drill(
            devices_fail,
            {
                "KvstrataBlocksCorrupt": {"pool": "disks", "node": "local", "tier": "nvme"},
                "KvstrataTierIoErrors": {"pool": "disks", "node": "local", "tier": "nvme", "operation": "read"},
                "KvstrataDeviceOut": {"pool": "disks", "node": "local", "tier": "nvme", "device": ".+/c"},
            },
        ),
        Drill(
            object_store_refuses,
            {"KvstrataObjectStoreRefuses": {"pool": "archive", "node": "local", "tier": "archive"}},
        ),
        Drill(
            engine_keeps_what_it_reserves,
            {"KvstrataTierStaysFull": {"pool": "memory", "node": "local", "tier": "dram"}},
        ),
    ],
    "work": [
        Drill(
            nobody_reads_what_is_stored,
            {"KvstrataCacheIneffective": {"pool": "memory", "node": "local", "kind": "Polluted"}},
        ),
    ],
}


@pytest.mark.parametrize("name", MACHINE_DRILLS)
def test_alerts_of_a_machine_fire_and_clear(name: str, machine: tuple[Machine, Alerts]) -> None:
    carry_out(MACHINE_DRILLS[name], *machine)


class Crowded(DirectoryFleet):
    """Agents with short queues, the last of which shows its metrics."""

    registry = CollectorRegistry()

    def make(
        self, record: AgentRecord, access: AccessProvider, holdings: Holdings, instruments: Instruments
    ) -> RedisDirectory:
        self.registry = instruments.registry
        return RedisDirectory(record, access, holdings, instruments, queue_max=QUEUE_MAX, jitter_s=self.jitter_s)


@dataclass
class Directory:
    """A Redis Cluster, and agents in this process that only hold their lanes to it."""

    cluster: RedisCluster
    agents: Crowded
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    async def churn(self) -> None:
        """Store and evict more blocks at once than an agent's queue takes."""
        for _ in range(2 * QUEUE_MAX):
            self.agents.evict("p.staying", self.agents.publish("p.staying"))


@pytest.fixture
async def directory(tmp_path: Path) -> AsyncIterator[tuple[Directory, Alerts]]:
    ports = dict(zip(("metadata", "agent"), free_ports(2), strict=True))
    async with AsyncExitStack() as stack:
        cluster = RedisCluster(tmp_path)
        stack.push_async_callback(cluster.stop)
        await cluster.start()
        service = replicas.launch("alone", None, cluster, tmp_path, "--metrics-port", str(ports["metadata"]))
        stack.callback(service.end)
        agents = Crowded(lambda: cluster.access(Role.AGENT))
        stack.push_async_callback(agents.close)
        for name in ("p.leaving", "p.staying"):
            agents.add(name, 200)
        endpoint = await http.serve("127.0.0.1", ports["agent"], agents.registry, lambda: True, lambda: True)
        stack.push_async_callback(endpoint.close)
        await agents.settled()
        await replicas.until(lambda: service.is_up, "the service is not ready")
        yield Directory(cluster, agents), stack.enter_context(watched(tmp_path, ports))


@contextmanager
def part_of_redis_is_killed(directory: Directory) -> Iterator[None]:
    """An agent leaves meanwhile, another one has much to tell."""
    server = (directory.cluster.owner(REGISTRY_KEY) + 1) % 3
    directory.wait(directory.cluster.kill(server))
    directory.wait(directory.agents.made["p.leaving"].close())
    with repeating(lambda: directory.wait(directory.churn()), 0.2):
        yield
    directory.wait(directory.cluster.start_again(server))


DIRECTORY_DRILLS = [
    Drill(
        part_of_redis_is_killed,
        {"KvstrataDeadAgentsRemain": {}, "KvstrataAnnouncementsDropped": {"pool": "p", "node": "staying"}},
    )
]


async def test_alerts_of_a_directory_fire_and_clear(directory: tuple[Directory, Alerts]) -> None:
    await asyncio.to_thread(lambda: carry_out(DIRECTORY_DRILLS, *directory))


@dataclass
class Chat:
    """An agent without Kubernetes, and an engine that asks it for a prefix all the time."""

    client: Client
    seeds: Iterator[int] = field(default_factory=itertools.count)
    seed: int = 0

    def ask(self) -> None:
        self.client.lookup(chain(self.client, self.seed or next(self.seeds), EIGHTH))


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[tuple[Chat, Alerts]]:
    (port,) = free_ports(1)
    with ExitStack() as stack:
        up = stack.enter_context(Up(tmp_path, ("--metrics-port", str(port))))
        up.declare(standalone.pool())
        up.start()
        client = stack.enter_context(up.client())
        PrefixCache(client).store(tokens(1, EIGHTH), content(1, EIGHTH))
        made = Chat(client, itertools.count(2), seed=1)
        stack.enter_context(repeating(made.ask, 0.1))
        yield made, stack.enter_context(watched(tmp_path, {"agent": port}, DAY_FACTOR, DAY_SCRAPE_S))


@contextmanager
def prompts_do_not_come_again(chat: Chat) -> Iterator[None]:
    chat.seed = 0
    yield
    chat.seed = 1


CHAT_DRILLS = [
    Drill(
        prompts_do_not_come_again,
        {"KvstrataHitRatioCollapsed": {"pool": "one"}},
        f"rate(kvstrata_lookup_blocks_total[{1_800_000 // DAY_FACTOR}ms] offset {86_400_000 // DAY_FACTOR}ms) > 10",
    )
]


def test_alerts_that_look_back_a_day_fire_and_clear(chat: tuple[Chat, Alerts]) -> None:
    carry_out(CHAT_DRILLS, *chat)


UNDRILLED: dict[str, str] = {}
"""Alerts without a drill, each with the reason."""


def test_every_alert_has_a_drill_or_a_reason_for_having_none() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    declared = {rule["alert"] for group in groups for rule in group["rules"]}
    drills: list[Drill[Any]] = [*DIRECTORY_DRILLS, *CHAT_DRILLS]
    drills += itertools.chain(*FLEET_DRILLS.values(), *MACHINE_DRILLS.values())
    drilled = {alert for drill in drills for alert in drill.alerts}

    assert drilled | UNDRILLED.keys() == declared
    assert not drilled & UNDRILLED.keys()


def test_quick_rules_are_the_rules_but_for_their_durations_and_counts() -> None:
    slow, quick = (yaml.safe_load(text)["groups"] for text in (RULES.read_text(), quickened(RULES.read_text(), 60)))
    for rule, other in zip(slow[0]["rules"], quick[0]["rules"], strict=True):
        assert {**rule, "for": "", "expr": without_durations(rule)} == {
            **other, "for": "", "expr": without_durations(other),
        }  # fmt: skip


def without_durations(rule: Json) -> str:
    expr = re.sub(r"(\[|offset )\d+[a-z]+", r"\1", rule["expr"])
    return re.sub(r"(increase.*) > [\d.]+$", r"\1", expr)


@pytest.mark.parametrize(
    ("expr", "quick"),
    [
        ("increase(a_total[15m]) > 0", "increase(a_total[15000ms]) > 0"),
        ('sum by (a) (increase(a_total{b="c"}[15m])) > 90', 'sum by (a) (increase(a_total{b="c"}[15000ms])) > 1.5'),
        ("sum(rate(a_total[15m])) > 90", "sum(rate(a_total[15000ms])) > 90"),
        ("x < 0.5 * (rate(x_total[30m] offset 1d))", "x < 0.5 * (rate(x_total[30000ms] offset 1440000ms))"),
        ('a{offset="1h", b="[5m]"} - time() < 14400', 'a{offset="1h", b="[5m]"} - time() < 14400'),
    ],
)
def test_ranges_offsets_and_counts_are_divided_and_nothing_else(expr: str, quick: str) -> None:
    rule = {"alert": "A", "for": "1m", "expr": expr}
    (group,) = yaml.safe_load(quickened(yaml.safe_dump({"groups": [{"rules": [rule]}]}), 60))["groups"]

    assert group["rules"] == [{**rule, "for": "1000ms", "expr": quick}]


def test_a_duration_that_would_be_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="1m divided by 1000000 is less than 1 ms"):
        quickened("groups: [{rules: [{for: 1m, expr: up == 0}]}]", 1_000_000)
