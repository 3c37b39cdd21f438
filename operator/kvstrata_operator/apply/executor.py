"""Carries out plans: a bounded number of requests at once, each idempotent, failures reported and never retried here.

The planner is level-triggered: whatever fails is still wanted when it plans next, so the caller only has to wait; and
writes may be in flight while the next plan is made, so that a change need not wait for what was planned before it.

Laws: of one object there is never more than one write in flight; a pool's finalizer waits for all that is made for the
pool, or something would be made for a pool that is gone; whatever ends badly for no reason that a retry could
mend ends the task group, and so the process.
"""

import asyncio
import base64
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvstrata_api import names
from kvstrata_api.errors import InvalidInputError, KvStrataError, RetryableError
from kvstrata_api.models.conditions import merge
from kvstrata_api.wrapping import Keks
from kvstrata_kube.answers import Answer, Json
from kvstrata_kube.api import APPLY_PATCH, MERGE_PATCH, Call, KubeApi
from kvstrata_operator.decide.plan.actions import (
    SILENT_REASON,
    Action,
    Apply,
    Create,
    Delete,
    DeleteMany,
    MarkSilent,
    Merge,
    MintDataKey,
    MintKek,
    MintKey,
    Note,
    Rewrap,
    SetFinalizers,
    Shred,
)
from kvstrata_operator.decide.plan.conditions import ConditionMaker
from kvstrata_operator.decide.trust import scope_keys
from kvstrata_operator.observe.kinds import EVENT, Kind, Ref, body_of, format_time
from kvstrata_operator.observe.parse import parse_declared, stored_conditions

log = logging.getLogger(__name__)

CONCURRENCY: Final = 12
"""Requests at once; more than 16 only adds latency on a two-core API server (design)."""

IN_FLIGHT_LIMIT: Final = CONCURRENCY
"""With fewer writes than this in flight some requests are free, and the next plan has something to do."""

KEY_BYTES: Final = 32
"""Key material of one scope and version: the key size of HMAC-SHA-256 and AES-256."""

_FIELD_OWNER: Final = {"fieldManager": names.FIELD_MANAGER_OPERATOR}

Stored = Callable[[Kind, bytes], None]
"""Called with each object as the API server stored it, so that the next plan sees what this one did."""

Fence = Callable[[], bool]
"""True while this process may write."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one action went."""

    action: Action
    error: KvStrataError | None = None
    is_begun: bool = True
    """False when its time was up before it had its turn: nothing was asked of the API server."""


Carry = Callable[[Iterable[Action], float], Awaitable[list[Outcome]]]
"""Carries actions out as `Executor.apply` does."""

Done = Callable[[Outcome], None]
"""Called with how an action went, once its object may be written again."""


