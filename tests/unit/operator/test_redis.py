"""Laws of the directory's Redis: how much memory it gets, when it is touched, and what pools are told."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.units import GIB, MIB
from kvstrata_operator.decide.directory import redis_workload
from kvstrata_operator.decide.directory.redis_workload import Bounds, Need, PoolLoad, holds
from kvstrata_operator.decide.plan.actions import Apply, Delete
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from kvstrata_operator.observe.world import Setting
from support.operator.fleet import Fleet, condition, pool_spec, tier

pytestmark = pytest.mark.unit

NAMESPACE = "kvstrata-system"
SETTING = Setting(NAMESPACE, "/run/kvstrata/{pool}/agent.sock", "", names.REDIS_TEMPLATE, "Embedded")
REDIS = Ref(kinds.STATEFUL_SET, names.REDIS, NAMESPACE)
BOUNDS = Bounds(256 * MIB, 64 * GIB, 1 * MIB)
EVERY_POOL = Ref(kinds.POOL, "p")
counts = st.integers(0, 1 << 34)


def template(image: str = "redis@sha256:1", **memory: str) -> Any:
    container = {"name": "redis", "image": image, "resources": {"requests": {"cpu": "250m"}}}
    pod = {"metadata": {"labels": {"app": "redis"}}, "spec": {"containers": [container]}}
    spec = {"replicas": 1, "serviceName": "kvstrata-redis", "selector": {"matchLabels": {"app": "redis"}}}
    return {"memory": {"min": "256Mi", "max": "64Gi", "block": "1Mi"} | memory, "spec": {**spec, "template": pod}}


class Release:
    """A fleet whose Redis the operator runs. Its StatefulSet's controller and kubelet are played here."""

    def __init__(self, said: Any = None) -> None:
        self.fleet = Fleet(setting=SETTING)
        self.install(said or template())

    def install(self, said: Any) -> None:
        labels = {kinds.LABEL_COMPONENT: kinds.REDIS_TEMPLATE}
        data = {names.REDIS_TEMPLATE_ENTRY: said if isinstance(said, str) else json.dumps(said)}
        self.fleet.put(kinds.CONFIG_MAP, names.REDIS_TEMPLATE, namespace=NAMESPACE, labels=labels, data=data)

    @property
    def made(self) -> Any:
        return self.fleet.objects[REDIS]

    @property
    def memory_bytes(self) -> int:
        (redis,) = self.made["spec"]["template"]["spec"]["containers"]
        return int(redis["env"][-1]["value"])

    def report(self, *, ready: int = 1, updated: int = 1, observed: int | None = None) -> None:
        generation = self.made["metadata"]["generation"] if observed is None else observed
        self.made["status"] = {"readyReplicas": ready, "updatedReplicas": updated, "observedGeneration": generation}

    def pod(self, **status: Any) -> None:
        self.fleet.put(kinds.POD, f"{names.REDIS}-0", namespace=NAMESPACE, labels=kinds.REDIS_LABELS, status=status)

    def says(self, type_: str = "MetadataAvailable") -> tuple[str, str]:
        self.fleet.settle()
        return condition(self.fleet.objects[EVERY_POOL], type_)


@given(counts, counts, st.integers(0, 10_000), st.integers(0, 5_000))
def test_more_to_hold_never_asks_for_less(locations: int, more: int, scopes: int, agents: int) -> None:
    need, larger = Need(locations, scopes, agents), Need(locations + more, scopes, agents)

    assert need.size_bytes <= larger.size_bytes
    assert redis_workload.fresh_bytes(need, BOUNDS) <= redis_workload.fresh_bytes(larger, BOUNDS)
    assert need.size_bytes <= Need(locations, scopes + 1, agents + 1).size_bytes


