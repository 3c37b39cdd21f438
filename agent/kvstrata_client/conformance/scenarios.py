"""What a client must get right: each scenario is a function of the stage, and its docstring says what it demands."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kvstrata_api import wire
from kvstrata_api.blocks import KEY_BYTES, Layout, LayoutId, ScopeId, ScopeSecret, chain_keys, variant_of
from kvstrata_api.checksum import checksum
from kvstrata_api.errors import InvalidInputError, KvStrataError, UnauthenticatedError, UnsupportedError
from kvstrata_api.tiers import Lookup
from kvstrata_api.wire import KEYS_MAX, SESSION_CHARS_MAX
from kvstrata_client.cache import PrefixCache
from kvstrata_client.client import Client
from kvstrata_client.conformance.content import Ranges, block_of, blocks_of, digests_of, tokens_of
from kvstrata_client.conformance.driver import Driver
from kvstrata_client.conformance.stage import LAYOUT, MEMORY_BYTES, SOON_S, Stage, keys_of, require, spoil, within

Json = dict[str, Any]
Scenario = Callable[[Stage], None]

BLOCKS: Final = 12
TOKENS: Final = LAYOUT.block_tokens
OUTAGE_S: Final = 15.0
"""An agent that does not answer is a miss by then; one that has gone is one at once."""
LEASE_S: Final = 0.5
DEADLINE_S: Final = 2.0
"""Within which a program is asked to have blocks brought into memory; they are there."""

_LAYOUTS: Final = (
    LAYOUT,
    replace(LAYOUT, model="m\u00f6del", rope_theta="500000.0", rope_scaling='{"factor":8.0}', tp_rank=1, tp_size=2),
    replace(LAYOUT, kv_heads=1, head_dim=576, kv_parts=1, block_tokens=64, quantization="fp8:1", adapter="x"),
)
_SIZES: Final = (32, 128, 129, 240, 241, 1023, 1024, 1025, 8192, 65_536, 100_000)
"""Bytes of blocks: XXH3 goes another way up to 16, 128 and 240 bytes, and by stripes of 64 and blocks of 1,024."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one scenario ended."""

    name: str
    demand: str
    duration_s: float
    failure: str = ""
    """What was wrong; empty when it passed."""


def run(stage: Stage, name: str) -> Outcome:
    """Try one scenario."""
    scenario, began_s, failure = SCENARIOS[name], time.monotonic(), ""
    try:
        scenario(stage)
    except KvStrataError as e:
        failure = f"{type(e).__name__}: {e}"
    return Outcome(name, demand(name), time.monotonic() - began_s, failure)


def demand(name: str) -> str:
    """What a scenario demands, in a line."""
    return (SCENARIOS[name].__doc__ or "").split("\n")[0]


def vectors(stage: Stage) -> None:
    """Layout ids, keys and checksums are those of the protocol, byte for byte."""
    secret, parent = bytes(range(7, 39)), bytes(range(KEY_BYTES))
    with stage.bare_program() as program:
        for layout in _LAYOUTS:
            for variant, start in (("", b""), ("", parent), ("user:7", b"")):
                ranges = [[5, 2 * layout.block_tokens], [4_000_000_000, layout.block_tokens + 3]]
                layout_id = layout.layout_id() if not variant else variant_of(layout.layout_id(), variant)
                asked: Json = {"layout": asdict(layout), "variant": variant, "parent": start.hex(), "tokens": ranges}
                answer = program.ask("keys", secret=secret.hex(), **asked)
                wanted = _keyed(secret, layout_id, layout, start, ranges)
                require(answer == wanted, f"keys of {asked}: {answer}, {wanted} wanted")
        for size in _SIZES:
            epoch = (1 << 62) + size
            asked = {"digest": parent.hex(), "epoch": str(epoch), "stamp": str(size), "seed": size, "bytes": size}
            answer = program.ask("checksum", **asked)
            made = checksum(block_of(size, 0, size), parent, epoch, size).hex()
            require(answer == {"checksum": made}, f"checksum of {size} B: {answer}, {made} wanted")


