"""The directory on a Redis Cluster of three primaries, plain and under TLS."""

import asyncio
from collections.abc import Iterator

import pytest

from kvstrata_metadata.store.access import COMMANDS, Role
from support.metadata.redis_cluster import RedisCluster
from support.metadata.store_contract import StoreContract, self_signed

pytestmark = pytest.mark.contract


def running(cluster: RedisCluster) -> Iterator[RedisCluster]:
    try:
        asyncio.run(cluster.start())
        yield cluster
    finally:
        asyncio.run(cluster.stop())


class ClusterContract(StoreContract):
    @pytest.mark.parametrize("role", list(Role))
    def test_each_primary_lets_a_role_run_exactly_what_is_listed(self, redis: RedisCluster, role: Role) -> None:
        for i in range(3):
            (rule,) = [line for line in acl_lines(redis, i) if line.startswith(f"user {role} ")]
            allowed = {word[1:] for word in rule.split() if word.startswith("+")}
            assert allowed == set(COMMANDS[role])


def acl_lines(cluster: RedisCluster, server: int) -> list[str]:
    with cluster._admin(server) as admin:
        return [line.decode() for line in admin.execute_command("ACL", "LIST")]


class TestCluster(ClusterContract):
    @pytest.fixture(scope="class")
    def redis(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
        yield from running(RedisCluster(tmp_path_factory.mktemp("cluster")))


class TestClusterTls(ClusterContract):
    @pytest.fixture(scope="class")
    def redis(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
        folder = tmp_path_factory.mktemp("tls")
        yield from running(RedisCluster(folder / "cluster", self_signed(folder)))
