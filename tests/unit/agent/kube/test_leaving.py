"""Laws of an agent's end: memory is kept for whoever comes after it, and for nobody else."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.kube import declared
from kvstrata_agent.kube.declared import KubeDesired
from kvstrata_agent.policy.removal import Presence, Removal, at_end, while_running
from kvstrata_kube.signal import Signal
from kvstrata_kube.typed_store import Known
from support.operator.fleet import pool_spec

if TYPE_CHECKING:
    from kvstrata_api.models.pool import KVPool

pytestmark = pytest.mark.unit

POLICIES = st.sampled_from(["Retain", "Destroy", ""])
PRESENCES = st.sampled_from(Presence)
GOES = (Presence.LEAVING, Presence.ABSENT)


@given(PRESENCES, PRESENCES, POLICIES)
def test_memory_outlasts_an_agent_that_ends_while_somebody_wants_it_or_may_want_it(
    pool: Presence, node: Presence, policy: str
) -> None:
    is_kept = at_end(pool, node, policy) is Removal.NONE

    assert is_kept == (Presence.UNKNOWN in (pool, node) or (pool, node) == (Presence.PRESENT, Presence.PRESENT))


@given(pool=PRESENCES, policy=POLICIES, is_drained=st.booleans())
def test_an_agent_that_runs_gives_up_what_it_has_only_with_its_pool(
    pool: Presence, policy: str, *, is_drained: bool
) -> None:
    removal = while_running(pool, policy, is_drained=is_drained)

    assert pool in GOES or removal is Removal.NONE
    assert is_drained or removal is not Removal.RELEASE, "blocks are brought to safety first"
    assert removal is not Removal.NONE or pool not in GOES or not is_drained


@given(pool=PRESENCES, node=PRESENCES, policy=POLICIES, is_drained=st.booleans())
def test_files_go_only_where_the_pool_says_so_before_it_is_gone(
    pool: Presence, node: Presence, policy: str, *, is_drained: bool
) -> None:
    may_destroy = pool is Presence.LEAVING and policy == "Destroy"

    assert (while_running(pool, policy, is_drained=is_drained) is Removal.DESTROY) == may_destroy
    assert (at_end(pool, node, policy) is Removal.DESTROY) == (may_destroy and node is not Presence.UNKNOWN)


class Stores:
    """What an agent's watches keep of its pool."""

    def __init__(self) -> None:
        self.pools: Known[KVPool] = Known("KVPool", declared.pool, lambda: None)
        nodes = Known("KVPoolNode", declared.pool_node, lambda: None)
        self.desired = KubeDesired("p", "n", self.pools, nodes, Signal())

    def presence(self) -> Presence:
        return self.desired.pool_presence

    def put(self, version: int, spec: Any = None, **meta: str) -> None:
        metadata = {"name": "p", "uid": "u", "resourceVersion": str(version), **meta}
        body = {"metadata": metadata, "spec": pool_spec() if spec is None else spec}
        self.pools.put(self.pools.read(json.dumps(body).encode()))


def test_a_pool_that_nobody_told_of_or_nobody_can_read_is_not_taken_for_gone() -> None:
    at = Stores()
    assert at.presence() is Presence.UNKNOWN

    at.put(1)
    assert at.presence() is Presence.PRESENT
    at.put(2, spec={"tiers": 7})
    assert at.desired.is_withdrawn, "trust fails closed"
    assert at.presence() is Presence.UNKNOWN, "memory does not"
    at.put(3, deletionTimestamp="2026-11-23T00:00:00Z")
    assert at.presence() is Presence.LEAVING
    at.pools.take([], "4")
    assert at.presence() is Presence.ABSENT