def round_trip(stage: Stage) -> None:
    """What the program stores others read, what others store it reads, byte for byte; a tail is not cached."""
    mine, theirs = stage.fresh(BLOCKS, tail=5), stage.fresh(BLOCKS)
    with stage.program() as program, stage.reference() as reference:
        stored(program, mine, 1, BLOCKS)
        loads(program, mine, 1, BLOCKS)
        readable(reference, mine, 1, BLOCKS)
        PrefixCache(reference).store(tokens_of(theirs), blocks_of(2, range(BLOCKS), LAYOUT.block_bytes))
        loads(program, theirs, 2, BLOCKS)
        stored(program, theirs, 2, 0)
        counts(program, theirs, BLOCKS)


def misses(stage: Stage) -> None:
    """A prompt that nobody stored has no block, whatever else is cached; nor has one shorter than a block."""
    with stage.program() as program:
        stored(program, stage.fresh(BLOCKS), 1, BLOCKS)
        for unknown in (stage.fresh(BLOCKS), stage.fresh(0, tail=TOKENS - 1)):
            loads(program, unknown, 1, 0)
            counts(program, unknown, 0)


def prefixes(stage: Stage) -> None:
    """The longest common prefix is found, and goes on from there; a block behind another one is another block."""
    first, second = stage.fresh(BLOCKS)[0][0], stage.fresh(BLOCKS)[0][0]
    short = [[first, 5 * TOKENS]]
    parted = [[first, 3 * TOKENS + 7], [second, 4 * TOKENS - 7]]
    longer = [[first, 5 * TOKENS], [second, 4 * TOKENS]]
    moved = [[first + TOKENS, 4 * TOKENS]]
    with stage.program() as program, stage.reference() as reference:
        stored(program, short, 1, 5)
        loads(program, longer, 1, 5)
        loads(program, parted, 1, 3)
        loads(program, moved, 1, 0)
        stored(program, longer, 1, 4, first_block=5)
        loads(program, longer, 1, 9)
        readable(reference, longer, 1, 9)
        counts(program, parted, 3)


def tenants(stage: Stage) -> None:
    """A refused token is reported and brings nothing; another tenant finds nothing of the first one's."""
    mine = stage.fresh(BLOCKS)
    with stage.program("a") as program, stage.program("b") as other:
        stored(program, mine, 1, BLOCKS)
        loads(other, mine, 1, 0)
        stored(other, mine, 2, BLOCKS)
        loads(other, mine, 2, BLOCKS)
        loads(program, mine, 1, BLOCKS)
        refused(stage, program, UnauthenticatedError.__name__, tenant="nobody")
        loads(program, mine, 1, 0)


def domains(stage: Stage) -> None:
    """New blocks go to the scope that the agent names: a member of the same trust domain finds them."""
    mine = stage.fresh(BLOCKS)
    with stage.program("c") as program, stage.program("d") as member, stage.reference("d") as reference:
        stored(program, mine, 1, BLOCKS)
        readable(reference, mine, 1, BLOCKS)
        loads(member, mine, 1, BLOCKS)
        stored(member, mine, 1, 0)


def layouts(stage: Stage) -> None:
    """A layout that the pool does not take is reported; blocks of another revision are misses."""
    mine = stage.fresh(BLOCKS)
    with stage.program() as program, stage.program(layout=replace(LAYOUT, revision="2")) as other:
        stored(program, mine, 1, BLOCKS)
        loads(other, mine, 1, 0)
        refused(stage, other, InvalidInputError.__name__, layout=replace(LAYOUT, dtype="fp16"))
        loads(program, mine, 1, BLOCKS)


