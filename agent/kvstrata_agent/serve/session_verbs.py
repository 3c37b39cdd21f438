"""The verbs that speak of sessions, and those that report: stats and explain."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstrata_agent.blocks.sessions import Session, SessionState
from kvstrata_agent.cache.explain import ABSENT
from kvstrata_agent.policy.attention import Attention
from kvstrata_api import wire
from kvstrata_api.blocks import KEY_BYTES
from kvstrata_api.errors import ForbiddenError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.cache.cache import Cache
    from kvstrata_agent.serve.authorization import Attaching, Attachment

_STATES = {"decoding": SessionState.DECODING, "idle": SessionState.IDLE, "tool": SessionState.IDLE}
"""States that a client may name. A tool call is an idle session whose return is expected soon."""
_COMPLETE = "session_complete"
URGENCY_MAX = 100
RETAIN_S_MAX = 7 * 86_400.0
"""Longest time for which a session is retained, or expected back: a week's work may rest over a weekend."""
CLOSE_S_MAX = 60.0
"""How long a client may wait for an archive."""


class SessionVerbs:
    """Opens, touches, closes and explains. A session is its tenant's; other tenants' names do not matter."""

    def __init__(self, cache: Cache, attaching: Attaching) -> None:
        self._cache = cache
        self._node = cache.node
        self._attaching = attaching
        self.handlers: dict[type, Callable[[Attachment, Any], wire.AnyReply | Coroutine[Any, Any, wire.AnyReply]]] = {
            wire.OpenSession: self._open,
            wire.TouchSession: self._touch,
            wire.CloseSession: self._close,
            wire.Retain: self._retain,
            wire.Stats: self._stats,
            wire.Explain: self._explain,
        }

    def _done(self, request: wire.AnyRequest, count: int) -> wire.Done:
        return wire.Done(request.id, self._attaching.grants_version, count)

    def _hinted(self, request: wire.AnyRequest, hint: str, outcome: wire.Outcome, count: int = 0) -> wire.Done:
        self._node.counters.add("kvstrata_hints_total", hint=hint, outcome=outcome)
        return wire.Done(request.id, self._attaching.grants_version, count, outcome)

    def _open(self, at: Attachment, request: wire.OpenSession) -> wire.Done:
        for name, value in (("session", request.session), ("parent", request.parent), ("priority", request.priority)):
            if len(value) > wire.SESSION_CHARS_MAX:
                raise InvalidInputError(f"{name} of {len(value)} characters, limit {wire.SESSION_CHARS_MAX}")
        if not request.session:
            raise InvalidInputError("session: empty, 1 to 128 characters wanted")
        attention = _attention_of(request)
        allowed = at.caller.grants.priorities if at.caller is not None else ()
        if request.priority and allowed and request.priority not in allowed:
            raise ForbiddenError(f"priority: {request.priority!r}, this tenant may use {', '.join(allowed)}")
        life, secret = self._cache.life, at.own_secret
        is_known = life.find(at.tenant, secret, request.session) is not None
        opened = life.open(
            at.owner, at.tenant, secret, request.session, parent=request.parent, priority=request.priority
        )
        if attention.window_tokens:
            opened.attention = attention
        if is_known:
            life.publish(opened)
        else:
            life.revive_from_directory(opened, contexts_of(at))
        return self._done(request, 1)

    def _touch(self, at: Attachment, request: wire.TouchSession) -> wire.Done:
        state = _STATES.get(request.state)
        if state is None:
            raise InvalidInputError(f"state: {request.state!r}, one of {', '.join(_STATES)} wanted")
        if not 0 <= request.urgency <= URGENCY_MAX:
            raise InvalidInputError(f"urgency: {request.urgency}, 0 to {URGENCY_MAX} wanted")
        hint = "tool_wait" if request.state == "tool" else request.state
        session, return_s = self._cache.life.find(at.tenant, at.own_secret, request.session), request.expected_return_s
        if session is None or return_s < 0:
            return self._hinted(request, hint, wire.Outcome.UNKNOWN if session is None else wire.Outcome.EXPIRED)
        if request.state == "tool" and not return_s:
            return_s = float(self._node.spec.policy.retention.tool_gap_seconds)
        self._cache.life.touch(session, state, request.urgency, min(return_s, RETAIN_S_MAX), at.owner)
        return self._hinted(request, hint, wire.Outcome.ACCEPTED, 1)

    def _retain(self, at: Attachment, request: wire.Retain) -> wire.Done:
        session = self._cache.life.find(at.tenant, at.own_secret, request.session)
        if session is None or request.for_s <= 0:
            return self._hinted(request, "retain", wire.Outcome.UNKNOWN if session is None else wire.Outcome.EXPIRED)
        session.retained_until_s = self._node.clock() + min(request.for_s, RETAIN_S_MAX)
        return self._hinted(request, "retain", wire.Outcome.ACCEPTED, 1)

    def _close(self, at: Attachment, request: wire.CloseSession) -> wire.Done | Coroutine[Any, Any, wire.Done]:
        session = self._cache.life.find(at.tenant, at.own_secret, request.session)
        if session is None:
            return self._hinted(request, _COMPLETE, wire.Outcome.UNKNOWN)
        archive = request.archive and self._node.spec.policy.retention.archive
        self._cache.life.finish(session, archive=archive)
        if archive and session.state is SessionState.ARCHIVING and request.deadline_s > 0:
            return self._close_slow(request, session)
        outcome = wire.Outcome.ACCEPTED if archive or not request.archive else wire.Outcome.PARTIAL
        return self._hinted(request, _COMPLETE, outcome, 2 if session.state is SessionState.ARCHIVED else 1)

    async def _close_slow(self, request: wire.CloseSession, session: Session) -> wire.Done:
        is_archived = await self._cache.archiver.archived(session, min(request.deadline_s, CLOSE_S_MAX))
        return self._hinted(request, _COMPLETE, wire.Outcome.ACCEPTED, 2 if is_archived else 1)

    def _stats(self, at: Attachment, request: wire.Stats) -> wire.Text:
        scopes = [right.access.scope for right in at.rights.values()]
        stats = self._cache.explainer.stats(at.owner, at.tenant, scopes)
        return wire.Text(request.id, self._attaching.grants_version, json.dumps(stats))

    def _explain(self, at: Attachment, request: wire.Explain) -> wire.Text:
        if bool(request.session) + bool(request.digest) > 1 or not (request.session or request.digest or request.scope):
            raise InvalidInputError("explain: exactly one of digest, session and a scope alone wanted")
        if not (request.session or request.digest):
            explained = self._tree(at, request.scope)
        elif request.session:
            explained = self._cache.explainer.session(self._cache.life.find(at.tenant, at.own_secret, request.session))
        elif len(request.digest) != KEY_BYTES:
            raise InvalidInputError(f"digest of {len(request.digest)} B, {KEY_BYTES} wanted")
        else:
            right = at.readable(request.scope)
            if right is None:
                self._attaching.audit.refused_scope(at.caller, request.scope, "explain", 1)
            else:
                known = self._node.index.find(right.access.scope, request.digest)
                self._attaching.audit.read(at.caller, right.access, "explain", [known] if known else [])
            scope, context = (right.access.scope, right.context) if right is not None else (None, None)
            explained = self._cache.explainer.block(scope, request.digest, context)
        return wire.Text(request.id, self._attaching.grants_version, json.dumps(explained))

    def _tree(self, at: Attachment, scope: str) -> dict[str, Any]:
        right = at.readable(scope)
        if right is None:
            self._attaching.audit.refused_scope(at.caller, scope, "explain", 1)
            return ABSENT
        return self._cache.explainer.tree(right.access, at.tenant)


def _attention_of(request: wire.OpenSession) -> Attention:
    asked = Attention(request.sink_tokens, request.window_tokens, request.anchor_tokens)
    for name, tokens in asdict(asked).items():
        if not 0 <= tokens <= wire.WINDOW_TOKENS_MAX:
            raise InvalidInputError(f"{name}: {tokens}, 0 to {wire.WINDOW_TOKENS_MAX} wanted")
        if tokens and not request.window_tokens:
            raise InvalidInputError(f"{name}: {tokens} without window_tokens, so all tokens are attended to")
    return asked


def contexts_of(at: Attachment) -> list[RequestContext]:
    """Return the context of each scope that the caller may read, its own first."""
    return [right.context for right in reversed(at.rights.values())]
