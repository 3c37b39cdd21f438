"""One simulated fleet: three agents, engines, a Redis, sweepers, and everything that may go wrong between them."""

import contextvars
import gc
import logging
import random
import zlib
from functools import cache
from typing import Any, Final

import kvstrata_agent.app.periodic
import kvstrata_agent.backends.file.record_store
import kvstrata_agent.backends.memory.arena
import kvstrata_agent.cache.store
from sim import agent as agents
from sim import determinism
from sim.agent import Host, Settings, Sizes
from sim.books import disagreements
from sim.disk import Disk
from sim.engine import Engine
from sim.keys import SEALED_EVERY
from sim.loop import SimLoop
from sim.memory import forget_all
from sim.network import Network
from sim.nixl import NixlNet
from sim.process import Process
from sim.redis_server import SimRedis
from sim.service import Service
from sim.shadow import Shadow
from sim.sockets import LocalNet
from sim.store import RedisLink
from sim.tally import Tally
from sim.tenancy import TENANTS, Tenancy
from sim.weather import Weather, calm, damage, forecast

SLOT_BYTES: Final = 4096
RECORD_BYTES: Final = 8192
"""A block and its header."""
HOSTS: Final = ("n1", "n2", "n3")
ENGINES: Final = 5
VIOLATIONS_MAX: Final = 20
CHECK_ALL_EVERY: Final = 50
REPEATS: Final = 0.05
"""Share of the frames that come twice or late where the run is about them."""
RESERVATION_S: Final = 4.0
"""Shorter than the product's, so that runs of a minute cross it often."""


