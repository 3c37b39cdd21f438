"""How rough a seed is: chances of all faults, drawn once for each seed. Some seeds are calm, some are wild."""

import random
from dataclasses import dataclass, field

from sim.disk import DiskFaults
from sim.network import NetFaults
from sim.nixl import NixlFaults
from sim.sockets import SocketFaults
from sim.store import RedisFaults


@dataclass(slots=True)
class Weather:
    """All chances of one seed."""

    wildness: float
    strikes_per_s: float
    """Faults that a god throws: crashes, stops, failovers, shredded scopes ..."""
    slow_executor: float
    redis: RedisFaults = field(default_factory=RedisFaults)
    net: NetFaults = field(default_factory=NetFaults)
    nixl: NixlFaults = field(default_factory=NixlFaults)
    sockets: SocketFaults = field(default_factory=SocketFaults)
    disk: DiskFaults = field(default_factory=DiskFaults)


def forecast(rng: random.Random) -> Weather:
    """Draw the weather of a seed."""
    wild = rng.choice((0.0, 0.3, 1.0, 1.0, 2.0))

    def some(most: float) -> float:
        return wild * most * rng.random() if rng.random() < 0.5 else 0.0

    return Weather(
        wildness=wild,
        strikes_per_s=wild * 0.4 * rng.random(),
        slow_executor=some(0.1),
        redis=RedisFaults(some(0.03), some(0.03), some(0.1), some(0.05), some(0.03)),
        net=NetFaults(some(0.05), some(0.05), some(0.3), some(0.1), some(0.1)),
        nixl=NixlFaults(some(0.2), some(0.2), some(0.2)),
        sockets=SocketFaults(some(0.05), some(0.05), some(0.05)),
        disk=DiskFaults(some(0.05), some(0.1), some(0.1)),
    )


def damage(weather: Weather) -> None:
    """Let bytes be damaged often, on whatever way they take."""
    weather.net.flip = weather.nixl.tear = 0.3
    weather.disk.lie = 0.1


def calm() -> Weather:
    """No faults at all."""
    return Weather(0.0, 0.0, 0.0)
