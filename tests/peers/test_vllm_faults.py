"""A real vLLM beside `kvstrata up`: many prompts, many deaths of the agent, and what else can be wrong with it.

Counts are for `make test-peers`; every prompt of every case is compared with what the engine says by itself.
"""

import itertools
import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from bench.harness.drivers import Driver
from kvstrata import NO_TOKEN, Client, PrefixCache, Target
from kvstrata_api.units import MIB
from support.agent.standalone import BLOCKS, LAYOUT, POOL, Json, Up, pool, tokens, until
from support.engines import short_leases
from support.engines.environments import say
from support.engines.tiny_model import prompts
from support.engines.vllm import Tokens, command, right_tokens

pytestmark = [pytest.mark.peers, pytest.mark.matrix, pytest.mark.timeout(3600)]

VERSION: Final = "0.32.0"
PEER: Final = f"vllm {VERSION} faults"
KILLS: Final = 100
MANY: Final = prompts(1000, seed=21)
FEW: Final = prompts(24, seed=22)
DEADLINE_S: Final = 2.0
"""How long a request waits for its blocks."""
CONNECTOR, TIER = "--connector", "--tier"
"""How KV of an engine comes to the agent: by our connector, or below vLLM's own CPU offloading."""
GROWTH_BYTES: Final = 64 * MIB


def _say(**facts: Any) -> None:
    say(json.dumps(facts))


@dataclass
class Place:
    """What engines and agents of this file share."""

    python: Path
    model: Path
    home: Path

    @property
    def socket(self) -> Path:
        return self.home / "state" / "run" / "agent.sock"

    @property
    def nvme(self) -> Path:
        return self.home / "state" / "nvme"

    def engine(self, *arguments: str, way: str = CONNECTOR, **extra: Any) -> Driver:
        """A vLLM that keeps its KV with the agent of this place, whether it is there or not."""
        known = {"socket": str(self.socket), "pool": POOL, "load_deadline_s": DEADLINE_S}
        more = {"revision": "1"} if way == TIER else {"staging_bytes": 64 * MIB}
        config = json.dumps({**known, **more, **extra})
        driver = Driver(command(self.python, self.model, way, config, *arguments, left=self.home))
        driver.versions()
        return driver

    def up(self, *options: str, module: str = "kvstrata_client.cli", memory: str = "64Mi", **accepted: str) -> Up:
        """An agent of this place with memory and a disk, started."""
        made = Up(self.home, options, module=module)
        declared: Json = pool(self.nvme)
        dram, nvme = declared["spec"]["tiers"]
        dram["capacityPerNode"], nvme["nvme"]["io"] = memory, "Posix"
        declared["spec"]["compatibility"] |= {"dtype": "fp32", **accepted}
        made.declare(declared)
        made.start()
        return made


@pytest.fixture(scope="module")
def version() -> str:
    return VERSION


