"""Drills of the alert rules: the rules in a faster time on a real Prometheus, and what is to be seen of an alert.

A `Drill` makes a real fault and takes it away again. Its alerts are quiet before, fire meanwhile with all that their
rule promises, and are quiet once more behind it.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from drawing.prometheus_server import Server

WAIT_S = 90.0
"""Bound of every wait. What is waited for takes some seconds; a machine that is busy takes longer."""
_TARGET = {"instance", "job"}
"""Labels that Prometheus adds, and a rule that aggregates drops."""
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(?<![\w.])(\d+)(ms|[smhd])(?!\w)")
_IN_EXPRESSION = re.compile(rf'"[^"]*"|(?<=\[){_DURATION.pattern}(?=\])|(?<=\boffset ){_DURATION.pattern}')
"""A text, which is left alone, a range or an offset."""
_COUNT = re.compile(r"(\bincrease\([^()]*\)\)*) > (\d+)")
"""How many of something a range has to have."""
T = TypeVar("T")


def quickened(rules: str, factor: int) -> str:
    """Rules whose `for`, ranges, offsets and counts in a range are divided by `factor`: as often, in less time.

    `ValueError` where that would be less than a millisecond, the least that Prometheus knows.
    """
    content = yaml.safe_load(rules)
    for group in content["groups"]:
        for rule in group["rules"]:
            rule["for"] = _divided(rule["for"], factor)
            quick = _IN_EXPRESSION.sub(lambda found: _divided(found.group(), factor), rule["expr"])
            rule["expr"] = _COUNT.sub(lambda found: f"{found[1]} > {int(found[2]) / factor:g}", quick)
    return yaml.safe_dump(content)


def _divided(duration: str, factor: int) -> str:
    if duration.startswith('"'):
        return duration
    found = _DURATION.fullmatch(duration)
    if found is None:
        raise ValueError(f"{duration!r} is no duration of one unit")
    whole_ms = round(int(found[1]) * _UNITS_S[found[2]] * 1000 / factor)
    if whole_ms < 1:
        raise ValueError(f"{duration} divided by {factor} is less than 1 ms")
    return f"{whole_ms}ms"


@dataclass(frozen=True)
class Alerts:
    """What a Prometheus says of the alerts of a file."""

    server: Server
    rules: Path

    def firing(self, name: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Alerts that fire under these labels, and maybe others. Values are patterns."""
        rule = next(rule for rule in self.server.rules() if rule["name"] == name)
        found = [alert for alert in rule["alerts"] if alert["state"] == "firing"]
        return [alert for alert in found if all(re.fullmatch(labels[k], alert["labels"].get(k, "")) for k in labels)]

    def wait_quiet(self, name: str, labels: Mapping[str, str]) -> None:
        """Wait until an alert does not fire."""
        is_quiet = self.server.wait(lambda: not self.firing(name, labels), WAIT_S)
        assert is_quiet, f"{name} goes on firing: {self.firing(name, labels)}"

    def wait_firing(self, name: str, labels: Mapping[str, str]) -> None:
        """Wait until an alert fires, and compare it with its rule: just these labels, every text filled in."""
        seen: list[dict[str, Any]] = []

        def fires() -> bool:
            seen[:] = self.firing(name, labels)
            return bool(seen)

        assert self.server.wait(fires, WAIT_S), f"{name} does not fire for {labels}"
        declared = self._declared(name)
        for alert in seen:
            own = {k: v for k, v in alert["labels"].items() if k not in _TARGET | labels.keys()}
            assert own == {"alertname": name, **declared["labels"]}
            assert alert["annotations"].keys() == declared["annotations"].keys()
            for key, text in declared["annotations"].items():
                assert re.fullmatch(_pattern(text, alert["labels"]), alert["annotations"][key]), alert["annotations"]

    def _declared(self, name: str) -> dict[str, Any]:
        groups = yaml.safe_load(self.rules.read_text())["groups"]
        return next(rule for group in groups for rule in group["rules"] if rule["alert"] == name)


def _pattern(template: str, labels: Mapping[str, str]) -> str:
    """What a template of an annotation may become: labels as they are, and a number or text for what is computed."""
    parts = re.split(r"(\{\{ with .*?\{\{ end \}\}|\{\{.*?\}\})", template)
    return "".join(_filled(part, labels) if part.startswith("{{") else re.escape(part) for part in parts)


def _filled(action: str, labels: Mapping[str, str]) -> str:
    of_label = re.fullmatch(r"\{\{ \$labels\.(\w+) \}\}", action)
    return re.escape(labels[of_label[1]]) if of_label else r"(?!NaN|[+-]Inf|<)\S.*"


@dataclass(frozen=True)
class Drill(Generic[T]):
    """A real fault on a running system `T`, and the alerts that it sets off, each with the labels of its subject."""

    fault: Callable[[T], AbstractContextManager[None]]
    alerts: Mapping[str, Mapping[str, str]]
    past: str = ""
    """What a rule compares with; the fault waits until this query has an answer."""


def carry_out(drills: Sequence[Drill[T]], system: T, watch: Alerts) -> None:
    """Quiet, all faults at once, firing, no fault, quiet."""
    expected = [(name, labels) for drill in drills for name, labels in drill.alerts.items()]
    for name, labels in expected:
        watch.wait_quiet(name, labels)
    for past in (drill.past for drill in drills if drill.past):
        assert watch.server.wait(lambda query=past: bool(watch.server.query(query)), WAIT_S), past  # type: ignore[misc]
    with ExitStack() as faults:
        for drill in drills:
            faults.enter_context(drill.fault(system))
        for name, labels in expected:
            watch.wait_firing(name, labels)
    for name, labels in expected:
        watch.wait_quiet(name, labels)


@contextmanager
def repeating(act: Callable[[], object], every_s: float) -> Iterator[None]:
    """Do something again and again, on a thread of its own, until the block ends. What it raises is raised there."""
    ended = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            while not ended.wait(every_s):
                act()
        except BaseException as e:  # noqa: BLE001  Raised again by the test's thread.
            raised.append(e)

    thread = threading.Thread(target=run, name="repeating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(WAIT_S)
        if raised:
            raise raised[0]