class Executor:
    """Applies actions through one client."""

    def __init__(
        self, api: KubeApi, stored: Stored, fence: Fence, instance: str, *, keks: Callable[[], Keks] = Keks
    ) -> None:
        """`instance` names this process in Events; `keks` gives the keys that data keys are wrapped by."""
        self._api = api
        self._stored = stored
        self._fence = fence
        self._instance = instance
        self._keks = keks
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._verbs: dict[type[Action], Callable[[Any], Awaitable[bool]]] = {
            Create: self._create,
            Apply: self._apply,
            Merge: self._merge,
            Delete: self._delete,
            Shred: self._shred,
            DeleteMany: self._delete_many,
            SetFinalizers: self._set_finalizers,
            MintKey: self._mint,
            MintKek: self._mint_kek,
            MintDataKey: self._mint_data_key,
            Rewrap: self._rewrap,
            MarkSilent: self._mark_silent,
        }
        """Each returns true when it changed anything, false when that was not needed any more."""

    async def apply(self, actions: Iterable[Action], until_s: float = math.inf) -> list[Outcome]:
        """Carry out all actions, in no particular order; return how each went.

        None is begun after `until_s`, a second of the event loop's clock.
        """
        return list(await asyncio.gather(*(self._guarded(action, until_s) for action in actions)))

    async def _guarded(self, action: Action, until_s: float) -> Outcome:
        async with self._slots:
            if asyncio.get_running_loop().time() > until_s:
                return Outcome(action, is_begun=False)
            if not self._fence():
                return Outcome(action, RetryableError("another replica leads"))
            try:
                if await self._verbs[type(action)](action):
                    await self._post_events(action.notes)
            except KvStrataError as e:
                return Outcome(action, e)
        return Outcome(action)

    async def _apply(self, action: Apply) -> bool:
        query = {**_FIELD_OWNER, "force": "true"}
        return await self._patch(action.ref, action.body, APPLY_PATCH, query=query)

    async def _set_finalizers(self, action: SetFinalizers) -> bool:
        meta = {"finalizers": list(action.finalizers), "resourceVersion": action.resource_version}
        return await self._patch(action.ref, {"metadata": meta}, MERGE_PATCH)

    async def _create(self, action: Create) -> bool:
        call = Call("POST", action.ref.kind.path(action.ref.namespace), _FIELD_OWNER, action.body)
        answer = await self._api.call(call)
        if answer.is_conflict:
            return action.adopts and await self._apply(Apply(action.ref, body=action.body))
        self._take(action.ref.kind, answer)
        return True

    async def _patch(
        self, ref: Ref, body: Any, content_type: str, *, query: dict[str, str] | None = None, subresource: str = ""
    ) -> bool:
        """Send a patch; false when the object is gone."""
        path = f"{ref.path}/{subresource}" if subresource else ref.path
        answer = await self._api.call(Call("PATCH", path, query or _FIELD_OWNER, body, content_type))
        if answer.is_absent:
            return False
        self._take(ref.kind, answer)
        return True

    async def _merge(self, action: Merge) -> bool:
        body = dict(action.body)
        if action.resource_version:
            body["metadata"] = {**body.get("metadata", {}), "resourceVersion": action.resource_version}
        return await self._patch(action.ref, body, MERGE_PATCH, subresource=action.subresource)

    async def _delete(self, action: Delete) -> bool:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": action.uid}}
        answer = await self._api.call(Call("DELETE", action.ref.path, body=body))
        if answer.is_absent or answer.is_conflict:  # 409: it is another object of that name by now.
            return False
        answer.content()
        return True

    async def _shred(self, action: Shred) -> bool:
        """Read the owner from the API server, not from what was followed, and delete what it does not need."""
        owner = action.owner
        # A list without a version is as new as the API server's last write; nothing grants us `get` on owners.
        only = {"fieldSelector": f"metadata.name={owner.name}"}
        found = (await self._api.call(Call("GET", owner.kind.path(owner.namespace), only))).content()["items"]
        live = parse_declared(owner.kind, found[0]) if found else None
        if scope_keys.is_in_use(live, action.owner_uid, datetime.now(UTC)):
            raise RetryableError(f"{action.ref}: {owner} needs its keys; what is known of it here is older")
        return await self._delete(action)

    async def _delete_many(self, action: DeleteMany) -> bool:
        selector = ",".join(f"{k}={v}" for k, v in sorted(action.selector.items()))
        call = Call("DELETE", action.kind.path(action.ref.namespace), {"labelSelector": selector})
        (await self._api.call(call, timeout_s=60.0)).content()  # 13.8 s for 5,000 objects (design).
        return True

    async def _mint(self, action: MintKey) -> bool:
        """Make a key. An entry that exists is safe: POST refuses it, and a patch is bound to the version seen."""
        key = base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
        if not action.resource_version:
            body = {**action.body, "data": {action.entry: key}}
            return await self._create(Create(action.ref, body=body))
        meta = {"resourceVersion": action.resource_version}
        return await self._patch(action.ref, {"metadata": meta, "data": {action.entry: key}}, MERGE_PATCH)

    async def _mint_kek(self, action: MintKek) -> bool:
        """Make the KEK Secret; the watch of KEKs takes it in, not ours."""
        key = base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
        body = {**action.body, "data": {action.entry: key}}
        answer = await self._api.call(Call("POST", action.ref.kind.path(action.ref.namespace), _FIELD_OWNER, body))
        if answer.is_conflict:
            return False
        answer.content()
        return True

    async def _mint_data_key(self, action: MintDataKey) -> bool:
        keks = self._keks()
        if not keks.newest:
            raise RetryableError(f"{action.ref}: there is no KEK any more to wrap {action.entry}")
        wrapped = {action.entry: keks.wrap(secrets.token_bytes(KEY_BYTES))}
        return await self._write_wrapped(action.ref, wrapped, action.resource_version)

    async def _rewrap(self, action: Rewrap) -> bool:
        """Wrap again what opens; what does not stays for whoever has its KEK."""
        keks = self._keks()
        opened = {entry: keks.unwrap(wrapped) for entry, wrapped in action.wrapped.items()}
        made = {entry: keks.wrap(key) for entry, key in opened.items() if key is not None}
        is_changed = bool(made) and await self._write_wrapped(action.ref, made, action.resource_version)
        if len(made) < len(opened):
            stuck = ", ".join(sorted(opened.keys() - made.keys()))
            raise InvalidInputError(f"{action.ref}: the KEK that {stuck} names does not open it")
        return is_changed

    async def _write_wrapped(self, ref: Ref, wrapped: Mapping[str, str], resource_version: str) -> bool:
        coded = {entry: base64.b64encode(text.encode()).decode() for entry, text in wrapped.items()}
        return await self._patch(ref, {"metadata": {"resourceVersion": resource_version}, "data": coded}, MERGE_PATCH)

    async def _mark_silent(self, action: MarkSilent) -> bool:
        """Change two conditions of a status that an agent owns; a conflict means that the agent is back."""
        answer = await self._api.call(Call("GET", action.ref.path))
        if answer.is_absent:
            return False
        seen = answer.content()
        meta = {"resourceVersion": seen["metadata"]["resourceVersion"]}
        conditions = _silenced(seen, action.message, format_time(datetime.now(UTC)))
        body = {"metadata": meta, "status": {"conditions": conditions}}
        return await self._patch(action.ref, body, MERGE_PATCH, subresource="status")

    async def _post_events(self, notes: Iterable[Note]) -> None:
        """Post Events. They are for people: one that cannot be posted is logged and not worth a retry."""
        for note in notes:
            try:
                call = Call("POST", EVENT.path(_event_namespace(note)), body=self._event(note))
                (await self._api.call(call)).content()
            except KvStrataError as e:
                log.warning(
                    "event not posted", extra={"about": str(note.about), "reason": note.reason, "error": str(e)}
                )

    def _event(self, note: Note) -> Json:
        now = format_time(datetime.now(UTC))
        ref = Ref(EVENT, f"{note.about.name}.{secrets.token_hex(8)}", _event_namespace(note))
        place = {"namespace": note.about.namespace} if note.about.namespace else {}
        about = {"apiVersion": note.about.kind.api_version, "kind": note.about.kind.name, "name": note.about.name}
        return body_of(
            ref,
            {},
            involvedObject={**about, **place, "uid": note.uid},
            reason=note.reason,
            message=note.message[:1024],  # What the API server accepts.
            type=str(note.severity),
            firstTimestamp=now,
            lastTimestamp=now,
            count=1,
            source={"component": names.FIELD_MANAGER_OPERATOR},
            reportingComponent=names.FIELD_MANAGER_OPERATOR,
            reportingInstance=self._instance,
        )

    def _take(self, kind: Kind, answer: Answer) -> None:
        answer.content()
        self._stored(kind, answer.raw)


