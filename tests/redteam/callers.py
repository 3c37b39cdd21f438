"""Child side of an attack: a client of one system that answers verbs, lines of JSON. Needs numpy and nothing of ours.

Every system has the same verbs, so that every attack is the same program for all of them. A prompt is a number; tokens
and bytes of its blocks follow from it, and whoever loads compares what came with what the owner stored.
"""

import contextlib
import hashlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS: Final = 16
BLOCKS: Final = 4
"""Of a prompt."""
LAYERS, HEAD_DIM = 2, 64
BLOCK_BYTES: Final = LAYERS * 2 * BLOCK_TOKENS * HEAD_DIM * 2
"""K and V of one head in bf16: 8 KiB."""
ERRORS_KEPT: Final = 3
FAILURES_MAX: Final = 8
"""A system that fails so often within one verb is asked no more: each time may be a timeout."""
CHARS_MAX: Final = 300
"""Of an error."""

Block = bytes


def tokens(prompt: int) -> list[int]:
    """Tokens of a prompt, which every tenant may have."""
    first = 1 + prompt * BLOCKS * BLOCK_TOKENS
    return list(range(first, first + BLOCKS * BLOCK_TOKENS))


def content(owner: str, prompt: int, version: int = 0) -> npt.NDArray[np.uint8]:
    """Bytes of the blocks that a tenant stores for a prompt, (BLOCKS, BLOCK_BYTES) uint8; no two are alike."""
    seed = hashlib.sha256(f"{owner}/{prompt}/{version}".encode()).digest()
    return np.random.default_rng(list(seed)).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)


class Caller(Protocol):
    """One tenant's client of a system, which has one connection until the next `attach`."""

    def attach(self) -> None:
        """Connect, again where it was connected. Raises what the client library raises."""

    def store(self, prompt: int, blocks: npt.NDArray[np.uint8]) -> int:
        """Store the blocks of a prompt as an engine does; how many are there then as far as the system says."""

    def load(self, prompt: int) -> Sequence[Block]:
        """The leading blocks of a prompt that the system serves."""

    def probe(self, prompt: int) -> int:
        """How many leading blocks the system says that there are."""

    def drop(self, prompt: int) -> None:
        """Delete the blocks of a prompt by whatever the system has for that."""

    def keys(self, prompt: int) -> dict[str, Any]:
        """All that names the blocks of a prompt in this system: what a thief of keys has."""

    def forge(self, how: str, stolen: dict[str, Any], prompt: int) -> Sequence[Block]:
        """Load another tenant's prompt: with a key that is `guess`ed, one that is `stolen`, or with `none`."""

    def hold(self, prompt: int) -> None:
        """Take a reference (a lease, a descriptor, an address) of a prompt's blocks, and keep it."""

    def redeem(self) -> Sequence[Block]:
        """What the reference that is held gives now, by the weakest check that the system's own client makes."""

    def flood(self, stop: threading.Event) -> int:
        """Look up prompts as fast as it goes until `stop`; how many."""

    def connect(self, count: int) -> int:
        """Open that many more connections and keep them, saying nothing; how many were accepted."""

    def rest(self, prompts: Sequence[int]) -> list[int]:
        """Bring blocks to files as far as that is the client's, and out of memory; the prompts that are there."""

    def close(self) -> None:
        """Let go of everything."""


def lookups_until(stop: threading.Event, probe: Callable[[int], int]) -> int:
    """Look up prompts that nobody stored, one after the other; how many."""
    count = 0
    while not stop.is_set():
        probe(1_000_000 + count % 1_000)
        count += 1
    return count


