"""Which threats there are, and how one is run."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from support.runner.outcome import Outcome, Scale

THREATS: Final[dict[str, str]] = {
    "T1": "hit timing tells nothing across scopes",
    "T2": "prompts cannot be confirmed by replay across scopes",
    "T3": "enumeration, direct fetch and stale rehydration find nothing",
    "T4": "a dump of Redis gives no way to guess prompts",
    "T5": "no caller chooses a salt, and none is ambiguous",
    "T6": "no tier drops the scope",
    "T7": "forged, swapped and replayed blocks are never served",
    "T8": "another model, dtype or layout never hits",
    "T9": "recycled slots hold nothing of their last scope",
    "T10": "nothing at rest is readable once its scope is shredded",
    "T11": "bad credentials are refused by every verb",
    "T12": "the roles in Redis may do what is declared and nothing else",
    "T13": "malformed frames are refused, without crash or growth",
    "T14": "a flood by one tenant leaves the hit ratio of another",
    "T15": "over-privileged manifests and bad custom resources are not admitted",
}
"""Names are those of the threat table in docs/isolation.md; module `threats.t<n>` runs each."""

RUNNABLE: Final = {name: told for name, told in THREATS.items() if find_spec(f"threats.{name.lower()}")}


def runner(threat: str) -> Callable[[Scale], Outcome]:
    """Return what tries a threat; it blocks until that is done."""
    return partial(_run, threat)


def _run(threat: str, scale: Scale) -> Outcome:
    run: Callable[[Scale], Outcome] = import_module(f"threats.{threat.lower()}").run
    return run(scale)
