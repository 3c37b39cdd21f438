"""Coordination Leases as agents and operators write and read them. Pure: the caller brings the time.

Whoever judges a Lease does so by its own clock: the times in it are another machine's, and only their change counts.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from kvstrata_kube.answers import Json

API_VERSION = "coordination.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Lease:
    """A Lease as read."""

    name: str
    holder: str
    """Empty when released or new."""
    renewed: str
    """Opaque: only whether it changes counts."""
    duration_s: float
    """0 when it is not stated."""
    transitions: int = 0
    resource_version: str = field(default="", compare=False)
    """Empty when there is no Lease yet."""


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    resource_version: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    renew_time: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)


def parse_lease(raw: bytes) -> Lease:
    """Read a Lease. Raises `msgspec.MsgspecError` for anything else."""
    read = msgspec.json.decode(raw, type=_Lease)
    spec = read.spec
    return Lease(
        name=read.metadata.name,
        holder=spec.holder_identity or "",
        renewed=spec.renew_time or "",
        duration_s=float(spec.lease_duration_seconds or 0),
        transitions=spec.lease_transitions or 0,
        resource_version=read.metadata.resource_version,
    )


def lease_path(namespace: str, name: str = "") -> str:
    """URL path of a Lease; of the collection when `name` is empty."""
    collection = f"/apis/{API_VERSION}/namespaces/{namespace}/leases"
    return f"{collection}/{name}" if name else collection


def renewal(holder: str, duration_s: float, moment: datetime) -> Json:
    """Build the part of a spec that every renewal writes; an empty holder releases."""
    return {
        "holderIdentity": holder,
        "leaseDurationSeconds": max(1, round(duration_s)),  # The API server refuses 0.
        "renewTime": micro_time(moment),
    }


def lease_body(name: str, metadata: Json, spec: Json) -> Json:
    """Put a whole Lease together."""
    return {"apiVersion": API_VERSION, "kind": "Lease", "metadata": {"name": name, **metadata}, "spec": spec}


def micro_time(moment: datetime) -> str:
    """Write a moment as `metav1.MicroTime`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