class Answers:
    """Carries out verbs."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._verbs: dict[str, Callable[..., dict[str, Any] | None]] = {
            "attach": caller.attach,
            "store": self._store,
            "load": lambda **asked: _compared(asked, caller.load),
            "redeem": lambda **asked: _compared(asked, lambda _: caller.redeem()),
            "forge": self._forge,
            "probe": self._probe,
            "keys": lambda prompts: {"keys": {prompt: caller.keys(prompt) for prompt in prompts}},
            "drop": lambda prompts: {"error": "; ".join(_each(prompts, caller.drop)[1])},
            "rest": lambda prompts: {"prompts": caller.rest(prompts)},
            "hold": caller.hold,
            "measure": lambda **asked: self._measure(asked),
            "connect": self._connect,
            "flood": self._start_flood,
            "calm": self._end_flood,
        }
        self._flood: threading.Thread | None = None
        self._stop = threading.Event()
        self._requests = 0

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One verb; what it raises is an answer as well."""
        verb = asked.pop("verb")
        try:
            return self._verbs[verb](**asked) or {}
        except Exception as e:  # noqa: BLE001  Any error of a peer is an observation.
            return {"error": _told(e)}

    def _forge(self, stolen: dict[str, Any], how: str, **asked: Any) -> dict[str, Any]:
        return _compared(asked, lambda prompt: self._caller.forge(how, stolen[str(prompt)], prompt))

    def _connect(self, count: int) -> dict[str, Any]:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return {"accepted": self._caller.connect(count)}

    def _store(self, owner: str, prompts: list[int], version: int = 0) -> dict[str, Any]:
        stored, errors = _each(prompts, lambda prompt: self._caller.store(prompt, content(owner, prompt, version)))
        return {"stored": sum(stored), "error": "; ".join(errors)}

    def _probe(self, prompts: list[int]) -> dict[str, Any]:
        hits, times_s = [], []
        for prompt in prompts:
            start_s = time.perf_counter()
            hits.append(self._caller.probe(prompt))
            times_s.append(time.perf_counter() - start_s)
        return {"hits": hits, "seconds": times_s}

    def _measure(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Load prompts in turn for some seconds; the times of loads, and what came."""
        until_s = time.monotonic() + asked["seconds"]
        times_s, found, turn = [], {"right": 0, "wrong": 0, "missing": 0}, 0
        error = ""
        while time.monotonic() < until_s:
            prompt = asked["prompts"][turn % len(asked["prompts"])]
            turn += 1
            start_s = time.perf_counter()
            one = _compared({"owner": asked["owner"], "prompts": [prompt]}, self._caller.load)
            times_s.append(time.perf_counter() - start_s)
            for what in found:
                found[what] += one[what]
            error = error or one["error"]
        p50_s, p99_s = (float(np.percentile(times_s, q)) for q in (50, 99))
        return {"loads": turn, "p50_s": p50_s, "p99_s": p99_s, "error": error, **found}

    def _start_flood(self) -> dict[str, Any]:
        def run() -> None:
            try:
                self._requests = self._caller.flood(self._stop)
            except Exception as e:  # noqa: BLE001  As in `answer`.
                sys.stderr.write(_told(e) + "\n")

        self._stop.clear()
        self._requests = 0
        self._flood = threading.Thread(target=run, daemon=True)
        self._flood.start()
        return {}

    def _end_flood(self) -> dict[str, Any]:
        self._stop.set()
        assert self._flood is not None
        self._flood.join(30.0)
        return {"requests": self._requests, "is_over": not self._flood.is_alive()}


def _compared(asked: dict[str, Any], load: Callable[[int], Sequence[Block]]) -> dict[str, Any]:
    """Load each prompt and compare: blocks as the owner stored them, other bytes, and blocks that did not come."""
    found = {"right": 0, "wrong": 0, "missing": 0}
    loaded, errors = _each(asked["prompts"], lambda prompt: (prompt, load(prompt)))
    for prompt, blocks in loaded:
        wanted = content(asked["owner"], prompt, asked.get("version", 0))
        right = sum(bytes(block) == bytes(row) for block, row in zip(blocks, wanted, strict=False))
        found["right"] += right
        found["wrong"] += len(blocks) - right
    found["missing"] = len(asked["prompts"]) * BLOCKS - found["right"] - found["wrong"]
    return {**found, "error": "; ".join(errors)}


def _each(prompts: Sequence[int], do: Callable[[int], Any]) -> tuple[list[Any], list[str]]:
    """Do it for each prompt, until it has failed some times; what came of it, and errors."""
    done: list[Any] = []
    errors: list[str] = []
    for prompt in prompts:
        if len(errors) >= FAILURES_MAX:
            break
        try:
            done.append(do(prompt))
        except Exception as e:  # noqa: BLE001  As in `answer`.
            errors.append(_told(e))
    return done, list(dict.fromkeys(errors))[:ERRORS_KEPT]


def _told(e: Exception) -> str:
    return " ".join(f"{type(e).__name__}: {e}".split())[:CHARS_MAX]


@contextlib.contextmanager
def _answers() -> Iterator[Any]:
    """Where answers go: libraries print to stdout, which joins stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    yield answers


def serve(make: Callable[[], Caller], version: str) -> None:
    """Answer verbs until stdin ends, then leave at once: some libraries never end by themselves."""
    with _answers() as answers:
        caller = make()
        print(json.dumps({"versions": {"version": version}}), file=answers)
        verbs = Answers(caller)
        for line in sys.stdin:
            print(json.dumps(verbs.answer(json.loads(line))), file=answers)
        caller.close()
        answers.flush()
    os._exit(0)
