"""The attacks, each one program for every system: what it does, what it sees, and what that is called.

Every attack that asks for another tenant's blocks sees first that their owner gets them: a system that serves nothing
withstands nothing. What is called `served` are bytes of another tenant, and what is called `wrong` are bytes that
nobody stored under the key.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from threats.samples import auc, ks_p

from bench.harness.drivers import Driver, FailedError
from redteam.callers import BLOCK_BYTES, BLOCKS, content
from redteam.systems import TENANTS, System

PAGE_BYTES: Final = 4096
PROMPTS: Final = 8
KILLS: Final = 3
BEYOND_MEMORY: Final = 1_200
"""Prompts, which are 38 MB: more than the memory of systems that have files below it."""
LOOKED_AT: Final = 60
"""Of the prompts that were stored before a kill, besides those of the kill."""
AUC_MAX: Final = 0.1
P_MAX: Final = 1e-4
"""Both must be passed for a difference of times to count: the machine is shared (as for threat T1)."""
NAME_CHARS_MIN: Final = 12
P99_GROWTH_MAX, P99_S_MAX = 20.0, 1.0
MEMORY_GROWTH_MAX: Final = 256 << 20
DISK_BYTES: Final = 8 << 20
"""Of the disk that gets full."""


class Seen(StrEnum):
    """What an attack came to."""

    SERVED = "served"
    """Another tenant's bytes."""
    WRONG = "wrong bytes"
    """Other bytes than were stored under the key."""
    TOLD = "told"
    """Nothing was served, but whether it is there, or that it is there, was told."""
    REFUSED = "refused"
    """An error, and nothing else."""
    MISS = "miss"
    """As though it were not there."""
    HELD = "held"
    """The right bytes, and service within its bounds."""
    FULL = "full"
    """Nothing new is taken; what was taken is served right."""
    WEDGED = "wedged"
    """It serves nothing any more, or not in time."""
    ABSENT = "not applicable"
    """The system has nothing that could be attacked so."""
    FAILED = "not run"
    """The attack itself could not be carried out; the evidence says why."""


HARM: Final = frozenset({Seen.SERVED, Seen.WRONG, Seen.TOLD, Seen.WEDGED})
"""What a system that isolates tenants and proves its bytes must not come to."""


@dataclass(frozen=True, slots=True)
class Result:
    """One attack on one system."""

    seen: Seen
    evidence: str
    """What was counted, in one line."""
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Arena:
    """A system that runs, with the owner's client and the attacker's."""

    system: System
    stack: ExitStack
    scale: int
    """1 for a short run; counts of the table are multiples."""
    rng: random.Random = field(default_factory=lambda: random.Random(20261127))
    _callers: dict[str, Driver] = field(default_factory=dict)
    _next: int = 0

    def caller(self, who: str) -> Driver:
        """A client that is attached, made once."""
        if who not in self._callers:
            self._callers[who] = self.stack.enter_context(self.system.caller(who))
            self.attach(who)
        return self._callers[who]

    def attach(self, *who: str) -> None:
        """Connect again. Raises `FailedError` where a client is refused."""
        for one in who:
            answer = self._callers[one].ask("attach")
            if answer.get("error"):
                raise FailedError(f"{one} is not attached: {answer['error']}")

    def attach_all(self) -> None:
        """Connect every client again that has credentials."""
        self.attach(*(who for who in self._callers if who in TENANTS))

    def replace(self, who: str, meanwhile: Callable[[], None]) -> None:
        """Kill a client, do something, and start another one."""
        made = self._callers.pop(who)
        made.kill()
        made.close()
        meanwhile()
        self.caller(who)

    def fresh(self, count: int) -> list[int]:
        """Numbers of prompts that nobody has used."""
        self._next += count
        return list(range(self._next - count, self._next))

    def stored(self, count: int = PROMPTS) -> list[int]:
        """Fresh prompts that the owner has stored and gets back. Raises `FailedError` when it does not."""
        prompts = self.fresh(count)
        answer = self.caller("a").ask("store", owner="a", prompts=prompts)
        found = self.caller("a").ask("load", owner="a", prompts=prompts)
        if found.get("right") != count * BLOCKS:
            raise FailedError(f"the owner gets back {found} of {count * BLOCKS} blocks after {answer}")
        return prompts

    def resident_bytes(self) -> int:
        """Memory of the processes that serve."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.system.pids())
        return pages * PAGE_BYTES


def _asked(found: Mapping[str, Any], total: int) -> Result:
    """Judge what an attacker got that asked for another tenant's blocks."""
    told = f"{found.get('right', 0)} of {total} blocks of the other tenant served"
    error = f"; {found['error']}" if found.get("error") else ""
    if found.get("right"):
        return Result(Seen.SERVED, told)
    if found.get("wrong"):
        return Result(Seen.WRONG, f"{found['wrong']} of {total} blocks with bytes of neither{error}")
    return Result(Seen.REFUSED if error else Seen.MISS, told + error)


