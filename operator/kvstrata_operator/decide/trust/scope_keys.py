"""Which key material must exist for which trust scope, of which version, and which keys have had their time. Pure.

The bytes are made when the plan is carried out. Laws: an entry that exists is never written again, except a data key
that is wrapped again; keys that were made for an earlier object of the same name are never handed to its successor; a
Secret that is not ours is never touched.

A domain's key version is the higher one of two: `spec.keyVersion`, which an administrator raises, and
`status.keyVersion`, which moves on by itself when somebody has left. The status is the memory for that: it names the
members that have been handed the current key. Laws: a version never goes down; a member that left is named in the
status until the next key is there; a key is removed only after the status has named its successor.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from kvstrata_api import names
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.trust import KVTenant, KVTrustDomain
from kvstrata_api.shares import is_open
from kvstrata_api.trust import ScopeKind, is_member
from kvstrata_api.wrapping import data_entry, wrapped_by
from kvstrata_operator.decide.plan.actions import Action, Merge, MintDataKey, MintKek, MintKey, Note, Rewrap, Shred
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import SECRET, Kind, Ref, body_of, owner_reference
from kvstrata_operator.observe.records import Declared, KeksSeen, ScopeSecretSeen

_ENTRY: Final = re.compile(r"v([1-9][0-9]{0,8})(\..*)?")
"""Entries of a scope Secret: `v<key version>`, and whatever else belongs to that version behind a dot."""


def entry_of(key_version: int) -> str:
    """Name the Secret's entry of one key version."""
    return f"v{key_version}"


def plan_key(
    owner: Declared[Any], scope: ScopeKind, key_version: int, secret: ScopeSecretSeen | None, namespace: str
) -> tuple[Action, ...]:
    """Make the key of an owner's current version when it is missing."""
    if owner.is_deleting:
        return ()
    ref = scope_secret_ref(scope, scope_name(owner.meta), namespace)
    entry = entry_of(key_version)
    note = Note(owner.ref, owner.uid, "KeyMinted", f"made key {entry} of the scope")
    body = scope_secret_body(ref, scope, owner.kind, owner.meta)
    if secret is None:
        return (MintKey(ref, notes=(note,), entry=entry, body=body),)
    if is_foreign(secret):
        return ()
    if secret.owner_uid != owner.uid:
        return (Shred(ref, uid=secret.uid, owner=owner.ref, owner_uid=secret.owner_uid),)
    if entry in secret.versions:
        return ()
    return (MintKey(ref, notes=(note,), entry=entry, body=body, resource_version=secret.resource_version),)


def plan_data_key(
    owner: Declared[Any],
    scope: ScopeKind,
    key_version: int,
    secret: ScopeSecretSeen | None,
    keks: KeksSeen,
    namespace: str,
) -> tuple[Action, ...]:
    """Make the data key of an owner's current version when it is missing and there is a KEK to wrap it."""
    entry = data_entry(entry_of(key_version))
    if owner.is_deleting or secret is None or not keks.newest or not has_key(owner, key_version, secret):
        return ()
    if entry in secret.versions:
        return ()
    ref = scope_secret_ref(scope, scope_name(owner.meta), namespace)
    return (MintDataKey(ref, entry=entry, resource_version=secret.resource_version),)


def plan_rewrapping(secrets: Iterable[ScopeSecretSeen], keks: KeksSeen, namespace: str) -> tuple[Action, ...]:
    """Wrap by the newest KEK what an older one that is still there has wrapped: the older one can go then."""
    actions: list[Action] = []
    for secret in secrets:
        older = {e: text for e, text in secret.wrapped.items() if keks.newest != wrapped_by(text) in keks.numbers}
        if older and not is_foreign(secret):
            ref = Ref(SECRET, secret.key, namespace)
            actions.append(Rewrap(ref, wrapped=older, resource_version=secret.resource_version))
    return tuple(actions)


def plan_kek(secrets: Iterable[ScopeSecretSeen], keks: KeksSeen, namespace: str) -> tuple[Action, ...]:
    """Make the KEK Secret when it is absent. Never the number of a lost one: what that wrapped is for its return."""
    if not keks.is_absent:
        return ()
    number = max(data_keys_by_kek(secrets), default=0) + 1
    ref = Ref(SECRET, names.KEK_SECRET, namespace)
    return (MintKek(ref, entry=f"k{number}", body=kek_secret_body(ref)),)


def data_keys_by_kek(secrets: Iterable[ScopeSecretSeen]) -> Counter[int]:
    """Count data keys by the number of the KEK that wraps them."""
    return Counter(wrapped_by(text) for secret in secrets for text in secret.wrapped.values())


def is_foreign(secret: ScopeSecretSeen) -> bool:
    """True when somebody else made the Secret that has the name of ours."""
    return not secret.owner_uid


def has_key(owner: Declared[Any], key_version: int, secret: ScopeSecretSeen | None) -> bool:
    """True when the key of this version exists and was made for this very object."""
    return secret is not None and secret.owner_uid == owner.uid and entry_of(key_version) in secret.versions


