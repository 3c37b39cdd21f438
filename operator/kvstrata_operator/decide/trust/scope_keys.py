"""Which key material must exist for which trust scope. Pure: the bytes are made when the plan is carried out.

Laws: an entry that exists is never written again, except a data key that is wrapped anew; keys that were made for an
earlier object of the same name are never handed to its successor; a Secret that is not ours is never touched.

Which KEK wraps how many data keys: said in the log whenever it changes, so that an old KEK can go.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvstrata_api import names
from kvstrata_api.trust import ScopeKind
from kvstrata_api.wrapping import data_entry, wrapped_by
from kvstrata_kube.keks import KekSource
from kvstrata_operator.decide.plan import objects
from kvstrata_operator.decide.plan.actions import Action, MintDataKey, MintKek, MintKey, Note, Rewrap, Shred
from kvstrata_operator.observe.kinds import SECRET, Ref
from kvstrata_operator.observe.records import Declared, KeksSeen, ScopeSecretSeen


def entry_of(key_version: int) -> str:
    """Name the Secret's entry of one key version."""
    return f"v{key_version}"


def plan_key(
    owner: Declared[Any], scope: ScopeKind, key_version: int, secret: ScopeSecretSeen | None, namespace: str
) -> tuple[Action, ...]:
    """Make the key of an owner's current version when it is missing."""
    if owner.is_deleting:
        return ()
    ref = objects.scope_secret_ref(scope, objects.scope_name(owner.meta), namespace)
    entry = entry_of(key_version)
    note = Note(owner.ref, owner.uid, "KeyMinted", f"made key {entry} of the scope")
    body = objects.scope_secret_body(ref, scope, owner.kind, owner.meta)
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
    ref = objects.scope_secret_ref(scope, objects.scope_name(owner.meta), namespace)
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
    return (MintKek(ref, entry=f"k{number}", body=objects.kek_secret_body(ref)),)


def data_keys_by_kek(secrets: Iterable[ScopeSecretSeen]) -> Counter[int]:
    """Count data keys by the number of the KEK that wraps them."""
    return Counter(wrapped_by(text) for secret in secrets for text in secret.wrapped.values())


def is_foreign(secret: ScopeSecretSeen) -> bool:
    """True when somebody else made the Secret that has the name of ours."""
    return not secret.owner_uid


def has_key(owner: Declared[Any], key_version: int, secret: ScopeSecretSeen | None) -> bool:
    """True when the key of this version exists and was made for this very object."""
    return secret is not None and secret.owner_uid == owner.uid and entry_of(key_version) in secret.versions


log = logging.getLogger(__name__)


class KekUse:
    """Looks at the KEKs and at what they wrap."""

    def __init__(self, source: KekSource) -> None:
        self._source = source
        self._told: tuple[KeksSeen, Counter[int]] = (KeksSeen(), Counter())

    def seen(self) -> KeksSeen:
        """Give the KEKs to a decision; none while they were not looked at."""
        return KeksSeen(frozenset(self._source.keks.keys), self._source.is_absent)

    def tell(self, secrets: Iterable[ScopeSecretSeen]) -> None:
        """Say which KEKs nothing needs any more, and which are missed, when that has changed."""
        seen, used = self.seen(), data_keys_by_kek(secrets)
        if (seen, used) == self._told:
            return
        self._told = (seen, used)
        for number in sorted(seen.numbers | used.keys()):
            facts = {"kek": f"k{number}", "data_keys": used[number]}
            if number not in seen.numbers:
                log.warning("data keys are wrapped by a KEK that is not there", extra=facts)
            elif not used[number] and number != seen.newest:
                log.info("no data key needs this KEK any more", extra=facts)
            else:
                log.info("data keys of a KEK", extra=facts)