def corruption(stage: Stage) -> None:
    """A block whose bytes are not its checksum's is a miss, and is reported, so that it can be stored again."""
    mine = stage.fresh(4)
    with stage.program() as program, stage.reference() as reference:
        stored(program, mine, 1, 4)
        spoil(reference, keys_of(reference, mine)[:3])
        loads(program, mine, 1, 2)
        within(
            SOON_S, lambda: program.ask("lookup", tokens=mine), {"blocks": 2}, "lookup once the suspect was reported"
        )
        answer = program.ask("store", tokens=mine, seed=1)
        require(answer.get("published", 0) >= 1, f"store of what was corrupt: {answer}, published 1 or more wanted")
        readable(reference, mine, 1, 4)


def leases(stage: Stage) -> None:
    """What was read under a lease that was over before the reader was done is a miss."""
    mine = stage.fresh(BLOCKS)
    with stage.program() as program:
        stored(program, mine, 1, BLOCKS)
        held(program, mine)
        finishes(program, 1, BLOCKS)
        held(program, mine, LEASE_S)
        time.sleep(4 * LEASE_S)
        finishes(program, 1, 0)
        loads(program, mine, 1, BLOCKS)


def outages(stage: Stage) -> None:
    """While the agent is dead or frozen every answer is a miss, in time; the program comes back by itself."""
    mine, more = stage.fresh(BLOCKS), stage.fresh(BLOCKS)
    with stage.program() as program:
        stored(program, mine, 1, BLOCKS)
        with agent_frozen(stage):
            loads(program, mine, 1, 0, within_s=OUTAGE_S)
        _comes_back(program, more, 2)
        held(program, more)
        with agent_dead(stage):
            finishes(program, 2, 0, within_s=OUTAGE_S)
            loads(program, more, 2, 0, within_s=OUTAGE_S)
            counts(program, more, 0, within_s=OUTAGE_S)
            answer = program.ask("store", within_s=OUTAGE_S, tokens=mine, seed=1)
            require(answer.get("published") == 0, f"store without an agent: {answer}, published 0 wanted")
        _comes_back(program, mine, 3)


def deaths(stage: Stage) -> None:
    """A program that dies in a store leaves nothing: no block of it is found, and no slot stays taken."""
    mine = stage.fresh(BLOCKS)
    with stage.reference() as reference:
        keys = keys_of(reference, mine)

        def states() -> bytes:
            return reference.lookup(keys).states

        with stage.program() as program:
            answer = program.ask("reserve", tokens=mine)
            require(answer.get("reserved") == BLOCKS, f"reserve: {answer}, reserved {BLOCKS} wanted")
            require(
                states() == bytes([Lookup.PENDING] * BLOCKS), f"states {states()!r} of reserved blocks, PENDING wanted"
            )
            program.kill()
        within(SOON_S, states, bytes([Lookup.MISS] * BLOCKS), "states of blocks that their writer left")
        with stage.program() as program:
            loads(program, mine, 1, 0)
            stored(program, mine, 1, BLOCKS)
        readable(reference, mine, 1, BLOCKS)


def sizes(stage: Stage) -> None:
    """More keys than a frame may have, a name that is too long and more blocks than fit cost nobody the connection."""
    slots = MEMORY_BYTES // LAYOUT.block_bytes
    mine = stage.fresh(4)
    huge = [*mine, *stage.fresh(KEYS_MAX + 8)]
    with stage.program() as program:
        stored(program, mine, 1, 4)
        counts(program, huge, 4)
        loads(program, huge, 1, 4)
        answer = program.ask("lookup", tokens=mine, session="s" * (SESSION_CHARS_MAX + 72))
        allowed = (answer.get("error") == InvalidInputError.__name__, answer.get("blocks") == 0)
        require(any(allowed), f"lookup with a session's name that is too long: {answer}, an error or blocks 0 wanted")
        within(SOON_S, lambda: program.ask("lookup", tokens=mine), {"blocks": 4}, "lookup after that")
        wide = stage.fresh(slots + 1000)
        answer = program.ask("store", tokens=wide, seed=2)
        require(
            answer.get("published", 0) > 0,
            f"store of {slots + 1000} blocks, {slots} fit: {answer}, some published wanted",
        )
        kept = program.ask("load", tokens=wide, deadline_s=DEADLINE_S)
        blocks = kept.get("blocks", 0)
        require(0 < blocks <= slots, f"load of them: {_brief(kept)}, 1 to {slots} blocks wanted")
        _is_read(kept, 2, blocks, "load of them")


