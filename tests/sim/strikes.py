"""Faults that strike at random moments: crashes, stops, partitions, lost directories, shredded scopes, other sizes."""

import asyncio
from typing import Any, Final

from sim.agent import Host
from sim.reading import place_of
from sim.world import RECORD_BYTES, SLOT_BYTES, World

ENGINES_MAX: Final = 7


class Strikes:
    """Throws one fault after the other until told to stop."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        weighted: list[tuple[Any, int]] = [
            (self._crash_agent, 4),
            (self._stop_agent, 2),
            (self._crash_engine, 4),
            (self._stop_engine, 4),
            (self._empty_redis, 1),
            (self._fail_over, 2),
            (self._redis_away, 1),
            (self._partition, 1),
            (self._api_away, 1),
            (self._shred, 1),
            (self._resize, 2),
            (self._drain, 1),
            (self._flip_bits, 1),
            (self._rot, 2),
            (self._lose_power, 1),
        ]
        self._choices = [strike for strike, weight in weighted for _ in range(weight)]

    async def run(self) -> None:
        """Strike until cancelled."""
        rate = self._world.weather.strikes_per_s
        while rate:
            await asyncio.sleep(self._rng.expovariate(rate))
            self._rng.choice(self._choices)()

    def _later(self, delay_s: float, what: Any, *args: Any) -> None:
        self._world.loop.call_later(delay_s, what, *args)

    def _crash_agent(self) -> None:
        host = self._rng.choice(self._world.hosts)
        if host.agent is None or host.agent.process.is_dead:
            return
        self._world.note(host.name, "crashes")
        self._world.tally.agent_crashes += 1
        host.agent.kill()
        self._later(self._rng.choice((0.05, 1.0, 30.0)) * self._rng.random(), reboot, host)

    def _lose_power(self) -> None:
        """A whole node goes: its agent, its engines, and what its disk had not written yet."""
        world, host = self._world, self._rng.choice(self._world.hosts)
        if host.agent is None or host.agent.process.is_dead:
            return
        world.note(host.name, "loses power")
        world.tally.power_losses += 1
        host.agent.kill(is_power_lost=True)
        for engine in [e for e in world.engines if e.host is host]:
            engine.process.kill()
            world.engines.remove(engine)
            world.start_engine(engine.tenant, self._rng.choice(world.hosts))
        self._later(self._rng.choice((1.0, 30.0)) * self._rng.random(), reboot, host)

    def _rot(self) -> None:
        host = self._rng.choice(self._world.hosts)
        if host.disk.rot():
            self._world.note(host.name, "has rot on its disk")

    def _stop_agent(self) -> None:
        host = self._rng.choice(self._world.hosts)
        agent = host.agent
        if agent is None or agent.process.is_dead or agent.process.is_stopped:
            return
        self._world.note(host.name, "stops")
        self._world.tally.agent_stops += 1
        agent.process.stop()
        self._later(self._rng.choice((0.5, 5.0, 40.0)) * self._rng.random(), agent.process.wake)

    def _crash_engine(self) -> None:
        world = self._world
        engine = self._rng.choice(world.engines)
        world.note(engine.name, "crashes")
        world.tally.engine_crashes += 1
        engine.process.kill()
        world.engines.remove(engine)
        if len(world.engines) < ENGINES_MAX:
            world.start_engine(engine.tenant, self._rng.choice(world.hosts))

    def _stop_engine(self) -> None:
        engine = self._rng.choice(self._world.engines)
        if engine.process.is_stopped:
            return
        self._world.note(engine.name, "stops")
        self._world.tally.engine_stops += 1
        engine.process.stop()
        self._later(self._rng.choice((0.5, 5.0, 20.0)) * self._rng.random(), engine.process.wake)

    def _empty_redis(self) -> None:
        self._world.note("redis", "restarts with nothing")
        self._world.tally.redis_restarts += 1
        self._world.redis.empty()

    def _fail_over(self) -> None:
        world = self._world
        lost = self._rng.choice((1, 3, 10, 100))
        world.tally.redis_failovers += 1
        effects = world.redis.fail_over(lost)
        world.tally.redis_lost_effects += effects
        world.note("redis", f"fails over and loses {lost} transitions")

    def _redis_away(self) -> None:
        world = self._world
        world.note("redis", "goes away")
        world.tally.redis_away += 1
        world.redis.is_up = False
        self._later(self._rng.choice((1.0, 10.0, 30.0)) * self._rng.random(), self._redis_back)

    def _redis_back(self) -> None:
        self._world.redis.is_up = True

    def _partition(self) -> None:
        world = self._world
        host = self._rng.choice(world.hosts)
        world.note(host.name, "is cut off")
        world.tally.partitions += 1
        world.net.partitioned.add(host.name)
        self._later(self._rng.choice((1.0, 10.0, 40.0)) * self._rng.random(), world.rejoin)

    def _api_away(self) -> None:
        world = self._world
        world.note("api server", "goes away")
        world.tally.api_away += 1
        world.is_api_away = True
        self._later(self._rng.random() * 40.0, self._api_back)

    def _api_back(self) -> None:
        self._world.is_api_away = False

    def _shred(self) -> None:
        world = self._world
        name = self._rng.choice(sorted(world.tenancy.versions))
        scope = world.tenancy.shred(name, world.loop.now_s)
        world.note("tenancy", f"shreds {scope}")
        world.tally.shredded_scopes += 1
        for host in world.hosts:
            if host.agent is not None:
                host.agent.shadow.shredded(scope)

    def _resize(self) -> None:
        host = self._rng.choice(self._world.hosts)
        self._world.tally.resizes += 1
        if self._rng.random() < 0.6:
            host.sizes.dram_bytes = self._rng.choice((10, 16, 24, 32)) * SLOT_BYTES
        else:
            host.sizes.nvme_bytes = self._rng.choice((20, 32, 48)) * RECORD_BYTES
        self._world.note(host.name, f"has {host.sizes}")

    def _drain(self) -> None:
        host = self._rng.choice(self._world.hosts)
        self._world.tally.drains += 1
        self._world.note(host.name, "drains")
        host.is_draining = True
        self._later(self._rng.random() * 10.0, self._undrain, host)

    @staticmethod
    def _undrain(host: Host) -> None:
        host.is_draining = False

    def _flip_bits(self) -> None:
        """Memory that rots under a block: whoever reads it must notice."""
        world, rng = self._world, self._rng
        host = rng.choice(world.hosts)
        agent = host.agent
        if agent is None or agent.process.is_dead:
            return
        blocks = [
            r
            for e in agent.node.index
            for r in e.residences
            if r.tier.backend.mappable is not None and r.slot.size_bytes
        ]
        if not blocks:
            return
        residence = rng.choice(blocks)
        mappable = residence.tier.backend.mappable
        assert mappable is not None
        view = mappable.view(residence.slot)
        world.dirty.add(place_of(view))
        view[rng.randrange(len(view))] ^= 1 << rng.randrange(8)
        world.tally.bit_flips += 1
        world.note(host.name, "flips a bit")


def reboot(host: Host) -> None:
    """Start a new agent where the old one is dead."""
    if host.agent is None or host.agent.process.is_dead:
        host.world.note(host.name, "boots")
        host.boot()
