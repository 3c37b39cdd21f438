"""An OCI image as one tar in the OCI image layout, as `ctr images import`, `skopeo` and `crane` take it."""

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from images.layers import MEDIA_TYPE, Layer

CREATED: Final = "1970-01-01T00:00:00Z"
"""When every image was made: a time of day would be the only thing that differs between two builds."""
_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
Json = dict[str, Any]


def write(archive: Path, reference: str, config: Json, layers: Sequence[Layer]) -> str:
    """Write an image to `archive`; returns the digest of its manifest.

    `reference` is its full name with host and tag; `config` what a container of it starts with.
    """
    blobs: dict[str, bytes] = {}
    described = _blob(blobs, _json(_configuration(config, layers)), _CONFIG)
    parts = [{"mediaType": MEDIA_TYPE, "digest": layer.digest, "size": layer.size_bytes} for layer in layers]
    labels = config["Labels"]
    manifest = {
        "schemaVersion": 2, "mediaType": _MANIFEST, "config": described, "layers": parts, "annotations": labels
    }  # fmt: skip
    entry = _blob(blobs, _json(manifest), _MANIFEST)
    # containerd takes the whole name from its own annotation, other tools the tag from the standard one.
    names = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }
    platform = {"architecture": "amd64", "os": "linux"}
    index = {
        "schemaVersion": 2,
        "mediaType": _INDEX,
        "manifests": [entry | {"platform": platform, "annotations": names}],
    }
    _write_tar(archive, {"index.json": _json(index), "oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}, blobs, layers)
    return str(entry["digest"])


def _configuration(config: Json, layers: Sequence[Layer]) -> Json:
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": CREATED,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": CREATED, "created_by": f"kvstrata images: {layer.name}"} for layer in layers],
    }


def _blob(blobs: dict[str, bytes], content: bytes, media_type: str) -> Json:
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _json(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _write_tar(archive: Path, top: Mapping[str, bytes], blobs: Mapping[str, bytes], layers: Sequence[Layer]) -> None:
    files = {layer.digest.removeprefix("sha256:"): layer.blob for layer in layers}
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sorted(top.items(), reverse=True):  # `oci-layout` first: readers of streams look for it.
            _add(tar, name, content)
        for digest in sorted((*blobs, *files)):
            _add(tar, f"blobs/sha256/{digest}", blobs[digest] if digest in blobs else files[digest])


def _add(tar: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o644
    if isinstance(content, bytes):
        member.size = len(content)
        tar.addfile(member, BytesIO(content))
        return
    member.size = content.stat().st_size
    with content.open("rb") as file:
        tar.addfile(member, file)