def read(arena: Arena) -> Result:
    """The attacker has the same prompts as the owner, and asks for them as itself."""
    prompts = arena.stored()
    return _asked(arena.caller("b").ask("load", owner="a", prompts=prompts), len(prompts) * BLOCKS)


def _forged(arena: Arena, how: str, who: str = "b") -> Result:
    prompts = arena.stored()
    keys = arena.caller("a").ask("keys", prompts=prompts)["keys"]
    stolen = {prompt: {"tenant": "a", **named} for prompt, named in keys.items()}
    found = arena.caller(who).ask("forge", owner="a", prompts=prompts, how=how, stolen=stolen)
    return _asked(found, len(prompts) * BLOCKS)


def guess(arena: Arena) -> Result:
    """The attacker knows prompts and the tenant's name, and makes the keys that the owner would have from these."""
    return _forged(arena, "guess")


def stolen(arena: Arena) -> Result:
    """The attacker has its own credentials, and everything that names the owner's blocks."""
    return _forged(arena, "stolen")


def nobody(arena: Arena) -> Result:
    """A process without any credentials has everything that names the owner's blocks."""
    try:
        arena.caller("nobody")
    except FailedError as e:  # It is refused at the door, and goes on by hand.
        refusal = str(e)
    else:
        refusal = ""
    result = _forged(arena, "none", "nobody")
    return Result(result.seen, f"{result.evidence}; {refusal}" if refusal else result.evidence)


def listing(arena: Arena) -> Result:
    """A process without credentials asks the management port what is stored."""
    prompts = arena.stored()
    keys = arena.caller("a").ask("keys", prompts=prompts)["keys"]
    names = {name for named in keys.values() for name in _texts(named)}
    said = arena.system.listed()
    if not said:
        return Result(Seen.ABSENT, "it has no management port")
    told = [f"{place} tells {name}" for place, text in said.items() for name in sorted(names) if name in text]
    line = f"asked {', '.join(said)}: " + (told[0] if told else "none names a key, a salt or a scope")
    return Result(Seen.TOLD if told else Seen.MISS, line)


def _texts(named: Mapping[str, Any]) -> Iterator[str]:
    """Names of blocks, long enough not to be found by chance."""
    for value in named.values():
        yield from (text for text in (value if isinstance(value, list) else [value]) if len(text) >= NAME_CHARS_MIN)


def timing(arena: Arena) -> Result:
    """The attacker asks whether prompts are there: some that the owner stored, and as many that nobody stored."""
    count = 50 * arena.scale
    present, absent = arena.stored(count), arena.fresh(count)
    for _ in range(3):
        order = [(prompt, True) for prompt in present] + [(prompt, False) for prompt in absent]
        arena.rng.shuffle(order)
        said = arena.caller("b").ask("probe", prompts=[prompt for prompt, _ in order])
        if said.get("error"):
            return Result(Seen.REFUSED, said["error"])
        is_stored = np.array([stored for _, stored in order])
        hits, times_s = np.array(said["hits"]), np.array(said["seconds"])
        p, area = ks_p(times_s[is_stored], times_s[~is_stored]), auc(times_s[is_stored], times_s[~is_stored])
        line = f"{(hits[is_stored] > 0).sum()} of {count} stored prompts and {(hits[~is_stored] > 0).sum()} of {count} "
        line += f"others said to be there; times: AUC {area:.2f}, p {p:.2g}"
        told = bool((hits[is_stored] > 0).any()) or (p < P_MAX and abs(area - 0.5) > AUC_MAX)
        if not told or hits.any():
            break
        absent = arena.fresh(count)
    return Result(Seen.TOLD if told else Seen.MISS, line, {"auc": area, "p": p})


