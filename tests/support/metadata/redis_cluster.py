"""A Redis Cluster of real servers for tests: started, killed, emptied, resharded and failed over."""

import asyncio
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import redis

from controlplane.ports import free_ports
from kvstrata_metadata.server import embedded
from kvstrata_metadata.server.embedded import EmbeddedConfig, EmbeddedRedis, TlsFiles
from kvstrata_metadata.store.access import RedisAccess, Role
from kvstrata_metadata.store.servers import SLOTS, slot_of
from support.metadata.directory_fleet import until

ADMIN: Final = "user admin on >admin allkeys allchannels +@all"
_SETTINGS: Final = (
    "cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 1000",
    # A primary without replica takes its own slots along, no others.
    "cluster-require-full-coverage no", "masteruser admin", "masterauth admin",
    "cluster-replica-no-failover yes", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1", "hz 100",
)  # fmt: skip


@dataclass
class RedisCluster:
    """`servers[i]` is primary i as it was begun; replicas follow in the same order."""

    folder: Path
    tls: TlsFiles | None = None
    servers: list[EmbeddedRedis] = field(default_factory=list)
    configs: list[EmbeddedConfig] = field(default_factory=list)

    async def start(self, primaries: int = 3, *, has_replicas: bool = False) -> None:
        for i in range(primaries * (2 if has_replicas else 1)):
            inner_tls = ("tls-cluster yes", "tls-replication yes") if self.tls else ()
            settings = (*_SETTINGS, f"cluster-port {free_ports(1)[0]}", *inner_tls)
            config = EmbeddedConfig(
                self.folder / f"server{i}", agent_password="agents", metadata_password="service", tls=self.tls,
                other_users=(ADMIN,), other_settings=settings,
            )  # fmt: skip
            server = await embedded.start(config)
            self.servers.append(server)
            self.configs.append(replace(config, port=server.port))
        await self._join(primaries)

    async def _join(self, primaries: int) -> None:
        for i in range(primaries):
            first, last = SLOTS * i // primaries, SLOTS * (i + 1) // primaries - 1
            self.cli(i, "CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
        for i in range(len(self.servers)):
            self.cli(i, "CLUSTER", "SET-CONFIG-EPOCH", str(i + 1))
        for i in range(1, len(self.servers)):
            self.cli(0, "CLUSTER", "MEET", "127.0.0.1", str(self.servers[i].port), self._bus_port(i))
        await until(lambda: all(self._knows_all(i) for i in range(len(self.servers))), "the cluster never joined")
        for i in range(primaries, len(self.servers)):
            self.cli(i, "CLUSTER", "REPLICATE", self.node_id(i - primaries))
        await until(self.is_whole, "the cluster never came up")

    def _bus_port(self, i: int) -> str:
        (setting,) = [s for s in self.configs[i].other_settings if s.startswith("cluster-port")]
        return setting.split()[1]

    def _knows_all(self, i: int) -> bool:
        lines = self.cli(i, "CLUSTER", "NODES").splitlines()
        return len(lines) == len(self.servers) and not any("handshake" in line for line in lines)

    def is_whole(self) -> bool:
        """Every server sees every slot served, and every replica is in step."""
        replicas = [i for i in range(len(self.servers)) if "myself,slave" in self.cli(i, "CLUSTER", "NODES")]
        links = all("master_link_status:up" in self.cli(i, "INFO", "replication") for i in replicas)
        return links and all(
            "cluster_state:ok" in (facts := self.cli(i, "CLUSTER", "INFO")) and f"slots_ok:{SLOTS}" in facts
            for i in range(len(self.servers))
        )

    def cli(self, i: int, *command: str | bytes) -> str:
        """Run a command as the administrator; its answer as text, bulk answers as they are on the wire."""
        with self._admin(i) as admin:
            answer = admin.execute_command(*command)
        return answer.decode() if isinstance(answer, bytes) else str(answer)

    def _admin(self, i: int) -> "redis.Redis":
        tls: dict[str, Any] = {}
        if self.tls:
            files = {"ssl_certfile": str(self.tls.certificate), "ssl_keyfile": str(self.tls.key)}
            tls = {"ssl": True, "ssl_ca_certs": str(self.tls.ca), **files}
        made = redis.Redis("127.0.0.1", self.servers[i].port, username="admin", password="admin", protocol=3, **tls)
        made.response_callbacks.clear()
        return made

    def node_id(self, i: int) -> str:
        return self.cli(i, "CLUSTER", "MYID")

    def owner(self, key: bytes) -> int:
        """Number of the primary that has the slot of a key, as the first living server sees it."""
        seen = next(i for i, s in enumerate(self.servers) if s.is_running)
        slot = slot_of(key)
        for line in self.cli(seen, "CLUSTER", "NODES").splitlines():
            words = line.split()
            for cut in words[8:]:
                first, _, last = cut.partition("-")
                if not cut.startswith("[") and int(first) <= slot <= int(last or first):
                    port = int(words[1].split("@")[0].rsplit(":", 1)[1])
                    return next(i for i, s in enumerate(self.servers) if s.port == port)
        raise AssertionError(f"nobody owns slot {slot}")

    def access(self, role: Role) -> RedisAccess:
        one = self.servers[0].access(role)
        scheme = "rediss+cluster" if self.tls else "redis+cluster"
        return replace(one, url=f"{scheme}://{','.join(f'127.0.0.1:{s.port}' for s in self.servers)}")

    async def kill(self, i: int) -> None:
        os.kill(self.servers[i].pid, signal.SIGKILL)
        await until(lambda: not self.servers[i].is_running, "the server survived SIGKILL")

    async def start_again(self, i: int) -> None:
        """The same server of the cluster, empty."""
        self.servers[i] = await embedded.start(self.configs[i])

    async def move_slot(self, slot: int, source: int, target: int, *, pause_s: float = 0.0) -> None:
        """Move a slot as an administrator does, key by key, with a pause in the middle."""
        self.cli(target, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", self.node_id(source))
        self.cli(source, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", self.node_id(target))
        await asyncio.sleep(pause_s)
        with self._admin(source) as admin:
            while keys := admin.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                to = ("127.0.0.1", self.servers[target].port, "", 0, 5000, "AUTH2", "admin", "admin", "KEYS")
                assert admin.execute_command("MIGRATE", *to, *keys) == b"OK"
                await asyncio.sleep(0)
        for i in (target, source):
            self.cli(i, "CLUSTER", "SETSLOT", str(slot), "NODE", self.node_id(target))

    async def cut_off(self, primary: int, replica: int) -> None:
        """From here on the replica hears nothing: what the primary acknowledges will be lost."""
        self.cli(replica, "CONFIG", "SET", "masterauth", "wrong")
        self.cli(primary, "CLIENT", "KILL", "TYPE", "replica")
        await until(lambda: "master_link_status:down" in self.cli(replica, "INFO", "replication"), "still linked")

    async def take_over(self, replica: int) -> None:
        """The replica becomes the primary of what its primary had, without asking it."""
        self.cli(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
        await until(lambda: "role:master" in self.cli(replica, "INFO", "replication"), "the replica is still one")

    async def stop(self) -> None:
        for server in self.servers:
            await server.stop()