@pytest.fixture(scope="module")
def place(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(python, model, tmp_path_factory.mktemp("one"))


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """What is open ends with the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def right(place: Place) -> dict[str, Tokens]:
    """Greedy tokens of an engine by itself."""
    many, few = right_tokens(place.python, place.model, (MANY, FEW))
    assert len({tuple(tokens) for tokens in many}) > 900, "wrong KV would not show in the tokens"
    return {"many": many, "few": few}


def run(driver: Driver, given: Tokens, wanted: Tokens) -> int:
    """Generate with nothing in the engine's own memory; every answer has to be right and whole.

    Returns the tokens that came from the agent.
    """
    assert driver.ask("reset")["is_reset"]
    found = driver.ask("run", prompts=given)
    assert found["reasons"] == ["length"], found["reasons"]
    wrong = [n for n, (a, b) in enumerate(zip(found["tokens"], wanted, strict=True)) if a != b]
    assert not wrong, f"{len(wrong)} of {len(given)} answers differ: prompts {wrong[:10]}"
    return int(found["external"])


def until_loaded(driver: Driver, wanted: Tokens) -> None:
    """Generate until blocks come from the agent; equal every time."""
    ends_s = time.monotonic() + 60
    while not run(driver, FEW, wanted):
        assert time.monotonic() < ends_s, "the agent is there, and nothing is loaded"


@pytest.mark.parametrize("chosen", [{}, {"layerwise": True}, {"way": TIER}], ids=["whole", "layerwise", "tier"])
def test_a_thousand_prompts_have_equal_tokens_and_zeros_are_noticed(
    place: Place,
    right: dict[str, Tokens],
    opened: ExitStack,
    chosen: dict[str, Any],
    record_property: Callable[[str, object], None],
) -> None:
    opened.enter_context(place.up())
    driver = opened.enter_context(place.engine(**chosen))
    run(driver, MANY, right["many"])
    hits = run(driver, MANY, right["many"])
    assert hits > 100_000
    wrong = opened.enter_context(place.engine("--zeros", **chosen)).ask("run", prompts=MANY[:100])
    assert wrong["external"] > 10_000
    differ = sum(a != b for a, b in zip(wrong["tokens"], right["many"], strict=False))
    assert differ > 90
    record_property("equal", f"{len(MANY)}/{len(MANY)}")
    record_property(f"{'_'.join(map(str, chosen)) or 'external'}_hit_tokens", hits)
    _say(**chosen, external_hit_tokens=hits, zeros_noticed=differ)


@pytest.mark.parametrize("way", [CONNECTOR, TIER])
def test_no_death_of_the_agent_ends_the_engine_or_changes_a_token(
    way: str,
    place: Place,
    right: dict[str, Tokens],
    opened: ExitStack,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # oneDNN keeps a kernel for each number of tokens that a step had, 0.2 MB each, and how many steps have depends here
    # on when blocks come: a vLLM by itself grows by 270 MB in 1,200 prompts of all lengths, and with this by 35 MB.
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4")
    driver, chosen = opened.enter_context(place.engine(way=way)), random.Random(5)
    run_s, hits, memory = 2.0, 0, []
    for n in range(KILLS):
        agent = opened.enter_context(place.up())
        until_loaded(driver, right["few"])
        dying = threading.Timer(chosen.uniform(0.0, run_s), agent.stop, (signal.SIGKILL,))
        dying.start()
        started_s = time.monotonic()
        hits += run(driver, FEW, right["few"])
        run_s = max(0.05, min(run_s, time.monotonic() - started_s))
        dying.join()
        if n % 10 == 9:
            memory.append(driver.ask("memory")["own_bytes"])
            _say(kills=n + 1, external_hit_tokens=hits, engine_own_bytes=memory[-1])
    record_property("agent_kills", KILLS)
    assert hits
    assert memory[-1] - memory[1] < GROWTH_BYTES, memory


def test_a_place_where_something_is_wrong_is_answered_in_time_and_used_when_it_is_right(
    place: Place, right: dict[str, Tokens], opened: ExitStack
) -> None:
    """One engine; each agent behind its socket has something wrong with it, and the last one nothing."""
    driver = opened.enter_context(place.engine())
    run(driver, FEW, right["few"])
    wrong: dict[str, Json] = {
        "another dtype": {"dtype": "bf16"},
        "another model": {"model": "somebody/else"},
        "another revision": {"model": str(place.model), "revision": "2"},
        "blocks of another size": {"blockTokens": 32},
    }
    for what, accepted in wrong.items():
        agent = opened.enter_context(place.up(**accepted))
        assert run(driver, FEW, right["few"]) == 0, what
        agent.stop(signal.SIGKILL)

    token = place.home / "token"
    token.write_text("token-of-somebody-" + "x" * 16)
    agent = opened.enter_context(place.up("--token", f"somebody={token}"))
    assert run(driver, FEW, right["few"]) == 0, "who has no token is nobody"
    agent.stop(signal.SIGKILL)

    agent = opened.enter_context(place.up(memory="2Mi"))
    until_loaded(driver, right["few"])
    agent.stop()  # All that fits goes to the disk.
    agent = opened.enter_context(place.up())
    until_loaded(driver, right["few"])
    agent.stop()

    slow = opened.enter_context(place.up(module="support.engines.slow_disk"))
    until(lambda: slow.status()["tiers"][1].get("recoveredBlocks"))
    waited_s = []
    for given, wanted in zip(FEW[:6], right["few"][:6], strict=True):
        started_s = time.monotonic()
        run(driver, [given], [wanted])
        waited_s.append(time.monotonic() - started_s)
    _say(slow_disk_longest_s=max(waited_s), deadline_s=DEADLINE_S)
    assert max(waited_s) < DEADLINE_S * 1.1 + 10.0, "the engine computes what does not come"
    run(driver, FEW, right["few"])
    slow.stop(signal.SIGKILL)

    for file in place.nvme.rglob("*"):
        if file.is_file() and file.stat().st_size > MIB:
            _spoil(file)
    spoilt = opened.enter_context(place.up())
    run(driver, FEW, right["few"])
    run(driver, FEW, right["few"])
    until_loaded(driver, right["few"])
    spoilt.stop(signal.SIGKILL)


@pytest.mark.parametrize("chosen", [{}, {"layerwise": True}, {"way": TIER}], ids=["whole", "layerwise", "tier"])
def test_a_load_whose_leases_were_over_is_a_miss(
    place: Place,
    right: dict[str, Tokens],
    opened: ExitStack,
    chosen: dict[str, Any],
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine is stopped with leases in its hands; meanwhile others write where the blocks lay."""
    driver = opened.enter_context(place.engine(**chosen))
    pid = driver.ask("regions")["pid"]
    monkeypatch.setenv(short_leases.STOPPED, str(pid))
    agent = opened.enter_context(place.up(module="support.engines.short_leases", memory="8Mi"))
    opened.callback(os.kill, pid, signal.SIGCONT)  # It is asked to end before the agent is.
    writing = opened.enter_context(others(agent))
    hits, ends_s = 0, time.monotonic() + 240
    while not (hits and counted(agent, "kvstrata_stray_releases_total", 'cause="late"') > 50):
        assert time.monotonic() < ends_s, f"{hits} tokens were loaded, and no lease was over before it was used"
        hits += run(driver, FEW, right["few"])
    late = counted(agent, "kvstrata_stray_releases_total", 'cause="late"')
    if chosen.get("way") == TIER:
        assert driver.ask("counts")["chunks"]["load failed"]
    else:
        assert counted(agent, "kvstrata_lookup_blocks_total", 'result="miss"') >= late
    assert writing(), "nothing was written meanwhile"
    agent.stop(signal.SIGKILL)
    opened.enter_context(place.up())
    until_loaded(driver, right["few"])
    record_property("leases_over", int(late))
    _say(**chosen, leases_over=late, external_hit_tokens=hits, blocks_of_others=writing())


@contextmanager
def others(agent: Up) -> Iterator[Callable[[], int]]:
    """Another engine of the same user, which stores all the time; what is yielded tells how many blocks by now."""
    ends, stored = threading.Event(), 0
    target = Target(agent.socket, POOL, NO_TOKEN, replace(LAYOUT, dtype="fp32", element_bytes=4), timeout_s=30.0)

    def write() -> None:
        nonlocal stored
        with Client.attach(target, wait_s=60.0) as client:
            for seed in itertools.count():
                if ends.wait(0.02):
                    return
                blocks = np.full((BLOCKS, target.layout.block_bytes), seed % 256, np.uint8)
                stored += PrefixCache(client).store(tokens(seed), blocks).published

    writing = threading.Thread(target=write)
    writing.start()
    try:
        yield lambda: stored
    finally:
        ends.set()
        writing.join()


def counted(agent: Up, name: str, label: str = "") -> float:
    """Sum of a counter of the agent's."""
    address = json.loads(agent.ready_file.read_text())["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{") and label in line)


def _spoil(file: Path) -> None:
    """Change a byte in each 4 KiB that holds something but a record's first, whose names a start reads."""
    with file.open("r+b") as f:
        size = os.fstat(f.fileno()).st_size
        for at in range(6000, size, 4096):
            f.seek(at)
            byte = f.read(1)
            if byte != b"\0":
                f.seek(at)
                f.write(bytes([byte[0] ^ 1]))


def test_an_engine_that_dies_in_a_save_leaves_nothing_wrong(
    place: Place, right: dict[str, Tokens], opened: ExitStack
) -> None:
    opened.enter_context(place.up())
    for after_s in (0.1, 0.3, 0.6):
        dying = opened.enter_context(place.engine())
        dying.send("run", prompts=MANY[:200])
        time.sleep(after_s)
        dying.kill()
    following = opened.enter_context(place.engine())
    run(following, MANY[:200], right["many"][:200])
    assert run(following, MANY[:200], right["many"][:200])