class World:
    """Everything of one seed."""

    def __init__(
        self, seed: int, *, check_every: int = 50, has_repeats: bool = False, has_damage: bool = False
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.loop = SimLoop(rng)
        determinism.World.loop, determinism.World.rng = self.loop, rng
        forget_all()
        self.check_every = check_every
        self.reservation_s = RESERVATION_S
        self.violations: list[str] = []
        self.tally = Tally()
        self.trace = 0
        self.story: list[str] | None = None
        self.dirty: set[int] = set()
        """Places that a late writer or a flipped bit spoilt: what is read there may rightly fail its check."""
        self.weather = forecast(rng)
        if has_damage:
            damage(self.weather)
        if has_repeats:
            self.weather.sockets.repeat = self.weather.sockets.delay = self.weather.redis.repeat = REPEATS
        self.think_s = rng.choice((0.05, 0.3, 1.0))
        self.is_api_away = False
        self.settings = self._settings()
        self.settings.is_sealed = seed % SEALED_EVERY == 1
        self._wire()
        self.tenancy = Tenancy(seed)
        self.hosts = [Host(self, name, Disk(rng), Sizes(0, 0)) for name in HOSTS]
        self.engines: list[Engine] = []
        self.services: list[Service] = []
        self._engine_boots = 0

    def _settings(self) -> Settings:
        rng = self.rng
        sizes = Sizes(rng.choice((16, 24)) * SLOT_BYTES, rng.choice((32, 48)) * RECORD_BYTES)
        return Settings(
            sizes,
            rng.choice(("None", "None", "Lossless")),
            rng.choice(("Always", "Always", "Auto")),
            rng.random() < 0.5,
        )

    def _wire(self) -> None:
        loop, rng = self.loop, self.rng
        self.local = determinism.World.local = LocalNet(loop, rng)
        self.net = loop.net = Network(loop, rng, self.local)
        self.nixl = NixlNet(loop, rng)
        self.redis = SimRedis()
        self.redis_link = RedisLink(loop, rng, self.redis, self.net)
        self.set_weather(self.weather)

    def set_weather(self, weather: Weather) -> None:
        """Let these chances hold from now on."""
        self.loop.slow_executor = weather.slow_executor
        self.redis_link.faults = weather.redis
        self.net.faults = weather.net
        self.nixl.faults = weather.nixl
        self.local.faults = weather.sockets
        for host in getattr(self, "hosts", ()):
            host.disk.faults = weather.disk

    def begin(self) -> None:
        """Start all processes."""
        self.redis.install()
        self.set_weather(self.weather)
        for host in self.hosts:
            host.sizes = Sizes(self.settings.sizes.dram_bytes, self.settings.sizes.nvme_bytes)
            host.boot()
        for i in range(ENGINES):
            self.start_engine(TENANTS[i % 2], self.hosts[i % len(self.hosts)])
        for i in range(2):
            self._start_service(f"m{i}")

    def start_engine(self, tenant: str, host: Host) -> None:
        """One more engine process."""
        self._engine_boots += 1
        self.engines.append(Engine(self, f"e{self._engine_boots}", tenant, host))

    def _start_service(self, name: str) -> None:
        process = Process(self.loop, name)
        service = process.call(Service, self, name)
        self.services.append(service)
        process.root(service.run(), self)

    def served(self, shadow: Shadow, verb: str) -> None:
        """An agent has carried out a verb: the unit in which a run is measured."""
        tally = self.tally
        tally.operations += 1
        self.trace = zlib.crc32(b"%s %f %d" % (verb.encode(), self.loop.now_s, tally.hits), self.trace)
        if self.story is not None:
            self.story.append(f"{self.loop.now_s:.6f} {shadow._name} {verb}")
        if tally.operations % self.check_every == 0:
            # Of one step at a time the agent that took it, now and then all of them.
            is_one = self.check_every == 1 and tally.operations % CHECK_ALL_EVERY
            self.loop.call_soon(self.check, shadow if is_one else None, context=_NOBODY.copy())

    def check(self, only: Shadow | None = None) -> None:
        """Hold the tables of all agents, or of one, against each other (I4)."""
        for host in self.hosts:
            agent = host.agent
            is_meant = agent is not None and (only is None or agent.shadow is only)
            if agent is not None and is_meant and agent.is_serving and not agent.process.is_dead:
                self.tally.checks += 1
                agent.shadow.expire()
                for message in disagreements(agent.shadow):
                    self.violate("I4", f"{host.name}: {message}")

    def note(self, who: str, what: str) -> None:
        """Something happened that is worth telling and must happen again in a replay."""
        line = f"{self.loop.now_s:.6f} {who} {what}"
        self.trace = zlib.crc32(line.encode(), self.trace)
        if self.story is not None:
            self.story.append(line)

    def violate(self, invariant: str, message: str) -> None:
        """An invariant is broken."""
        self.note(invariant, message)
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(
                f"{invariant} at {self.loop.now_s:.6f} s, operation {self.tally.operations}: {message}"
            )

    def heal(self) -> None:
        """End all faults; what they broke stays broken."""
        self.set_weather(calm())
        self.redis.is_up = True
        self.redis.skew_s = 0.0
        self.is_api_away = False
        self.rejoin()
        for host in self.hosts:
            host.is_draining = False
            if host.agent is not None and host.agent.process.is_stopped:
                host.agent.process.wake()
        for engine in self.engines:
            engine.process.wake()

    def rejoin(self) -> None:
        """End all partitions; connections that lost bytes meanwhile are reset."""
        self.net.partitioned.clear()

    def digest(self) -> str:
        """What tells two runs apart: every verb and fault with its time, and every random number.

        Not the number of callbacks: some sets are ordered by addresses, and what waits for one may wake in one turn
        or in two.
        """
        state = zlib.crc32(repr(self.rng.getstate()).encode())
        return f"{self.trace:08x}{state:08x}"


_NOBODY: Final = contextvars.Context()


class BugWatch(logging.Handler):
    """A bug that the product caught and logged is a violation as well."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.world: World | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record of the product."""
        if self.world is not None and record.exc_info:
            error = record.exc_info[1]
            self.world.violate("bug", f"{record.name}: {record.getMessage()}: {type(error).__name__}: {error}")


BUGS: Final = BugWatch()


@cache
def install() -> None:
    """Prepare this process for simulated worlds. Idempotent."""
    determinism.install()
    agents.install()
    changed: Any = kvstrata_agent.app.periodic
    changed.EXPIRE_S, changed.TEND_S = 0.4, 0.3
    changed.Sweeper.gauges = lambda _: None  # A tenth of a run's time, for figures that nobody reads.
    writer: Any = kvstrata_agent.cache.store
    writer.RESERVATION_S = RESERVATION_S
    arena: Any = kvstrata_agent.backends.memory.arena
    arena._EXTENT_PARTS = 6
    nvme: Any = kvstrata_agent.backends.file.record_store
    nvme._SEGMENT_PARTS = 8
    for name in ("kvstrata", "kvstrata_agent", "kvstrata_metadata", "kvstrata_client"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        if BUGS not in logger.handlers:
            logger.addHandler(BUGS)
    gc.freeze()
