"""The Lua transitions as they are loaded into Redis: text and SHA-1. Pure but for reading package files."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Final

_FOLDER: Final = files("kvstrata_metadata.store") / "lua"
_EARLIER: Final = _FOLDER / "earlier"
"""Whole texts as a release had them, each `<transition>-<version>.lua`; they are never changed."""

_ALLOW_OOM: Final = "#!lua flags=allow-oom\n"


class Script(StrEnum):
    """Every transition; the value is the name of its file."""

    ANNOUNCE = "announce"
    LOCATE = "locate"
    WITHDRAW = "withdraw"
    DROP_AGENT = "drop_agent"
    SWEEP = "sweep"
    COUNT = "count"
    SURVEY = "survey"
    TALLY = "tally"
    ERASE = "erase"
    NOMINATE = "nominate"
    TAKE_NOMINATIONS = "take_nominations"
    SESSION = "session"
    REGISTER_AGENT = "register_agent"
    HEARTBEAT = "heartbeat"
    OPEN_SHARDS = "open_shards"
    RESOLVE = "resolve"
    FENCE = "fence"
    FLEET = "fleet"
    SHARDS_OF = "shards_of"
    FORGET = "forget"
    LEAD = "lead"
    CLAIM_ERASED = "claim_erased"
    CLAIMS = "claims"
    SETTLE_CLAIM = "settle_claim"


_OF_REGISTRY = (
    Script.REGISTER_AGENT, Script.HEARTBEAT, Script.OPEN_SHARDS, Script.RESOLVE, Script.FENCE, Script.FLEET,
    Script.SHARDS_OF, Script.FORGET, Script.LEAD, Script.CLAIM_ERASED, Script.CLAIMS, Script.SETTLE_CLAIM,
)  # fmt: skip


_OF_MAILBOX = (Script.NOMINATE, Script.TAKE_NOMINATIONS)

_REFUSED_WHEN_FULL = (Script.ANNOUNCE, Script.SESSION, Script.NOMINATE)
"""What fills Redis. Everything else goes on without memory: beats, withdrawals and removals are the way out of it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Text of a transition and the name by which EVALSHA calls it."""

    text: str
    """As Redis loads it. A first line that begins with `#!` is for Redis, the rest is Lua 5.1."""
    sha: str


@cache
def sources() -> dict[Script, Source]:
    """All transitions, each joined with the definitions that it shares with the others on its keys."""
    call = (_FOLDER / "call.lua").read_text()
    made = {}
    for script in Script:
        flags = "" if script in _REFUSED_WHEN_FULL else _ALLOW_OOM
        prelude = (_FOLDER / f"{_prelude(script)}.lua").read_text()
        made[script] = _source(flags + call + prelude + (_FOLDER / f"{script}.lua").read_text())
    return made


@cache
def loaded() -> tuple[Source, ...]:
    """What Redis is to know: our transitions, and those that agents of the release before call by other texts.

    Agents load nothing, and are replaced long after the metadata service and Redis.
    """
    earlier = sorted(found.name for found in _EARLIER.iterdir() if found.name.endswith(".lua"))
    return (*sources().values(), *(_source((_EARLIER / name).read_text()) for name in earlier))


def _source(text: str) -> Source:
    return Source(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _prelude(script: Script) -> str:
    if script in _OF_REGISTRY:
        return "registry"
    return "mailbox" if script in _OF_MAILBOX else "prelude"
