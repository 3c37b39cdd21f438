"""Uids, key versions and keys of tenants, domains and shares: what operator and etcd keep for a fleet, in one file.

`settle` is pure but for the random bytes that it is given. Laws: a key that exists is never made again; a successor of
the same name never gets an earlier one's key; a version never goes down; a domain's key moves on when a member has
left. The new keys are durable before anybody is granted them.
"""

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstrata_agent.app.standalone.manifests import Manifest
from kvstrata_agent.kube.trust import SECRET_BYTES
from kvstrata_api import names, shares, trust
from kvstrata_api.errors import UnsupportedError
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.trust import ScopeKind
from kvstrata_api.wrapping import DATA_KEY_BYTES, Keks, data_entry, wrapped_by
from kvstrata_node import directories

Random = Callable[[int], bytes]
"""So many bytes that nobody can guess."""

_UID_BYTES: Final = 16


class Entry(msgspec.Struct, frozen=True, rename="camel"):
    """What is kept of one tenant, domain or share."""

    uid: str
    key_version: int
    data: dict[str, str]
    """As in a scope Secret: base64 by `v<key version>`, and of the wrapped data key by `v<key version>.data`."""
    members: tuple[str, ...] = ()
    """Of a domain: tenants that have its key."""
    erase: str = ""
    """Of a tenant: the value of `spec.eraseRequested` that the key was moved on for."""
    erased: str = ""
    """The same, once nothing of before is left."""
    prefixes: str = ""
    """Of a share: digest of what it lists, which never changes under one uid."""


Book = Mapping[str, Entry]
"""Entries by `<kind>/<name>`, as scopes begin."""


class _File(msgspec.Struct):
    format: int
    owners: dict[str, Entry]


def load(path: Path) -> Book:
    """Read the file; empty when there is none.

    Raises `UnsupportedError` when it cannot be read: to go on without it would lose every block on disk.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as e:
        raise UnsupportedError(f"keys {path}: {e}; remove the file to begin without what is cached") from e
    return found.owners


def save(path: Path, book: Book) -> None:
    """Replace the file, of mode 0600; durable on return. Raises `OSError`."""
    directories.write_durably(path, msgspec.json.encode(_File(1, dict(book))))


def new_kek(path: Path, random: Random) -> None:
    """Make a key-encryption key in a file of mode 0600. Raises `OSError`."""
    directories.write_durably(path, f"k1:{base64.b64encode(random(DATA_KEY_BYTES)).decode()}\n".encode())


def settle(before: Book, wanted: Manifest, keks: Keks, random: Random) -> Book:
    """Return the entries of everything declared, with a key of the version that it should have, and of no other."""
    found: dict[str, Entry] = {}
    for tenant in wanted.tenants:
        name = _name(ScopeKind.TENANT, tenant.metadata.name)
        found[name] = _keyed(_tenant(before.get(name) or _new(random), tenant), keks, random)
    for domain in wanted.domains:
        name = _name(ScopeKind.DOMAIN, domain.metadata.name)
        found[name] = _keyed(_domain(before.get(name) or _new(random), domain, wanted.tenants), keks, random)
    for share in wanted.shares:
        name = _name(ScopeKind.SHARE, shares.share_name(share))
        old, listed = before.get(name), _prefixes(share)
        kept = old if old is not None and old.prefixes == listed else _new(random)
        found[name] = _keyed(msgspec.structs.replace(kept, prefixes=listed), keks, random)
    return found


def confirm(book: Book, uid: str, key_version: int) -> Book:
    """Note that nothing of a tenant from before a key version is left."""
    done = {
        k: msgspec.structs.replace(e, erased=e.erase)
        for k, e in book.items()
        if (e.uid, e.key_version) == (uid, key_version)
    }
    return {**book, **done}


def objects(book: Book, wanted: Manifest, namespace: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and object of everything declared, with uid and status as an API server would hold them; and Secrets."""
    for tenant in wanted.tenants:
        entry = book[_name(ScopeKind.TENANT, tenant.metadata.name)]
        status = {"keyVersion": entry.key_version, "lastErase": entry.erased}
        yield "KVTenant", _stored(tenant, entry, status)
    for domain in wanted.domains:
        entry = book[_name(ScopeKind.DOMAIN, domain.metadata.name)]
        yield "KVTrustDomain", _stored(domain, entry, {"keyVersion": entry.key_version, "members": list(entry.members)})
    for share in wanted.shares:
        yield "KVPrefixShare", _stored(share, book[_name(ScopeKind.SHARE, shares.share_name(share))], {})
    for name, labels in wanted.namespaces.items():
        yield "Namespace", {"metadata": {"name": name, "labels": dict(labels)}}
    for owner, entry in book.items():
        kind, _, name = owner.partition("/")
        meta = {
            "name": names.scope_secret_name(kind, name),
            "namespace": namespace,
            "annotations": {names.ANNOTATION_OWNER_UID: entry.uid},
        }
        yield "Secret", {"metadata": meta, "data": entry.data}


def _stored(declared: KVTenant | KVTrustDomain | KVPrefixShare, entry: Entry, status: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": declared.metadata.name, "namespace": declared.metadata.namespace, "uid": entry.uid}
    kept = {k: v for k, v in meta.items() if v is not None}
    return {"metadata": kept, "spec": declared.spec.to_json(), "status": status}


def _name(kind: ScopeKind, name: str) -> str:
    return f"{kind}/{name}"


def _new(random: Random) -> Entry:
    return Entry(random(_UID_BYTES).hex(), KEY_VERSION, {})


def _tenant(entry: Entry, tenant: KVTenant) -> Entry:
    """Move the key on for each new value of `spec.eraseRequested`; the first value of all has nothing to erase."""
    wanted = tenant.spec.erase_requested or ""
    if not wanted or wanted == entry.erase:
        return entry
    version = entry.key_version + 1 if entry.data else entry.key_version
    return msgspec.structs.replace(entry, key_version=version, erase=wanted)


def _domain(entry: Entry, domain: KVTrustDomain, tenants: tuple[KVTenant, ...]) -> Entry:
    """Move the key on when somebody who has it is no member any more, and when it is asked for."""
    members = tuple(sorted(t.metadata.name for t in tenants if trust.is_member(t, domain)))
    has_left = bool(set(entry.members) - set(members))
    version = max(entry.key_version + has_left, domain.spec.key_version)
    return msgspec.structs.replace(entry, key_version=version, members=members)


def _keyed(entry: Entry, keks: Keks, random: Random) -> Entry:
    """Keep the keys of the current version alone; make what is missing, and wrap by the newest KEK."""
    version = f"v{entry.key_version}"
    secret = entry.data.get(version) or _text(random(SECRET_BYTES))
    data = {version: secret}
    if (wrapped := _wrapped(entry.data.get(data_entry(version), ""), keks, random)) is not None:
        data[data_entry(version)] = wrapped
    return msgspec.structs.replace(entry, data=data)


def _wrapped(stored: str, keks: Keks, random: Random) -> str | None:
    """Return the entry of a wrapped data key; None while there is no KEK to make one."""
    wrapped = base64.b64decode(stored).decode() if stored else ""
    if not keks.newest or (wrapped and wrapped_by(wrapped) == keks.newest):
        return stored or None
    key = keks.unwrap(wrapped) if wrapped else random(DATA_KEY_BYTES)
    return _text(keks.wrap(key).encode()) if key is not None else stored


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _prefixes(share: KVPrefixShare) -> str:
    listed = sorted((p.digest, p.token_count) for p in share.spec.prefixes)
    return hashlib.sha256(f"{share.spec.pool_ref} {listed}".encode()).hexdigest()
