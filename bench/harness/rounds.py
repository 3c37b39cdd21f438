"""Runs cases: every participant in turn, in every repeat in another order, so that drift hits all alike."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from bench.harness.cases import FILL_SETS, Case
from bench.harness.common import Sample
from bench.harness.drivers import Driver, FailedError, ask_all
from bench.harness.participants import OURS, TOKENS, Field

THROUGH_AGENT: Final = (OURS, TOKENS)
"""Participants whose blocks lie in the agent."""


@dataclass(slots=True)
class Turns:
    """Seconds of each repeat of one case, by participant."""

    case: Case
    put: dict[str, list[float]] = field(default_factory=dict)
    get: dict[str, list[float]] = field(default_factory=dict)
    parts: list[dict[str, float]] = field(default_factory=list)
    """For each repeat the seconds that ours spent in each verb, one client only."""

    def seconds(self, work: str, name: str) -> Sample | None:
        """Seconds of a participant; None when it took no part to the end."""
        taken = (self.put if work == "put" else self.get).get(name, [])
        return Sample(tuple(taken)) if len(taken) == self.case.repeats else None

    def rate(self, work: str, name: str) -> Sample | None:
        """Bytes per second of a participant."""
        seconds = self.seconds(work, name)
        return None if seconds is None else Sample(tuple(self.case.set_bytes / s for s in seconds.values))


class WrongBytesError(Exception):
    """A participant gave back other bytes than it was given: its figures would mean nothing."""


class Rounds:
    """Carries out cases on one field of participants."""

    def __init__(self, made: Field) -> None:
        self._field = made
        self._generation = 0

    def store_and_load(self, case: Case, clients: dict[str, tuple[Driver, ...]]) -> Turns:
        """Store and load a set with every participant, once to warm up and then `case.repeats` times."""
        turns = Turns(case)
        for name, drivers in tuple(clients.items()):
            with self._or_without(name, clients):
                self._open(case, drivers)
        for repeat in range(-1, case.repeats):
            for name in _rotated(tuple(clients), repeat):
                with self._or_without(name, clients):
                    self._turn(turns, name, clients[name], is_counted=repeat >= 0)
        self._field.agent.ask("clear", keep=False)
        return turns

    def store_into_full(self, case: Case, clients: dict[str, tuple[Driver, ...]]) -> Turns:
        """Store set after set and remove none, so that whoever is full has to make room for each.

        Nothing is loaded: what of a set a full cache keeps is for its policy to say.
        """
        turns = Turns(case)
        for drivers in clients.values():
            self._open(case, drivers)
        for repeat in range(-FILL_SETS, case.repeats):
            for name in _rotated(tuple(clients), repeat):
                self._generation += 1
                at = {"generation": self._generation}
                ask_all(clients[name], "prepare", at)
                put_s, _ = _timed(clients[name], "put", at)
                if repeat >= 0:
                    turns.put.setdefault(name, []).append(put_s)
        return turns

    def _open(self, case: Case, drivers: Sequence[Driver]) -> None:
        for number, driver in enumerate(drivers):
            driver.send("open", **{**asdict(case.work), "client": number})
        for driver in drivers:
            driver.read()

    def _turn(self, turns: Turns, name: str, drivers: Sequence[Driver], *, is_counted: bool) -> None:
        self._generation += 1
        at = {"generation": self._generation}
        ask_all(drivers, "prepare", at)
        put_s, put_parts = _timed(drivers, "put", at)
        get_s, get_parts = _timed(drivers, "get", at)
        if not all(answer["is_same"] for answer in ask_all(drivers, "check", at)):
            raise WrongBytesError(f"{name}: what was loaded is not what was stored")
        ask_all(drivers, "clear", at)
        if name in THROUGH_AGENT:
            self._field.agent.ask("clear", keep=True)
        if is_counted:
            turns.put.setdefault(name, []).append(put_s)
            turns.get.setdefault(name, []).append(get_s)
            if name == OURS:
                turns.parts.append({**put_parts, **get_parts})

    def lookups(self, case: Case, rounds: int) -> dict[str, Sample]:
        """Keys per second of every participant that can tell how long a prefix is there."""
        names = tuple(n for n in self._field.present if n not in {TOKENS, "memcpy nt"})
        rates: dict[str, list[float]] = {name: [] for name in names}
        self._generation += 1
        at = {"generation": self._generation}
        for name in names:
            driver = self._field.present[name]
            self._open(case, (driver,))
            for verb in ("prepare", "put"):
                driver.ask(verb, **at)
        for repeat in range(-1, case.repeats):
            for name in _rotated(names, repeat):
                answer = self._field.present[name].ask("lookup", **at, rounds=rounds)
                if answer["hits"] != case.blocks:
                    raise WrongBytesError(f"{name}: {answer['hits']} of {case.blocks} blocks found")
                if repeat >= 0:
                    rates[name].append(case.blocks * rounds / answer["seconds"])
        self._field.agent.ask("clear", keep=False)
        return {name: Sample(tuple(values)) for name, values in rates.items()}

    @contextlib.contextmanager
    def _or_without(self, name: str, clients: dict[str, tuple[Driver, ...]]) -> Iterator[None]:
        """A peer that breaks off is left out of the rest of the run; ours may not break off."""
        try:
            yield
        except FailedError as e:
            if name in THROUGH_AGENT:
                raise
            self._field.drop(name, str(e))
            del clients[name]


def _timed(drivers: Sequence[Driver], verb: str, at: dict[str, int]) -> tuple[float, dict[str, float]]:
    """Seconds until all clients are done, and the parts of the first: one client times itself, beside the work."""
    start_s = time.perf_counter()
    answers = ask_all(drivers, verb, at)
    wall_s = time.perf_counter() - start_s
    return (answers[0]["seconds"] if len(drivers) == 1 else wall_s), answers[0]["parts"]


def _rotated(names: Sequence[str], repeat: int) -> Iterator[str]:
    """All names, beginning with another one in each repeat."""
    start = repeat % len(names) if names else 0
    yield from (*names[start:], *names[:start])