def stale(arena: Arena) -> Result:
    """A reader keeps a reference, the blocks are deleted, their memory is used again, and the reader reads by it."""
    (prompt,) = arena.stored(1)
    reader = arena.caller("a")
    reader.ask("hold", prompt=prompt)
    fresh = reader.ask("redeem", owner="a", prompts=[prompt])
    if fresh.get("right") != BLOCKS:
        return Result(Seen.FAILED, f"the reference gives {fresh} before anything is deleted")
    held = reader.ask("hold", prompt=prompt)
    dropped = reader.ask("drop", prompts=[prompt])
    if held.get("error") or dropped.get("error"):
        return Result(Seen.FAILED, f"hold: {held.get('error', '')}; drop: {dropped.get('error', '')}")
    reader.ask("store", owner="a", prompts=arena.fresh(BEYOND_MEMORY))
    found = reader.ask("redeem", owner="a", prompts=[prompt])
    line = f"after deletion and reuse the reference gave {found.get('right', 0)} blocks as stored, "
    line += f"{found.get('wrong', 0)} with other bytes, {found.get('missing', 0)} not"
    error = f"; {found['error']}" if found.get("error") else ""
    if found.get("wrong"):
        return Result(Seen.WRONG, line + error)
    if found.get("right"):
        return Result(Seen.HELD, line + error)
    return Result(Seen.REFUSED if error else Seen.MISS, line + error)


def _at_rest(arena: Arena, damage: Callable[[Sequence[Path], list[bytes]], int]) -> Result:
    """Let blocks come to rest, damage their files, and load them."""
    prompts = arena.stored(4)
    try:
        prompts = arena.system.rest(arena.caller("a"), prompts)
    except TimeoutError as e:
        return Result(Seen.FAILED, f"the blocks do not come to rest: {e}")
    blocks = [bytes(block) for prompt in prompts for block in content("a", prompt)]
    touched = damage(arena.system.files(), blocks)
    arena.system.wake()
    if not touched:
        return Result(Seen.FAILED, f"no block was found in {len(arena.system.files())} files")
    if arena.system.stops_to_rest:
        arena.attach_all()
    found = arena.caller("a").ask("load", owner="a", prompts=prompts)
    line = f"{touched} places changed; of {len(blocks)} blocks {found.get('wrong', 0)} were served with wrong bytes, "
    line += f"{found.get('right', 0)} right, {found.get('missing', 0)} not"
    error = f"; {found['error']}" if found.get("error") else ""
    if found.get("wrong"):
        return Result(Seen.WRONG, line + error)
    if found.get("right") == len(blocks):
        return Result(Seen.FAILED, f"{line}: what was changed is not what is read")
    return Result(Seen.REFUSED if error else Seen.MISS, line + error)