@given(counts, st.integers(0, 10_000), st.integers(0, 5_000))
def test_a_fresh_redis_holds_what_is_needed_and_a_quarter_more_within_its_bounds(
    locations: int, scopes: int, agents: int
) -> None:
    need = Need(locations, scopes, agents)
    size = redis_workload.fresh_bytes(need, BOUNDS)

    assert BOUNDS.min_bytes <= size <= BOUNDS.max_bytes
    assert size == BOUNDS.max_bytes or size >= need.size_bytes * 5 // 4
    assert size == BOUNDS.min_bytes or size <= need.size_bytes * 2.5 + MIB, "no more than two steps above"


@given(counts, st.integers(0, 1 << 38))
def test_a_redis_that_is_not_replaced_keeps_its_memory_or_gets_more(locations: int, held_bytes: int) -> None:
    need = Need(locations, 10, 10)
    size = redis_workload.kept_bytes(held_bytes, need, BOUNDS)

    if BOUNDS.min_bytes <= held_bytes <= BOUNDS.max_bytes:
        assert size >= held_bytes
        assert size == held_bytes or need.size_bytes > held_bytes
    assert BOUNDS.min_bytes <= size <= BOUNDS.max_bytes
    assert size >= min(need.size_bytes, BOUNDS.max_bytes)
    assert redis_workload.kept_bytes(size, need, BOUNDS) == size


MEASURED = [
    (1, 1, 10_000, 2.7), (1, 1, 100_000, 13.6), (1, 1, 1_000_000, 78.8), (1, 100, 1_000_000, 120.0),
    (1, 100, 100_000, 25.0), (100, 1, 1_000_000, 226.5), (100, 10, 100_000, 31.7), (20, 20, 400_000, 108.1),
]  # fmt: skip
"""Scopes, agents of each, locations and MB used: docs/decisions/100."""


@pytest.mark.parametrize(("scopes", "agents", "locations", "used_mb"), MEASURED)
def test_the_need_is_above_what_a_real_redis_took(scopes: int, agents: int, locations: int, used_mb: float) -> None:
    assert Need(locations, scopes, agents).size_bytes >= used_mb * 1e6


