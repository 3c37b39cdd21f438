"""A simulated engine process: the real asyncio client, driven through the verbs at random."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from kvstrata_api.blocks import BlockKey
from kvstrata_api.errors import KvStrataError, LeaseLostError
from kvstrata_client.async_client import AsyncClient
from kvstrata_client.cache import AsyncPrefixCache
from kvstrata_client.target import Target
from kvstrata_client.verbs.results import Stored
from sim import prompts
from sim.agent import POOL
from sim.process import Process
from sim.reading import FALSE_SUM, Reading
from support.agent.doubles import LAYOUT

SESSIONS: Final = 4
NEW_BLOCKS: Final = 6
"""Blocks that a turn adds to a prompt that fills memory."""


class Engine:
    """One engine of one tenant, attached to one node."""

    def __init__(self, world: Any, name: str, tenant: str, host: Any) -> None:
        self._world = world
        self.name = name
        self.tenant = tenant
        self.host = host
        self.process = Process(world.loop, name)
        self._rng = world.rng
        self._reading = Reading(world)
        self.is_done = False
        self._verbs: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._turn, 10),
            (self._load_and_store, 2),
            (self._read, 8),
            (self._hold, 3),
            (self._look, 2),
            (self._write_badly, 2),
            (self._session, 2),
            (self._pin, 1),
            (self._prefetch, 1),
        ]
        self._choices = [verb for verb, weight in self._verbs for _ in range(weight)]
        self.process.root(self._live(), world)

    @property
    def shadow(self) -> Any:
        """Shadow books of the agent that runs on our node now."""
        return self.host.agent.shadow if self.host.agent is not None else None

    async def _live(self) -> None:
        target = Target(Path(self.host.path), POOL, self.tenant, LAYOUT, client=self.name)
        self._client = client = AsyncClient(target)
        self._cache = AsyncPrefixCache(client)
        client.start()
        try:
            while not self.is_done:
                if not client.is_attached and not await client.wait_attached(1.0):
                    continue
                await self._do(self._rng.choice(self._choices))
                await asyncio.sleep(self._think_s())
        finally:
            await client.close()

    async def _do(self, verb: Callable[[], Awaitable[None]]) -> None:
        try:
            await verb()
        except LeaseLostError:
            self._world.tally.lost_leases += 1
        except KvStrataError as e:
            self._world.violate("bug", f"{self.name}: {verb.__name__} raised {type(e).__name__}: {e}")

    def _think_s(self) -> float:
        """Between two verbs: mostly moments, now and then the time in which leases run out."""
        chance = self._rng.random()
        if chance < 0.03:
            return float(self._rng.random() * 12.0)
        return float(self._rng.random() * self._world.think_s)

    def _scope(self) -> Any:
        grants = self._client.grants
        if grants is None or not grants.scopes:
            return None
        return self._rng.choice(grants.scopes).id

    def _chain(self) -> tuple[BlockKey, ...]:
        scope = self._scope()
        if scope is None:
            return ()
        keys = prompts.keys(scope, self._rng.randrange(prompts.CHAINS))
        return keys[: self._rng.choice((8, 8, 8, 5, 3))]

    def _session_name(self) -> str:
        return f"{self.name.partition('#')[0]}-s{self._rng.randrange(SESSIONS)}"

    async def _turn(self) -> None:
        """What engines do all day: load what is there, store what is not."""
        keys, client = self._chain(), self._client
        if not keys:
            return
        session = self._session_name() if self._rng.random() < 0.7 else ""
        if session:
            await client.open_session(session)
            await client.touch_session(session, "decoding", urgency=50)
        have = await self._load(keys, session)
        if have < len(keys):
            await self._store(keys, have, session)
        if session and self._rng.random() < 0.8:
            if self._rng.random() < 0.5:
                await client.touch_session(session, "idle", expected_return_s=5.0)
            else:
                await client.tool_wait(session, 5.0)

    async def _load(self, keys: tuple[BlockKey, ...], session: str) -> int:
        lease_s = self._rng.choice((30.0, 5.0, 1.0))
        deadline_s = self._rng.choice((10.0, 1.0, 0.1))
        leases = await self._client.acquire(keys, session=session, lease_s=lease_s, deadline_s=deadline_s)
        have = len(leases)
        self._world.tally.misses += len(keys) - have
        async with leases:
            self._reading.read(self.shadow, keys, leases)
        return have

    async def _store(self, keys: tuple[BlockKey, ...], first: int, session: str) -> None:
        parent = keys[first - 1].digest if first else b""
        slots = await self._client.reserve(keys[first:], parent=parent, session=session)
        if self._rng.random() < 0.2:
            await asyncio.sleep(self._rng.random() * self._rng.choice((0.05, 0.05, 6.0)))
        await self._fill(slots)

    async def _fill(self, slots: Any) -> None:
        written = [slot for slot in slots if slot.reservation]
        sums = [self._reading.write(self.shadow, slot) for slot in written]
        if written:
            await self._client.publish(written, sums)

    async def _load_and_store(self) -> None:
        """The same through the high-level interface, which finds its way across scopes by itself."""
        chain = self._rng.randrange(prompts.WHOLE_CHAINS)
        tokens, rows = prompts.whole_tokens(chain), prompts.whole_rows(self.tenant, chain)
        loaded = await self._cache.load(tokens, deadline_s=1.0)
        self._reading.judge_loaded(rows, loaded.data)
        if loaded.blocks < len(rows):
            await self._cache.store(tokens, rows[loaded.blocks :], first_block=loaded.blocks)

    async def _read(self) -> None:
        """Load twice, at once and as slowly as a copy may be."""
        keys = self._chain()
        if not keys:
            return
        lease_s = self._rng.choice((30.0, 3.0, 0.5))
        async with await self._client.acquire(keys, lease_s=lease_s, deadline_s=1.0) as leases:
            self._reading.read(self.shadow, keys, leases)
            if leases and self._rng.random() < 0.4:
                pause_s = self._rng.random() ** 3 * self._rng.choice((0.1, 1.0, 10.0))
                await self._reading.read_slowly(self.shadow, keys, leases, pause_s)
            self._world.tally.misses += len(keys) - len(leases)

    async def _hold(self) -> None:
        """Read in place, across other verbs: what the agent confirms at the end must have been right all the time."""
        keys = self._chain()
        if not keys:
            return
        leases = await self._client.acquire(keys, lease_s=self._rng.choice((5.0, 1.0, 0.2)), deadline_s=0.5)
        held = tuple(leases)
        first = self._reading.peek(keys, held)
        if held and self._rng.random() < 0.5:
            await self._do(self._turn)
        await asyncio.sleep(self._rng.random() ** 2 * 4.0)
        self._reading.read(self.shadow, keys, held)
        second = self._reading.peek(keys, held)
        if self._rng.random() < 0.8 and await leases.release():
            self._reading.confirmed(first + second)

    async def _look(self) -> None:
        keys = self._chain()
        if keys:
            await self._client.lookup(keys)

    async def _write_badly(self) -> None:
        """Give reservations back, forget them, fill them wrongly or much too late."""
        keys = self._chain()
        if not keys:
            return
        slots = [s for s in await self._client.reserve(keys) if s.reservation]
        what = self._rng.randrange(4)
        if not slots or what == 0:
            return
        if what == 1:
            self._client.abandon(slots)
        elif what == 2:
            await asyncio.sleep(self._rng.random() * 2 * self._world.reservation_s)
            await self._fill(slots)
        else:
            sums = [self._reading.write(self.shadow, slot) for slot in slots]
            sums[0] = FALSE_SUM
            await self._client.publish(slots, sums)

    async def _session(self) -> None:
        """Fork, close or archive a conversation."""
        name, client = self._session_name(), self._client
        what = self._rng.randrange(3)
        if what == 0:
            await client.fork_session(f"{name}-f{self._rng.randrange(2)}", name)
        elif what == 1:
            await client.complete_session(name, archive=True)
        else:
            await client.complete_session(f"{name}-f{self._rng.randrange(2)}", archive=False)

    async def _pin(self) -> None:
        keys = self._chain()
        if keys:
            await self._client.pin(keys, self._rng.choice((0.5, 5.0)))
            if self._rng.random() < 0.5:
                await self._client.unpin(keys)

    async def _prefetch(self) -> None:
        keys = self._chain()
        if keys:
            await self._client.prefetch(keys)


class LastEngine:
    """The only engine of a node that everybody else has left: loads a prompt that fills memory, and stores at once."""

    def __init__(self, world: Any, host: Any, tenant: str, blocks: int) -> None:
        self._world = world
        self._host = host
        self._tenant = tenant
        self._blocks = blocks
        self.process = Process(world.loop, f"last-{host.name}")
        self.is_done = False
        self.process.root(self._live(), world)

    async def _live(self) -> None:
        client = AsyncClient(Target(Path(self._host.path), POOL, self._tenant, LAYOUT, client="last"))
        client.start()
        try:
            while not await client.wait_attached(1.0):
                pass
            await self._turn(client, AsyncPrefixCache(client))
        finally:
            self.is_done = True
            await client.close()

    async def _turn(self, client: AsyncClient, cache: AsyncPrefixCache) -> None:
        tokens, rows = prompts.last_prompt(self._host.name, self._blocks + NEW_BLOCKS)
        before = tokens[: self._blocks * LAYOUT.block_tokens]
        await client.open_session("last")
        self._expect_all(await cache.store(before, rows[: self._blocks], session="last"), "a prompt")
        loaded = await cache.load(before, session="last", deadline_s=10.0)
        if loaded.blocks != self._blocks:
            self._world.violate("room", f"{self._host.name}: {loaded.blocks} of {self._blocks} blocks came back")
        await client.touch_session("last", "decoding", urgency=100)
        await client.touch_session("last", "idle")
        first = loaded.blocks
        self._expect_all(await cache.store(tokens, rows[first:], first_block=first, session="last"), "its next turn")

    def _expect_all(self, stored: Stored, what: str) -> None:
        if stored.refused:
            self._world.violate("room", f"{self._host.name}: {what}: {stored.refused} refused, {stored.error}")