def flip(arena: Arena) -> Result:
    """One bit of every block in files is flipped."""

    def damage(files: Sequence[Path], blocks: list[bytes]) -> int:
        places = arena.system.places(files, blocks)
        for place in places:
            piece = bytearray(place.read())
            piece[-BLOCK_BYTES // 3] ^= 0x10
            place.write(bytes(piece))
        return len(places)

    return _at_rest(arena, damage)


def swap(arena: Arena) -> Result:
    """Blocks in files change places, two and two, with all that is stored of each."""

    def damage(files: Sequence[Path], blocks: list[bytes]) -> int:
        places = arena.system.places(files, blocks)
        for mine, its in zip(places[::2], places[1::2], strict=False):
            here, there = mine.read(), its.read()
            mine.write(there)
            its.write(here)
        return len(places) // 2 * 2

    return _at_rest(arena, damage)


def flood(arena: Arena) -> Result:
    """One client asks without pause, on thousands of connections; another one loads its blocks meanwhile."""
    prompts, victim, flooder = arena.stored(), arena.caller("a"), arena.caller("b")
    seconds = 2.0 * arena.scale
    calm = victim.ask("measure", owner="a", prompts=prompts, seconds=seconds)
    before = arena.resident_bytes()
    flooder.ask("flood")
    accepted = flooder.ask("connect", count=1_000 * arena.scale)
    under = victim.ask("measure", owner="a", prompts=prompts, seconds=2 * seconds)
    over = flooder.ask("calm")
    grown = arena.resident_bytes() - before
    line = f"{over.get('requests')} requests and {accepted.get('accepted')} connections; the other's p99 "
    line += f"{1e3 * calm.get('p99_s', 0):.1f} ms before, {1e3 * under.get('p99_s', 0):.1f} ms under it, "
    line += f"{under.get('missing')} blocks missed; memory {grown / (1 << 20):+.0f} MiB"
    line += f"; {under['error']}" if under.get("error") else ""
    values = {"p99_calm_s": calm.get("p99_s", 0.0), "p99_flood_s": under.get("p99_s", 0.0), "grown_bytes": float(grown)}
    if under.get("wrong"):
        return Result(Seen.WRONG, line, values)
    is_slow = values["p99_flood_s"] > max(P99_S_MAX, P99_GROWTH_MAX * values["p99_calm_s"])
    if is_slow or not under.get("right") or grown > MEMORY_GROWTH_MAX:
        return Result(Seen.WEDGED, line, values)
    return Result(Seen.HELD, line, values)


def crash(arena: Arena) -> Result:
    """What serves is killed in the middle of writes, again and again; then everything is loaded."""
    wrong = right = 0
    errors: list[str] = []
    written = arena.fresh(BEYOND_MEMORY)
    arena.caller("a").ask("store", owner="a", prompts=written)
    for _ in range(KILLS * arena.scale):
        prompts = arena.fresh(200)
        arena.caller("a").send("store", owner="a", prompts=prompts)
        time.sleep(arena.rng.uniform(0.05, 0.8))  # The moment is drawn; nothing is waited for.
        arena.system.kill()
        arena.replace("a", arena.system.start)
        looked_at = [*arena.rng.sample(written, LOOKED_AT), *prompts]
        written += prompts
        found = arena.caller("a").ask("load", owner="a", prompts=looked_at)
        wrong, right = wrong + found.get("wrong", 0), right + found.get("right", 0)
        errors += [found["error"]] if found.get("error") else []
    (again,) = arena.fresh(1)
    arena.caller("a").ask("store", owner="a", prompts=[again])
    works = arena.caller("a").ask("load", owner="a", prompts=[again]).get("right") == BLOCKS
    line = f"{KILLS * arena.scale} kills: {wrong} blocks with wrong bytes, {right} right"
    line += "" if works else "; it stores nothing any more"
    line += f"; {errors[-1]}" if errors else ""
    if wrong:
        return Result(Seen.WRONG, line)
    if not works:
        return Result(Seen.WEDGED, line)
    return Result(Seen.HELD if right else Seen.MISS, line)


def full(arena: Arena) -> Result:
    """Six times what the disk holds is stored, which is more than memory and disk hold together."""
    prompts = arena.fresh(6 * DISK_BYTES // (BLOCKS * BLOCK_BYTES))
    stored = arena.caller("a").ask("store", owner="a", prompts=prompts)
    found = arena.caller("a").ask("load", owner="a", prompts=prompts)
    (again,) = arena.fresh(1)
    arena.caller("a").ask("store", owner="a", prompts=[again])
    works = arena.caller("a").ask("load", owner="a", prompts=[again]).get("right") == BLOCKS
    total = len(prompts) * BLOCKS
    line = f"{stored.get('stored', 0)} of {total} blocks taken; then {found.get('right', 0)} right, "
    line += f"{found.get('wrong', 0)} wrong, {found.get('missing', 0)} not there"
    line += "; a new prompt is stored and found" if works else "; a new prompt is not stored"
    line += f"; {stored['error']}" if stored.get("error") else ""
    if found.get("wrong"):
        return Result(Seen.WRONG, line)
    if works:
        return Result(Seen.HELD, line)
    return Result(Seen.FULL if found.get("right") else Seen.WEDGED, line)


@dataclass(frozen=True, slots=True)
class Attack:
    """A row of the table."""

    number: int
    title: str
    run: Callable[[Arena], Result]
    is_alone: bool = False
    """It wants a system of its own, because of what it leaves."""


ATTACKS: Final[Mapping[str, Attack]] = {
    "read": Attack(1, "another tenant's blocks, same prompt", read),
    "guess": Attack(1, "another tenant's blocks, guessed keys", guess),
    "swap": Attack(2, "blocks swapped in files", swap),
    "flip": Attack(2, "a bit of each block flipped in files", flip),
    "stale": Attack(3, "a reference used after deletion and reuse", stale),
    "stolen": Attack(4, "another tenant's keys or name, own credentials", stolen),
    "nobody": Attack(4, "another tenant's keys, no credentials", nobody),
    "listing": Attack(4, "blocks listed without credentials", listing),
    "timing": Attack(6, "does a probe tell what others have", timing),
    "flood": Attack(5, "flood by one client", flood, is_alone=True),
    "crash": Attack(7, "kill -9 in writes", crash, is_alone=True),
    "full": Attack(8, "full disk", full, is_alone=True),
}
"""By the name that the command line takes, in the order of a run: blocks are swapped while all others are sound."""
