"""Uids, key versions and keys of tenants, domains and shares: what operator and etcd keep for a fleet, in one file.

`settle` is pure but for the random bytes that it is given. Laws: a key that exists is never made again; a successor of
the same name never gets an earlier one's key; a version never goes down; a domain's key moves on when a member has
left. The new keys are durable before anybody is granted them.
"""

import base64
import hashlib
import json
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstrata_agent.app.standalone.manifests import Manifest
from kvstrata_agent.kube.trust import SECRET_BYTES
from kvstrata_api import names, shares, trust
from kvstrata_api.errors import InvalidInputError, UnsupportedError
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


FLEET_BYTES: Final = 32
"""Of the secret that the members of a fleet share."""


@dataclass(frozen=True, slots=True)
class FleetKeys:
    """Uids and keys that all members of a fleet derive alike from one secret, and the token of each.

    A name stands for one owner as long as the secret is the same: whoever is declared anew has the earlier one's keys.
    """

    secret: bytes = field(repr=False)

    def derive(self, purpose: str, *names: str, size_bytes: int) -> bytes:
        """Derive a key of a purpose; of other names, or another purpose, it is another one."""
        text = json.dumps([purpose, *names]).encode()
        return hashlib.blake2b(text, key=self.secret, digest_size=size_bytes, person=b"kvstrata-fleet").digest()

    def token(self, agent: str) -> str:
        """Return what a member shows to others to prove that it has the secret."""
        return self.derive("peer", agent, size_bytes=SECRET_BYTES).hex()


def load_fleet(path: Path) -> FleetKeys:
    """Read the secret of a fleet: base64 of 32 bytes. Raises `InvalidInputError` that says what is wrong."""
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
        secret = base64.b64decode(text, validate=True)
    except OSError as e:
        raise InvalidInputError(f"--keys-file {path}: {e.strerror}; {MAKE_KEYS.format(path)}") from e
    except ValueError as e:
        raise InvalidInputError(f"--keys-file {path}: not base64; {MAKE_KEYS.format(path)}") from e
    if len(secret) != FLEET_BYTES:
        raise InvalidInputError(f"--keys-file {path}: base64 of {len(secret)} bytes, {FLEET_BYTES} wanted")
    if mode & (stat.S_IRWXO):
        raise InvalidInputError(f"--keys-file {path}: mode {stat.S_IMODE(mode):04o}; nobody else may read it: 0600")
    return FleetKeys(secret)


MAKE_KEYS: Final = "make it once with (umask 077; head -c 32 /dev/urandom | base64 > {}) and copy it to each member"

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


def settle(before: Book, wanted: Manifest, keks: Keks, random: Random, fleet: FleetKeys | None = None) -> Book:
    """Return the entries of everything declared, with a key of the version that it should have, and of no other.

    Uids and keys are those of the `fleet` where there is one; data keys are each member's own.
    """
    make = _Maker(keks, random, fleet)
    found: dict[str, Entry] = {}
    for tenant in wanted.tenants:
        name = _name(ScopeKind.TENANT, tenant.metadata.name)
        found[name] = make.keyed(name, _tenant(make.entry(before, name), tenant))
    for domain in wanted.domains:
        name = _name(ScopeKind.DOMAIN, domain.metadata.name)
        found[name] = make.keyed(name, _domain(make.entry(before, name), domain, wanted.tenants))
    for share in wanted.shares:
        name = _name(ScopeKind.SHARE, shares.share_name(share))
        found[name] = make.keyed(name, make.entry(before, name, _prefixes(share)))
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


@dataclass(frozen=True, slots=True)
class _Maker:
    """Keeps what there is and makes what is missing."""

    keks: Keks
    random: Random
    fleet: FleetKeys | None

    def entry(self, before: Book, name: str, prefixes: str = "") -> Entry:
        """Return the entry of before, or one without a key where it was another owner's."""
        old = before.get(name)
        uid = self.fleet.derive("uid", name, prefixes, size_bytes=_UID_BYTES).hex() if self.fleet else ""
        if old is not None and old.prefixes == prefixes and uid in ("", old.uid):
            return old
        return Entry(uid or self.random(_UID_BYTES).hex(), KEY_VERSION, {}, prefixes=prefixes)

    def keyed(self, name: str, entry: Entry) -> Entry:
        """Keep the keys of the current version alone; make what is missing, and wrap by the newest KEK."""
        version = f"v{entry.key_version}"
        data = {version: entry.data.get(version) or _text(self._secret(name, entry))}
        if (wrapped := _wrapped(entry.data.get(data_entry(version), ""), self.keks, self.random)) is not None:
            data[data_entry(version)] = wrapped
        return msgspec.structs.replace(entry, data=data)

    def _secret(self, name: str, entry: Entry) -> bytes:
        if self.fleet is None:
            return self.random(SECRET_BYTES)
        return self.fleet.derive("scope", name, entry.uid, str(entry.key_version), size_bytes=SECRET_BYTES)


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
