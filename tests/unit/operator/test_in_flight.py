"""Laws of writes that nobody waits for."""

import asyncio
import math
from collections.abc import Iterable

import pytest

from kvstrata_operator.apply.executor import IN_FLIGHT_LIMIT, Outcome, WritesInFlight
from kvstrata_operator.decide.plan.actions import Action, Create, Delete, SetFinalizers
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref

pytestmark = pytest.mark.unit


def create(name: str, pool: str = "p") -> Create:
    """Build the making of a KVPoolNode."""
    return Create(Ref(kinds.POOL_NODE, name), pool, body={})


class Server:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Future[None]] = {}

    async def apply(self, actions: Iterable[Action], _until_s: float = math.inf) -> list[Outcome]:
        """Wait for the answer to each action."""
        outcomes = []
        for action in actions:
            self.answers[action.ref.name] = asyncio.get_running_loop().create_future()
            await self.answers[action.ref.name]
            outcomes.append(Outcome(action))
        return outcomes

    def answer(self, name: str) -> None:
        """Carry one action out."""
        self.answers.pop(name).set_result(None)


async def _turn() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_of_one_object_there_is_one_write_at_a_time() -> None:
    server, landed = Server(), list[str]()
    async with asyncio.TaskGroup() as tasks:
        in_flight = WritesInFlight(tasks, server.apply)

        def note(outcome: Outcome) -> None:
            assert in_flight.is_free(outcome.action)
            landed.append(outcome.action.ref.name)

        in_flight.start([create("p.a"), create("p.b")], note)
        await _turn()
        assert not in_flight.is_free(Delete(Ref(kinds.POOL_NODE, "p.a"), uid="u"))
        assert in_flight.is_free(create("p.c"))
        server.answer("p.a")
        await _turn()
        assert in_flight.is_free(create("p.a"))
        server.answer("p.b")
    assert landed == ["p.a", "p.b"]


async def test_a_pools_finalizer_waits_for_what_is_made_for_it() -> None:
    server = Server()
    release = SetFinalizers(Ref(kinds.POOL, "p"), "p", finalizers=(), resource_version="1")
    async with asyncio.TaskGroup() as tasks:
        in_flight = WritesInFlight(tasks, server.apply)
        in_flight.start([create("q.a", "q")], lambda _: None)
        assert in_flight.is_free(release)
        in_flight.start([create("p.a")], lambda _: None)
        assert not in_flight.is_free(release)
        await _turn()
        server.answer("p.a")
        await _turn()
        assert in_flight.is_free(release)
        server.answer("q.a")


async def test_the_next_plan_waits_while_every_request_is_taken() -> None:
    server, names = Server(), [f"p.n{i}" for i in range(IN_FLIGHT_LIMIT)]
    async with asyncio.TaskGroup() as tasks:
        in_flight = WritesInFlight(tasks, server.apply)
        in_flight.start((create(name) for name in names), lambda _: None)
        waiting = asyncio.create_task(in_flight.until_below_limit())
        await _turn()
        assert not waiting.done()
        server.answer(names[0])
        await waiting
        for name in names[1:]:
            server.answer(name)


async def test_what_no_retry_can_mend_ends_the_group() -> None:
    async def broken(_: Iterable[Action], _until_s: float) -> list[Outcome]:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            WritesInFlight(tasks, broken).start([create("p.a")], lambda _: None)