def members(domain: KVTrustDomain, tenants: Mapping[str, KVTenant]) -> frozenset[str]:
    """Tenants that both sides name."""
    return frozenset(name for name, tenant in tenants.items() if is_member(tenant, domain))


def status_version(owner: Declared[Any]) -> int:
    """Key version that the status has; 0 when it never had any."""
    current = owner.status.get("keyVersion", 0)
    return current if isinstance(current, int) else 0


def highest_version(owner: Declared[Any], secret: ScopeSecretSeen | None) -> int:
    """Highest version that the owner's Secret has a key of; 0 without any."""
    if secret is None or secret.owner_uid != owner.uid:
        return 0
    found = (_ENTRY.fullmatch(entry) for entry in secret.versions)
    return max((int(match[1]) for match in found if match), default=0)


def status_members(domain: Declared[KVTrustDomain]) -> frozenset[str]:
    """Members that the status has: those that may hold the current key."""
    names_ = domain.status.get("members")
    return frozenset(names_) if isinstance(names_, list) else frozenset()


def domain_key_version(domain: Declared[KVTrustDomain], now_members: Collection[str]) -> int:
    """Key version that a readable domain should have."""
    assert domain.model is not None
    current = status_version(domain)
    has_loss = current > 0 and bool(status_members(domain) - set(now_members))
    return max(domain.model.spec.key_version, current + has_loss)


def plan_retirement(
    owner: Declared[Any], scope: ScopeKind, secret: ScopeSecretSeen | None, namespace: str
) -> tuple[Action, ...]:
    """Remove the keys before the version that the status has: what they name and hold is shredded by that."""
    current = status_version(owner)
    if secret is None or secret.owner_uid != owner.uid or entry_of(current) not in secret.versions:
        return ()
    old = sorted(e for e in secret.versions if (found := _ENTRY.fullmatch(e)) and int(found[1]) < current)
    if not old:
        return ()
    ref = scope_secret_ref(scope, scope_name(owner.meta), namespace)
    note = Note(owner.ref, owner.uid, "KeyRetired", f"removed {', '.join(old)} of the scope's keys")
    body = {"data": dict.fromkeys(old)}
    return (Merge(ref, notes=(note,), body=body, resource_version=secret.resource_version),)


def plan_orphans(
    wanted: Mapping[str, str], secrets: Mapping[str, ScopeSecretSeen], namespace: str
) -> tuple[Action, ...]:
    """Delete the Secrets of shares that are over. `wanted` gives the owner's uid by the name of each to keep."""
    prefix = scope_secret_ref(ScopeKind.SHARE, "", namespace).name
    gone = (s for n, s in sorted(secrets.items()) if n.startswith(prefix) and s.owner_uid)
    return tuple(
        Shred(
            Ref(kinds.SECRET, s.key, namespace),
            uid=s.uid,
            owner=_share_of(s.key.removeprefix(prefix)),
            owner_uid=s.owner_uid,
        )
        for s in gone
        if wanted.get(s.key) != s.owner_uid
    )


def _share_of(scope: str) -> Ref:
    """Address of a share by the name of its scope; a namespace has no dot in its name."""
    namespace, _, name = scope.partition(".")
    return Ref(kinds.SHARE, name, namespace)


def is_in_use(live: Declared[Any] | None, owner_uid: str, now: datetime) -> bool:
    """True when the keys of `owner_uid` are needed still, as the owner was just read; None when there is none.

    Of a share that is over its own key is not needed any more.
    """
    if live is None or live.uid != owner_uid:
        return False
    return live.kind != kinds.SHARE or (live.model is not None and is_open(live.model, now))


def scope_name(owner: ObjectMeta) -> str:
    """Name of the owner's scope: that of the owner, behind its namespace where it has one."""
    return f"{owner.namespace}.{owner.name}" if owner.namespace else owner.name


def scope_secret_ref(scope: str, name: str, namespace: str) -> Ref:
    """Address of the Secret with the keys of a scope; `scope` is `tenant`, `domain` or `share`."""
    return Ref(SECRET, names.scope_secret_name(scope, name), namespace)


def scope_secret_body(ref: Ref, scope: str, kind: Kind, owner: ObjectMeta) -> dict[str, Any]:
    """Return a scope Secret without its keys. Deleting the owner deletes it, and so shreds the scope.

    An owner of another namespace cannot be referred to; the planner deletes what such an owner leaves behind.
    """
    metadata: dict[str, Any] = {
        "labels": {names.LABEL_SCOPE: scope, names.LABEL_MANAGED_BY: names.MANAGED_BY},
        "annotations": {names.ANNOTATION_OWNER_UID: owner.uid},
    }
    if not owner.namespace:
        metadata["ownerReferences"] = [owner_reference(kind, owner)]
    return body_of(ref, metadata, type="Opaque")


def kek_secret_body(ref: Ref) -> dict[str, Any]:
    """Return the KEK Secret without its key. It belongs to nobody: no deletion takes it along."""
    return body_of(ref, {"labels": {names.LABEL_MANAGED_BY: names.MANAGED_BY}}, type="Opaque")
