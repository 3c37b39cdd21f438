"""What a plan can ask for. Pure values; `apply` carries them out.

The verbs know no kind: a new kind of object (a DaemonSet, a StatefulSet) needs a `Kind` and a body, no new verb.
Every action is idempotent: carrying it out twice, or after somebody else did, is harmless.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvstrata_operator.observe.kinds import Kind, Ref

SILENT_REASON: Final = "LeaseExpired"
"""Reason of the conditions that `MarkSilent` writes."""


class Severity(StrEnum):
    """Type of a Kubernetes Event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Note:
    """One Event about one object, to be posted when the action that carries it succeeds."""

    about: Ref
    uid: str
    reason: str
    """CamelCase, for programs."""
    message: str
    severity: Severity = Severity.NORMAL


@dataclass(frozen=True, slots=True)
class Owned:
    """What all actions have."""

    ref: Ref
    pool: str = ""
    """Pool whose status states a failure; empty for none."""
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Create(Owned):
    """Make an object that is absent; one that exists is left as it is, unless it is to be adopted."""

    body: Mapping[str, Any]
    adopts: bool = False
    """Whether one that exists is made like this one: its name is ours alone, and it has lost what we know it by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Owned):
    """Set the fields of `body` and remove those that an earlier `Apply` of ours set and this one lacks."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge(Owned):
    """Set the fields of `body`, remove those that are None in it, and leave all others."""

    body: Mapping[str, Any]
    subresource: str = ""
    resource_version: str = ""
    """Refuse when the object has changed since; empty: whatever it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete(Owned):
    """Delete the object if it still is the one with this uid."""

    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shred(Delete):
    """Delete a scope's Secret, unless the owner that it was made for turns out to need it still.

    Kinds are followed one by one, so that the picture of owners may be older than that of Secrets; then a key that
    another replica has made for a newer owner looks as if nobody owned it. So the owner is read again before this.
    """

    owner: Ref
    """Where the owner is, or was."""
    owner_uid: str
    """Uid of the object that the keys were made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteMany(Owned):
    """Delete all objects of `ref.kind` with these labels in one request; `ref` names who asked."""

    kind: Kind
    selector: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFinalizers(Owned):
    """Replace the finalizers, unless the object has changed since `resource_version`."""

    finalizers: tuple[str, ...]
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MintKey(Owned):
    """Add one entry of fresh key material to a scope Secret; an entry that exists is never replaced."""

    entry: str
    """Name of the entry, such as `v1`."""
    body: Mapping[str, Any]
    """The Secret without data: made when absent."""
    resource_version: str = ""
    """Of the Secret that exists and lacks the entry; empty when there is no Secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MintKek(Owned):
    """Make the KEK Secret with one fresh key; one that exists is left as it is."""

    entry: str
    """Name of the entry, such as `k1`."""
    body: Mapping[str, Any]
    """The Secret without data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MintDataKey(Owned):
    """Add one entry with a fresh data key, wrapped by the newest KEK; an entry that exists is never replaced."""

    entry: str
    """Name of the entry, such as `v1.data`."""
    resource_version: str
    """Of the Secret that lacks the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrap(Owned):
    """Wrap data keys by the newest KEK; the keys themselves stay."""

    wrapped: Mapping[str, str]
    """Entries as they are, by name."""
    resource_version: str
    """Of the Secret that has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkSilent(Owned):
    """Write AgentConnected=False and Ready=False with `SILENT_REASON` on a KVPoolNode, keeping the rest."""

    message: str


Action = (
    Create | Apply | Merge | Delete | DeleteMany | SetFinalizers | MintKey | MintKek | MintDataKey | Rewrap | MarkSilent
)


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """One status that is not as it should be."""

    action: Merge
    is_usage_only: bool
    """True when only figures that move with the load differ."""
