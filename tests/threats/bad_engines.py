"""Engines with bad credentials at every verb of the local protocol."""

import asyncio
import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, get_args

from kvstrata_agent.kube import declared
from kvstrata_agent.kube.authenticator import AgentIdentity, KubeAuthenticator
from kvstrata_agent.kube.trust import TrustStores, TrustView
from kvstrata_api import names, wire
from kvstrata_api.wire import Advance, Arrive, Reply
from kvstrata_kube.typed_store import Known
from support.agent.doubles import LAYOUT
from support.agent.guarded import TokenEngine, guarded
from threats.credentials import GOOD, OTHER_TENANT, SYSTEM, Tokens

VERBS: Final = tuple(kind for kind in get_args(wire.AnyRequest) if kind is not wire.Hello)
"""All that need a caller; `Hello` tells the agent's name and version to anybody who reaches the socket."""

_KEY: Final = b"k" * 32
_NEVER: Final = "never attached"
_TAKEN: Final = "another identity on an attached connection"
_RENEWED: Final = "a renewal that was refused"


def authenticator(tokens: Tokens) -> KubeAuthenticator:
    """Of an agent on node-a, with one tenant for team/engine and two for team/contested."""
    view: TrustView

    def changed() -> None:
        view.invalidate()

    stores = TrustStores(
        Known("KVTenant", declared.tenant, changed),
        Known("KVTrustDomain", declared.trust_domain, changed),
        Known("KVPrefixShare", declared.prefix_share, changed),
        Known("Namespace", declared.namespace_labels, changed),
        Known("Secret", declared.scope_keys, changed),
    )
    view = TrustView(stores, SYSTEM, "pool", lambda: datetime.now(UTC))
    claims = [_tenant("a", "engine", "removed", "replaced"), _tenant("b", "contested", "other")]
    claims += [_tenant("c", "contested"), _tenant("d", "engine", namespace="gone")]
    _fill(stores.tenants, claims)
    _fill(stores.secrets, [_secret(name) for name in "abcd"])
    for empty in (stores.domains, stores.shares, stores.namespaces):
        _fill(empty, [])
    return KubeAuthenticator(tokens.api, view, AgentIdentity("pool", "node-a", SYSTEM, needs_bound_tokens=True))


async def attempts(tokens: Tokens, folder: Path, classes: Mapping[str, str]) -> tuple[int, list[str]]:
    """Try every class at every verb; how many cases, and what was accepted."""
    path = folder / "run" / "agent.sock"
    async with guarded(authenticator(tokens), path):
        return await asyncio.to_thread(_attempt_all, path, tokens, classes)


async def control(tokens: Tokens, folder: Path) -> list[str]:
    """Verbs that refuse the good credential: the control, which must come out empty."""
    path = folder / "run" / "agent.sock"
    async with guarded(authenticator(tokens), path):
        return await asyncio.to_thread(_refused_good, path, tokens)


def _attempt_all(path: Path, tokens: Tokens, classes: Mapping[str, str]) -> tuple[int, list[str]]:
    accepted, cases = [], 0
    for verb in VERBS:
        for name, token in {_NEVER: "", **classes}.items():
            cases += 1
            engine = TokenEngine(path, 7, token)
            if name != _NEVER and not _is_failure(engine, engine.attach_request()):
                accepted.append(f"attach with {name}")
            if verb is not wire.Attach and not _is_failure(engine, request_of(engine, verb)):
                accepted.append(f"{verb.__name__} after {name}")
            engine.close()
        for second, words in ((OTHER_TENANT, _TAKEN), ("deleted pod", _RENEWED)):
            cases += 1
            accepted += [f"{verb.__name__} after {words}"] if _is_served_still(path, tokens, second, verb) else []
    return cases, accepted


def _is_served_still(path: Path, tokens: Tokens, second: str, verb: type[wire.AnyRequest]) -> bool:
    """Show a second token on an attached connection, of another identity or a bad one; true when it serves on."""
    engine = TokenEngine(path, 7, tokens.by_class[GOOD])
    engine.ask(engine.attach_request(), wire.Granted)
    engine.token = tokens.by_class[second]
    is_kept = not _is_failure(engine, engine.attach_request())
    is_served = verb is not wire.Attach and not _is_failure(engine, request_of(engine, verb))
    engine.close()
    return is_kept or is_served


def _refused_good(path: Path, tokens: Tokens) -> list[str]:
    engine = TokenEngine(path, 7, tokens.by_class[GOOD])
    engine.hold()
    refused = [verb.__name__ for verb in VERBS if _is_failure(engine, request_of(engine, verb))]
    engine.close()
    return refused


def _is_failure(engine: TokenEngine, request: wire.AnyRequest) -> bool:
    """Whether a request is refused, or the connection ended."""
    try:
        reply = engine.ask(request, Reply)
    except (AssertionError, OSError):
        return True
    return isinstance(reply, wire.Failed)


def request_of(engine: TokenEngine, verb: type[wire.AnyRequest]) -> wire.AnyRequest:
    """A request that would be served if the caller were."""
    number, scope, key = engine.next_id(), "tenant/a/a/v1", b"k" * 20
    fields: dict[type, tuple[Any, ...]] = {
        wire.Attach: (engine.token, "pool", LAYOUT),
        wire.OpenSession: ("s",),
        wire.TouchSession: ("s7", "idle"),
        wire.CloseSession: ("none",),
        wire.CountLoad: (0, 0),
        wire.Release: ((1,),),
        wire.CloseExtents: ((1,),),
        wire.Publish: ((), ()),
        wire.Abandon: ((1,),),
        wire.Reserve: (scope, b"", key),
        wire.Pin: (scope, key, 1.0),
        wire.Explain: (scope, key),
        wire.ReportEngine: (1.0,),
        Advance: ((), 0, ()),
        Arrive: ((), 0, 0.0),
        wire.Retain: ("s7", 1.0),
        **dict.fromkeys((wire.Lookup, wire.Acquire, wire.Prefetch, wire.Fetch, wire.Unpin, wire.Touch), (scope, key)),
        **dict.fromkeys((wire.Demote, wire.Drop), (scope, key)),
        **dict.fromkeys((wire.WhyMiss, wire.RouteHint), (scope, key)),
    }
    return verb(number, *fields.get(verb, ()))


def _tenant(name: str, *accounts: str, namespace: str = "team") -> dict[str, Any]:
    claimed = [{"namespace": namespace, "name": account} for account in accounts]
    return {"metadata": {"name": name, "uid": name}, "spec": {"serviceAccounts": claimed}}


def _secret(tenant: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": names.scope_secret_name("tenant", tenant), "namespace": SYSTEM}
    metadata["annotations"] = {names.ANNOTATION_OWNER_UID: tenant}
    return {"metadata": metadata, "data": {"v1": base64.b64encode(_KEY).decode()}}


def _fill(store: Known[Any], objects: list[dict[str, Any]]) -> None:
    store.take([store.read(json.dumps(one).encode()) for one in objects], "")