def _event_namespace(note: Note) -> str:
    """Events of cluster-scoped objects live in `default` (k8s convention, core validation)."""
    return note.about.namespace or "default"


def _silenced(seen: Any, message: str, now: str) -> list[dict[str, Any]]:
    """Put the two conditions of a silent agent over those that it wrote."""
    generation = seen["metadata"].get("generation", 0)
    make = ConditionMaker(generation)
    gone = (make.false("AgentConnected", SILENT_REASON, message), make.false("Ready", SILENT_REASON, message))
    return [c.to_json() for c in merge(stored_conditions(seen.get("status") or {}), gone, now)]


class WritesInFlight:
    """Runs each action in a task of its own."""

    def __init__(self, tasks: asyncio.TaskGroup, apply: Carry) -> None:
        """`tasks` must be entered; `apply` bounds how many requests there are at once."""
        self._tasks = tasks
        self._apply = apply
        self._paths: dict[str, str] = {}
        """Objects that are being written, and the pool of each."""
        self._below_limit = asyncio.Event()
        self._below_limit.set()

    def is_free(self, action: Action) -> bool:
        """True when nothing is being written that the action has to wait for."""
        waits = isinstance(action, SetFinalizers) and action.pool in self._paths.values()
        return action.ref.path not in self._paths and not waits

    def start(self, actions: Iterable[Action], done: Done, until_s: float = math.inf) -> None:
        """Carry out actions whose objects are free, of which there is one each; none is begun after `until_s`."""
        for action in actions:
            assert self.is_free(action), action.ref
            self._paths[action.ref.path] = action.pool
            self._tasks.create_task(self._run(action, done, until_s))
        self._count()

    async def until_below_limit(self) -> None:
        """Wait until another plan is worth it."""
        await self._below_limit.wait()

    async def _run(self, action: Action, done: Done, until_s: float) -> None:
        (outcome,) = await self._apply([action], until_s)
        del self._paths[action.ref.path]
        self._count()
        done(outcome)

    def _count(self) -> None:
        if len(self._paths) < IN_FLIGHT_LIMIT:
            self._below_limit.set()
        else:
            self._below_limit.clear()
