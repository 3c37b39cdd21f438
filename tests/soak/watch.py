"""What is looked at all along: conditions, metrics, and what each process holds."""

import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from demo.errors import DemoError
from demo.world import NODES, World
from kvstrata_api.units import MIB

REST_S: Final = 180.0
"""Until everything is again as it was before a fault: a fenced agent, a lost directory, a busy machine included."""
LOOK_S: Final = 0.5
GROWTH_SAMPLES_MIN: Final = 20
"""A process that did not live for so many rounds says nothing of growth: pools of threads fill at first."""
MEMORY_GROWTH: Final = 1.25
MEMORY_SLACK_BYTES: Final = 24 * MIB
"""Arenas of malloc and caches that are still filling up: a leak of 2 h passes it."""
COUNT_SLACK: Final = 64
"""Descriptors and threads come and go with connections and segments; one more in each round of 2 h passes it."""

OF_THE_LOAD: Final = frozenset({"CacheEffective", "CalibrationCurrent", "StoresKeepUp"})
"""Conditions that judge what engines ask for and how fast the machine is, not whether the fleet is whole."""

Conditions = Mapping[tuple[str, str], str]
"""Status by object and type of condition."""
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True, slots=True)
class Held:
    """What one process has at rest."""

    memory_bytes: int
    """Its own anonymous memory, without tiers that are files."""
    descriptors: int
    threads: int


@dataclass(slots=True)
class Watch:
    """Follows one world from round to round."""

    world: World
    baseline: dict[tuple[str, str], str] = field(default_factory=dict)
    went: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Conditions that were otherwise than at rest, by the fault that was made then."""
    wrong: list[str] = field(default_factory=list)
    _lives: dict[tuple[str, int], list[Held]] = field(default_factory=lambda: defaultdict(list))
    _counters: dict[str, tuple[int, Series]] = field(default_factory=dict)

    def begin(self) -> None:
        """Take what is there as what there should be."""
        self.baseline = dict(self.conditions())

    def conditions(self) -> Conditions:
        """Of all pools, nodes and tenants, without those of the load."""
        told = json.loads(self.world.cluster.kubectl("get", "kvpools,kvpoolnodes,kvtenants", "-o", "json"))
        return {
            (f"{item['kind']}/{item['metadata']['name']}", condition["type"]): condition["status"]
            for item in told["items"]
            for condition in item.get("status", {}).get("conditions", ())
            if condition["type"] not in OF_THE_LOAD
        }

    def look(self, fault: str) -> None:
        """While a fault lasts: remember what it changed."""
        self.went[fault] |= {f"{of}: {type_} {status}" for (of, type_), status in self._differing()}

    def rest(self) -> float:
        """Wait until processes and conditions are as at the beginning; the seconds it took. What is not is wrong."""
        began_s = time.monotonic()
        while differing := [*self._away(), *(f"{of}: {type_} {status}" for (of, type_), status in self._differing())]:
            if time.monotonic() - began_s > REST_S:
                self.wrong.append(f"{REST_S:.0f} s after the faults: {'; '.join(differing)}")
                break
            time.sleep(LOOK_S)
        return time.monotonic() - began_s

    def sample(self) -> None:
        """Keep what each process holds, and look at its metrics. At rest."""
        for name, pid in self._pids().items():
            self._lives[name, pid].append(held(pid))
        for name, series in self._scraped().items():
            self._judge(name, series)

    def delivered_tokens(self) -> int:
        """What the agents say that they gave to engines since they run."""
        agents = [self.world.runner.name(node) for node in NODES]
        return round(
            sum(
                value
                for name, series in self._scraped().items()
                if name in agents
                for (metric, labels), value in series.items()
                if metric == "kvstrata_load_tokens_total" and ("stage", "delivered") in labels
            )
        )

    def growth(self) -> list[str]:
        """Processes that hold more at the end of their life than near its beginning."""
        return [f"{name} ({pid}): {line}" for (name, pid), life in self._lives.items() for line in grown(life)]

    def judged_lives(self) -> int:
        """Of how many processes growth could be told."""
        return sum(len(life) >= GROWTH_SAMPLES_MIN for life in self._lives.values())

    def _differing(self) -> list[tuple[tuple[str, str], str]]:
        try:
            now = self.conditions()
        except DemoError as e:
            return [(("the API server", "answers"), str(e))]
        found = [(key, now.get(key, "gone")) for key, status in self.baseline.items() if now.get(key) != status]
        # What an operation adds, as EraseCompleted, has to come true.
        return found + [(key, status) for key, status in now.items() if key not in self.baseline and status != "True"]

    def _away(self) -> list[str]:
        pids = self._pids()
        return [f"{name} does not run" for name in self.world.processes.names if name not in pids]

    def _pids(self) -> dict[str, int]:
        found = {name: self.world.processes.pid(name) for name in self.world.processes.names}
        return {name: pid for name, pid in found.items() if pid is not None}

    def _scraped(self) -> dict[str, Series]:
        return {name: scraped(address) for name, address in self.world.metrics().items()}

    def _judge(self, name: str, series: Series) -> None:
        """No counter of a process falls, and no tier holds more than it may."""
        pid = self._pids().get(name, 0)
        of, before = self._counters.get(name, (0, {}))
        if of == pid:
            self.wrong += [
                f"{name}: {key[0]}{dict(key[1])} fell from {value} to {series.get(key)}"
                for key, value in before.items()
                if key[0].endswith("_total") and series.get(key, value) < value
            ]
        self._counters[name] = (pid, series)
        for (metric, labels), used in series.items():
            may = series.get(("kvstrata_tier_capacity_bytes", labels))
            if metric == "kvstrata_tier_used_bytes" and may is not None and used > may:
                self.wrong.append(f"{name}: tier {dict(labels)['tier']} holds {used:.0f} bytes, may hold {may:.0f}")


def held(pid: int) -> Held:
    """What a process has now; nothing where it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return Held(0, 0, 0)
    found = {name: value.split()[0] for name, _, value in (line.partition(":") for line in status) if value.split()}
    return Held(int(found.get("RssAnon", "0")) * 1024, descriptors, int(found.get("Threads", "0")))


def grown(life: Sequence[Held]) -> list[str]:
    """How much more the last third of a life holds than its second quarter, where that is more than it may. Pure.

    The first quarter is left out: caches fill up then.
    """
    if len(life) < GROWTH_SAMPLES_MIN:
        return []
    early, late = life[len(life) // 4 : len(life) // 2 + 1], life[-(len(life) // 3) :]
    found = []
    for what in ("memory_bytes", "descriptors", "threads"):
        before, after = (median(getattr(sample, what) for sample in part) for part in (early, late))
        most = before * MEMORY_GROWTH + MEMORY_SLACK_BYTES if what == "memory_bytes" else before + COUNT_SLACK
        if after > most:
            found.append(f"{what} grew from {before:.0f} to {after:.0f}, {most:.0f} at most in {len(life)} rounds")
    return found


def scraped(address: str) -> Series:
    """Every series that a process serves."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
