"""What is left of a cluster when all has come to rest, in a form that is the same whenever it means the same."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from adversity.calls import Json
from controlplane import ControlPlane
from kvstrata_api import names
from kvstrata_api.schema_kinds import KINDS
from kvstrata_operator.observe.kinds import ADMINISTRATOR_KINDS, CONNECTION_LABELS

_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+\d\d:\d\d)")
_DROPPED: Final = {
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "generation",
    "observedGeneration",
    "lastTransitionTime",
    "deadline",
}
_TOLD: Final = {kind.name for kind in ADMINISTRATOR_KINDS}
"""Kinds whose status is the operator's word."""
KeyName = tuple[str, str]
"""Uid of the owner and entry of its Secret."""


@dataclass(frozen=True, slots=True)
class Portrait:
    """Normalised objects, and the key material that must never change."""

    objects: Mapping[str, Any]
    """By kind and name."""
    behind: tuple[str, ...] = ()
    """Objects that are on their way out, or whose status speaks of an older generation."""
    keys: Mapping[KeyName, str] = field(default_factory=dict)

    def differences(self, wanted: "Portrait") -> tuple[str, ...]:
        """What is not as in another portrait, a line each."""
        found = [f"{key} is leaving or tells of an older generation" for key in self.behind]
        for key in sorted(self.objects.keys() | wanted.objects.keys()):
            found += _differences(key, self.objects.get(key), wanted.objects.get(key))
        return tuple(found)

    def changed_keys(self, before: Mapping[KeyName, str]) -> tuple[str, ...]:
        """Keys that are not what they were; one that is gone has had its time."""
        return tuple(f"key {key} was made anew" for key, value in before.items() if self.keys.get(key, value) != value)


def take(plane: ControlPlane) -> Portrait:
    """Look at everything that kvstrata has in a cluster. New kinds come in by the list of CRDs."""
    inside = f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}"
    selector = ",".join(f"{k}={v}" for k, v in CONNECTION_LABELS.items())
    paths = [f"/apis/{names.API_VERSION}/{kind.plural}" for kind in KINDS]
    more = [f"{inside}/secrets?labelSelector={names.LABEL_SCOPE}", f"{inside}/configmaps?labelSelector={selector}"]
    *lists, secrets, config_maps = (found["items"] for found in plane.api.get_all([*paths, *more]))
    objects: dict[str, Any] = {}
    behind: list[str] = []
    for kind, bodies in zip(KINDS, lists, strict=True):
        for body in bodies:
            key = f"{kind.name} {body['metadata'].get('namespace', '')}/{body['metadata']['name']}"
            objects[key] = normal(body)
            behind += [key] * _is_behind(kind.name, body)
    for secret in secrets:
        bare = {**secret, "data": sorted(secret.get("data") or ())}
        objects[f"Secret {secret['metadata']['name']}"] = normal(bare)
    objects |= {f"ConfigMap {found['metadata']['name']}": normal(found) for found in config_maps}
    living = {body["metadata"]["uid"] for bodies in lists for body in bodies}
    return Portrait(objects, tuple(behind), _keys(secrets, living))


def _is_behind(kind: str, body: Json) -> bool:
    told = (body.get("status") or {}).get("observedGeneration", 0)
    is_untold = kind in _TOLD and told != body["metadata"]["generation"]
    return is_untold or "deletionTimestamp" in body["metadata"]


def _keys(secrets: list[Json], living: Collection[str]) -> dict[KeyName, str]:
    """Key material by the living object that it belongs to; data keys are wrapped anew now and then: they are left out.

    An operator that still sees an object that is gone may make a key for it, which goes as the first one went.
    """
    found: dict[KeyName, str] = {}
    for secret in secrets:
        owner = secret["metadata"].get("annotations", {}).get(names.ANNOTATION_OWNER_UID, "")
        if owner in living:
            found |= {(owner, e): value for e, value in (secret.get("data") or {}).items() if "." not in e}
    return found


def normal(body: Json) -> Any:
    """An object without what differs between two runs that mean the same."""
    meta = {k: v for k, v in body["metadata"].items() if k not in _DROPPED}
    meta["annotations"] = {k: v for k, v in meta.get("annotations", {}).items() if k != names.ANNOTATION_OWNER_UID}
    return _plain({**body, "metadata": meta})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in sorted(value.items()) if k not in _DROPPED}
    if isinstance(value, list):
        plain = [_plain(item) for item in value]
        is_conditions = all(isinstance(item, dict) and {"type", "status", "reason"} <= item.keys() for item in plain)
        return sorted(plain, key=lambda c: str(c["type"])) if plain and is_conditions else plain
    return _TIME.sub("TIME", value) if isinstance(value, str) else value


def _differences(path: str, found: Any, wanted: Any) -> list[str]:
    """Where two values differ, at the deepest place."""
    if found == wanted:
        return []
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = sorted(found.keys() | wanted.keys())
        return [line for k in keys for line in _differences(f"{path}.{k}", found.get(k), wanted.get(k))]
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [line for i, (f, w) in pairs for line in _differences(f"{path}[{i}]", f, w)]
    return [f"{path}: {found!r}, wanted {wanted!r}"]
