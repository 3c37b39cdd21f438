"""Requests of the operator as the proxy sees them, and what may be done to one. Pure."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Json = dict[str, Any]

_PERIODIC: Final = ("leases",)
"""Collections that are read and written by the clock: how often depends on the machine, not on the scenario."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes = b""

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") in ("1", "true")

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and not self.is_watch and len(self.path.split("/")) in _LIST_PARTS

    @property
    def is_write(self) -> bool:
        return self.method != "GET"

    @property
    def collection(self) -> str:
        """Plural of the kind."""
        parts = self.path.strip("/").split("/")
        rest = parts[3:] if parts[0] == "apis" else parts[2:]
        return rest[2] if rest[:1] == ["namespaces"] and len(rest) > 2 else "/".join(rest[:1])

    @property
    def is_periodic(self) -> bool:
        return self.collection in _PERIODIC

    @property
    def signature(self) -> str:
        """Name of the call that is the same in every run."""
        what = "WATCH" if self.is_watch else self.method
        return f"{what} {self.path}{self._about()}"

    def _about(self) -> str:
        """What tells apart requests for one path: who a POST is about, and the fields of a patch."""
        if self.method not in ("POST", "PATCH") or not self.body:
            return ""
        body = json.loads(self.body)
        if self.collection == "events":
            return f" {body['reason']} {body['involvedObject']['kind']} {body['involvedObject']['name']}"
        if self.method == "POST":
            return f" {body['metadata']['name']}"
        return f" {','.join(sorted(_fields(body)))}"


_LIST_PARTS: Final = (4, 5, 6, 7)


def _fields(body: Json) -> list[str]:
    """Fields of a patch, two levels deep: a finalizer is another call than a drain."""
    outer = body.keys() - {"apiVersion", "kind"}
    return [f"{k}.{inner}" for k in outer if isinstance(body[k], dict) for inner in body[k] if k != "status"] + [
        k for k in outer if k == "status" or not isinstance(body[k], dict)
    ]


@dataclass(frozen=True, slots=True)
class Deed:
    """What becomes of one request."""

    forwards: bool = True
    status: int = 0
    """Answered in the API server's place; 0: its own answer, or none."""
    loses: bool = False
    """Whether the connection is cut where the answer would come."""
    delay_s: float = 0.0
    """Before anything else."""
    then: Callable[[], None] | None = None
    """Called before the answer is given or lost."""


PASS: Final = Deed()

Judge = Callable[[Seen], Deed]


def refusal(status: int) -> Json:
    """The API server's own words."""
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "message": f"injected {status}"}


@dataclass
class Sight:
    """What watches and lists are shown. Changed by the test while the operator runs."""

    pause_s: float = 0.0
    """Between two events of a watch, so that what lies between them is seen and told of as well."""
    is_frozen: bool = False
    """Watches tell nothing new, as behind a lagging API server."""
    shows_old_lists: bool = False
    """Lists are answered as they were when this began, which the API server never does to a list without a version."""
    coalesces: bool = False
    """What was withheld is never told: the watch ends with 410 and the operator has to list."""
    page_objects: int = 0
    """Lists come in pages of so many; 0: as asked for."""
    expires_pages: int = 0
    """So many of the following pages are refused with 410."""
    tears: int = 0
    """So many of the next events are cut in the middle."""
    old: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """Lists as they were last, by path and query."""
