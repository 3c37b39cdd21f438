"""Runs one seed from its first agent to the check after the storm."""

import asyncio
import contextlib
import gc
import warnings
from dataclasses import dataclass, field

from sim import world as worlds
from sim.aftermath import check_contents, check_directory, check_leaks, check_room, is_converged
from sim.strikes import Strikes, reboot
from sim.tally import Tally
from sim.world import World

STORM_S_MAX = 3600.0
QUIET_S = 62.0
"""A minute after the last engine has gone nothing may be held any more."""
CONVERGE_S = 120.0
"""By then the dead are fenced and removed, and gaps in what was announced are found."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of one seed."""

    seed: int
    digest: str
    """Equal for equal runs."""
    tally: Tally
    violations: tuple[str, ...]
    story: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run each seed."""

    operations: int = 1000
    check_every: int = 50
    """Operations between looks at all tables; 1 looks after every single one."""
    has_repeats: bool = False
    """Whether messages come twice and late whatever the weather."""
    has_damage: bool = False
    """Whether bytes are damaged often whatever the weather."""
    tells: bool = False
    """Whether the story is kept."""


def run_seed(seed: int, plan: Plan) -> Ran:
    """Run one seed; the same arguments give the same run."""
    worlds.install()
    gc.disable()
    with warnings.catch_warnings():
        # What a dead process had begun and never came to is thrown away with it.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
        try:
            return _run(seed, plan)
        finally:
            gc.enable()
            gc.collect()


def _run(seed: int, plan: Plan) -> Ran:
    world = World(seed, check_every=plan.check_every, has_repeats=plan.has_repeats, has_damage=plan.has_damage)
    worlds.BUGS.world = world
    if plan.tells:
        world.story = []
    loop = world.loop
    loop.set_exception_handler(lambda _, context: _bug(world, context))
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_live(world, plan.operations))
    finally:
        worlds.BUGS.world = None
        _collect(world)
        asyncio.set_event_loop(None)
        loop.end()
    return Ran(seed, world.digest(), world.tally, tuple(world.violations), tuple(world.story or ()))


def _bug(world: World, context: dict[str, object]) -> None:
    error = context.get("exception")
    world.violate("bug", f"{context.get('message')}: {type(error).__name__}: {error}")


async def _live(world: World, operations: int) -> None:
    loop = world.loop
    world.begin()
    strikes = asyncio.ensure_future(Strikes(world).run())
    while world.tally.operations < operations and loop.now_s < STORM_S_MAX and not world.violations:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    strikes.cancel()
    if not world.violations:
        await _calm_down(world)
    world.tally.virtual_s = loop.now_s


async def _calm_down(world: World) -> None:
    """Heal everything, let engines go, leave some agents dead for ever, and look at what is left."""
    rng = world.rng
    world.heal()
    for host in world.hosts:
        assert host.agent is not None
        if host.agent.process.is_dead and rng.random() < 0.7:
            reboot(host)
        host.is_abandoned = host.agent.process.is_dead
    for engine in world.engines:
        engine.is_done = True
        if rng.random() < 0.5:
            engine.process.kill()
    await asyncio.sleep(QUIET_S)
    world.check()
    check_leaks(world)
    check_contents(world)
    await check_room(world)
    until_s = world.loop.now_s + CONVERGE_S
    while not is_converged(world) and world.loop.now_s < until_s:  # noqa: ASYNC110
        await asyncio.sleep(5.0)
    check_directory(world)
    world.check()


def _collect(world: World) -> None:
    tally = world.tally
    redis, net, nixl, local = world.redis_link.tally, world.net.tally, world.nixl, world.local
    tally.redis_lost_requests, tally.redis_lost_replies = redis.lost_requests, redis.lost_replies
    tally.redis_repeats, tally.redis_cuts = redis.repeats, redis.cuts
    tally.connections_cut, tally.peer_flips, tally.peer_connections = net.cuts, net.flips, net.connections
    tally.nixl_late, tally.nixl_torn = nixl.late, nixl.torn
    tally.frames_repeated, tally.frames_reordered = local.repeated, local.reordered
    tally.disk_errors = sum(host.disk.failed for host in world.hosts)
    tally.disk_lies = sum(host.disk.lied for host in world.hosts)
    tally.disk_rot = sum(host.disk.rotten for host in world.hosts)
    tally.fenced = sum(service.duties.sweeper.swept.fenced for service in world.services)
    with contextlib.suppress(AttributeError):
        world.hosts.clear()