def hints(stage: Stage) -> None:
    """What became of a hint is what the agent says, and a hint changes no block."""
    mine, absent = stage.fresh(BLOCKS), stage.fresh(2)
    by_tokens: tuple[tuple[str, Ranges, float, wire.Outcome], ...] = (
        ("demote", mine, 0.0, wire.Outcome.REFUSED),  # There is no slower tier.
        ("demote", absent, 0.0, wire.Outcome.UNKNOWN),
        ("pin", mine, 5.0, wire.Outcome.ACCEPTED),
        ("pin", [*mine, *stage.fresh(1)], 5.0, wire.Outcome.PARTIAL),
        ("pin", mine, 0.0, wire.Outcome.EXPIRED),
        ("pin", absent, 5.0, wire.Outcome.UNKNOWN),
        ("prefetch", mine, 0.0, wire.Outcome.ACCEPTED),
        ("prefetch", absent, 0.0, wire.Outcome.UNKNOWN),
        ("fetch", mine, 0.0, wire.Outcome.ACCEPTED),
        ("fetch", absent, 0.0, wire.Outcome.UNKNOWN),
        ("share", mine, 0.0, wire.Outcome.REFUSED),  # The tenant shares with nobody.
    )
    by_session: tuple[tuple[str, str, float, wire.Outcome], ...] = (
        ("tool_wait", "mine", 5.0, wire.Outcome.ACCEPTED),
        ("tool_wait", "mine", -1.0, wire.Outcome.EXPIRED),
        ("tool_wait", "nobody's", 5.0, wire.Outcome.UNKNOWN),
        ("retain", "mine", 5.0, wire.Outcome.ACCEPTED),
        ("retain", "mine", 0.0, wire.Outcome.EXPIRED),
        ("retain", "nobody's", 5.0, wire.Outcome.UNKNOWN),
        ("complete", "nobody's", 0.0, wire.Outcome.UNKNOWN),
        ("complete", "mine", 0.0, wire.Outcome.ACCEPTED),
    )
    with stage.program() as program:
        stored(program, mine, 1, BLOCKS)
        answer = program.ask("open_session", session="mine")
        require(answer == {"opened": True}, f"open_session: {answer}")
        for hint, tokens, session, seconds, outcome in (
            *((h, t, "nobody's", s, o) for h, t, s, o in by_tokens),
            *((h, [], n, s, o) for h, n, s, o in by_session),
        ):
            answer = program.ask("hint", hint=hint, tokens=tokens, seconds=seconds, session=session)
            is_left_out = hint == "share" and answer.get("error") == UnsupportedError.__name__
            said = f"{hint} of {seconds} s: {answer}, outcome {outcome} wanted"
            require(is_left_out or answer == {"outcome": outcome}, said)
        loads(program, mine, 1, BLOCKS)


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "vectors": vectors,
    "round-trip": round_trip,
    "miss": misses,
    "prefix": prefixes,
    "tenant": tenants,
    "domain": domains,
    "layout": layouts,
    "corrupt": corruption,
    "lease": leases,
    "outage": outages,
    "death": deaths,
    "size": sizes,
    "hint": hints,
}


# What programs are asked for, and what is wanted of the answers.


def stored(program: Driver, ranges: Ranges, seed: int, published: int, *, first_block: int = 0) -> None:
    """Have blocks stored; so many are new, and none is refused."""
    answer = program.ask("store", tokens=ranges, seed=seed, first_block=first_block)
    found = answer.get("published"), answer.get("refused")
    require(found == (published, 0), f"store: {answer}, published {published} and refused 0 wanted")