def test_a_pool_is_worth_its_full_tiers_and_never_less_than_it_holds() -> None:
    assert PoolLoad(10 * GIB).locations(BOUNDS) == 10 * 1024
    assert PoolLoad(10 * GIB, used_bytes=5 * GIB, blocks=20_480).locations(BOUNDS) == 40 * 1024
    assert PoolLoad(10 * GIB, used_bytes=GIB // 2, blocks=20_480).locations(BOUNDS) == 20_480, "too empty to tell"
    assert PoolLoad(0, used_bytes=GIB, blocks=5_000).locations(BOUNDS) == 5_000, "a pool that goes"


def test_redis_is_made_without_any_pool_and_then_left_alone() -> None:
    release = Release()
    release.fleet.settle()

    assert release.memory_bytes == 256 * MIB
    owner = release.fleet.of(kinds.CONFIG_MAP)[names.REDIS_TEMPLATE]["metadata"]
    assert release.made["metadata"]["ownerReferences"][0]["uid"] == owner["uid"]
    (redis,) = release.made["spec"]["template"]["spec"]["containers"]
    assert redis["resources"] == {"requests": {"cpu": "250m", "memory": "320Mi"}, "limits": {"memory": "384Mi"}}
    assert release.fleet.orders() == ()


def test_it_goes_with_its_template() -> None:
    release = Release()
    release.fleet.settle()
    release.fleet.delete(Ref(kinds.CONFIG_MAP, names.REDIS_TEMPLATE, NAMESPACE))

    assert REDIS not in release.fleet.objects
    assert release.fleet.orders() == ()


def test_others_redis_is_none_of_ours() -> None:
    release = Release()
    release.fleet.setting = Setting(NAMESPACE, "/run/{pool}")
    release.fleet.settle()

    assert REDIS not in release.fleet.objects


@pytest.mark.parametrize(
    "by_hand",
    [
        lambda made: made["spec"].update(replicas=0),
        lambda made: made["metadata"]["labels"].clear(),
        lambda made: made["metadata"].update(ownerReferences=[]),
        lambda made: made["spec"]["template"]["spec"]["containers"][0].update(image="other"),
        lambda made: made["spec"]["template"]["spec"]["containers"][0]["env"][-1].update(value="1"),
        lambda made: made["spec"]["template"]["spec"]["containers"].append({"name": "spy", "image": "spy"}),
    ],
)
def test_what_somebody_changes_is_restored(by_hand: Any) -> None:
    release = Release()
    release.fleet.settle()
    before = json.loads(json.dumps(release.made))
    by_hand(release.made)

    (action,) = release.fleet.orders()
    assert isinstance(action, Apply)
    release.fleet.settle()
    assert {k: release.made[k] for k in ("spec",)} == {"spec": before["spec"]}
    assert release.made["metadata"]["labels"] == before["metadata"]["labels"]


def test_a_value_that_the_chart_drops_is_dropped() -> None:
    said = template()
    said["spec"]["template"]["spec"]["priorityClassName"] = "high"
    release = Release(said)
    release.fleet.settle()
    release.install(template())
    release.fleet.settle()

    assert "priorityClassName" not in release.made["spec"]["template"]["spec"]


def test_a_part_that_never_changes_makes_a_new_one() -> None:
    release = Release()
    release.fleet.settle()
    said = template()
    said["spec"]["podManagementPolicy"] = "Parallel"
    release.install(said)

    (action,) = release.fleet.orders()
    assert isinstance(action, Delete)
    assert [n.reason for n in action.notes] == ["ReplacingStatefulSet"]
    release.fleet.settle()
    assert release.made["spec"]["podManagementPolicy"] == "Parallel"


def filled(release: Release, nodes: int, size: str) -> None:
    for n in range(nodes):
        release.fleet.node(f"n{n}")
    release.fleet.pool(spec=pool_spec([tier(size=size)]))
    release.fleet.settle()


def test_memory_follows_pools_up_at_once_and_down_with_the_next_replacement() -> None:
    release = Release()
    release.fleet.tenant("a")
    release.fleet.settle()
    filled(release, 4, "1Ti")
    grown = release.memory_bytes
    assert grown == 512 * MIB, "4,194,304 locations of 75 B, buckets of one scope, 32 MiB, and a quarter more"

    filled(release, 4, "1Gi")
    assert release.memory_bytes == grown, "nobody is restarted to save memory"
    release.install(template("redis@sha256:2"))
    (action,) = release.fleet.orders()
    assert [n.reason for n in action.notes] == ["UpgradingRedis", "ResizingRedis"]
    release.fleet.settle()
    assert release.memory_bytes == 256 * MIB


def test_a_pool_of_another_redis_does_not_count() -> None:
    release = Release()
    release.fleet.node("n")
    external = {"redis": {"mode": "External", "external": {"secretRef": {"name": "s"}}}}
    release.fleet.pool(spec=pool_spec([tier(size="64Ti")], metadata=external))

    assert release.says() == ("False", "RedisModeMismatch")
    assert release.memory_bytes == 256 * MIB


def test_full_tiers_beyond_the_bound_are_told() -> None:
    release = Release(template(max="512Mi"))
    filled(release, 1, "64Ti")
    release.report()
    release.fleet.report("p.n0", MetadataAvailable=("True", "Available"))

    assert release.memory_bytes == 512 * MIB
    assert release.says() == ("True", "Available")
    said = {c["type"]: c["message"] for c in release.fleet.objects[EVERY_POOL]["status"]["conditions"]}
    assert "redis.memory.max 512Mi is less than" in said["MetadataAvailable"]


WAITING = {"reason": "CrashLoopBackOff", "message": "back-off"}


@pytest.mark.parametrize(
    ("status", "pod", "reason"),
    [
        ({"ready": 0, "observed": 0}, None, "RedisRolling"),
        ({"ready": 0, "updated": 0}, {"conditions": []}, "RedisRolling"),
        ({"ready": 0}, None, "RedisStarting"),
        ({"ready": 0}, {"containerStatuses": [{"state": {"waiting": WAITING}}]}, "RedisNotRunning"),
        (
            {"ready": 0},
            {
                "containerStatuses": [
                    {"state": {"waiting": WAITING}, "lastState": {"terminated": {"reason": "OOMKilled"}}}
                ]
            },
            "RedisOutOfMemory",
        ),
        (
            {"ready": 0},
            {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
            "RedisNotReady",
        ),
        ({"ready": 1}, {"containerStatuses": [{"lastState": {"terminated": {"reason": "OOMKilled"}}}]}, ""),
    ],
)
def test_pools_are_told_why_redis_does_not_answer(status: Any, pod: Any, reason: str) -> None:
    release = Release()
    filled(release, 1, "1Gi")
    release.fleet.report("p.n0", MetadataAvailable=("True", "Available"))
    release.report(**status)
    if pod is not None:
        release.pod(**pod)

    assert release.says() == (("False", reason) if reason else ("True", "Available"))
    is_passing = reason in ("", "RedisRolling", "RedisStarting")
    assert release.says("Degraded")[0] == ("False" if is_passing else "True")


def test_what_the_api_server_refuses_is_told() -> None:
    release = Release()
    filled(release, 1, "1Gi")
    release.report()
    release.fleet.failures[str(REDIS)] = "422: no"

    assert release.says() == ("False", "RedisApplyFailed")


@pytest.mark.parametrize(("mode", "other"), [("Embedded", "External"), ("External", "Embedded")])
def test_a_pool_that_means_another_kind_of_redis_is_told_which_field_says_so(mode: str, other: str) -> None:
    release = Release()
    release.fleet.setting = Setting(NAMESPACE, "/run/{pool}", redis_mode=other)
    external = {"external": {"secretRef": {"name": "s"}}} if mode == "External" else {}
    release.fleet.pool(spec=pool_spec(metadata={"redis": {"mode": mode, **external}}))

    assert release.says() == ("False", "RedisModeMismatch")
    said = {c["type"]: c["message"] for c in release.fleet.objects[EVERY_POOL]["status"]["conditions"]}
    assert f"spec.metadata.redis.mode is {mode}, and this release runs {other}" in said["MetadataAvailable"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        (json.dumps({"spec": {}}), "memory needs min, max, block"),
        (json.dumps(template() | {"spec": {}}), "template.spec.containers is missing"),
        (json.dumps(template(min="2gb")), "quantity '2gb'"),
        (json.dumps(template(min="65Gi")), "memory.min 65Gi is above memory.max 64Gi"),
        (json.dumps(template()).replace('"name": "redis"', '"name": "r"'), "no container named redis"),
    ],
)
def test_a_template_that_cannot_be_used_is_told_and_touches_nothing(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        redis_workload.parse_template(text)
    release = Release(text)
    release.fleet.pool()

    assert release.says() == ("False", "RedisTemplateInvalid")
    assert REDIS not in release.fleet.objects
    release.fleet.delete(Ref(kinds.CONFIG_MAP, names.REDIS_TEMPLATE, NAMESPACE))
    assert release.says() == ("False", "RedisTemplateMissing")


json_values = st.recursive(
    st.text(max_size=3) | st.integers(0, 5) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_an_object_says_what_it_says(value: Any) -> None:
    assert holds(value, json.loads(json.dumps(value)))


def test_drift_is_what_differs_and_not_how_it_is_written() -> None:
    assert holds({"memory": "1024Mi", "cpu": "0.25"}, {"memory": "1Gi", "cpu": "250m", "more": 1})
    assert holds({"readOnly": False, "value": ""}, {})
    for seen in ({"a": [1, 2, 3]}, {"a": [1]}, {"a": [2, 1]}, {"a": "12"}, {}, {"b": [1, 2]}):
        assert not holds({"a": [1, 2]}, seen)
    assert not holds({"memory": "1Gi"}, {"memory": "1G"})