def loads(program: Driver, ranges: Ranges, seed: int, blocks: int, *, within_s: float | None = None) -> None:
    """Have a prompt loaded; so many blocks are wanted, with the bytes of a seed."""
    answer = program.ask("load", within_s=within_s, tokens=ranges, deadline_s=DEADLINE_S)
    _is_read(answer, seed, blocks, "load")


def held(program: Driver, ranges: Ranges, lease_s: float = SOON_S) -> None:
    """Have a prompt of `BLOCKS` blocks leased."""
    answer = program.ask("acquire", tokens=ranges, lease_s=lease_s)
    require(answer.get("leased") == BLOCKS, f"acquire: {answer}, leased {BLOCKS} wanted")


def finishes(program: Driver, seed: int, blocks: int, *, within_s: float | None = None) -> None:
    """Have what is leased read and released."""
    _is_read(program.ask("finish", within_s=within_s), seed, blocks, "finish")


def counts(program: Driver, ranges: Ranges, blocks: int, *, within_s: float | None = None) -> None:
    """Have a prompt looked up."""
    answer = program.ask("lookup", within_s=within_s, tokens=ranges)
    require(answer.get("blocks") == blocks, f"lookup: {answer}, blocks {blocks} wanted")


def refused(stage: Stage, program: Driver, error: str, *, tenant: str = "a", layout: Layout = LAYOUT) -> None:
    """Have the program attach where it is refused."""
    answer = stage.attach(program, tenant, layout)
    is_refused = answer.get("attached") is False and answer.get("error") == error
    require(is_refused, f"attach: {answer}, attached false and error {error} wanted")


def readable(reference: Client, ranges: Ranges, seed: int, blocks: int) -> None:
    """Blocks of a seed are there for a client that is known to be right."""
    loaded = PrefixCache(reference).load(tokens_of(ranges))
    read = {"blocks": loaded.blocks, "sha256": digests_of(loaded.data)}
    _is_read(read, seed, blocks, "what the program stored, loaded by the reference client")


@contextmanager
def agent_frozen(stage: Stage) -> Iterator[None]:
    """An agent that takes connections and requests, and answers nothing."""
    stage.signal_agent(signal.SIGSTOP)
    try:
        yield
    finally:
        stage.signal_agent(signal.SIGCONT)


@contextmanager
def agent_dead(stage: Stage) -> Iterator[None]:
    """No agent; afterwards there is one again, whose memory is empty."""
    stage.signal_agent(signal.SIGKILL)
    try:
        yield
    finally:
        stage.start_agent()


def _comes_back(program: Driver, ranges: Ranges, seed: int) -> None:
    """Blocks are stored and loaded again, soon."""

    def are_there() -> int:
        program.ask("store", tokens=ranges, seed=seed)
        blocks = program.ask("load", tokens=ranges, deadline_s=DEADLINE_S).get("blocks")
        return blocks if isinstance(blocks, int) else -1

    within(SOON_S, are_there, BLOCKS, "blocks that are stored and loaded once the agent is back")
    loads(program, ranges, seed, BLOCKS)


def _is_read(answer: Json, seed: int, blocks: int, what: str) -> None:
    require(answer.get("blocks") == blocks, f"{what}: {_brief(answer)}, blocks {blocks} wanted")
    wanted = digests_of(blocks_of(seed, range(blocks), LAYOUT.block_bytes))
    require(answer.get("sha256") == wanted, f"{what}: bytes of {blocks} blocks differ from those that were stored")


def _brief(answer: Json) -> Json:
    return {name: value for name, value in answer.items() if name != "sha256"}


def _keyed(secret: bytes, layout_id: LayoutId, layout: Layout, parent: bytes, ranges: Ranges) -> Json:
    scope = ScopeSecret(ScopeId("scope"), secret)
    keys = chain_keys(scope, layout_id, tokens_of(ranges), layout.block_tokens, parent=parent)
    return {"layout_id": layout_id.hex(), "keys": [k.digest.hex() for k in keys]}
